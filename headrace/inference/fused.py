"""Inference and environments in one program, where both are on the same device.

One call a turn chooses the actions and takes the step. What is dispatched at ``submit`` is the answer *and* the group's
next rows; the group's ``send`` finds the step taken, its ``recv`` reads the rows. Whoever drives the group sees no
difference.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import numpy as np

from headrace import xla
from headrace.agents.agent import Agent, Params
from headrace.envs.contract import EnvGroup, EnvSpec
from headrace.inference.actor import (
    ActorInference,
    Compiled,
    Pending,
    Published,
    compile_inference,
)
from headrace.inference.messages import Answer, Request
from headrace.inference.slots import Slots, make_step
from headrace.seeds import Role
from headrace.types import Array, Progress, PyTree, TimeStep

T = TypeVar("T")
EnvStep: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, TimeStep]]
"""``(env slots, action [N, ...] in the environment's coordinates) -> (env slots, rows [N])``."""
FusedStep: TypeAlias = Callable[..., tuple[PyTree, TimeStep, tuple[Slots, Answer]]]


@runtime_checkable
class FusableGroup(EnvGroup, Protocol):
    """A lock-step group whose step can be traced into a program; see ``envs.jax_group`` for the rules."""

    env_step: EnvStep

    def advance(self, program: Callable[[PyTree, TimeStep], tuple[PyTree, TimeStep, T]]) -> T:
        """Let ``program`` choose actions for the rows received last and take the step with them."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until the rows under way are there."""
        ...


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def fuse(agent: Agent, env_step: EnvStep) -> FusedStep:
    """Jit the step of a training policy and then of its environments, donating both slots.

    ``(params, progress, slots, global ids [N], env slots, rows [N]) -> (env slots, rows [N], (slots, Answer))``.
    """
    act = make_step(agent, training=True)

    def step(
        params: Params, progress: Progress, slots: Slots, global_ids: Array, env_slots: PyTree, rows: TimeStep
    ) -> tuple[PyTree, TimeStep, tuple[Slots, Answer]]:
        slots, answer = act(params, progress, slots, rows, None, global_ids)
        env_slots, rows = env_step(env_slots, agent.to_env(answer.action))
        return env_slots, rows, (slots, answer)

    return xla.jit(step, donate_argnums=(2, 4))


def can_trace(agent: Agent) -> bool:
    """Whether the agent's ``to_env`` can be part of a program; one written for NumPy alone cannot."""
    try:
        jax.eval_shape(lambda x: agent.to_env(jax.tree.map(lambda leaf: leaf[None], x)), agent.action)
    except _NEEDS_VALUES:
        return False
    return True


class FusedInference(ActorInference):
    """Inference of one ``FusableGroup``, all of whose slots speak in each request."""

    def __init__(
        self,
        agent: Agent,
        group: FusableGroup,
        slot_ids: np.ndarray,
        compiled: Compiled,
        fused: FusedStep,
        published: Callable[[], Published],
        seed: int,
        role: Role,
        timeout_s: float,
    ) -> None:
        """Make the slots; ``fused`` is from ``fuse``, ``timeout_s`` bounds a step, the others as of ``ActorInference``."""
        super().__init__(agent, group.spec, slot_ids, compiled, published, seed, role)
        self._group, self._fused, self._timeout_s = group, fused, timeout_s

    def submit(self, request: Request) -> Pending:
        """Dispatch the policy's step and the environments' for the rows that the group gave last."""
        size = len(self._global_ids)
        assert np.array_equal(request.slot_ids, np.arange(size)), (
            "a lock-step group gives all slots, in order"
        )
        if not np.array_equal(self._lives, request.run_ids):
            self._begin_lives(request.slot_ids, request.run_ids)
        published = self._published()

        def program(env_slots: PyTree, rows: TimeStep) -> tuple[PyTree, TimeStep, tuple[Slots, Answer]]:
            return self._fused(
                published.params, published.progress, self._slots, self._global_ids, env_slots, rows
            )

        self._slots, answer = self._group.advance(program)
        return Pending(request.slot_ids, answer, published.version, size)

    def answer(self, pending: Pending, with_carry: bool) -> Answer:
        """As of ``ActorInference``; raises what the group's ``wait`` does."""
        self._group.wait(self._timeout_s)
        return super().answer(pending, with_carry)


def inference_maker(
    agent: Agent, spec: EnvSpec, published: Callable[[], Published], seed: int, role: Role, timeout_s: float
) -> Callable[[EnvGroup, np.ndarray], ActorInference]:
    """``(group, slot_ids) -> inference`` of a run's groups, fused where the group and the agent allow it.

    Groups of the same environment share what is compiled.
    """
    compiled, fused = compile_inference(agent), dict[Any, FusedStep]()

    def make(group: EnvGroup, slot_ids: np.ndarray) -> ActorInference:
        if not isinstance(group, FusableGroup) or not can_trace(agent):
            return ActorInference(agent, spec, slot_ids, compiled, published, seed, role)
        step = fused.setdefault(group.env_step, fuse(agent, group.env_step))
        return FusedInference(agent, group, slot_ids, compiled, step, published, seed, role, timeout_s)

    return make
