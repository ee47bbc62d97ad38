"""Returns and lengths by slot, checked by hand and against a slow twin."""

import json
import math

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.metrics.episodes import Episode, EpisodeTracker, EpisodeWindow
from headrace.types import TimeStep


def message(reward, first, terminated, truncated):
    flags = (np.array(x, bool) for x in (first, terminated, truncated))
    return TimeStep(None, np.array(reward, np.float32), *flags)


def ids(*slots):
    return np.array(slots, np.int32)


def test_two_slots_by_hand():
    tracker = EpisodeTracker(3, lambda r: np.clip(r, -1, 1))
    tracker.update(message([0, 0], [1, 1], [0, 0], [0, 0]), ids(2, 0))
    tracker.update(message([5, -3], [0, 0], [0, 0], [0, 0]), ids(0, 2))
    tracker.update(message([0.5], [0], [0], [1]), ids(2))
    assert tracker.take() == [Episode(-2.5, -0.5, 2, 2)]
    tracker.update(message([0, 2], [1, 0], [0, 1], [0, 1]), ids(2, 0))
    assert tracker.take() == [Episode(7.0, 2.0, 2, 0)] and tracker.take() == []
    tracker.update(message([1], [0], [1], [0]), ids(2))  # nothing of the episode before
    assert tracker.take() == [Episode(1.0, 1.0, 1, 2)]


def test_first_rows_count_nothing_even_if_a_transform_is_not_zero_at_zero():
    tracker = EpisodeTracker(1, lambda r: r - 1)
    tracker.update(message([0], [1], [0], [0]), ids(0))
    tracker.update(message([3], [0], [1], [0]), ids(0))
    assert tracker.take() == [Episode(3.0, 2.0, 1, 0)]


def test_a_life_cut_is_no_episode():
    tracker = EpisodeTracker(2)
    tracker.update(message([9, 1], [0, 0], [0, 0], [0, 0]), ids(0, 1))
    tracker.drop(ids(0))
    tracker.update(message([1, 1], [0, 0], [1, 1], [0, 0]), ids(0, 1))
    assert tracker.take() == [Episode(1.0, 1.0, 1, 0), Episode(2.0, 2.0, 2, 1)]
    # a reset that nobody announced ends it as well
    tracker.update(message([9], [0], [0], [0]), ids(0))
    tracker.update(message([0], [1], [0], [0]), ids(0))
    tracker.update(message([1], [0], [1], [0]), ids(0))
    assert tracker.take() == [Episode(1.0, 1.0, 1, 0)]


def slow_twin(messages, slots):
    sums = {s: [0.0, 0] for s in range(slots)}
    for step, who in messages:
        for i, slot in enumerate(who.tolist()):
            if step.first[i]:
                sums[slot] = [0.0, 0]
                continue
            sums[slot][0] += float(step.reward[i])
            sums[slot][1] += 1
            if step.terminated[i] or step.truncated[i]:
                yield slot, *sums[slot]
                sums[slot] = [0.0, 0]


def random_messages(rng, slots, count):
    over = np.ones(slots, bool)
    for _ in range(count):
        who = rng.permutation(slots)[: rng.integers(1, slots + 1)].astype(np.int32)
        first = over[who]
        ends = ~first & (rng.random(len(who)) < 0.2)
        terminated = ends & (rng.random(len(who)) < 0.5)
        reward = np.where(first, 0, rng.normal(size=len(who))).astype(np.float32)
        over[who] = ends
        yield TimeStep(None, reward, first, terminated, ends & ~terminated), who


def test_against_a_slow_twin_through_a_checkpoint():
    messages = list(random_messages(np.random.default_rng(3), 7, 400))
    tracker, window = EpisodeTracker(7), EpisodeWindow(10)
    got = []
    for i, one in enumerate(messages):
        tracker.update(*one)
        if i % 3 == 0:
            taken = tracker.take()
            got += taken
            window.add(taken)
        if i == 200:
            state, other = tracker.get_state(), window.get_state()
            tracker.update(message([99], [0], [0], [0]), ids(0))  # the state must not share memory
            tracker, window = EpisodeTracker(7), EpisodeWindow(10)
            tracker.set_state(state)
            window.set_state(other)
    rest = tracker.take()
    window.add(rest)
    got += rest
    want = list(slow_twin(messages, 7))
    assert len(want) > 100
    assert [(e.slot_id, e.raw_return, e.length) for e in got] == want
    figures = window.metrics()
    assert figures["episodes"] == len(want)
    returns = np.array([r for _, r, _ in want[-10:]])
    assert figures["return_mean"] == pytest.approx(returns.mean(), abs=1e-12)
    assert (figures["return_min"], figures["return_max"]) == (returns.min(), returns.max())
    assert figures["length_mean"] == np.mean([n for _, _, n in want[-10:]])


def test_window_by_hand():
    window = EpisodeWindow(2)
    assert window.metrics() == {"episodes": 0}
    window.add([Episode(100.0, 1.0, 9, 0), Episode(1.0, 0.5, 2, 0), Episode(2.0, 1.0, 5, 1)])
    assert window.metrics() == {
        "episodes": 3,
        "return_mean": 1.5,
        "return_min": 1.0,
        "return_max": 2.0,
        "return_train_mean": 0.75,
        "length_mean": 3.5,
    }
    window.add([Episode(math.nan, 1.0, 1, 0)])
    assert math.isnan(window.metrics()["return_mean"])


def test_states_are_arrays_and_json():
    tracker, window = EpisodeTracker(2), EpisodeWindow()
    tracker.update(message([1.0], [0], [1], [0]), ids(1))
    for state in (tracker.get_state(), window.get_state()):
        for value in state.values():
            assert isinstance(value, np.ndarray) or json.dumps(value)
    fresh = EpisodeTracker(2)
    fresh.set_state(tracker.get_state())
    assert fresh.take() == [Episode(1.0, 1.0, 1, 1)]
    with pytest.raises(ConfigError, match="of 2 slots, expected 3"):
        EpisodeTracker(3).set_state(tracker.get_state())
