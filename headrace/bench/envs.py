"""The environment room alone: what worker processes make of environments, beside the thread and Gymnasium's own processes.

- *busy*: an environment that computes for 2 ms a step. Cores ÷ step time is all that a machine can make of it.
- *cartpole*: one that takes microseconds, so that what is measured is the way to a process and back.

The arms are driven in turn, window by window, so that a drift of the machine's speed meets them alike.
"""

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.bench.machine import cores, machine, versions
from headrace.envs.contract import EnvGroup
from headrace.envs.registry import make_group
from headrace.seeds import Role, SlotSeeds

NUM_ENVS = 16
BUSY_S = 0.002
WINDOWS = 5
Turns = Generator[int, None, None]


class Busy(gym.Env):
    """Computes for ``BUSY_S`` of its thread's own time each step, whatever else the machine does."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Zeros."""
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Zeros, some time later."""
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            pass
        return np.zeros(4, np.float32), 0.0, False, False, {}


def bench_envs(seconds: float = 20.0, workers: int | None = None) -> dict[str, Any]:
    """Measure all arms.

    Args:
        seconds: over all windows of all arms.
        workers: processes; None: one a core.

    Returns:
        A JSON object: steps/s of each arm (median of its windows), and the two ratios.
    """
    workers = cores() if workers is None else workers
    busy, cartpole = "headrace.bench.envs:Busy", "CartPole-v1"
    arms: dict[str, Callable[[], Turns]] = {
        "busy pool": lambda: _group_turns(_pool(busy, workers)),
        "cartpole pool": lambda: _group_turns(_pool(cartpole, workers)),
        "cartpole AsyncVectorEnv": lambda: _async_turns(cartpole),
        "cartpole thread": lambda: _group_turns(_pool(cartpole, 0)),
    }
    rates = _measure(arms, seconds / (len(arms) * WINDOWS))
    median = {name: statistics.median(values) for name, values in rates.items()}
    most = cores() / BUSY_S
    return {
        "num_envs": NUM_ENVS,
        "workers": workers,
        "steps_per_s": median,
        "windows": rates,
        "busy_limit": most,
        "busy_efficiency": median["busy pool"] / most,
        "pool_to_async": median["cartpole pool"] / median["cartpole AsyncVectorEnv"],
        "cores": cores(),
        "machine": machine(),
        "versions": versions(),
    }


def table(result: dict[str, Any]) -> str:
    """What ``bench_envs`` gives, as text."""
    lines = [f"{result['num_envs']} environments, {result['workers']} workers, {result['cores']} cores"]
    for name, rate in result["steps_per_s"].items():
        windows = " ".join(f"{x:,.0f}" for x in result["windows"][name])
        lines.append(f"{name:<24}{rate:>10,.0f} steps/s   ({windows})")
    lines += [
        f"busy pool ÷ (cores ÷ {BUSY_S * 1e3:g} ms)   {result['busy_efficiency']:.2f}",
        f"cartpole pool ÷ AsyncVectorEnv   {result['pool_to_async']:.1f}",
        f"machine   {', '.join(result['machine'].values())}",
        f"versions  {', '.join(f'{name} {version}' for name, version in result['versions'].items())}",
    ]
    return "\n".join(lines)


def _measure(arms: dict[str, Callable[[], Turns]], window_s: float) -> dict[str, list[float]]:
    """Each arm alone in each window: idle processes of the others would still be woken by nothing."""
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(WINDOWS):
        for name, make in arms.items():
            with closing(make()) as turns:
                _run(turns, window_s / 5)  # warm
                rates[name].append(_run(turns, window_s))
    return rates


def _run(turns: Turns, seconds: float) -> float:
    begun, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begun) < seconds:
        steps += next(turns)
    return steps / elapsed


def _pool(env_id: str, workers: int) -> EnvGroup:
    batch_size = NUM_ENVS // 2 if workers > 1 else None
    return make_group(env_id, NUM_ENVS, SlotSeeds(0, Role.TRAIN_ENV), workers=workers, batch_size=batch_size)


def _group_turns(group: EnvGroup) -> Turns:
    actions = np.random.default_rng(0).integers(0, 2, (256, NUM_ENVS))
    try:
        while True:
            for row in actions:
                timestep, slot_ids = group.recv(60.0)
                group.send(row[: len(slot_ids)], slot_ids)
                yield len(slot_ids) - int(np.count_nonzero(timestep.first))
    finally:
        group.close()


def _async_turns(env_id: str) -> Turns:
    """Gymnasium's processes: one an environment, rows in shared memory, next-step autoreset."""
    env = gym.make_vec(env_id, num_envs=NUM_ENVS, vectorization_mode="async")
    env.reset(seed=0)
    actions, resets = np.random.default_rng(0).integers(0, 2, (256, NUM_ENVS)), 0
    try:
        while True:
            for row in actions:
                _, _, terminated, truncated, _ = env.step(row)
                yield NUM_ENVS - resets
                resets = int(np.count_nonzero(terminated | truncated))
    finally:
        env.close()
