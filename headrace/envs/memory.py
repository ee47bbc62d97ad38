"""CartPole whose observations leave out the velocities: what moves must be remembered."""

from typing import Any

import gymnasium as gym
import numpy as np


class WithoutVelocities(gym.ObservationWrapper):
    """Keeps the cart's position and the pole's angle of CartPole's ``(x, ẋ, θ, θ̇)``."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        box = env.observation_space
        assert isinstance(box, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(box.low[::2], box.high[::2], dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        """Position and angle, f32 ``[2]``."""
        return observation[::2]


def make_cartpole_without_velocities(**kwargs: Any) -> gym.Env:
    """CartPole-v1, episodes of at most 500 steps, without velocities."""
    return WithoutVelocities(gym.make("CartPole-v1", **kwargs))
