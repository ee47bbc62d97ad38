"""The batching policy, with a clock that is handed in: minimum, maximum and deadline all hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.inference.batcher import Batch, Batcher, Limits


def rows_of(batch):
    return [(part.ticket, row) for part in batch.parts for row in range(part.start, part.stop)]


def test_the_minimum_sends_at_once_and_takes_what_is_there():
    batcher = Batcher(Limits(min_batch=3, max_batch=8, deadline_s=1.0))
    batcher.add("a", 2, now=10.0)
    assert batcher.take(10.0) is None and batcher.rows == 2
    batcher.add("b", 3, now=10.25)
    batch = batcher.take(10.5)
    assert batch == Batch([("a", 0, 2), ("b", 0, 3)], "minimum", [0.5, 0.25]) and batch.size == 5
    assert batcher.take(99.0) is None and batcher.rows == 0 and batcher.due() is None


def test_the_deadline_sends_less_than_the_minimum_and_counts_from_the_oldest():
    batcher = Batcher(Limits(min_batch=4, max_batch=8, deadline_s=1.0))
    batcher.add("a", 1, now=10.0)
    batcher.add("b", 1, now=10.75)
    assert batcher.due() == 11.0 and batcher.take(10.875) is None
    assert batcher.take(11.0) == Batch([("a", 0, 1), ("b", 0, 1)], "deadline", [1.0, 0.25])
    batcher.add("c", 1, now=11.5)
    assert batcher.take(12.0) is None and batcher.due() == 12.5
    assert batcher.take(12.0, hurry=True) == Batch([("c", 0, 1)], "deadline", [0.5])
    assert batcher.take(12.0, hurry=True) is None


def test_a_request_larger_than_the_maximum_is_split():
    batcher = Batcher(Limits(min_batch=2, max_batch=3, deadline_s=1.0))
    batcher.add("a", 7, now=0.0)
    batcher.add("b", 1, now=0.5)
    assert batcher.take(0.5) == Batch([("a", 0, 3)], "maximum", [])
    assert batcher.take(0.5) == Batch([("a", 3, 6)], "maximum", [])
    assert batcher.take(0.5) == Batch([("a", 6, 7), ("b", 0, 1)], "minimum", [0.5, 0.0])


def test_what_is_left_of_a_request_waits_from_when_it_was_made():
    batcher = Batcher(Limits(min_batch=2, max_batch=2, deadline_s=1.0))
    batcher.add("a", 3, now=5.0)
    assert batcher.take(5.5) == Batch([("a", 0, 2)], "maximum", [])
    assert batcher.take(5.5) is None and batcher.due() == 6.0
    assert batcher.take(6.0) == Batch([("a", 2, 3)], "deadline", [1.0])


def test_an_empty_request_is_refused():
    with pytest.raises(ValueError, match="0 rows"):
        Batcher(Limits(1, 1, 1.0)).add("a", 0, now=0.0)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9)),
        st.tuples(st.just("wait"), st.integers(0, 5)),
        st.tuples(st.just("take"), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, low=st.integers(1, 6), more=st.integers(0, 6), deadline=st.integers(1, 6))
def test_every_row_goes_out_once_oldest_first_within_bounds(events, low, more, deadline):
    """Beside the batcher, every row that waits by itself in a list."""
    limits = Limits(low, low + more, float(deadline))
    batcher, now, waiting, added, sent = Batcher(limits), 0.0, [], [], []
    drain = [("wait", deadline), *[("take", False)] * (1 + sum(n for kind, n in events if kind == "add"))]
    for kind, value in [*events, *drain]:
        if kind == "add":
            ticket = len(added)
            rows = [(ticket, row) for row in range(value)]
            added += rows
            waiting += [(row, now, row == rows[-1]) for row in rows]
            batcher.add(ticket, value, now)
        elif kind == "wait":
            now += value
        else:
            overdue = bool(waiting) and (value or now - waiting[0][1] >= deadline)
            batch = batcher.take(now, hurry=value)
            if batch is None:
                assert len(waiting) < limits.min_batch and not overdue
            else:
                size = min(len(waiting), limits.max_batch)
                gone, waiting = waiting[:size], waiting[size:]
                assert batch.size == size and rows_of(batch) == [row for row, _, _ in gone]
                assert batch.waits == [now - since for _, since, last in gone if last]
                enough = size + len(waiting) >= limits.min_batch
                assert enough or overdue
                expected = "maximum" if size == limits.max_batch else "minimum" if enough else "deadline"
                assert batch.reason == expected
                sent += rows_of(batch)
        assert batcher.rows == len(waiting)
        assert batcher.due() == (waiting[0][1] + deadline if waiting else None)
    assert sent == added and not waiting
