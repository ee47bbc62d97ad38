"""The experience room: rows in, batches out, under one guard.

``Experience`` joins the store and the queue. It never waits itself; a runner that has threads hands in a
``threading.Condition`` as the guard and waits on it, the one-thread runner a ``NoGuard``.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.experience.queue import Queue, QueueLimits
from headrace.experience.store import Observed, Range, RangeLayout, Store
from headrace.types import PyTree, Row, TimeStep, Trajectory


class Guard(Protocol):
    """The part of ``threading.Condition`` that is needed here."""

    def __enter__(self) -> Any:
        """Enter."""
        ...

    def __exit__(self, *exc: Any) -> Any:
        """Leave."""
        ...

    def notify_all(self) -> None:
        """Wake whoever waits for a change."""
        ...


class NoGuard:
    """The guard of a runner with one thread."""

    def __enter__(self) -> None:
        """Nothing to take."""

    def __exit__(self, *exc: Any) -> None:
        """Nothing to give back."""

    def notify_all(self) -> None:
        """Nobody waits."""


class Batch(NamedTuple):
    """A batch for one update.

    Attributes:
        trajectory: the rows; its ``item_id`` is (), as only the host needs it.
        items: the ranges they came from.
        lag: of each range, in updates ``[B]``.
        steps: agent steps among the rows that no batch before held.
    """

    trajectory: Trajectory
    items: list[Range]
    lag: np.ndarray
    steps: int


class Experience:
    """Store and queue as one room."""

    def __init__(
        self, row: Row, carry: PyTree, num_slots: int, layout: RangeLayout, limits: QueueLimits, guard: Guard
    ) -> None:
        """See ``Store`` for ``row`` and ``carry``."""
        # In lock-step no slot has more ranges in flight than its share of the permits, rounded up, and one that it collects.
        in_flight = limits.permits if limits.on_full == "wait" else limits.capacity + 2 * limits.batch_size
        self.store = Store(row, carry, num_slots, layout, ranges_per_slot=-(-in_flight // num_slots) + 2)
        self.queue = Queue(limits)
        self.guard = guard
        self.cut = 0
        self._counted = np.full(
            num_slots, -1, np.int64
        )  # per slot, number of the newest range given to the learner

    def observe(self, timestep: TimeStep, slot_ids: np.ndarray, run_ids: np.ndarray) -> np.ndarray:
        """Write what slots said; queue the ranges that it completes. Returns ``begins``, bool ``[b]`` (see ``Observed``)."""
        with self.guard:
            observed: Observed = self.store.observe(timestep, slot_ids, run_ids)
            if observed.cut:
                self.cut += observed.cut
                self.queue.cut(observed.cut)
            if observed.completed:
                self._release(self.queue.put(observed.completed))
                self.guard.notify_all()
        return observed.begins

    def begin(self, slot_ids: np.ndarray) -> bool:
        """Take leave to begin a range at the open rows of ``slot_ids``; False: not yet, learn first."""
        if not len(slot_ids):
            return True
        with self.guard:
            if self.queue.limits.on_full == "drop_oldest":
                self._make_room(slot_ids)
            return self.store.has_room(slot_ids) and self.queue.begin(len(slot_ids))

    def take(self, update: int) -> list[Range]:
        """The ranges of the batch for update number ``update``; empty where too few are complete."""
        with self.guard:
            items, freed = self.queue.take(update)
            if freed:
                self._release(freed)
                self.guard.notify_all()
        return items

    def collate(self, items: list[Range], update: int) -> Batch:
        """Copy the ranges of a batch out (they are held, so this needs no guard; one thread at a time)."""
        lag = update - np.array([i.version for i in items], np.int64)
        trajectory = self.store.collate(items)
        slots, numbers = trajectory.slot_id, np.array([i.number for i in items], np.int64)
        unseen = numbers > self._counted[slots]
        np.maximum.at(self._counted, slots, numbers)
        new_rows = ~trajectory.rows.timestep.first[self.store.layout.overlap + 1 :]
        return Batch(trajectory._replace(item_id=()), items, lag, int(np.sum(new_rows & unseen)))

    def finished(self, items: list[Range]) -> None:
        """Say that the update on ``items`` was published: their place in flight and their rows are free."""
        with self.guard:
            self._release(self.queue.finished(items))
            self.guard.notify_all()

    def dropped(self) -> dict[str, int]:
        """Ranges dropped so far, by reason."""
        return {"queue_full": self.queue.dropped_full, "lag": self.queue.dropped_lag, "life_cut": self.cut}

    def get_state(self) -> dict[str, Any]:
        """Everything needed to continue."""
        with self.guard:
            rooms = {"store": self.store.get_state(), "queue": self.queue.get_state()}
            return {**rooms, "cut": self.cut, "counted": self._counted.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``."""
        with self.guard:
            self.store.set_state(state["store"])
            self.queue.set_state(state["queue"])
            self.cut = int(state["cut"])
            self._counted[...] = state["counted"]

    def _make_room(self, slot_ids: np.ndarray) -> None:
        for slot in self.store.crowded(slot_ids):
            while not self.store.has_room(np.array([slot])):
                freed = self.queue.drop_oldest_of(slot)
                if freed is None:
                    return
                self._release(freed)

    def _release(self, items: list[Range]) -> None:
        for item in items:
            self.store.release(item)
