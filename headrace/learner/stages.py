"""The learner's compiled stages: batch and state in, new state, metrics and a copy of the params out."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from headrace import xla
from headrace.agents.agent import (
    Agent,
    LearnerState,
    Phase,
    Report,
    Update,
    apply_if_finite,
    compose,
    select,
)
from headrace.types import Array, Progress, PyTree, Trajectory

UpdateFn: TypeAlias = Callable[[LearnerState, Trajectory, Progress, Array], Update]


def compile_update(agent: Agent) -> UpdateFn:
    """The update of ``agent``, compiled, the state donated.

    One program, unless there are micro-batches: then a program for each stage, because a loop around a convolution
    inside one program takes it off the CPU's threaded path. Both give what ``compose`` gives.
    """
    spec = agent.experience
    if spec.micro_batches == 1 or spec.epochs > 1 or spec.minibatches > 1:
        return xla.jit(compose(agent), donate_argnums=(0,))
    return _stage_by_stage(agent)


def _stage_by_stage(agent: Agent) -> UpdateFn:
    parts = agent.experience.micro_batches
    prepare = xla.jit(agent.prepare)
    phases = [_compile_phase(phase, number, parts) for number, phase in enumerate(agent.phases)]

    def update(state: LearnerState, batch: Trajectory, progress: Progress, key: Array) -> Update:
        keys = _split_key(key)
        batch = prepare(state, batch, progress, keys[1])
        reports = []
        for run in phases:
            state, metrics, writes = run(state, batch, progress, keys[0])
            reports.append(metrics)
        metrics = reports[0] if len(reports) == 1 else jax.tree.map(lambda *x: sum(x) / len(x), *reports)
        return Update(state, metrics, writes)

    return update


@jax.jit
def _split_key(key: Array) -> Array:
    return jax.random.split(key)


Sums: TypeAlias = tuple[PyTree, Array, dict[str, Array]]
"""Gradient sums, weight sum, metric sums."""


def _compile_phase(
    phase: Phase, number: int, parts: int
) -> Callable[..., tuple[LearnerState, dict[str, Array], dict[str, Array]]]:
    def grads(
        state: LearnerState, batch: Trajectory, key: Array, index: Array
    ) -> tuple[Sums, dict[str, Array]]:
        size = batch.weight.shape[0] // parts
        # The keys that ``compose`` gives its only epoch and minibatch.
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 0), 0), number)
        gradient, weight, report = phase.grads(state, select(batch, index * size + jnp.arange(size)), key)
        return (gradient, weight, report.metrics), report.writes

    def accumulate(
        sums: Sums, state: LearnerState, batch: Trajectory, key: Array, index: Array
    ) -> tuple[Sums, dict[str, Array]]:
        more, writes = grads(state, batch, key, index)
        return jax.tree.map(jnp.add, sums, more), writes

    def apply(state: LearnerState, sums: Sums, progress: Progress) -> tuple[LearnerState, dict[str, Array]]:
        return apply_if_finite(phase, state, (sums[0], sums[1], Report(sums[2], {})), progress)

    first = xla.jit(grads)
    more = xla.jit(accumulate, donate_argnums=(0,))
    last = jax.jit(apply, donate_argnums=(0,))

    def run(
        state: LearnerState, batch: Trajectory, progress: Progress, key: Array
    ) -> tuple[LearnerState, dict[str, Array], dict[str, Array]]:
        sums, *writes = first(state, batch, key, 0)
        for index in range(1, parts):
            sums, fields = more(sums, state, batch, key, index)
            writes.append(fields)
        state, metrics = last(state, sums, progress)
        return state, metrics, jax.tree.map(lambda *x: jnp.concatenate(x), *writes)

    return run


copy_params = jax.jit(partial(jax.tree.map, jnp.copy))
"""A device copy: what is published must not be a reference into the donated state."""
