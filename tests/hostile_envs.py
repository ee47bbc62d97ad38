"""Environments that fail in the ways users' environments do; made in worker processes by name."""

import os
import subprocess
import time
from pathlib import Path

import gymnasium as gym
import numpy as np


class Counting(gym.Env):
    """Shows how often it was stepped in its life; reward 1; an episode has ``length`` steps."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=20, at=7, folder="", **kwargs):
        self.length, self.at, self.folder, self.total = length, at, folder, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.draw = 0, float(self.np_random.integers(1000))
        return np.array([self.t, self.draw], np.float32), {}

    def step(self, action):
        self.t, self.total = self.t + 1, self.total + 1
        if self.total == self.at:
            self.misbehave()
        return self.see(), self.reward(), self.t >= self.length, False, {"final": self.t}

    def see(self):
        return np.array([self.t, self.draw], np.float32)

    def reward(self):
        return 1.0

    def misbehave(self):
        pass

    def once(self):
        """Whether this is the first time that any process asks, by a file in ``folder``."""
        try:
            (Path(self.folder) / "seen").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class Raises(Counting):
    def misbehave(self):
        raise RuntimeError("the simulator lost its way")


class Quits(Counting):
    def misbehave(self):
        raise SystemExit(3)


class Dies(Counting):
    def misbehave(self):
        os._exit(7)


class DiesOnce(Counting):
    def misbehave(self):
        if self.once():
            os._exit(7)


class Sleeps(Counting):
    def misbehave(self):
        time.sleep(3600)


class SleepsOnce(Counting):
    def misbehave(self):
        if self.once():
            time.sleep(3600)


class HoldsTheInterpreter(Counting):
    def misbehave(self):
        sum(range(10**13))


class NotANumber(Counting):
    """Case H2: the 7th step's reward is ``kwargs['value']``, in the environment with the given draw only."""

    def __init__(self, value="nan", **kwargs):
        super().__init__(**kwargs)
        self.value = float(value)

    def reward(self):
        return self.value if self.total == self.at else 1.0


class NeverCloses(Counting):
    def close(self):
        time.sleep(3600)


class Spawns(Counting):
    """Starts a process of its own, as simulators do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.child = subprocess.Popen(["sleep", "3599"])


class CannotStart(Counting):
    def __init__(self, **kwargs):
        raise OSError("no licence server")


class StartsAtTheSecondTry(Counting):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if self.once():
            raise OSError("the port is taken")


class DiesAtStart(Counting):
    def __init__(self, **kwargs):
        os._exit(9)


class ResetRaises(Counting):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no level")


class SlowSometimes(Counting):
    def step(self, action):
        time.sleep(0.02 if self.draw % 2 else 0.0)
        return super().step(action)
