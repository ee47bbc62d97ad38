"""Frame stacks rebuilt from single rows: state with finite memory n, zeroed at an episode's first row.

At time t the stack is frames t−n … t, oldest first, where

    stack[t, n−j] = frame[t−j]   if no row of t−j+1 … t is first
                    0            otherwise

so that nothing of an earlier episode, or of the memory before a slot's life, is ever seen: dead frames are
selected away, not multiplied by zero.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from headrace.spaces import Spec, map_leaves
from headrace.types import Context, PyTree


def stack_sequence(context: Context, observation: PyTree, first: Bool[Array, "T B"]) -> PyTree:
    """The stacks of a sequence, from its rows and the ``n`` rows before them.

    Args:
        context: leaves ``[n, B, ...]``, the rows before row 0.
        observation: leaves ``[T, B, ...]``.
        first: ``[T, B]``.

    Returns:
        Leaves ``[T, B, n+1, ...]`` in the observation's own dtypes, oldest first.

    Raises:
        ValueError: the context's observation and ``first`` disagree on n.
    """
    n, length = context.first.shape[0], first.shape[0]
    all_first = jnp.concatenate([jnp.asarray(context.first, bool), jnp.asarray(first, bool)])
    # alive[j]: no episode began in the j rows up to and including t, so frame t−j belongs to t's episode.
    alive = [jnp.ones(first.shape, bool)]
    for j in range(n):
        alive.append(alive[-1] & ~all_first[n - j : n - j + length])

    def stack(before: Array, now: Array) -> Array:
        if before.shape != (n, *now.shape[1:]) or before.dtype != now.dtype:
            raise ValueError(
                f"context observation is {before.dtype}{list(before.shape)}; expected {now.dtype}"
                f"{[n, *now.shape[1:]]}: n as in context.first, the rest as in the observation"
            )
        frames = jnp.concatenate([before, now])
        shifted = [_keep(alive[j], frames[n - j : n - j + length]) for j in range(n, -1, -1)]
        return jnp.stack(shifted, axis=2)

    return jax.tree.map(stack, context.observation, observation)


def stack_step(recent: PyTree, observation: PyTree, first: Bool[Array, " b"]) -> tuple[PyTree, PyTree]:
    """One step of acting; the same stacks as ``stack_sequence``.

    Args:
        recent: leaves ``[b, n, ...]``, the frames before; ``zero_recent`` at first, then as returned.
        observation: leaves ``[b, ...]``.
        first: ``[b]``.

    Returns:
        The stacks, leaves ``[b, n+1, ...]`` oldest first, and the next step's ``recent``.
    """
    alive = ~jnp.asarray(first, bool)

    def stack(before: Array, now: Array) -> Array:
        return jnp.concatenate([_keep(alive, before), jnp.asarray(now)[:, None]], axis=1)

    stacked = jax.tree.map(stack, recent, observation)
    return stacked, jax.tree.map(lambda frames: frames[:, 1:], stacked)


def zero_recent(observation_spec: Spec, n: int, batch: int) -> PyTree:
    """``recent`` of slots that have seen nothing: zeros ``[b, n, ...]`` in the agent's types."""
    return map_leaves(lambda leaf: jnp.zeros((batch, n, *leaf.shape), leaf.dtype), observation_spec)


def _keep(alive: Bool[Array, "..."], frames: Array) -> Array:
    """``frames`` where ``alive``, zero elsewhere; ``alive`` covers the leading axes."""
    mask = alive.reshape(alive.shape + (1,) * (frames.ndim - alive.ndim))
    return jnp.where(mask, frames, jnp.zeros((), frames.dtype))
