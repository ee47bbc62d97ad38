"""The bounded queue of complete ranges, and the count of ranges in flight that bounds lag.

A range is *in flight* from the row where it begins until the update that trained on it is published: it is being
collected, queued, staged or trained on. With at most ``(max_lag + 1) · batch_size`` of them, first in, first out, a range
that begins with the params of update ``v`` is trained on at update ``v + max_lag`` at the latest. What is older all
the same (a straggler) is dropped when a batch is made, and counted.

Pure state; the runners decide who waits.
"""

from collections import Counter, deque
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.errors import ConfigError
from headrace.experience.store import Range

OnFull = Literal["wait", "drop_oldest"]


class QueueLimits(NamedTuple):
    """Bounds of the queue.

    Attributes:
        batch_size: ranges of a batch, ``B``.
        max_lag: bound on the lag of a batch, in updates.
        capacity: complete ranges that may wait in the queue.
        max_reuse: how often a range is trained on.
        on_full: ``wait`` makes collecting wait, ``drop_oldest`` gives up the oldest range.
    """

    batch_size: int
    max_lag: int
    capacity: int
    max_reuse: int = 1
    on_full: OnFull = "wait"

    @property
    def permits(self) -> int:
        """Ranges that may be in flight: each takes ``max_reuse`` places in batches, waiting at the back between two."""
        within_lag = (self.max_lag + 1) * self.batch_size // self.max_reuse
        return min(within_lag, self.capacity + self.batch_size)


def check_limits(limits: QueueLimits, group_size: int, unfinished: int = 0) -> None:
    """Refuse bounds under which collecting and learning would wait for each other for ever.

    Groups begin ``group_size`` ranges at a time, and the learner needs ``batch_size`` complete ones. Where those in
    flight are complete but for ``unfinished``, and too few for a batch, a group must have leave to begin.

    Args:
        limits: the bounds.
        group_size: slots of an env group, which begin their ranges together.
        unfinished: ranges that overlap the next one of their slot, and so are in flight while the slot waits for leave.

    Raises:
        ConfigError: with the reason and what to change.
    """
    if (
        limits.batch_size < 1
        or limits.capacity < limits.batch_size
        or limits.max_lag < 0
        or limits.max_reuse < 1
    ):
        raise ConfigError(
            f"{limits}: expected batch_size >= 1, capacity >= batch_size, max_lag >= 0 and max_reuse >= 1"
        )
    if limits.max_reuse > limits.max_lag + 1:
        raise ConfigError(
            f"max_reuse {limits.max_reuse} with max_lag {limits.max_lag}: each use is at least one update after the one "
            f"before, so the last would be dropped; raise max_lag to {limits.max_reuse - 1} or lower max_reuse"
        )
    too_few = limits.batch_size - (group_size if limits.batch_size % group_size == 0 else 1)
    needed = unfinished + too_few + group_size
    if limits.on_full == "wait" and needed > limits.permits:
        raise ConfigError(
            f"max_lag {limits.max_lag}, max_reuse {limits.max_reuse} and capacity {limits.capacity} with batches of "
            f"{limits.batch_size} trajectories let {limits.permits} be in flight; groups of {group_size} slots need {needed}"
            f"{f' ({unfinished} overlap the next one of their slot)' if unfinished else ''} to fill a batch; raise "
            f"experience.max_lag, or make batch_size a multiple of the group size (env.num_envs / env.groups)"
        )


class _Item(NamedTuple):
    range: Range
    uses: int


class Queue:
    """Bounded first-in-first-out queue of ranges; see the module docstring."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self.in_flight = 0
        self.dropped_full = 0
        self.dropped_lag = 0
        self._items: deque[_Item] = deque()
        self._holds: Counter[int] = Counter()  # by item id: places in the queue + batches not yet finished

    def __len__(self) -> int:
        return len(self._items)

    def begin(self, count: int) -> bool:
        """Take leave to begin ``count`` ranges; False where too many are in flight (``on_full = wait``)."""
        if self.limits.on_full == "wait" and self.in_flight + count > self.limits.permits:
            return False
        self.in_flight += count
        return True

    def put(self, items: list[Range]) -> list[Range]:
        """Add complete ranges; returns those given up for them whose rows are now free (``on_full = drop_oldest``)."""
        self._append([_Item(i, 0) for i in items])
        given_up: list[Range] = []
        while self.limits.on_full == "drop_oldest" and len(self._items) > self.limits.capacity:
            given_up.append(self._items.popleft().range)
        self.dropped_full += len(given_up)
        return self._let_go(given_up)

    def drop_oldest_of(self, slot: int) -> list[Range] | None:
        """Give up the oldest queued range of ``slot`` (see ``put``), or None where it has none."""
        for item in self._items:
            if item.range.slot == slot:
                self._items.remove(item)
                self.dropped_full += 1
                return self._let_go([item.range])
        return None

    def take(self, update: int) -> tuple[list[Range], list[Range]]:
        """Take a batch for the update with number ``update`` (the count of updates before it).

        Returns:
            The ``batch_size`` oldest ranges (or none, where too few are there), and those whose rows are now free
            because they were stragglers.
        """
        taken: list[_Item] = []
        stale: list[Range] = []
        if len(self._items) < self.limits.batch_size:
            return [], []
        while self._items and len(taken) < self.limits.batch_size:
            item = self._items.popleft()
            if update - item.range.version > self.limits.max_lag:
                stale.append(item.range)
            else:
                taken.append(item)
        self.dropped_lag += len(stale)
        freed = self._let_go(stale)
        if len(taken) < self.limits.batch_size:
            self._items.extendleft(reversed(taken))
            return [], freed
        self._append([_Item(i.range, i.uses + 1) for i in taken if i.uses + 1 < self.limits.max_reuse])
        return [i.range for i in taken], freed

    def finished(self, items: list[Range]) -> list[Range]:
        """Say that an update on ``items`` was published; returns those whose rows are now free."""
        return self._let_go(items)

    def cut(self, count: int) -> None:
        """Account for ``count`` begun ranges that a life's end dropped unfinished."""
        self.in_flight -= count

    def get_state(self) -> dict[str, Any]:
        """Everything needed to continue, as NumPy arrays and numbers."""
        items = [(*i.range, i.uses) for i in self._items]
        return {
            "items": np.array(items, np.int64).reshape(-1, 6),
            "in_flight": self.in_flight,
            "dropped_full": self.dropped_full,
            "dropped_lag": self.dropped_lag,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``."""
        self._items, self._holds = deque(), Counter()
        self._append([_Item(Range(*row[:5]), row[5]) for row in np.asarray(state["items"]).tolist()])
        self.in_flight = int(state["in_flight"])
        self.dropped_full, self.dropped_lag = int(state["dropped_full"]), int(state["dropped_lag"])

    def _append(self, items: list[_Item]) -> None:
        self._items.extend(items)
        self._holds.update(i.range.item_id for i in items)

    def _let_go(self, items: list[Range]) -> list[Range]:
        freed = []
        for item in items:
            self._holds[item.item_id] -= 1
            if not self._holds[item.item_id]:
                del self._holds[item.item_id]
                freed.append(item)
        self.in_flight -= len(freed)
        return freed
