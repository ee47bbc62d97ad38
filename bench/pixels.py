"""Claim: from standardised images a value is learned where from pixels / 255 it is not.

Regresses the discounted returns of a random policy in EnvPool's Pong with the network and optimiser of preset ``pong`` on
batches as the agent's, and explains returns of environments held out. Two more ways show which half of standardising
does it: ``centred`` takes each image's mean off and divides by 255, ``rescaled`` divides by its deviation, mean kept.

python bench/pixels.py
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import envpool
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

import headrace
from headrace import xla
from headrace.agents import optim
from headrace.bench.machine import machine, versions
from headrace.networks.actor_critic import actor_critic
from headrace.networks.network import Input
from headrace.spaces import from_gymnasium
from headrace.types import Progress

RESULTS = Path(__file__).parent.parent / "docs" / "results"
ENVS, HELD_OUT, STEPS, TAIL, STACK = 32, 8, 2_100, 300, 4
"""The last ``TAIL`` steps only complete the returns."""
AXES = (1, 2, 3)
PREPARE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "centred": lambda x: x - x.mean(AXES, keepdims=True),
    "rescaled": lambda x: x / x.std(AXES, keepdims=True) * 255.0,
}
"""What is done to images [n, STACK, 84, 84] before the network divides them by 255."""


def collect(discount: float) -> tuple[np.ndarray, np.ndarray]:
    """Frames u8 ``[STEPS, ENVS, 84, 84]`` of a random policy, and discounted returns f32 ``[STEPS, ENVS]``."""
    envs = envpool.make_gymnasium("Pong-v5", num_envs=ENVS, stack_num=1, seed=1)
    rng, length = np.random.default_rng(0), STEPS + TAIL
    frames = np.zeros((STEPS, ENVS, 84, 84), np.uint8)
    rewards, ends = np.zeros((length, ENVS)), np.zeros((length, ENVS), bool)
    frame = envs.reset()[0]
    for t in range(length):
        if t < STEPS:
            frames[t] = frame[:, 0]
        frame, rewards[t], terminated, truncated, _ = envs.step(rng.integers(0, 6, ENVS))
        ends[t] = terminated | truncated
    envs.close()
    returns = np.zeros((length + 1, ENVS))
    for t in reversed(range(length)):
        returns[t] = rewards[t] + discount * returns[t + 1] * ~ends[t]
    return frames, returns[:STEPS].astype(np.float32)


def stacks(frames: np.ndarray, times: np.ndarray, envs: np.ndarray) -> np.ndarray:
    """Stacks u8 ``[n, STACK, 84, 84]`` that end at ``times``, oldest first."""
    return np.stack([frames[times - k, envs] for k in reversed(range(STACK))], axis=1)


def explained(way: str, frames: np.ndarray, returns: np.ndarray, updates: int, seed: int) -> float:
    """Part of the variance of held-out returns that the value explains after ``updates``, its mean error apart."""
    agent: Any = headrace.config("pong").agent
    box, actions = gym.spaces.Box(0, 255, (84, 84), np.uint8), gym.spaces.Discrete(6)
    pixels, prepare = ("unit", PREPARE[way]) if way in PREPARE else (way, lambda x: x)
    network = actor_critic(
        replace(agent.network, pixels=pixels), from_gymnasium(box), from_gymnasium(actions), 6
    )

    def value(params: Any, images: jax.Array) -> jax.Array:
        n = images.shape[0]
        x = Input(
            prepare(images.astype(jnp.float32)), jnp.zeros(n, jnp.int32), jnp.zeros(n), jnp.zeros(n, bool)
        )
        return network.step(params, x, ())[0].value

    def loss(params: Any, images: jax.Array, target: jax.Array) -> jax.Array:
        return agent.baseline_cost * 0.5 * jnp.mean(jnp.square(value(params, images) - target))

    @partial(xla.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, images: jax.Array, target: jax.Array, update: Any) -> tuple[Any, Any]:
        gradient = jax.grad(loss)(params, images, target)
        progress = Progress(update / updates, update)
        return optim.step(agent.optimizer, params, gradient, state, progress)[:2]

    params = network.init(jax.random.key(seed))
    state = optim.make_optimizer(agent.optimizer).init(params)
    rng, length = np.random.default_rng(seed), agent.unroll_length
    for update in range(updates):
        begins = rng.integers(STACK, STEPS - length, (agent.batch_size, 1))
        times = (begins + np.arange(length)).ravel()
        envs = np.repeat(rng.integers(0, ENVS - HELD_OUT, agent.batch_size), length)
        params, state = step(
            params, state, stacks(frames, times, envs), returns[times, envs], np.float32(update)
        )
    times, envs = rng.integers(STACK, STEPS, 2_000), rng.integers(ENVS - HELD_OUT, ENVS, 2_000)
    predict = xla.jit(value)
    parts = [
        predict(params, stacks(frames, *x)) for x in zip(np.split(times, 10), np.split(envs, 10), strict=True)
    ]
    target = returns[times, envs]
    return float(1.0 - np.var(target - np.concatenate(parts)) / np.var(target))


def main() -> None:
    """Measure and write ``docs/results/pixels.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    arguments = parser.parse_args()
    agent: Any = headrace.config("pong").agent
    frames, returns = collect(agent.discount)
    result: dict[str, Any] = {
        "command": f"python bench/pixels.py --updates {arguments.updates}",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "rows": arguments.updates * agent.batch_size * agent.unroll_length,
    }
    for way in ("unit", "standard", "centred", "rescaled"):
        seeds = [explained(way, frames, returns, arguments.updates, seed) for seed in range(3)]
        result[way] = {"explained_variance": seeds, "median": float(np.median(seeds))}
        print(f"{way}: {', '.join(f'{x:.3f}' for x in seeds)}", file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "pixels.json").write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
