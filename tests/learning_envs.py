"""Environments whose right values are known."""

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
