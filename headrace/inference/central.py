"""Inference in one place for many env groups (placement ``central``): one server answers the requests of all.

Whoever drives a group submits requests; the batcher says which rows go out together and when. One thread at a time
serves: a thread of its own (``own_thread``), or whoever waits for an answer.
"""

import math
import threading
import time
from typing import Any

import jax
import numpy as np

from headrace.errors import HeadraceError, WaitTimeoutError
from headrace.inference.actor import bucket
from headrace.inference.bank import SlotBank
from headrace.inference.batcher import Batch, Batcher, Limits
from headrace.inference.messages import Answer, Request
from headrace.inference.tickets import Ticket, gather, joined
from headrace.metrics.batches import Tally
from headrace.types import TimeStep

ANSWER_S = 60.0
"""How long an answer may take beyond the deadline of its batch, before the wait for it is an error."""
POLL_S = 0.2
"""How long a wait for an answer lasts before it looks whether the server has ended."""


class InferenceServer:
    """Answers requests of several env groups in batches."""

    def __init__(self, bank: SlotBank, blank: TimeStep, limits: Limits, own_thread: bool) -> None:
        """Nothing is compiled yet, see ``warm_up``.

        Args:
            bank: all slots; nobody else uses it.
            blank: what one slot says, in zeros, without a leading axis.
            limits: of batches.
            own_thread: another thread calls ``serve`` until ``close``; else whoever waits for an answer serves, and as
                nobody can come while it waits, the deadline has come when it begins to wait.
        """
        self._bank, self._own_thread, self.closed = bank, own_thread, False
        self._blank = jax.tree.map(np.asarray, blank)
        self._most = min(limits.max_batch, bank.num_slots)
        self._limit_s = limits.deadline_s + ANSWER_S
        self._group_sizes: set[int] = set()
        self._asked = threading.Condition()  # guards what follows
        deadline_s = limits.deadline_s if own_thread else math.inf
        self._batcher: Batcher[Ticket] = Batcher(Limits(limits.min_batch, self._most, deadline_s))
        self._waiting = np.zeros(bank.num_slots, bool)
        self._tally = Tally()

    def group(self, first_slot: int, size: int) -> "CentralInference":
        """The side of an env group that has the slots from ``first_slot`` on."""
        self._group_sizes.add(size)
        return CentralInference(self, self._bank, first_slot, size)

    def warm_up(self) -> None:
        """Compile all that serving needs. Changes no slot."""
        self._bank.warm_up(self._blank, self._most, self._group_sizes)

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return self._bank.compilations

    def submit(self, request: Request, slot_ids: np.ndarray) -> Ticket:
        """Ask for ``request``, whose ids are global; ``slot_ids`` are those within the group. Returns at once.

        Raises:
            ValueError: it is not what the environments' spec says, or a slot asks again before it was answered.
        """
        self._check(request)
        ticket = Ticket(request, slot_ids)
        with self._asked:
            twice = request.slot_ids[self._waiting[request.slot_ids]]
            if len(twice):
                raise ValueError(f"slots {twice.tolist()} ask again before they were answered")
            self._batcher.add(ticket, ticket.size, time.monotonic())
            self._waiting[request.slot_ids] = True
            self._asked.notify_all()
        if not self._own_thread:
            while self.serve(0.0):
                pass
        return ticket

    def answer(self, ticket: Ticket, with_carry: bool) -> Answer:
        """Wait for the answer; NumPy arrays ``[b, ...]``. ``carry`` is () unless asked for.

        Raises:
            WaitTimeoutError: nobody serves.
            HeadraceError: the server has ended.
        """
        if self._own_thread:
            self._wait_for(ticket)
        while not ticket.done.is_set():
            if not self.serve(0.0, hurry=True):
                raise HeadraceError(f"slots {ticket.request.slot_ids.tolist()} never asked this server")
        return ticket.read(with_carry)

    def serve(self, timeout_s: float, hurry: bool = False) -> bool:
        """Send the next batch to the device, waiting until one is due, at most ``timeout_s`` seconds.

        Args:
            timeout_s: seconds.
            hurry: what waits goes out as if the deadline had come.

        Returns:
            Whether there was one.
        """
        with self._asked:
            batch = self._next(time.monotonic() + timeout_s, hurry)
            if batch is None:
                return False
            ids, run_ids = joined(batch.parts)
            self._waiting[ids] = False
            padded = bucket(len(ids), self._most)
            self._tally.count(len(ids), padded, batch.reason, batch.waits)
        answer, version = self._bank.step(gather(batch.parts, padded), ids, run_ids)
        at = 0
        for part in batch.parts:
            part.ticket.put(part, answer, at, version)
            at += part.size
        return True

    def close(self) -> None:
        """Say that nobody serves any more: waits for answers end with an error."""
        with self._asked:
            self.closed = True
            self._asked.notify_all()

    def take_tally(self) -> Tally:
        """What was served since the last call."""
        with self._asked:
            tally, self._tally = self._tally, Tally()
        return tally

    def _check(self, request: Request) -> None:
        """Whatever got by here would be compiled for, or end the server's thread instead of the asker's."""
        got, expected = jax.tree.leaves(request.timestep), jax.tree.leaves(self._blank)
        size = len(request.slot_ids)
        kinds = [((size, *x.shape), x.dtype) for x in expected]
        if [(x.shape, x.dtype) for x in got] != kinds:
            raise ValueError(
                f"a request of {size} slots has leaves {[(x.shape, str(x.dtype)) for x in got]}; expected "
                f"{[(shape, str(dtype)) for shape, dtype in kinds]}"
            )

    def _next(self, end: float, hurry: bool) -> Batch[Ticket] | None:
        while not self.closed:
            now = time.monotonic()
            batch = self._batcher.take(now, hurry)
            if batch is not None or now >= end:
                return batch
            due = self._batcher.due()
            self._asked.wait((end if due is None else min(due, end)) - now)
        return None

    def _wait_for(self, ticket: Ticket) -> None:
        end = time.monotonic() + self._limit_s
        while not ticket.done.wait(POLL_S):
            slots = ticket.request.slot_ids.tolist()
            if self.closed and not ticket.done.is_set():
                raise HeadraceError(f"central inference has ended; slots {slots} are not answered")
            if time.monotonic() > end:
                raise WaitTimeoutError(
                    f"waited {self._limit_s:g} s for central inference to answer slots {slots}; nobody serves, though "
                    f"{self._batcher.rows} rows wait"
                )


class CentralInference:
    """One env group's side of the server."""

    def __init__(self, server: InferenceServer, bank: SlotBank, first_slot: int, size: int) -> None:
        """Made by ``InferenceServer.group``."""
        self._server, self._bank, self._first_slot, self._size = server, bank, first_slot, size

    def submit(self, request: Request) -> Ticket:
        """Ask; see ``InferenceServer.submit``."""
        ids = request.slot_ids
        return self._server.submit(request._replace(slot_ids=ids + np.int32(self._first_slot)), ids)

    def answer(self, pending: Ticket, with_carry: bool) -> Answer:
        """Wait for the answer; see ``InferenceServer.answer``."""
        return self._server.answer(pending, with_carry)

    def get_state(self) -> dict[str, Any]:
        """The group's slots, to be called with no request on its way."""
        return self._bank.get_state(self._first_slot, self._size)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``, or from that of an ``ActorInference``."""
        self._bank.set_state(self._first_slot, state)
