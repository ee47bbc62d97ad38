"""Train on an environment of your own: a walk through a dark room to the lamp.

    python examples/own_environment.py            # about half a minute on two cores
    python examples/own_environment.py --total-steps 300000

An environment is an ordinary ``gymnasium.Env``; nothing of it is registered, and it does not know headrace.
The setting ``env.id`` names a function that makes one, as ``module:function``. The module must be
importable by its name: Python puts the folder of a script on its path, so that here the name is
``own_environment``, wherever the script is started from. The command line looks in the working directory,
so in this folder the same run is

    headrace train impala --env.id own_environment:make --env.kwargs '{"size": 9}'
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import headrace

MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]])


class LampRoom(gym.Env):
    """A square room. Each step costs 1; the episode ends at the lamp, or when patience runs out."""

    def __init__(self, size: int = 9, patience: int = 50) -> None:
        """Make a room of ``size`` by ``size`` tiles."""
        self.size, self.patience = size, patience
        # Any nesting of Dict and Tuple over Box, Discrete, MultiDiscrete and MultiBinary will do. Numbers
        # reach the network as they are, so keep them near 1.
        place = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.observation_space = gym.spaces.Dict({"me": place, "lamp": place})
        self.action_space = gym.spaces.Discrete(len(MOVES))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Put the walker and the lamp somewhere."""
        # This seeds ``self.np_random``. All randomness should come from it: then runs repeat, and a resumed
        # run finds its rooms as it left them.
        super().reset(seed=seed)
        self.me, self.lamp = self.np_random.integers(self.size, size=(2, 2))
        while (self.me == self.lamp).all():
            self.lamp = self.np_random.integers(self.size, size=2)
        self.steps = 0
        return self._see(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        """Walk one tile; walls hold."""
        self.me = np.clip(self.me + MOVES[action], 0, self.size - 1)
        self.steps += 1
        # The difference matters. At the lamp the task is over: nothing follows, its value is 0. When
        # patience runs out the task would go on, only nobody watches: the learner takes its own estimate of
        # what would have come.
        terminated = bool((self.me == self.lamp).all())
        truncated = self.steps >= self.patience
        return self._see(), -1.0, terminated, truncated, {}

    def _see(self) -> dict[str, np.ndarray]:
        scale = np.float32(self.size - 1)
        return {"me": self.me.astype(np.float32) / scale, "lamp": self.lamp.astype(np.float32) / scale}


def make(size: int = 9, patience: int = 50) -> gym.Env:
    """What ``env.id`` names; its arguments are ``env.kwargs``."""
    return LampRoom(size, patience)


def main(total_steps: int) -> None:
    """Train, and show how the return grew."""
    run = tempfile.mkdtemp(prefix="headrace-own-environment-")
    config = headrace.config(
        "cartpole",  # a preset to start from; its agent suits small tasks
        **{
            "env.id": "own_environment:make",
            "env.kwargs": {"size": 9},
            "total_steps": total_steps,
            "run": run,
            "log.every_steps": max(total_steps // 10, 1),
            "log.panel": False,
        },
    )
    headrace.train(config)

    # Everything a run measured is in its directory, a JSON object a line.
    print("   steps   mean return of the last 100 episodes")
    for line in (Path(run) / "metrics.jsonl").read_text().splitlines():
        figures = json.loads(line)
        if "return_mean" in figures:  # it is there once an episode has ended
            print(f"{figures['steps']:>8,}   {figures['return_mean']:.1f}")
    result = headrace.evaluate(run, episodes=100)
    print(f"trained, greedy: {result['return_mean']:.1f} (the shortest ways: {shortest():.1f} on average)")

    # The policy alone takes and gives what the environment gives and takes.
    policy, env = headrace.load(run), make()
    carry, (observation, _) = policy.initial_carry(), env.reset(seed=1)
    action, carry = policy.act(observation, carry)
    print(f"me {observation['me']}, lamp {observation['lamp']}: it walks {MOVES[action]}")


def shortest(size: int = 9) -> float:
    """Mean return of a walker that knows the way: minus the mean distance of two different tiles."""
    apart = np.abs(np.arange(size)[:, None] - np.arange(size))
    distance = apart[:, None, :, None] + apart[None, :, None, :]
    return -float(distance[distance > 0].mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total-steps", type=int, default=150_000)
    main(parser.parse_args().total_steps)
