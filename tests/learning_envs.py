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
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        observation = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return observation, 1.0, False, self.steps >= 20, {}
