"""Tiny JAX environments to test with; none needs more than JAX."""

from dataclasses import replace
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from headrace.envs.jax_env import JaxEnv


def make_counter(length: int = 5, limit: int | None = None) -> JaxEnv:
    """Shows (a number drawn at the reset, t); rewards t, terminates after ``length`` steps."""

    def observe(state: Any) -> Any:
        return jnp.stack([state["x"], state["t"]])

    def reset(key: Any) -> Any:
        state = {"x": jax.random.randint(key, (), 0, 2**30), "t": 0}
        return state, observe(state)

    def step(key: Any, state: Any, action: Any) -> Any:
        state = {"x": state["x"], "t": state["t"] + 1}
        return state, observe(state), state["t"] + 0.0, state["t"] >= length

    space = gym.spaces.Box(0, 2**30, (2,), np.int32)
    return JaxEnv(reset, step, space, gym.spaces.Discrete(2), limit)


def make_nested() -> JaxEnv:
    """Dict and Tuple observations and actions; shows the last action, which must be in its space, and a drawn number."""
    observation = gym.spaces.Dict(
        {
            "seen": gym.spaces.Tuple(
                [gym.spaces.Discrete(3, start=5), gym.spaces.Box(-1, 1, (2,), np.float64)]
            ),
            "bits": gym.spaces.MultiBinary(2),
        }
    )
    action = gym.spaces.Dict(
        {
            "go": gym.spaces.Discrete(3, start=5),
            "push": gym.spaces.Box(np.float32([-1, -0.5]), np.float32([1, 0.25])),
            "many": gym.spaces.MultiDiscrete([2, 4]),
        }
    )

    def reset(key: Any) -> Any:
        key, noise = jax.random.split(key)
        return {"key": key, "t": jnp.bfloat16(0)}, {
            "seen": (5, jax.random.uniform(noise, (2,))),
            "bits": jnp.zeros(2, jnp.int8),
        }

    def step(key: Any, state: Any, action: Any) -> Any:
        push, many = action["push"], action["many"]
        fine = (push >= jnp.float32([-1, -0.5])).all() & (push <= jnp.float32([1, 0.25])).all()
        fine &= (
            (action["go"] >= 5) & (action["go"] <= 7) & (many >= 0).all() & (many < jnp.array([2, 4])).all()
        )
        new, noise = jax.random.split(state["key"])  # a stream of its own, which must be kept
        seen = (action["go"], jnp.clip(push + jax.random.uniform(noise, (2,)), -1, 1))
        observation = {"seen": seen, "bits": many % 2 == 1}
        state = {"key": new, "t": state["t"] + 1}
        return state, observation, jnp.where(fine, 1.0, jnp.nan), jax.random.bernoulli(key, 0.2)

    return JaxEnv(reset, step, observation, action, 9)


def make_walk() -> JaxEnv:
    """A walk on 0 … 6 from about the middle, by a Discrete that starts at -1; the right end gives 1. Learned in no time."""

    def reset(key: Any) -> Any:
        x = jax.random.randint(key, (), 2, 5)
        return x, jax.nn.one_hot(x, 7)

    def step(key: Any, x: Any, action: Any) -> Any:
        x = jnp.clip(x + action, 0, 6)
        return x, jax.nn.one_hot(x, 7), (x == 6).astype(jnp.float32), (x == 6) | (x == 0)

    return JaxEnv(reset, step, gym.spaces.Box(0, 1, (7,)), gym.spaces.Discrete(3, start=-1), 20)


def make_walk_back() -> JaxEnv:
    """The walk whose left end is good."""
    walk = make_walk()

    def step(key: Any, x: Any, action: Any) -> Any:
        x, observation, _, end = walk.step(key, x, action)
        return x, observation, (x == 0).astype(jnp.float32), end

    return replace(walk, step=step)


def make_poison(at: int = 3, what: str = "reward") -> JaxEnv:
    """NaN in the reward, or infinity in the observation, at a step."""

    def reset(key: Any) -> Any:
        return jnp.int32(0), jnp.zeros(2)

    def step(key: Any, t: Any, action: Any) -> Any:
        bad = t + 1 == at
        reward = jnp.where(bad & (what == "reward"), jnp.nan, 0.0)
        observation = jnp.where(bad & (what == "observation"), jnp.inf, jnp.zeros(2))
        return t + 1, observation, reward, False

    return JaxEnv(reset, step, gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2))


def make_slow() -> JaxEnv:
    """A step of about a second and more."""

    def reset(key: Any) -> Any:
        return jnp.zeros(()), jnp.zeros(1)

    def step(key: Any, state: Any, action: Any) -> Any:
        state = jax.lax.fori_loop(0, 10_000_000, lambda i, x: jnp.cos(x + i), state)
        return state, jnp.zeros(1), state, False

    return JaxEnv(reset, step, gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2))


def make_unannotated():  # type: ignore[no-untyped-def]
    return make_counter()


def make_other() -> JaxEnv:
    return 3  # type: ignore[return-value]
