"""What passes between the driver of an env group and inference: arrays and ids only, and nothing of JAX.

So a thread, process or machine boundary can be drawn there.
"""

from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from headrace.types import PyTree, TimeStep


class Request(NamedTuple):
    """A question: what slots said ``[b, ...]``, who they are (int32 ids), and in which life (int64).

    Ids are those within the group on the driver's side, global ones on the side of a server of many groups.
    """

    timestep: TimeStep
    slot_ids: np.ndarray
    run_ids: np.ndarray


class Answer(NamedTuple):
    """What a step gives for the slots of a request ``[b, ...]``; ``carry`` is the one *before* the row."""

    action: PyTree
    extras: PyTree
    carry: PyTree


class Question(Protocol):
    """A request on its way."""

    @property
    def slot_ids(self) -> np.ndarray:
        """Who asked, ids within the group."""
        ...

    @property
    def size(self) -> int:
        """How many they are."""
        ...

    @property
    def version(self) -> int | np.ndarray:
        """Of the params that answer, for all rows or int32 ``[b]``; known once it is answered."""
        ...


Q = TypeVar("Q")


class Inference(Protocol[Q]):
    """What the driver of an env group asks, wherever the policy runs; ``Q`` is the ``Question`` that it gives."""

    def submit(self, request: Request) -> Q:
        """Ask; returns at once."""
        ...

    def answer(self, pending: Q, with_carry: bool) -> Answer:
        """Wait for the answer; NumPy arrays ``[b, ...]``. ``carry`` is () unless asked for."""
        ...

    def get_state(self) -> dict[str, Any]:
        """The group's slots as NumPy arrays, with no request on its way; the same format wherever the policy runs."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``."""
        ...
