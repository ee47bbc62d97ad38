"""What inference remembers of each slot, and the one step that every placement calls."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from headrace import spaces
from headrace.agents.agent import ActInput, Agent, Params
from headrace.envs.contract import EnvSpec
from headrace.inference.messages import Answer
from headrace.networks.context import stack_step
from headrace.types import Array, Progress, PyTree, TimeStep


class Slots(NamedTuple):
    """Per-slot memory ``[N, ...]`` on the inference device.

    It has one owner and is donated to each step; nothing reads a leaf of it from the host.

    Attributes:
        carry: recurrent state.
        recent: the last ``n`` observations, ``[N, n, ...]``; ``()`` without context.
        prev_action: the action one row ago.
        key: uint32 key data of the slot's stream of action noise.
        count: i32, rows answered in this life: the position in that stream.
    """

    carry: PyTree
    recent: PyTree
    prev_action: PyTree
    key: Array
    count: Array


Step: TypeAlias = Callable[[Params, Progress, Slots, TimeStep, Array | None, Array], tuple[Slots, Answer]]


def fresh_slots(agent: Agent, spec: EnvSpec, seeds: np.ndarray) -> Slots:
    """Slots at the start of a life; ``seeds`` ``[N]`` begin their streams of action noise."""
    size, context = len(seeds), agent.experience.context
    recent = jax.tree.map(jnp.asarray, spaces.zeros(spec.observation, (size, context))) if context else ()
    return Slots(
        carry=agent.initial_carry(size),
        recent=recent,
        prev_action=jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), agent.action),
        key=jax.vmap(lambda s: jax.random.key_data(jax.random.key(s)))(jnp.asarray(seeds, jnp.uint32)),
        count=jnp.zeros(size, jnp.int32),
    )


def make_step(agent: Agent, training: bool) -> Step:
    """The step ``(params, progress, slots, timestep [b], ids, global_ids [b]) -> (slots, Answer)``, to be jitted.

    ``ids`` are the rows of ``slots`` that speak, padded with ``N`` (dropped); None: all, in order. ``global_ids`` are
    the slots' ids in the run. Without ``training`` every slot is greedy.
    """

    def step(
        params: Params,
        progress: Progress,
        slots: Slots,
        timestep: TimeStep,
        ids: Array | None,
        global_ids: Array,
    ) -> tuple[Slots, Answer]:
        mine = slots if ids is None else jax.tree.map(lambda x: x.at[ids].get(mode="clip"), slots)
        observation, recent = timestep.observation, mine.recent
        if agent.experience.context:
            observation, recent = stack_step(mine.recent, observation, timestep.first)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(mine.key), mine.count)
        explore = agent.exploration(global_ids, progress) if training else jnp.zeros(global_ids.shape)
        x = ActInput(timestep._replace(observation=observation), mine.prev_action, explore)
        (action, extras), carry = agent.act(params, mine.carry, x, keys)
        new = Slots(carry, recent, action, mine.key, mine.count + 1)
        if ids is not None:
            new = jax.tree.map(lambda old, x: old.at[ids].set(x, mode="drop"), slots, new)
        return new, Answer(action, extras, mine.carry)

    return step


def renew(slots: Slots, fresh: Slots, mask: Array) -> Slots:
    """``slots`` with those of ``mask`` bool ``[N]`` replaced by ``fresh``: a new life begins with nothing of the old one."""
    return jax.tree.map(
        lambda new, old: jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old), fresh, slots
    )
