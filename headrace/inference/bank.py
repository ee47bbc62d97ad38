"""All slots of a run in one place, indexed by global slot id, and the compiled programs that work on them."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.agents.agent import Agent
from headrace.envs.contract import EnvSpec
from headrace.inference.actor import Published, bucket, compile_inference
from headrace.inference.messages import Answer
from headrace.inference.slots import Slots, fresh_slots, renew
from headrace.seeds import Role, stream_seed
from headrace.types import Array, PyTree, TimeStep


class SlotBank:
    """The one owner of ``Slots`` ``[N, ...]``; every program that it needs is compiled by ``warm_up``."""

    def __init__(
        self,
        agent: Agent,
        spec: EnvSpec,
        num_slots: int,
        published: Callable[[], Published],
        seed: int,
        role: Role,
    ) -> None:
        """Make the slots.

        Args:
            agent: whose policy acts.
            spec: of the environments.
            num_slots: ``N``.
            published: gives the newest params.
            seed: the run's seed.
            role: the streams of action noise.
        """
        self._agent, self._spec, self._published, self._seed, self._role = agent, spec, published, seed, role
        self.num_slots = num_slots
        # Partials, as JAX keeps the programs of one function together, also those of another run in this process.
        self._step_compiled = compile_inference(agent).step
        self._renew_compiled = jax.jit(partial(renew), donate_argnums=(0,))
        self._cut = jax.jit(partial(_cut), static_argnums=2)
        self._lives = np.zeros(num_slots, np.int64)
        self._slots = self._fresh(np.arange(num_slots))
        # A checkpoint is read by another thread than the one that serves.
        self._owner = threading.Lock()

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        programs: list[Any] = [self._step_compiled, self._renew_compiled, self._cut]
        return sum(program._cache_size() for program in programs)

    def step(self, rows: TimeStep, ids: np.ndarray, run_ids: np.ndarray) -> tuple[Answer, int]:
        """Dispatch the step for the slots ``ids`` ``[b]``, each there once.

        Args:
            rows: what they say, ``[p, ...]`` with p >= b: the rows beyond are padding.
            ids: int32, global.
            run_ids: the lives they are in; a changed one begins with nothing of the old one.

        Returns:
            The answer ``[p, ...]`` on the device, and the version of the newest params, which gave it.
        """
        padded = len(rows.first)
        index, global_ids = np.full(padded, self.num_slots, np.int32), np.full(padded, ids[0], np.int32)
        index[: len(ids)] = global_ids[: len(ids)] = ids
        with self._owner:
            changed = ids[self._lives[ids] != run_ids]
            self._lives[ids] = run_ids
            if len(changed):
                self._renew(changed)
            published = self._published()
            return self._step(published, rows, index, global_ids), published.version

    def warm_up(self, blank: TimeStep, most: int, group_sizes: set[int]) -> None:
        """Compile the step for every bucket up to ``most`` rows, and the rest. Changes no slot.

        Args:
            blank: what one slot says, in zeros, without a leading axis.
            most: rows of the largest batch.
            group_sizes: numbers of slots that ``get_state`` is asked for.
        """
        published, size = self._published(), 0
        with self._owner:
            while size < most:
                size = bucket(size + 1, most)
                rows = jax.tree.map(lambda x, size=size: np.zeros((size, *x.shape), x.dtype), blank)
                nobody = np.full(size, self.num_slots, np.int32)
                self._step(published, rows, nobody, np.zeros(size, np.int32))
            self._renew(np.zeros(0, np.int64))
            for size in group_sizes:
                self._cut(self._slots, np.int32(0), size)
            jax.block_until_ready(self._slots)

    def get_state(self, first_slot: int, size: int) -> dict[str, Any]:
        """Slots of a group as ``ActorInference`` gives them, to be called with none of its requests on their way."""
        with self._owner:
            leaves = jax.tree.leaves(self._cut(self._slots, np.int32(first_slot), size))
            lives = self._lives[first_slot : first_slot + size].copy()
            return {"slots": [np.asarray(x) for x in leaves], "lives": lives}

    def set_state(self, first_slot: int, state: dict[str, Any]) -> None:
        """Continue from ``get_state``."""
        mine = slice(first_slot, first_slot + len(state["lives"]))
        with self._owner:
            leaves, treedef = jax.tree.flatten(self._slots)
            leaves = [
                x.at[mine].set(jnp.asarray(saved)) for x, saved in zip(leaves, state["slots"], strict=True)
            ]
            self._slots = jax.tree.unflatten(treedef, leaves)
            self._lives[mine] = state["lives"]

    def _step(self, published: Published, rows: PyTree, index: np.ndarray, global_ids: np.ndarray) -> Answer:
        self._slots, answer = self._step_compiled(
            published.params, published.progress, self._slots, rows, index, global_ids
        )
        return answer

    def _renew(self, slots: np.ndarray) -> None:
        mask = np.zeros(self.num_slots, bool)
        mask[slots] = True
        self._slots = self._renew_compiled(self._slots, self._fresh(slots), mask)

    def _fresh(self, slots: np.ndarray) -> Slots:
        """All slots as at the start of a life; only those of ``slots`` have the streams of theirs."""
        seeds = np.zeros(self.num_slots, np.uint32)
        for slot in slots.tolist():
            seeds[slot] = stream_seed(self._seed, self._role, slot, int(self._lives[slot]))
        return fresh_slots(self._agent, self._spec, seeds)


def _cut(slots: Slots, first: Array, size: int) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), slots)
