"""Environments whose figures are known, for runs of several ids and for infos. Light, as worker processes import it."""

from typing import Any

import gymnasium as gym
import numpy as np


class Steps(gym.Env):
    """Episodes of ``length`` steps of reward 1, with the step, counted from 0, in each info."""

    def __init__(self, length: int) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (), np.float32)
        self.length, self._t = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(2, np.float32), {"final": 99.0}

    def step(self, action: Any) -> Any:
        self._t += 1
        return np.full(2, self._t, np.float32), 1.0, self._t >= self.length, False, {"final": self._t - 1}


class Drawn(Steps):
    """Shows what its generator gave at the reset, which is also each step's reward and in its info."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._drawn = self.np_random.random()
        return np.array([self._drawn, 0], np.float32), {"drawn": 7.0}

    def step(self, action: Any) -> Any:
        _, _, *ends, _ = super().step(action)
        observation = np.array([self._drawn, self._t], np.float32)
        return observation, self._drawn, *ends, {"drawn": self._drawn, "done": True}


def make_one(length: int = 1) -> gym.Env:
    return Steps(length)


def make_nine(length: int = 9) -> gym.Env:
    return Steps(length)


def make_drawn() -> gym.Env:
    return Drawn(3)


def make_drawn_too() -> gym.Env:
    return Drawn(5)


def make_cart(**kwargs: Any) -> gym.Env:
    return gym.make("CartPole-v1", **kwargs)
