"""An environment whose pictures tell which step they show. It imports little, as worker processes make it."""

import os
import signal

import gymnasium as gym
import numpy as np

STEP = 40
"""Between the brightness of two pictures: more than any encoding loses."""


class Painter(gym.Env):
    """Its picture is one grey, STEP times the step of the episode; its reward is the action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    interrupt_at: int | None = None
    seeds: list[int] = []  # noqa: RUF012

    def __init__(self, length=5, truncate=False, size=(12, 16), render_mode=None):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(-np.inf, np.inf, (), np.float32)
        self.render_mode, self._size, self._length, self._truncate = render_mode, size, length, truncate
        self._episode, self._t = -1, 0

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            Painter.seeds.append(seed)
        super().reset(seed=seed)
        self._episode, self._t = self._episode + 1, 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self._t += 1
        if (self._episode, self._t) == (1, Painter.interrupt_at):
            os.kill(os.getpid(), signal.SIGINT)
        end = self._t >= self._length
        observation = np.array([self._episode, self._t], np.float32)
        return observation, float(action), end and not self._truncate, end and self._truncate, {}

    def render(self):
        return np.full((*self._size, 3), STEP * self._t, np.uint8)


def make_painter(length=5, truncate=False, size=(12, 16), render_mode=None):
    return Painter(length, truncate, tuple(size), render_mode)
