"""Inference where the environments are (placement ``actor``): one owner of ``Slots`` per env group.

``submit`` dispatches and returns at once; ``answer`` waits for the arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headrace import xla
from headrace.agents.agent import Agent, Params
from headrace.envs.contract import EnvSpec
from headrace.inference.messages import Answer, Request
from headrace.inference.slots import Slots, fresh_slots, make_step, renew
from headrace.seeds import Role, stream_seed
from headrace.types import Array, Progress, PyTree, TimeStep


class Published(NamedTuple):
    """Params as they are published: a copy that no update donates, the updates behind it, and where the run stood."""

    params: Params
    version: int
    progress: Progress


class Pending(NamedTuple):
    """A request on its way: device arrays, of which the first ``size`` rows count."""

    slot_ids: np.ndarray
    answer: Answer
    version: int
    size: int


class Compiled(NamedTuple):
    """The compiled functions of inference, shared by all groups of a run."""

    step: Callable[..., tuple[Slots, Answer]]
    renew: Callable[[Slots, Slots, Array], Slots]


def compile_inference(agent: Agent, training: bool = True) -> Compiled:
    """Jit the step and the renewal, both donating the slots."""
    return Compiled(
        xla.jit(make_step(agent, training), donate_argnums=(2,)), jax.jit(renew, donate_argnums=(0,))
    )


def bucket(size: int, most: int) -> int:
    """The padded size of a request of ``size`` rows: the next power of two, at most ``most``."""
    return min(1 << (size - 1).bit_length(), most)


class ActorInference:
    """Inference of one env group."""

    def __init__(
        self,
        agent: Agent,
        spec: EnvSpec,
        slot_ids: np.ndarray,
        compiled: Compiled,
        published: Callable[[], Published],
        seed: int,
        role: Role,
    ) -> None:
        """Make the slots.

        Args:
            agent: whose policy acts.
            spec: of the environments.
            slot_ids: global ids of the group's slots.
            compiled: from ``compile_inference`` of the same agent.
            published: gives the newest params.
            seed: the run's seed.
            role: the streams of action noise.
        """
        self._agent, self._spec, self._compiled, self._published = agent, spec, compiled, published
        self._seed, self._role = seed, role
        self._global_ids = slot_ids.astype(np.int32)
        self._lives = np.zeros(len(slot_ids), np.int64)
        self._slots = self._fresh()

    def submit(self, request: Request) -> Pending:
        """Dispatch the step for the slots of ``request``, with the newest published params."""
        ids, size = request.slot_ids, len(request.slot_ids)
        if not np.array_equal(self._lives[ids], request.run_ids):
            self._begin_lives(ids, request.run_ids)
        published = self._published()
        if size == len(self._global_ids) and np.array_equal(ids, np.arange(size)):
            rows, index, global_ids = request.timestep, None, self._global_ids
        else:
            rows, index, global_ids = self._pad(request)
        self._slots, answer = self._compiled.step(
            published.params, published.progress, self._slots, rows, index, global_ids
        )
        return Pending(ids, answer, published.version, size)

    def answer(self, pending: Pending, with_carry: bool) -> Answer:
        """Wait for the answer; NumPy arrays ``[b, ...]``. ``carry`` is () unless asked for."""
        wanted = pending.answer if with_carry else pending.answer._replace(carry=())
        return jax.tree.map(lambda x: np.asarray(x)[: pending.size], wanted)

    def get_state(self) -> dict[str, Any]:
        """The slots as NumPy arrays, to be called with no request on its way."""
        copies = jax.tree.map(jnp.copy, self._slots)
        return {"slots": [np.asarray(x) for x in jax.tree.leaves(copies)], "lives": self._lives.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``."""
        treedef = jax.tree.structure(self._slots)
        self._slots = jax.tree.unflatten(treedef, [jnp.array(x, copy=True) for x in state["slots"]])
        self._lives = np.array(state["lives"])

    def _fresh(self) -> Slots:
        seeds = [
            stream_seed(self._seed, self._role, int(slot), int(life))
            for slot, life in zip(self._global_ids, self._lives, strict=True)
        ]
        return fresh_slots(self._agent, self._spec, np.array(seeds, np.uint32))

    def _begin_lives(self, ids: np.ndarray, run_ids: np.ndarray) -> None:
        mask = np.zeros(len(self._lives), bool)
        mask[ids] = self._lives[ids] != run_ids
        self._lives[ids] = run_ids
        self._slots = self._compiled.renew(self._slots, self._fresh(), mask)

    def _pad(self, request: Request) -> tuple[TimeStep, np.ndarray, np.ndarray]:
        """Rows padded to a bucket by repeating row 0, with an id that the step drops."""
        size, most = len(request.slot_ids), len(self._global_ids)
        source = np.zeros(bucket(size, most), np.int64)
        source[:size] = np.arange(size)
        index = np.full(len(source), most, np.int32)
        index[:size] = request.slot_ids
        rows: PyTree = jax.tree.map(lambda x: x[source], request.timestep)
        return rows, index, self._global_ids[request.slot_ids[source]]
