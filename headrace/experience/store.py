"""The store: a ring of rows per slot on the host, from which ranges are copied out.

A *range* is ``(slot, start, length)``: rows ``start … start+T`` of one life of one slot, where ``T`` is overlap + new
rows. Ranges of a life start every ``stride = T - overlap`` rows, so neighbours share rows and overlap costs no memory.
Row ``T`` is also a row of the next range, and its action need not be chosen yet: a range is complete when its row
``T`` was *observed*. So with ``max_lag = 0`` the learner trains before that row is acted on.

Rows are written in two halves, ``observe`` (what the slot said) and ``act`` (what was answered). The recurrent carry is kept
for the rows where a range begins. Nothing here knows of threads: each slot has one writer, and ranges
reach their reader through the queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from headrace.errors import ConfigError
from headrace.types import Context, PyTree, Row, TimeStep, Trajectory


@dataclass(frozen=True)
class RangeLayout:
    """How ranges lie in a slot's rows.

    Attributes:
        length: ``T``, transitions of a range: overlap + new rows.
        overlap: rows shared with the range before, besides the one row every neighbour shares.
        context: rows before row 0 that finite memory (a frame stack) is rebuilt from.
        burn_in: rows at the start that only warm the recurrent carry; transitions k >= burn_in are trained.
    """

    length: int
    overlap: int = 0
    context: int = 0
    burn_in: int = 0

    def __post_init__(self) -> None:
        """Refuse layouts in which no new row is learned."""
        within = 0 <= self.overlap < self.length and 0 <= self.burn_in < self.length
        if self.length < 1 or not within or self.context < 0:
            raise ConfigError(
                f"{self}: expected length >= 1, overlap and burn_in of 0 … length-1, and context >= 0"
            )

    @property
    def stride(self) -> int:
        """Rows from the start of one range to the start of the next."""
        return self.length - self.overlap

    @property
    def lookback(self) -> int:
        """Rows before a range's start that are read: its context, and the previous action."""
        return max(self.context, 1)


class Range(NamedTuple):
    """A complete range.

    Attributes:
        item_id: never repeats in a run.
        slot: global slot id.
        start: absolute number of its row 0 in the slot.
        number: counts the complete ranges of the slot.
        version: oldest params version among its trained rows.
    """

    item_id: int
    slot: int
    start: int
    number: int
    version: int


class Observed(NamedTuple):
    """What an ``observe`` brought about.

    Attributes:
        begins: bool ``[b]``: a range begins at this row (its carry is wanted).
        completed: ranges whose row ``T`` this was, in slot order.
        cut: number of unfinished ranges dropped because their slot began a new life.
    """

    begins: np.ndarray
    completed: list[Range]
    cut: int


class Store:
    """Host ring of rows for ``num_slots`` slots; see the module docstring."""

    def __init__(
        self, row: Row, carry: PyTree, num_slots: int, layout: RangeLayout, ranges_per_slot: int
    ) -> None:
        """Allocate the ring.

        Args:
            row: one slot's row of zeros (no leading axis), giving shapes and dtypes.
            carry: one slot's recurrent carry, likewise; ``()`` without recurrence.
            num_slots: ``N``.
            layout: how ranges lie.
            ranges_per_slot: ranges of one slot, the one being collected included, that must fit at once.
        """
        self.layout, self.num_slots = layout, num_slots
        # One row more, as a new life may begin right after the last row that a range has leave for.
        self.capacity = (ranges_per_slot - 1) * layout.stride + layout.length + 2 + layout.lookback
        self._ring: Row = jax.tree.map(lambda x: _blank(x, self.capacity, num_slots), row)
        self._timestep = jax.tree.leaves(self._ring.timestep)
        self._answer = jax.tree.leaves((self._ring.action, self._ring.extras))
        self._carry = jax.tree.map(lambda x: _blank(x, ranges_per_slot + 1, num_slots), carry)
        self._cursor = np.zeros(num_slots, np.int64)  # absolute number of the row observed next
        self._life_start = np.zeros(num_slots, np.int64)
        # Complete ranges before this life. Those cut off do not count: kept carries lie by number, so that short
        # lives would soon come round to the carry of a range still held.
        self._life_number = np.zeros(num_slots, np.int64)
        self._observed = np.zeros(num_slots, np.int64)  # 1 where the open row was observed
        self._run_id = np.zeros(num_slots, np.int64)
        self._held: list[list[int]] = [[] for _ in range(num_slots)]  # starts of complete, unreleased ranges
        self._next_item = np.zeros(num_slots, np.int64)

    def observe(self, timestep: TimeStep, slot_ids: np.ndarray, run_ids: np.ndarray) -> Observed:
        """Write what slots said ``[b, ...]`` as their next row. A slot observed twice in turn must have acted between."""
        cut = self._begin_lives(slot_ids, run_ids)
        self._observed[slot_ids] = 1
        cursor = self._cursor[slot_ids]
        position = cursor % self.capacity
        for ring, value in zip(self._timestep, jax.tree.leaves(timestep), strict=True):
            ring[position, slot_ids] = value
        age = cursor - self._life_start[slot_ids]
        stride, length = self.layout.stride, self.layout.length
        complete = (age >= length) & ((age - length) % stride == 0)
        completed = self._complete(slot_ids[complete]) if complete.any() else []
        return Observed(age % stride == 0, completed, cut)

    def keep_carry(self, carry: PyTree, slot_ids: np.ndarray) -> None:
        """Keep the carry ``[b, ...]`` before the open row of slots in which a range begins there."""
        number = self._life_number[slot_ids] + self._age(slot_ids) // self.layout.stride
        for ring, value in zip(jax.tree.leaves(self._carry), jax.tree.leaves(carry), strict=True):
            ring[number % len(ring), slot_ids] = value

    def act(self, slot_ids: np.ndarray, action: PyTree, extras: PyTree, version: int | np.ndarray) -> None:
        """Write the answer ``[b, ...]`` to the open rows of ``slot_ids`` and close them; ``version`` may differ per row."""
        position = self._cursor[slot_ids] % self.capacity
        for ring, value in zip(self._answer, jax.tree.leaves((action, extras)), strict=True):
            ring[position, slot_ids] = value
        self._ring.version[position, slot_ids] = version
        self._cursor[slot_ids] += 1
        self._observed[slot_ids] = 0

    def has_room(self, slot_ids: np.ndarray) -> bool:
        """Whether a range beginning at the open rows of ``slot_ids`` would overwrite no range still held."""
        return not any(self._crowded(int(s)) for s in slot_ids)

    def crowded(self, slot_ids: np.ndarray) -> list[int]:
        """The slots among ``slot_ids`` for which ``has_room`` is false."""
        return [int(s) for s in slot_ids if self._crowded(int(s))]

    def collate(self, items: Sequence[Range]) -> Trajectory:
        """Copy ranges out into a ``Trajectory`` ``[T+1, B]`` of fresh memory, which nobody writes again."""
        start, slot = (np.array([getattr(i, f) for i in items], np.int64) for f in ("start", "slot"))
        rows = self._gather(self._ring, start, slot, 0, self.layout.length + 1)
        for leaf in jax.tree.leaves((rows.action, rows.extras, rows.version)):
            leaf[-1] = 0
        before = self._gather(self._ring.timestep, start, slot, -self.layout.context, 0)
        previous = self._gather(self._ring.action, start, slot, -1, 0)
        number = np.array([i.number for i in items], np.int64)
        return Trajectory(
            rows=rows,
            context=Context(before.observation, before.first),
            carry=jax.tree.map(lambda ring: ring[number % len(ring), slot], self._carry),
            prev_action=jax.tree.map(lambda x: x[0], previous),
            slot_id=slot.astype(np.int32),
            item_id=np.array([i.item_id for i in items], np.int64),
            weight=np.ones(len(items), np.float32),
        )

    def release(self, item: Range) -> None:
        """Give up the rows of ``item``: they may be overwritten."""
        self._held[item.slot].remove(item.start)

    def get_state(self) -> dict[str, Any]:
        """Everything needed to continue, as NumPy arrays in dicts and lists."""
        return {
            "ring": [x.copy() for x in jax.tree.leaves(self._ring)],
            "carry": [x.copy() for x in jax.tree.leaves(self._carry)],
            "slots": np.stack(self._per_slot()),
            "held": np.array([(s, x) for s, held in enumerate(self._held) for x in held], np.int64).reshape(
                -1, 2
            ),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state`` of a store of the same shape."""
        for ring, saved in zip(jax.tree.leaves(self._ring), state["ring"], strict=True):
            ring[...] = saved
        for ring, saved in zip(jax.tree.leaves(self._carry), state["carry"], strict=True):
            ring[...] = saved
        for array, saved in zip(self._per_slot(), state["slots"], strict=True):
            array[...] = saved
        self._held = [[] for _ in range(self.num_slots)]
        for slot, start in state["held"].tolist():
            self._held[slot].append(start)

    def _per_slot(self) -> list[np.ndarray]:
        counters = [self._cursor, self._life_start, self._life_number, self._run_id, self._next_item]
        return [*counters, self._observed]

    def _age(self, slot_ids: np.ndarray) -> np.ndarray:
        return self._cursor[slot_ids] - self._life_start[slot_ids]

    def _begin_lives(self, slot_ids: np.ndarray, run_ids: np.ndarray) -> int:
        """Drop the unfinished ranges of slots whose run id changed; their next row begins a life."""
        changed = run_ids != self._run_id[slot_ids]
        if not changed.any():
            return 0
        slots = slot_ids[changed]
        rows = self._age(slots)  # rows acted on in the life that ended
        stride, length = self.layout.stride, self.layout.length
        begun = -(-rows // stride)
        # A resumed run may find a row that was observed but not acted on: no range began there, but one may end with it.
        ends = (self._observed[slots] > 0) & (rows >= length) & ((rows - length) % stride == 0)
        done = np.maximum((rows - 1 - length) // stride + 1, 0) + ends
        self._cursor[slots] += ends
        self._life_number[slots] += done
        self._life_start[slots] = self._cursor[slots]
        self._run_id[slots] = run_ids[changed]
        return int((begun - done).sum())

    def _complete(self, slots: np.ndarray) -> list[Range]:
        start = self._cursor[slots] - self.layout.length
        number = self._life_number[slots] + (start - self._life_start[slots]) // self.layout.stride
        item_id = self._next_item[slots] * self.num_slots + slots
        self._next_item[slots] += 1
        columns = (item_id, slots, start, number, self._oldest_versions(start, slots))
        items = [Range(*row) for row in np.stack(columns, axis=1).tolist()]
        for item in items:
            self._held[item.slot].append(item.start)
        return items

    def _oldest_versions(self, start: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Oldest version among rows burn_in … T-1 of valid transitions; of all of them where none is valid."""
        rows = (start + np.arange(self.layout.burn_in, self.layout.length + 1)[:, None]) % self.capacity
        joins = self._ring.timestep.first[rows[1:], slots]
        versions = self._ring.version[rows[:-1], slots]
        return np.where(joins & ~joins.all(0), np.iinfo(np.int32).max, versions).min(0)

    def _crowded(self, slot: int) -> bool:
        held = self._held[slot]
        last_row = int(self._cursor[slot]) + self.layout.length + 1
        return bool(held) and last_row - self.capacity >= min(held) - self.layout.lookback

    def _gather(self, tree: PyTree, start: np.ndarray, slot: np.ndarray, begin: int, end: int) -> PyTree:
        rows = (start + np.arange(begin, end)[:, None]) % self.capacity
        return jax.tree.map(lambda ring: ring[rows, slot], tree)


def _blank(x: Any, length: int, num_slots: int) -> np.ndarray:
    x = np.asarray(x)
    return np.zeros((length, num_slots, *x.shape), x.dtype)
