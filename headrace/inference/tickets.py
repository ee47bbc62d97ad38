"""Requests that wait for central inference, cut into batches and put together again."""

import threading
from collections.abc import Sequence

import jax
import numpy as np

from headrace.inference.batcher import Part
from headrace.inference.messages import Answer, Request
from headrace.types import TimeStep


class Ticket:
    """A question on its way, and what is there of its answer.

    Attributes:
        request: with global ids.
        slot_ids: ids within the group.
        size: number of rows.
        version: int32 ``[b]``, of the params that chose each action; complete once ``done`` is set.
        done: every row was sent to the device.
    """

    def __init__(self, request: Request, slot_ids: np.ndarray) -> None:
        self.request, self.slot_ids, self.size = request, slot_ids, len(slot_ids)
        self.version = np.zeros(self.size, np.int32)
        self.done = threading.Event()
        self._pieces: list[tuple[Answer, slice]] = []

    def put(self, part: "Part[Ticket]", answer: Answer, at: int, version: int) -> None:
        """The rows of ``part`` are those from ``at`` on of the batch's ``answer``. Parts come in order."""
        self._pieces.append((answer, slice(at, at + part.size)))
        self.version[part.start : part.stop] = version
        if part.stop == self.size:
            self.done.set()

    def read(self, with_carry: bool) -> Answer:
        """Wait for the device; the parts put together again, NumPy ``[b, ...]``."""
        parts: list[Answer] = []
        for answer, rows in self._pieces:
            wanted = answer if with_carry else answer._replace(carry=())
            parts.append(jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], wanted))
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)


def gather(parts: Sequence[Part[Ticket]], padded: int) -> TimeStep:
    """What the slots of ``parts`` say, ``[padded, ...]``; padded by repeating row 0. Nobody writes to it again."""
    first = parts[0]
    if first.size == first.ticket.size == padded:
        return first.ticket.request.timestep
    leaves, treedef = jax.tree.flatten(first.ticket.request.timestep)
    rows = [np.empty((padded, *x.shape[1:]), x.dtype) for x in leaves]
    at = 0
    for part in parts:
        for whole, x in zip(rows, jax.tree.leaves(part.ticket.request.timestep), strict=True):
            whole[at : at + part.size] = x[part.start : part.stop]
        at += part.size
    for whole in rows:
        whole[at:] = whole[0]
    timestep: TimeStep = jax.tree.unflatten(treedef, rows)
    return timestep


def joined(parts: Sequence[Part[Ticket]]) -> tuple[np.ndarray, np.ndarray]:
    """Global slot ids and run ids of ``parts``."""
    ids = [part.ticket.request.slot_ids[part.start : part.stop] for part in parts]
    run_ids = [part.ticket.request.run_ids[part.start : part.stop] for part in parts]
    return np.concatenate(ids), np.concatenate(run_ids)
