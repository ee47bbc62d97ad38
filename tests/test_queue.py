"""The queue by hand, and the check that collecting and learning never wait for each other."""

import itertools

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.experience import Queue, QueueLimits, Range, check_limits


def ranges(ids, version=0):
    return [Range(i, i % 3, 10 * i, i, version) for i in ids]


def ids(items):
    return [i.item_id for i in items]


def test_first_in_first_out():
    queue = Queue(QueueLimits(batch_size=2, max_lag=1, capacity=4))
    assert queue.begin(3) and not queue.begin(2) and queue.begin(1) and not queue.begin(1)
    assert queue.in_flight == 4
    assert queue.put(ranges([5])) == [] and queue.take(0) == ([], [])
    queue.put(ranges([3, 7]))
    items, freed = queue.take(0)
    assert ids(items) == [5, 3] and freed == [] and queue.in_flight == 4
    assert ids(queue.finished(items)) == [5, 3] and queue.in_flight == 2
    queue.cut(1)
    assert queue.in_flight == 1 and queue.begin(3) and len(queue) == 1


def test_stragglers_are_dropped_and_counted():
    queue = Queue(QueueLimits(batch_size=2, max_lag=2, capacity=8))
    queue.begin(5)
    queue.put(ranges([0], version=1) + ranges([1], version=3) + ranges([2], version=1))
    items, freed = queue.take(4)  # lags 3, 1, 3
    assert items == [] and ids(freed) == [0, 2] and queue.dropped_lag == 2 and queue.in_flight == 3
    queue.put(ranges([3], version=2))
    items, freed = queue.take(4)
    assert ids(items) == [1, 3] and freed == [], "what was not stale keeps its place"


def test_reuse():
    queue = Queue(QueueLimits(batch_size=1, max_lag=9, capacity=9, max_reuse=3))
    queue.begin(2)
    queue.put(ranges([0, 1]))
    taken = []
    for update in range(6):
        (item,), _ = queue.take(update)
        taken.append(item.item_id)
        freed = queue.finished([item])
        assert ids(freed) == ([item.item_id] if update >= 4 else [])
    assert taken == [0, 1, 0, 1, 0, 1] and queue.in_flight == 0 and queue.take(6) == ([], [])


def test_drop_oldest():
    queue = Queue(QueueLimits(batch_size=1, max_lag=0, capacity=2, on_full="drop_oldest"))
    assert all(queue.begin(3) for _ in range(5)) and queue.in_flight == 15
    assert ids(queue.put(ranges([0, 1, 2, 3]))) == [0, 1] and queue.dropped_full == 2 and len(queue) == 2
    assert ids(queue.drop_oldest_of(0)) == [3] and queue.drop_oldest_of(0) is None and queue.dropped_full == 3


def test_state():
    queue = Queue(QueueLimits(batch_size=2, max_lag=4, capacity=8, max_reuse=2))
    queue.begin(4)
    queue.put(ranges([0, 1, 2, 3]))
    queue.finished(queue.take(0)[0])
    state = queue.get_state()
    other = Queue(queue.limits)
    other.set_state(state)
    for q in (queue, other):
        assert ids(q.take(1)[0]) == [2, 3] and ids(q.take(1)[0]) == [0, 1] and q.in_flight == 4
        assert ids(q.finished(ranges([0, 1]))) == [0, 1]
    assert other.get_state()["in_flight"] == queue.get_state()["in_flight"] == 2
    np.testing.assert_array_equal(other.get_state()["items"], queue.get_state()["items"])


def deadlocks(limits, groups, group_size, ranges_at_once, order):
    """Whether the groups, each with leave asked for in turn as ``order`` says, and the learner all wait in the end.

    A group's step begins a range of each of its slots, and completes those begun ``ranges_at_once`` steps ago.
    """
    in_flight, queued, begun = 0, 0, [0] * groups
    for group in order:
        if in_flight + group_size > limits.permits:
            continue
        in_flight += group_size
        begun[group] += 1
        if begun[group] >= ranges_at_once:
            queued += group_size
        while queued >= limits.batch_size:
            queued, in_flight = queued - limits.batch_size, in_flight - limits.batch_size
    return in_flight + group_size > limits.permits


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_limits_are_refused_exactly_where_they_deadlock(at_once):
    rng = np.random.default_rng(0)
    refused = 0
    for batch, lag, size, groups in itertools.product((1, 2, 3, 4, 6), (0, 1, 2), (1, 2, 3, 4), (1, 2, 3)):
        limits = QueueLimits(batch, lag, (lag + 1) * batch)
        orders = [rng.integers(0, groups, 120) for _ in range(30)]
        found = any(deadlocks(limits, groups, size, at_once, order) for order in orders)
        try:
            check_limits(limits, size, (at_once - 1) * size * groups)
            assert not found, (limits, size, groups)
        except ConfigError:
            refused += 1
            # The check is for any speeds and any remainder; it may refuse a little more than random orders find.
            assert found or limits.permits < (at_once - 1) * size * groups + batch - 1 + size
    assert refused > 10


def test_lock_step_with_lag_zero_is_accepted():
    check_limits(QueueLimits(16, 0, 16), 16)
    check_limits(QueueLimits(32, 0, 32), 16)
    with pytest.raises(ConfigError, match=r"raise experience\.max_lag"):
        check_limits(QueueLimits(16, 0, 16), 32)
    with pytest.raises(ConfigError, match="overlap"):
        check_limits(QueueLimits(16, 0, 16), 16, unfinished=16)
    check_limits(QueueLimits(16, 0, 16, on_full="drop_oldest"), 32)


@pytest.mark.parametrize(
    "limits",
    [
        QueueLimits(0, 0, 1),
        QueueLimits(2, 0, 1),
        QueueLimits(2, -1, 2),
        QueueLimits(2, 0, 2, 0),
        QueueLimits(2, 1, 4, 3),
    ],
)
def test_senseless_limits_are_refused(limits):
    with pytest.raises(ConfigError):
        check_limits(limits, 1)
