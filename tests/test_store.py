"""The store against a slow list-based twin, under any interleaving of slots, messages, lives and releases."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from headrace.experience import RangeLayout
from headrace.experience.queue import QueueLimits
from headrace.experience.room import Experience, NoGuard
from headrace.types import Row, TimeStep

SIZE = 2  # of the observation


def blank_row():
    no = np.zeros((), bool)
    timestep = TimeStep(np.zeros(SIZE, np.float32), np.zeros((), np.float32), no, no, no)
    return Row(timestep, np.zeros((), np.int32), np.zeros(1, np.float32), np.zeros((), np.int32))


class Twin:
    """All rows of a slot for ever, in a list; ranges found by looking through it."""

    def __init__(self, layout):
        self.layout = layout
        self.rows = []  # one dict a row
        self.carries = {}  # by row number

    def observe(self, mark, first, life):
        self.rows.append({"mark": mark, "first": first, "life": life, "action": None, "version": None})
        begins = (len(self.rows) - 1 - self.life_start()) % self.layout.stride == 0
        return begins, len(self.rows) - 1 - self.layout.length if self.ends_range() else None

    def life_start(self):
        life = self.rows[-1]["life"]
        return min(i for i, r in enumerate(self.rows) if r["life"] == life)

    def ends_range(self):
        """Whether the newest row is row T of a range."""
        age = len(self.rows) - 1 - self.life_start()
        return age >= self.layout.length and (age - self.layout.length) % self.layout.stride == 0

    def unfinished(self):
        """Ranges of the newest life that began (and were acted on) and are not complete."""
        if not self.rows:
            return 0
        start, end = self.life_start(), len(self.rows)
        begun = [b for b in range(start, end, self.layout.stride) if self.rows[b]["action"] is not None]
        return sum(b + self.layout.length > end - 1 for b in begun)

    def oldest_version(self, start):
        layout = self.layout
        rows = range(start + layout.burn_in, start + layout.length)
        valid = [k for k in rows if not self.rows[k + 1]["first"]]
        return min(self.rows[k]["version"] for k in valid or rows)


class Harness:
    """Drives an ``Experience`` and its twins alike, and compares every batch."""

    def __init__(self, layout, limits, num_slots):
        self.layout, self.limits, self.num_slots = layout, limits, num_slots
        self.experience = self.make()
        self.twins = [Twin(layout) for _ in range(num_slots)]
        self.open = {}  # slot -> begins, of slots whose row waits for leave
        self.acted = np.ones(num_slots, bool)
        self.lives = np.zeros(num_slots, np.int64)
        self.update, self.marks, self.cut = 0, 0, 0
        self.seen_items, self.ranges, self.training = set(), {}, []
        self.counted = set()
        self.steps = 0

    def make(self):
        carry = np.zeros(1, np.float32)
        return Experience(blank_row(), carry, self.num_slots, self.layout, self.limits, NoGuard())

    def observe(self, slots, rng, restarts=()):
        # A row that waits for leave is forgotten where a resumed run begins a new life in its slot.
        slots = np.array([s for s in slots if self.acted[s] or s in restarts], np.int64)
        if not len(slots):
            return
        marks, firsts, begins, completed = [], [], [], 0
        for s in slots:
            twin = self.twins[s]
            if s in restarts and twin.rows:
                self.cut += twin.unfinished()
                self.lives[s] += 1
                if not self.acted[s] and not twin.ends_range():
                    twin.rows.pop()
            new_life = not twin.rows or twin.rows[-1]["life"] != self.lives[s]
            self.marks += 1
            first = bool(new_life or rng.random() < 0.2)
            begin, start = twin.observe(float(self.marks), first, int(self.lives[s]))
            marks.append(self.marks)
            firsts.append(first)
            begins.append(begin)
            if start is not None:
                self.ranges[(int(s), start)] = True
                completed += 1
        before = len(self.experience.queue)
        marks = np.array(marks, np.float32)
        no = np.zeros(len(slots), bool)
        timestep = TimeStep(np.stack([marks, -marks], 1), marks * 10, np.array(firsts), no, no)
        got = self.experience.observe(timestep, slots, self.lives[slots])
        assert got.tolist() == begins
        if self.limits.on_full == "wait":
            assert len(self.experience.queue) == before + completed
        for s, b in zip(slots, begins, strict=True):
            self.open[int(s)] = b
            self.acted[s] = False

    def answer(self, slots, version):
        slots = [s for s in slots if s in self.open]
        if not slots:
            return False
        begins = np.array([s for s in slots if self.open[s]], np.int64)
        if not self.experience.begin(begins):
            return False
        ids = np.array(slots, np.int64)
        if len(begins):
            carry = np.array([[self.twins[s].rows[-1]["mark"] + 0.5] for s in begins], np.float32)
            self.experience.store.keep_carry(carry, begins)
        actions = np.array([self.marks * 7 + s for s in slots], np.int32)
        extras = actions[:, None].astype(np.float32) / 2
        self.experience.store.act(ids, actions, extras, version)
        for s, a in zip(slots, actions, strict=True):
            self.twins[s].rows[-1] |= {"action": int(a), "version": version}
            self.acted[s] = True
            del self.open[s]
        return True

    def take(self):
        items = self.experience.take(self.update)
        if items:
            self.check(items, self.experience.collate(items, self.update))
            self.training.append(items)
            self.update += 1
        return bool(items)

    def finish(self):
        if self.training:
            self.experience.finished(self.training.pop(0))

    def check(self, items, batch):
        layout, t = self.layout, batch.trajectory
        assert len(items) == self.limits.batch_size and len(t.slot_id) == len(items)
        steps = 0
        for i, item in enumerate(items):
            assert (item.slot, item.start) in self.ranges, "a range that never was complete"
            assert t.slot_id[i] == item.slot
            if self.limits.max_reuse == 1:
                assert item.item_id not in self.seen_items
            self.seen_items.add(item.item_id)
            self.check_range(self.twins[item.slot], item, i, t)
            version = self.twins[item.slot].oldest_version(item.start)
            assert item.version == version and batch.lag[i] == self.update - version
            assert batch.lag[i] <= self.limits.max_lag
            rows = range(item.start + layout.overlap + 1, item.start + layout.length + 1)
            new = [k for k in rows if not self.twins[item.slot].rows[k]["first"]]
            fresh = (item.slot, item.start) not in self.counted
            steps += len(new) if fresh else 0
            self.counted.add((item.slot, item.start))
        assert batch.steps == steps

    def check_range(self, twin, item, i, t):
        layout, rows = self.layout, twin.rows[item.start : item.start + self.layout.length + 1]
        assert len({r["life"] for r in rows}) == 1
        np.testing.assert_array_equal(t.rows.timestep.observation[:, i, 0], [r["mark"] for r in rows])
        np.testing.assert_array_equal(t.rows.timestep.observation[:, i, 1], [-r["mark"] for r in rows])
        np.testing.assert_array_equal(t.rows.timestep.reward[:, i], [10 * r["mark"] for r in rows])
        np.testing.assert_array_equal(t.rows.timestep.first[:, i], [r["first"] for r in rows])
        np.testing.assert_array_equal(t.rows.action[:, i], [r["action"] for r in rows[:-1]] + [0])
        np.testing.assert_array_equal(t.rows.extras[:-1, i, 0], [r["action"] / 2 for r in rows[:-1]])
        np.testing.assert_array_equal(t.rows.version[:, i], [r["version"] for r in rows[:-1]] + [0])
        assert t.carry[i, 0] == rows[0]["mark"] + 0.5
        assert t.weight[i] == 1
        if item.start and twin.rows[item.start - 1]["action"] is not None:
            assert t.prev_action[i] == twin.rows[item.start - 1]["action"]
        for j in range(1, layout.context + 1):
            if item.start >= j and not any(
                r["first"] for r in twin.rows[item.start - j + 1 : item.start + 1]
            ):
                before = twin.rows[item.start - j]
                assert t.context.observation[layout.context - j, i, 0] == before["mark"]
                assert t.context.first[layout.context - j, i] == before["first"]
            elif item.start >= j:
                # Whatever it is, a first row after it must hide it.
                firsts = np.concatenate(
                    [t.context.first[layout.context - j + 1 :, i], t.rows.timestep.first[:1, i]]
                )
                assert firsts.any()

    def invariants(self):
        queue, store = self.experience.queue, self.experience.store
        assert queue.in_flight >= 0
        if self.limits.on_full == "wait":
            assert queue.in_flight <= self.limits.permits
            assert len(queue) <= max(self.limits.permits, self.limits.capacity)
        else:
            assert len(queue) <= self.limits.capacity
        collecting = sum(t.unfinished() for t in self.twins)
        held = sum(len(h) for h in store._held)
        assert queue.in_flight == collecting + held
        assert self.experience.dropped() == {
            "queue_full": queue.dropped_full, "lag": queue.dropped_lag, "life_cut": self.cut
        }  # fmt: skip

    def round_trip(self):
        """Continue in another store, from arrays that were written over afterwards."""
        if self.training:  # a checkpoint is taken between two updates
            return
        state = self.experience.get_state()
        for x in self.experience.store._timestep:
            x[...] = 99
        self.experience = self.make()
        self.experience.set_state(state)


layouts = st.builds(
    lambda length, overlap, context, burn_in: RangeLayout(length, overlap % length, context, burn_in % length),
    st.integers(1, 5), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4),
)  # fmt: skip


@st.composite
def limits(draw):
    batch, lag = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    return QueueLimits(
        batch, lag, batch + draw(st.integers(0, 6)), draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.sampled_from(["wait", "wait", "drop_oldest"])),
    )  # fmt: skip


def drive(layout, limits, num_slots, seed, moves, cut_rate):
    rng = np.random.default_rng(seed)
    harness = Harness(layout, limits, num_slots)
    batches = 0
    for _ in range(moves):
        move = rng.choice(5, p=[0.4, 0.4, 0.1, 0.09, 0.01])
        slots = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].tolist()
        if move == 0:
            harness.observe(slots, rng, [s for s in slots if rng.random() < cut_rate])
        elif move == 1:
            harness.answer(slots, max(harness.update - len(harness.training), 0))
        elif move == 2:
            batches += harness.take()
        elif move == 3:
            harness.finish()
        else:
            harness.round_trip()
        harness.invariants()
    return harness, batches


def assert_every_range_is_accounted_for(driven):
    """Rows are compared batch by batch on the way; in the end each complete range was trained on, was dropped, or waits."""
    harness, batches = driven
    queue = harness.experience.queue
    assert harness.counted <= set(harness.ranges)
    if harness.limits.max_reuse == 1:
        assert len(harness.seen_items) == batches * harness.limits.batch_size
        gone = len(harness.seen_items) + queue.dropped_lag + queue.dropped_full
        assert len(harness.ranges) == gone + len(queue)


quick = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@quick
@given(layouts, limits(), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 0.4]))
def test_batches_are_the_twins_rows(layout, limits, num_slots, seed, cut_rate):
    assert_every_range_is_accounted_for(drive(layout, limits, num_slots, seed, 250, cut_rate))


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(layouts, limits(), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 0.4]))
def test_batches_are_the_twins_rows_many_times(layout, limits, num_slots, seed, cut_rate):
    assert_every_range_is_accounted_for(drive(layout, limits, num_slots, seed, 400, cut_rate))


@pytest.mark.parametrize("on_full", ["wait", "drop_oldest"])
@pytest.mark.parametrize("reuse", [1, 2])
def test_the_ring_wraps_many_times(on_full, reuse):
    """The driven test really trains: many batches, rows many times the ring, cuts, context and burn-in."""
    layout, limits = RangeLayout(4, 2, 3, 1), QueueLimits(2, 6, 14, reuse, on_full)
    harness, batches = drive(layout, limits, 2, 5, 3000, 0.02)
    assert batches > 30 and harness.cut > 3
    rows = min(len(t.rows) for t in harness.twins)
    assert rows > 3 * harness.experience.store.capacity
    assert len(harness.seen_items) > 50
