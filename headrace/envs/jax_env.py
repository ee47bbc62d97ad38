"""An environment of one's own as pure functions of JAX; the record alone, so that reading it imports no JAX.

A function annotated as making one has an id like any other, ``my_module:make_env``:

    def make_env(size: int = 5) -> JaxEnv:
        return JaxEnv(reset, step, gym.spaces.Box(0, 1, (size,)), gym.spaces.Discrete(3), max_episode_steps=100)

It is called once in a process for each set of arguments: what it makes is shared by all groups, and compiled once.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym

from headrace.types import Array, PyTree

Reset: TypeAlias = Callable[[Array], tuple[PyTree, PyTree]]
"""``key -> (state, observation)``."""
Step: TypeAlias = Callable[[Array, PyTree, PyTree], tuple[PyTree, PyTree, Array, Array]]
"""``(key, state, action) -> (state, observation, reward, terminated)``."""


@dataclass(frozen=True, eq=False)
class JaxEnv:
    """One environment, without a batch axis; it is mapped over the slots.

    Both functions are traced: their randomness is that of ``key`` (another one each time), branches on values are
    ``jnp.where`` or ``jax.lax.cond``. ``step`` does not reset: the observation it gives with ``terminated`` is the
    episode's true final one. It is never asked what follows, but may be called: the result is dropped.

    Attributes:
        reset: ``key -> (state, observation)``; ``state`` is any pytree of arrays.
        step: ``(key, state, action) -> (state, observation, reward, terminated)``, with the state's shapes and dtypes
            those of ``reset``. ``terminated``: the task has ended; a time limit is not the step's business.
        observation_space: Gymnasium's space of ``observation``: its structure, shapes and dtypes.
        action_space: Gymnasium's space of ``action``, which ``step`` gets in its dtypes, starts and bounds.
        max_episode_steps: episodes are truncated here; None: never.
    """

    reset: Reset
    step: Step
    observation_space: gym.Space
    action_space: gym.Space
    max_episode_steps: int | None = None


def makes_jax_env(function: Callable[..., Any] | None) -> bool:
    """Whether ``function`` is annotated as making a ``JaxEnv``; told without calling it."""
    if function is None:
        return False
    try:
        annotation = inspect.signature(function).return_annotation
    except (TypeError, ValueError):  # some callables have no signature
        return False
    return annotation is JaxEnv or (isinstance(annotation, str) and annotation.split(".")[-1] == "JaxEnv")
