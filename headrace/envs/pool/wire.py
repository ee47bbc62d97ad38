"""What a pool and its workers share and say to each other.

Rows lie in shared memory; messages tell whose. A message is int32 numbers, the first of which is its kind; the rest of it
are slot ids, or a pickle where seldom anything else is to be said.
"""

import pickle
from dataclasses import dataclass, replace
from enum import IntEnum
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from headrace.envs import rows
from headrace.envs.contract import EnvSpec
from headrace.envs.pool.memory import Field
from headrace.envs.request import Request
from headrace.spaces import Spec
from headrace.types import PyTree, TimeStep


class Kind(IntEnum):
    """Kinds of messages."""

    STEP = 0  # to a worker: these slots have an action
    CALL = 1  # to a worker: a name and arguments
    READY = 2  # of a worker: these slots have a row
    NOTES = 3  # of a worker: failures and infos
    REPLY = 4  # of a worker: what a call gave
    FAILED = 5  # of a worker: why it ends


@dataclass(frozen=True)
class Shifted:
    """``seed_of`` of a worker's slots, which begin at slot ``low`` of the group."""

    seed_of: Any
    low: int

    def __call__(self, slot: int, life: int) -> int:
        """The seed of a slot of the worker in a life."""
        return int(self.seed_of(self.low + slot, life))


class Job(NamedTuple):
    """What a worker is to do.

    Attributes:
        request: for its own slots.
        low: the group's slot that is its slot 0.
        total: slots of the group.
        spec: of the environments; None: tell what it is and do nothing else (see ``probe``).
        block: file descriptor of the shared memory; -1 without.
        lives: int64, first life of each of its slots.
        left: int64, restarts that each has left.
        measure: whether a probe steps the environment to see how long it takes.
    """

    request: Request
    low: int = 0
    total: int = 1
    spec: EnvSpec | None = None
    block: int = -1
    lives: np.ndarray | None = None
    left: np.ndarray | None = None
    measure: bool = False


class Resumed(NamedTuple):
    """Whether a worker reproduced the state of its slots, and bool ``[num_slots]``: those that will speak unasked."""

    exact: bool
    due: np.ndarray


def share(request: Request, low: int, high: int) -> Request:
    """The part of a group's request that is about its slots ``low … high-1``."""
    return replace(
        request,
        num_slots=high - low,
        seed_of=Shifted(request.seed_of, low),
        first_slot=request.first_slot + low,
        workers=0,
        batch_size=None,
    )


def layout(spec: EnvSpec, num_slots: int) -> list[Field]:
    """The arrays of a pool's shared memory: rows and actions ``[num_slots, ...]``."""
    seen = [
        Field(f"observation {i}", (num_slots, *leaf.shape), leaf.dtype)
        for i, leaf in enumerate(_leaves(spec.observation))
    ]
    more = [
        Field(f"extra {i}", (num_slots, *leaf.shape), leaf.dtype)
        for i, leaf in enumerate(_leaves(spec.extra))
    ]
    acts = [
        Field(f"action {i}", (num_slots, *rows.env_shape(leaf)), leaf.env_dtype)
        for i, leaf in enumerate(_leaves(spec.action))
    ]
    flags = [Field(name, (num_slots,), np.dtype(bool)) for name in ("first", "terminated", "truncated")]
    reward = Field("reward", (num_slots,), np.dtype(np.float32))
    lives = Field("lives", (num_slots,), np.dtype(np.int64))
    return [*seen, *more, *acts, reward, *flags, lives]


def _leaves(spec: Spec) -> list[Any]:
    return [leaf for leaf, _ in rows.tree_leaves(spec, spec)]


class Shared:
    """The arrays of a pool's shared memory, as rows.

    Attributes:
        action: tree ``[N, ...]`` in environment types.
        timestep: fields ``[N, ...]`` in agent types.
        lives: int64 ``[N]``.
    """

    def __init__(self, spec: EnvSpec, found: dict[str, np.ndarray]) -> None:
        def tree(part: Spec, name: str) -> PyTree:
            count = len(_leaves(part))
            return rows.tree_from_arrays(part, {str(i): found[f"{name} {i}"] for i in range(count)})

        self._spec, self._extra = spec.observation, spec.extra
        self.action = tree(spec.action, "action")
        flags = (found[name] for name in ("reward", "first", "terminated", "truncated"))
        reward, first, terminated, truncated = flags
        seen, extra = tree(spec.observation, "observation"), tree(spec.extra, "extra")
        self.timestep = TimeStep(seen, reward, first, terminated, truncated, extra)
        self.lives = found["lives"]

    def write(self, slot_ids: Any, timestep: TimeStep) -> None:
        """Put rows down."""
        rows.put(self._spec, self.timestep.observation, slot_ids, timestep.observation)
        rows.put(self._extra, self.timestep.extra, slot_ids, timestep.extra)
        for mine, value in zip(self.timestep[1:5], timestep[1:5], strict=True):
            mine[slot_ids] = value

    def read(self, slot_ids: np.ndarray) -> TimeStep:
        """Copies of rows: shared memory itself is written again."""
        observation = rows.pick(self._spec, self.timestep.observation, slot_ids)
        reward, first, terminated, truncated = (mine[slot_ids] for mine in self.timestep[1:5])
        extra = rows.pick(self._extra, self.timestep.extra, slot_ids)
        return TimeStep(observation, reward, first, terminated, truncated, extra)


def send_ids(connection: Connection, kind: Kind, slot_ids: np.ndarray) -> None:
    """A message about slots."""
    message = np.empty(len(slot_ids) + 1, np.int32)
    message[0], message[1:] = kind, slot_ids
    connection.send_bytes(message.tobytes())


def send_object(connection: Connection, kind: Kind, value: Any) -> None:
    """A message of anything else."""
    connection.send_bytes(np.int32(kind).tobytes() + pickle.dumps(value))


def receive(connection: Connection) -> tuple[Kind, Any]:
    """The next message: slot ids int32 ``[b]`` for ``STEP`` and ``READY``, else an object.

    Raises:
        EOFError, OSError: the other side is gone.
    """
    message = connection.recv_bytes()
    kind = Kind(int.from_bytes(message[:4], "little"))
    if kind in (Kind.STEP, Kind.READY):
        return kind, np.frombuffer(message, np.int32)[1:]
    return kind, pickle.loads(message[4:])
