"""Two tasks in one run: one policy learns CartPole and Acrobot, and each has its own figures.

python examples/two_ids.py [--total-steps 300000]

Environments of one run need the same spaces. A wrapper gives both those of the larger one: observations are filled up
with zeros, and actions that the smaller one does not have do what its last one does.
"""

import argparse
import tempfile
from typing import Any

import gymnasium as gym
import numpy as np

import headrace

OBSERVATION, ACTIONS = 6, 3  # Acrobot's; CartPole has four numbers and two actions


class Padded(gym.Wrapper):
    """An environment with a vector observation and a few actions, with more of both."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32)
        self.action_space = gym.spaces.Discrete(ACTIONS)

    def reset(self, **options: Any) -> Any:
        """Begin an episode of the environment within."""
        observation, info = self.env.reset(**options)
        return self._pad(observation), info

    def step(self, action: Any) -> Any:
        """Take the action, or the last one that there is."""
        last = self.env.action_space.n - 1
        observation, reward, terminated, truncated, info = self.env.step(min(action, last))
        # The numbers in an episode's last info are metrics too: here, whether the task was done.
        info = {"success": truncated if last == 1 else terminated}
        return self._pad(observation), reward, terminated, truncated, info

    def _pad(self, observation: np.ndarray) -> np.ndarray:
        return np.pad(observation, (0, OBSERVATION - len(observation))).astype(np.float32)


def cartpole() -> gym.Env:
    """A pole that must not fall: 1 for each of at most 500 steps."""
    return Padded(gym.make("CartPole-v1"))


def acrobot() -> gym.Env:
    """A double pendulum to be swung up: -1 for each of at most 500 steps."""
    return Padded(gym.make("Acrobot-v1"))


def main(total_steps: int) -> None:
    """Train on both, and show the figures of each."""
    config = headrace.config(
        "impala",
        **{
            "env.id": "two_ids:cartpole,two_ids:acrobot",
            "env.groups": 2,  # a multiple of the number of ids: they are spread over the groups
            "total_steps": total_steps,
            "run": tempfile.mkdtemp(prefix="headrace-two-ids-"),
            "log.panel": False,
        },
    )
    summary = headrace.train(config)
    result = headrace.evaluate(summary["run"], episodes=20)
    print(f"{'':<18}{'episodes':>9}{'return, last 100':>18}{'greedy':>9}{'success':>9}")
    for name in config.env.ids:
        last = summary[f"env/{name}/return_mean"]
        print(
            f"{name:<18}{summary[f'env/{name}/episodes']:>9}{'-' if last is None else f'{last:.1f}':>18}"
            f"{result[f'{name}/return_mean']:>9.1f}{result[f'{name}/episode/success']:>9.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total-steps", type=int, default=300_000)
    main(parser.parse_args().total_steps)
