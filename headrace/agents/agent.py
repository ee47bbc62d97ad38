"""An agent is a record of functions, and ``compose`` is what an update means.

No agent knows a thread, a device or a file; no room knows an agent's name. Variants are made by passing functions, and
with ``dataclasses.replace``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from headrace.types import Array, Progress, PyTree, TimeStep, Trajectory

LearnerState: TypeAlias = Any
"""Params, targets, optimisers, statistics: one pytree, and all of what an agent has to checkpoint."""
Params: TypeAlias = Any


class ActInput(NamedTuple):
    """What ``act`` sees, leading axis ``[b]``.

    Attributes:
        timestep: with ``context = n > 0``, observation leaves are ``[b, n+1, ...]``, oldest first.
        prev_action: the slot's action one row ago (of the episode before, where ``first``).
        explore: f32 ``[b]``, what ``exploration`` gave the slot; 0 is greedy.
    """

    timestep: TimeStep
    prev_action: PyTree
    explore: Array


class Report(NamedTuple):
    """What a phase has to say.

    Attributes:
        metrics: named sums over the trained rows; divided by the weight sum when reported.
        writes: fields ``[B]`` that go back to the items of the batch by id.
    """

    metrics: dict[str, Array]
    writes: dict[str, Array]


class Phase(NamedTuple):
    """One pair of the stages of an update.

    ``grads(state, minibatch, key) -> (grad_sum, weight_sum, Report)``: sums over rows, never means, so that
    micro-batches and devices add up exactly. ``apply(state, grad_sum, weight_sum, progress) -> (state, metrics)``.
    """

    grads: Callable[[LearnerState, Trajectory, Array], tuple[PyTree, Array, Report]]
    apply: Callable[[LearnerState, PyTree, Array, Progress], tuple[LearnerState, dict[str, Array]]]


@dataclass(frozen=True)
class ExperienceSpec:
    """What an agent wants to learn from.

    Attributes:
        length: transitions of a trajectory, ``T`` = overlap + new rows.
        batch_size: trajectories of a batch, ``B``.
        overlap: rows shared with the trajectory before.
        burn_in: rows at the start that only warm the carry.
        context: rows before row 0 that finite memory is rebuilt from.
        epochs: passes over a batch.
        minibatches: parts of a batch, one ``apply`` each.
        micro_batches: parts of a minibatch whose sums are added before ``apply``.
        reward_transform: raw to trained reward, on NumPy and JAX arrays; None: the raw reward.
    """

    length: int
    batch_size: int
    overlap: int = 0
    burn_in: int = 0
    context: int = 0
    epochs: int = 1
    minibatches: int = 1
    micro_batches: int = 1
    reward_transform: Callable[[Array], Array] | None = None


def greedy_or_sample(slot_ids: Array, progress: Progress) -> Array:
    """The exploration of stochastic policies: 1 everywhere (sample); evaluation passes 0 (mode)."""
    del progress
    return jnp.ones(slot_ids.shape, jnp.float32)


def keep_batch(state: LearnerState, batch: Trajectory, progress: Progress, key: Array) -> Trajectory:
    """The ``prepare`` of agents that need nothing of the whole batch."""
    del state, progress, key
    return batch


@dataclass(frozen=True)
class Agent:
    """An agent, as functions.

    Attributes:
        init: ``key -> LearnerState``.
        policy_params: ``LearnerState -> params`` that ``act`` takes; these are published.
        initial_carry: ``b -> carry [b, ...]``.
        act: ``(params, carry, ActInput, keys [b]) -> ((action, extras), carry)``; one key a slot.
        phases: the stages of an update.
        experience: what it learns from.
        action: one action of zeros in its own coordinates, giving shapes and dtypes.
        extras: one row of ``extras`` in zeros, likewise.
        to_env: ``action -> env action``, NumPy: the sample's own coordinates to the environment's.
        exploration: ``(slot_ids [b], progress) -> explore [b]`` of training slots.
        prepare: ``(state, batch, progress, key) -> batch``, once a batch.
        value: ``(params, carry, ActInput) -> value [b]``, where the agent has one.
    """

    init: Callable[[Array], LearnerState]
    policy_params: Callable[[LearnerState], Params]
    initial_carry: Callable[[int], PyTree]
    act: Callable[[Params, PyTree, ActInput, Array], tuple[tuple[PyTree, PyTree], PyTree]]
    phases: tuple[Phase, ...]
    experience: ExperienceSpec
    action: PyTree
    extras: PyTree = ()
    to_env: Callable[[PyTree], PyTree] = field(default=lambda action: action)
    exploration: Callable[[Array, Progress], Array] = greedy_or_sample
    prepare: Callable[[LearnerState, Trajectory, Progress, Array], Trajectory] = keep_batch
    value: Callable[[Params, PyTree, ActInput], Array] | None = None


class Update(NamedTuple):
    """What an update gives: the new state, metrics as means, and the fields written back."""

    state: LearnerState
    metrics: dict[str, Array]
    writes: dict[str, Array]


def compose(agent: Agent) -> Callable[[LearnerState, Trajectory, Progress, Array], Update]:
    """The update of ``agent`` as one function: the specification, and what the learner compiles.

    ``prepare`` once, then for each epoch and minibatch every phase: the sums of its micro-batches, then ``apply``. A phase
    whose sums or new state are not finite leaves the state as it was and reports ``skipped_updates``.
    """
    spec = agent.experience

    def update(state: LearnerState, batch: Trajectory, progress: Progress, key: Array) -> Update:
        key, prepare_key = jax.random.split(key)
        batch = agent.prepare(state, batch, progress, prepare_key)
        reports: list[tuple[dict[str, Array], dict[str, Array]]] = []
        for epoch in range(spec.epochs):
            epoch_key = jax.random.fold_in(key, epoch)
            for index, minibatch in enumerate(_minibatches(spec, batch, epoch_key)):
                for number, phase in enumerate(agent.phases):
                    phase_key = jax.random.fold_in(jax.random.fold_in(epoch_key, index), number)
                    parts = split(minibatch, spec.micro_batches)
                    sums = add_sums([phase.grads(state, p, phase_key) for p in parts])
                    state, metrics = apply_if_finite(phase, state, sums, progress)
                    reports.append((metrics, sums[2].writes))
        metrics = jax.tree.map(lambda *x: jnp.mean(jnp.stack(x)), *[m for m, _ in reports])
        return Update(state, metrics, reports[-1][1])

    return update


def apply_if_finite(
    phase: Phase, state: LearnerState, sums: tuple[PyTree, Array, Report], progress: Progress
) -> tuple[LearnerState, dict[str, Array]]:
    """``phase.apply`` unless a sum or the new state is not finite; returns the state and the metrics as means over the rows.

    Finite sums are not enough: the square of a large gradient in an optimiser's state may overflow.
    """
    grad_sum, weight_sum, report = sums
    new_state, metrics = phase.apply(state, grad_sum, weight_sum, progress)
    leaves = jax.tree.leaves((grad_sum, report.metrics.get("loss/total", 0.0), new_state))
    finite = jnp.all(
        jnp.stack(
            [jnp.all(jnp.isfinite(x)) for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        )
    )
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_state, state)
    means = {k: v / jnp.maximum(weight_sum, 1.0) for k, v in report.metrics.items()}
    return state, {**means, **metrics, "skipped_updates": 1.0 - finite.astype(jnp.float32)}


def add_sums(parts: list[tuple[PyTree, Array, Report]]) -> tuple[PyTree, Array, Report]:
    """Add what ``grads`` gave for the parts of a minibatch, in order; writes are joined along ``B``."""
    total = parts[0]
    for part in parts[1:]:
        total = add_two(total, part)
    return total


def add_two(a: tuple[PyTree, Array, Report], b: tuple[PyTree, Array, Report]) -> tuple[PyTree, Array, Report]:
    """``a + b`` of two results of ``grads``."""
    grads, weight, metrics = jax.tree.map(jnp.add, (a[0], a[1], a[2].metrics), (b[0], b[1], b[2].metrics))
    writes = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a[2].writes, b[2].writes)
    return grads, weight, Report(metrics, writes)


def split(batch: Trajectory, parts: int) -> list[Trajectory]:
    """``batch`` in ``parts`` equal parts along ``B``."""
    size = batch.weight.shape[0] // parts
    return [select(batch, np.arange(i * size, (i + 1) * size)) for i in range(parts)]


def select(batch: Trajectory, index: Array) -> Trajectory:
    """The trajectories ``index`` of ``batch``."""
    over_time = jax.tree.map(lambda x: x[:, index], (batch.rows, batch.context))
    rest = (batch.carry, batch.prev_action, batch.slot_id, batch.item_id, batch.weight)
    return Trajectory(*over_time, *jax.tree.map(lambda x: x[index], rest))


def _minibatches(spec: ExperienceSpec, batch: Trajectory, key: Array) -> list[Trajectory]:
    if spec.minibatches == 1:
        return [batch]
    order = jax.random.permutation(key, batch.weight.shape[0])
    return [select(batch, part) for part in jnp.split(order, spec.minibatches)]
