"""Environments whose right values are known."""

from typing import ClassVar

import gymnasium as gym
import numpy as np


class ConstantReward(gym.Env):
    """Reward 1 for ever, cut by a limit after 20 steps: with γ = 0.9 every state is worth 10."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = self.np_random.uniform(-0.5, 0.5, 2).astype(np.float32)
        return observation, 1.0, False, self.steps >= 20, {}


class NaNAtStep7(ConstantReward):
    """Its 7th reward is NaN where it stands in slot 2 of the training environments."""

    made = 0

    def __init__(self):
        # The first one made is looked at for its spaces and closed.
        self.number = NaNAtStep7.made - 1
        NaNAtStep7.made += 1

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        reward = float("nan") if self.number == 2 and self.steps == 7 else reward
        return observation, reward, terminated, truncated, info


def make_nan_in_slot_2():
    return NaNAtStep7()


class Forbidding(gym.Env):
    """Ten steps. Each shows five payments and allows three of the actions; a forbidden one costs 10.

    The payment of the best allowed action is 1, of others 0 or −0.1, so the mask is needed: what is forbidden looks best.
    """

    made: ClassVar[list["Forbidding"]] = []
    observation_space = gym.spaces.Box(-1.0, 2.0, (5,), np.float32)
    action_space = gym.spaces.Discrete(5, start=3)

    def __init__(self):
        self.forbidden = self.steps = self.t = 0
        Forbidding.made.append(self)

    def _say(self):
        order = self.np_random.permutation(5)
        self.allowed, self.pay = order[:3], np.full(5, 2.0, np.float32)
        self.pay[self.allowed] = 1.0, 0.0, -0.1
        mask = np.zeros(5, np.int8)
        mask[self.allowed] = self.t < 10  # at the end nothing can be done any more
        return self.pay, {"action_mask": mask}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._say()

    def step(self, action):
        index = int(action) - 3
        self.t, self.steps = self.t + 1, self.steps + 1
        fine = index in self.allowed
        self.forbidden += not fine
        reward = float(self.pay[index]) if fine else -10.0
        observation, info = self._say()
        return observation, reward, self.t == 10, False, info


class Hybrid(gym.Env):
    """Ten steps of doing what is shown, in parts: gear, two boxes of unequal bounds, and a pick of two.

    A step pays the mean of four parts, each 1 at best: the right gear; in either box, for each dimension, 1 − 4·distance
    ÷ width where that is positive; the share of the right picks. At best an episode pays 10; random actions get 2.9.
    """

    made: ClassVar[list["Hybrid"]] = []
    action_space = gym.spaces.Dict(
        {
            "move": gym.spaces.Tuple(
                (
                    gym.spaces.Box(np.array([-2, 0], np.float32), np.array([0, 10], np.float32)),
                    gym.spaces.Box(-0.1, 1 / 3, (1,), np.float64),
                )
            ),
            "gear": gym.spaces.Discrete(3, start=5),
            "pick": gym.spaces.MultiDiscrete([2, 4]),
        }
    )
    observation_space = gym.spaces.Dict(
        {
            "wanted": gym.spaces.Tuple(
                (
                    gym.spaces.Discrete(3, start=-1),
                    gym.spaces.Dict({"pick": gym.spaces.MultiDiscrete([2, 4], start=[1, 0])}),
                )
            ),
            "place": gym.spaces.Box(-1.0, 1.0, (3,), np.float64),
            "bits": gym.spaces.MultiBinary(2),
        }
    )

    def __init__(self):
        self.outside = self.steps = 0
        Hybrid.made.append(self)

    def _say(self):
        draw = self.np_random
        self.gear, self.pick = int(draw.integers(3)), draw.integers([2, 4])
        self.place = draw.uniform(-1, 1, 3)
        return {
            "wanted": (np.int64(self.gear - 1), {"pick": self.pick + np.array([1, 0])}),
            "place": self.place,
            "bits": draw.integers(2, size=2, dtype=np.int8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._say(), {}

    def step(self, action):
        self.steps += 1
        self.outside += not self.action_space.contains(action)
        boxes, shown, near = self.action_space["move"].spaces, [self.place[:2], self.place[2:]], []
        for box, u, a in zip(boxes, shown, action["move"], strict=True):
            low, high = box.low.astype(np.float64), box.high.astype(np.float64)
            target = low + (u + 1) / 2 * (high - low)
            near.append(np.maximum(0, 1 - 4 * np.abs(a - target) / (high - low)).mean())
        parts = [action["gear"] - 5 == self.gear, *near, np.mean(action["pick"] == self.pick)]
        self.t += 1
        return self._say(), float(np.mean(parts)), False, self.t == 10, {}
