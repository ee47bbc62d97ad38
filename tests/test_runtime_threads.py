"""The threads runner: the same parts, no hang, no thread left, and the lag bound of case H13."""

import json
import signal
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from helpers import ScriptedEnv, make_async, parts_of, tiny

from headrace.errors import EnvironmentFailure, HeadraceError, WaitTimeoutError
from headrace.experience.room import NoGuard
from headrace.runtime import threads
from headrace.runtime.book import Book
from headrace.runtime.parts import build
from headrace.runtime.run import Stopped, train
from headrace.runtime.sync import SyncRunner
from headrace.runtime.threads import ThreadsRunner


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while left := [t for t in threading.enumerate() if t not in before and t.is_alive()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def threads_of(**options):
    parts = parts_of(tiny(runtime="threads", **options), threading.Condition())
    return parts, ThreadsRunner(parts)


def counter_parts(runtime, updates=50, lag=4, step_s=0.0, **options):
    kwargs = {"length": 1000, "step_s": step_s}
    config = tiny(
        runtime=runtime, total_steps=updates * 16, env__id="helpers:make_scripted", env__kwargs=kwargs,
        build_agent="helpers:counter_agent", experience__max_lag=lag, **options,
    )  # fmt: skip
    return build(config, threading.Condition() if runtime == "threads" else NoGuard())


def run_counter(parts, runtime, next_lanes=None):
    runner = (ThreadsRunner if runtime == "threads" else SyncRunner)(parts, next_lanes)
    batches = []
    for finished in runner.updates():
        batches.append(finished.learned.batch)
    return batches


PLACEMENTS = {
    "actor": {},
    "central": {"inference__placement": "central"},
    "central, all at once": {
        "inference__placement": "central",
        "inference__min_batch": 4,
        "inference__max_batch": 4,
        "inference__deadline_ms": 3.0,
    },
}


@pytest.mark.parametrize(
    ("runtime", "staging", "placement"),
    [
        ("sync", 1, "actor"), ("threads", 0, "actor"), ("threads", 1, "actor"), ("threads", 3, "actor"),
        ("sync", 1, "central"), ("threads", 1, "central"),
        ("sync", 1, "central, all at once"), ("threads", 1, "central, all at once"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lag", [0, 4])
def test_h13_weights_reach_the_actors(runtime, lag, staging, placement):
    began = time.monotonic()
    # Steps that take their time: which of two idle rooms is faster changes from moment to moment, and the lag with it.
    options = {"learner__staging": staging, **PLACEMENTS[placement]}
    parts = counter_parts(runtime, lag=lag, step_s=0.002, **options)
    batches = run_counter(parts, runtime)
    assert time.monotonic() - began < 60
    assert len(batches) >= 45 and parts.learner.updates == len(batches)
    lags = []
    for update, batch in enumerate(batches):
        rows = batch.trajectory.rows
        np.testing.assert_array_equal(np.asarray(rows.version)[:-1], np.asarray(rows.action)[:-1])
        got = update - np.asarray(rows.version)[:-1].min(0)
        assert batch.lag.tolist() == got.tolist() and batch.lag.max() <= lag
        lags.append(batch.lag.max())
    assert np.mean(lags[-10:]) <= np.mean(lags[:10]) + 1
    assert sum(parts.experience.dropped().values()) == 0
    newest = {
        s: np.asarray(b.trajectory.rows.version)[:-1, b.trajectory.slot_id == s]
        for b in batches
        for s in range(4)
    }
    for versions in newest.values():
        assert versions.max(initial=len(batches)) >= len(batches) - 1 - max(lag, 3)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("runtime", ["sync", "threads"])
def test_h13_resume_at_update_30(runtime, placement):
    first = counter_parts(runtime, updates=30, **PLACEMENTS[placement])
    run_counter(first, runtime)
    state = first.learner.get_state()
    assert state["updates"] >= 28
    second = counter_parts(runtime, **PLACEMENTS[placement])
    second.learner.set_state(state)
    second.newest.value = second.learner.publish()
    batches = run_counter(second, runtime)
    assert min(np.asarray(b.trajectory.rows.action)[:-1].min() for b in batches) >= state["updates"]


@pytest.mark.parametrize("placement", ["actor", "central"])
def test_both_runners_learn_the_same_where_the_order_is_fixed(placement):
    """With lag 0 and one lane, collecting and learning alternate in both."""
    options = {"env__groups": 1, "experience__max_lag": 0, "total_steps": 200, **PLACEMENTS[placement]}
    sync = parts_of(tiny(**options))
    _, runner = threads_of(**options)
    a, b = list(SyncRunner(sync).updates()), list(runner.updates())
    assert len(a) == len(b) >= 10
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(
            x.learned.batch.trajectory.rows.action, np.asarray(y.learned.batch.trajectory.rows.action)
        )
        assert x.metrics == y.metrics


@pytest.mark.parametrize("on_full", ["wait", "drop_oldest"])
@pytest.mark.parametrize("actors", [1, 2])
def test_trains_and_stops_within_its_bounds(on_full, actors):
    parts, runner = threads_of(
        experience__max_lag=2, experience__on_full=on_full, env__actor_threads=actors, total_steps=2000
    )
    lags = [f.learned.batch.lag.max() for f in runner.updates()]
    assert max(lags) <= 2 and parts.steps >= 2000
    dropped = parts.experience.dropped()
    if on_full == "wait":
        # The slots of a slow thread may fall behind those of a fast one, and are dropped; one thread's never do.
        assert dropped["queue_full"] == 0 and dropped["lag"] <= (0 if actors == 1 else 200)
        assert 4 * len(lags) + dropped["lag"] >= 2000 // 4 - 16
    queue = parts.experience.queue
    assert queue.in_flight >= 0 and sum(map(len, parts.experience.store._held)) == len(queue)


def test_drop_oldest_never_blocks_collecting():
    """A learner that does nothing: collecting goes on to the end all the same."""
    parts, _ = threads_of(experience__on_full="drop_oldest", total_steps=1500, learner__staging=0)
    from headrace.runtime.driver import Driver

    driver = Driver(parts.lanes)
    while not parts.collected:
        assert driver.turn()
    driver.settle()
    assert parts.experience.dropped()["queue_full"] > 10
    assert len(parts.experience.queue) <= parts.experience.queue.limits.capacity


def test_asynchronous_slots_and_restarts():
    config = tiny(runtime="threads", total_steps=1500, experience__max_lag=4)
    parts = parts_of(config, threading.Condition())
    make_async(config, parts, least=1)
    assert max(f.learned.batch.lag.max() for f in ThreadsRunner(parts).updates()) <= 4


def test_out_of_step_slots_with_lag_zero_end_with_an_error_not_a_hang():
    """Slots of one group that begin their trajectories at different times cannot alternate with the learner."""
    config = tiny(runtime="threads", experience__max_lag=0, env__groups=1, total_steps=2000)
    parts = parts_of(config, threading.Condition())
    make_async(config, parts, least=1)
    began = time.monotonic()
    with pytest.raises(HeadraceError, match="wait for each other"):
        list(ThreadsRunner(parts).updates())
    assert time.monotonic() - began < 30


class Sleeper(ScriptedEnv):
    """Hangs in its eighth step, until the test is over."""

    def step(self, action):
        if self._t == 7:
            over.wait(30)
        return super().step(action)


over = threading.Event()


def make_sleeper():
    return Sleeper(length=20)


@pytest.mark.parametrize("actors", [1, 2])
def test_a_hanging_step_ends_the_run(actors):
    over.clear()
    _, runner = threads_of(
        env__id="test_runtime_threads:make_sleeper", env__step_timeout_s=0.5, env__actor_threads=actors
    )
    began = time.monotonic()
    try:
        with pytest.raises(WaitTimeoutError, match=r"make_sleeper slot \d .* env.step_timeout_s = 0.5 s"):
            list(runner.updates())
    finally:
        over.set()
    assert time.monotonic() - began < 15


class Closing(Sleeper):
    """Remembers what was closed."""

    closed: ClassVar[list[str]] = []

    def close(self):
        Closing.closed.append(threading.current_thread().name)


def make_closing():
    return Closing(length=20)


def test_environments_are_not_closed_under_a_step_that_hangs():
    over.clear()
    parts, runner = threads_of(env__id="test_runtime_threads:make_closing", env__step_timeout_s=0.5)
    Closing.closed.clear()
    try:
        with pytest.raises(WaitTimeoutError):
            list(runner.updates())
        parts.close()
        assert Closing.closed == []
    finally:
        over.set()


@pytest.mark.parametrize("staging", [0, 1])
def test_a_pause_waits_for_many_slow_environments(staging, monkeypatch):
    """A turn of one group takes longer than the limit of a step, and every step is within it."""
    monkeypatch.setattr(threads, "JOIN_S", 0.1)
    parts, runner = threads_of(
        env__id="test_runtime_threads:make_slow", env__num_envs=8, env__groups=1, env__step_timeout_s=1.0,
        agent__batch_size=8, learner__staging=staging, total_steps=10**9,
    )  # fmt: skip
    updates, group = runner.updates(), parts.lanes[0].group
    next(updates)
    deadline = time.monotonic() + 30
    while (group.stepping or (-1,))[0] != 0:
        assert time.monotonic() < deadline, "no turn began"
        time.sleep(0.001)
    began = time.monotonic()
    with runner.paused() as remaining:
        list(remaining)
        assert time.monotonic() - began > 1.1  # else it was no test
    monkeypatch.undo()
    updates.close()
    assert not parts.left_behind


def make_slow():
    return ScriptedEnv(length=1000, step_s=0.2)


def test_a_caller_that_leaves_does_not_wait_for_a_long_turn(monkeypatch):
    parts, runner = threads_of(
        env__id="test_runtime_threads:make_slow",
        env__num_envs=8,
        env__groups=1,
        agent__batch_size=8,
        total_steps=10**9,
    )
    updates, lane = runner.updates(), parts.lanes[0]
    next(updates)
    while (lane.group.stepping or (-1,))[0] != 0:
        time.sleep(0.001)
    monkeypatch.setattr(threads, "JOIN_S", 0.1)
    updates.close()
    assert parts.left_behind == [lane]  # its turn has more than a second to go


def test_a_caller_that_takes_its_time_in_a_pause_is_waited_for(monkeypatch):
    monkeypatch.setattr(threads, "JOIN_S", 0.1)
    parts, runner = threads_of(env__step_timeout_s=0.5, total_steps=10**9, learner__staging=0)
    updates = runner.updates()
    for _ in range(5):
        next(updates)
        with runner.paused() as remaining:
            for _ in remaining:
                time.sleep(0.8)
    monkeypatch.undo()
    updates.close()
    assert not parts.left_behind


def test_a_batch_that_takes_long_to_make_is_no_deadlock(monkeypatch):
    parts, runner = threads_of(experience__max_lag=0, env__groups=1, total_steps=64)
    monkeypatch.setattr(threads, "POLL_S", 0.05)
    collate = parts.experience.collate

    def slow(*arguments):
        time.sleep(1.5)  # many times the refusals that make a deadlock
        return collate(*arguments)

    monkeypatch.setattr(parts.experience, "collate", slow)
    assert sum(1 for _ in runner.updates()) >= 3


class OneSleeper(ScriptedEnv):
    """Hangs, once it is told to, where it was made as the last of all."""

    made = 0
    hang = False

    def __init__(self):
        super().__init__(length=20)
        OneSleeper.made += 1
        self._number = OneSleeper.made

    def step(self, action):
        if OneSleeper.hang and self._number == OneSleeper.made:
            over.wait(30)
        return super().step(action)


def make_one_sleeper():
    return OneSleeper()


def test_a_hanging_lane_is_seen_beside_a_busy_one():
    over.clear()
    OneSleeper.hang = False
    parts, runner = threads_of(
        env__id="test_runtime_threads:make_one_sleeper",
        env__step_timeout_s=1.0,
        env__actor_threads=2,
        total_steps=10**9,
        agent__batch_size=2,
    )
    try:
        with pytest.raises(WaitTimeoutError, match=r"slot 3 "):
            for _ in runner.updates():
                OneSleeper.hang = parts.learner.updates > 10
    finally:
        over.set()
    assert parts.learner.updates > 20


class Raiser(ScriptedEnv):
    def step(self, action):
        if self._t == 3:
            raise RuntimeError("the rope broke")
        return super().step(action)


def make_raiser():
    return Raiser()


@pytest.mark.parametrize("staging", [0, 1])
def test_an_environment_that_raises_ends_the_run(staging):
    _, runner = threads_of(env__id="test_runtime_threads:make_raiser", learner__staging=staging)
    with pytest.raises(EnvironmentFailure, match="the rope broke") as caught:
        list(runner.updates())
    assert any("_act" in str(t) for t in caught.traceback)  # it is the thread's own traceback


class SecondSleeper(ScriptedEnv):
    """Hangs where it was made for an evaluation, after the six of training (one is made to be described)."""

    made = 0

    def __init__(self):
        super().__init__(length=20)
        SecondSleeper.made += 1
        self._hangs = SecondSleeper.made > 5

    def step(self, action):
        if self._hangs:
            over.wait(30)
        return super().step(action)


def make_second_sleeper():
    return SecondSleeper()


@pytest.mark.parametrize("total", [200, 10**9])
def test_a_hanging_evaluation_ends_the_run(total, tmp_path):
    over.clear()
    SecondSleeper.made = 0
    config = tiny(
        tmp_path / "run", runtime="threads", env__id="test_runtime_threads:make_second_sleeper", total_steps=total,
        env__step_timeout_s=0.5, eval__every_steps=64, eval__num_envs=1, eval__episodes=1,
    )  # fmt: skip
    began = time.monotonic()
    try:
        with pytest.raises(WaitTimeoutError, match="make_second_sleeper slot 0 "):
            train(config)
    finally:
        over.set()
    assert time.monotonic() - began < 25


def test_evaluation_beside_training(tmp_path):
    config = tiny(
        tmp_path / "run", runtime="threads", total_steps=600, eval__every_steps=64, eval__num_envs=2, eval__episodes=3,
        checkpoint__every_steps=64,
    )  # fmt: skip
    train(config)
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (
        sum("eval/return_mean" in x for x in lines) >= 600 // 64 - 1
    )  # also of updates that a checkpoint waited for


def test_a_stop_cuts_an_evaluation_short(tmp_path, monkeypatch):
    config = tiny(
        tmp_path / "run", runtime="threads", total_steps=10**9, eval__every_steps=64, eval__num_envs=1,
        eval__episodes=10**7,
    )  # fmt: skip
    record = Book.record

    def interrupt(self, finished):
        record(self, finished)
        if finished.learned.published.version == 8:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Book, "record", interrupt)
    began = time.monotonic()
    with pytest.raises(Stopped):
        train(config)
    assert time.monotonic() - began < 20


def test_an_error_while_staging_ends_the_run():
    parts, runner = threads_of()

    def broken(items, update):
        raise RuntimeError("no memory")

    parts.experience.collate = broken
    with pytest.raises(RuntimeError, match="no memory"):
        list(runner.updates())


def test_a_consumer_that_leaves_ends_the_threads():
    _, runner = threads_of(total_steps=10**9)
    updates = runner.updates()
    for _ in range(3):
        next(updates)
    updates.close()
    assert not any(thread.is_alive() for thread in runner._threads)


def test_a_stop_learns_from_what_is_queued():
    parts, runner = threads_of(total_steps=10**9)
    for finished in runner.updates():
        if finished.learned.published.version == 10:
            parts.stop.asked = True
    assert parts.learner.updates >= 10 and len(parts.experience.queue) < 4


@pytest.mark.parametrize("staging", [0, 2])
def test_pauses_hold_everything_still(staging):
    parts, runner = threads_of(total_steps=10**9, learner__staging=staging, env__actor_threads=2)
    versions = []
    for finished in runner.updates():
        versions.append(finished.learned.published.version)
        if len(versions) % 5 == 0:
            with runner.paused() as remaining:
                versions += [f.learned.published.version for f in remaining]
                before = parts.steps, parts.experience.get_state(), parts.learner.updates
                time.sleep(0.05)
                after = parts.steps, parts.experience.get_state(), parts.learner.updates
                assert (before[0], before[2]) == (after[0], after[2]) and after[2] == versions[-1]
                np.testing.assert_equal(before[1], after[1])
                held = sum(map(len, parts.experience.store._held))
                assert held == len(parts.experience.queue)  # nothing is staged or trained on
        if len(versions) > 40:
            parts.stop.asked = True
    assert versions == list(range(1, len(versions) + 1))


def test_resume_of_threads(tmp_path):
    config = tiny(tmp_path / "run", runtime="threads", total_steps=400, checkpoint__every_steps=64)
    first = train(config)
    more = train(tiny(tmp_path / "run", runtime="threads", total_steps=800, checkpoint__every_steps=64))
    assert more["steps"] >= 800 and more["updates"] > first["updates"] and more["lag_max"] <= 4
    changed = train(tiny(tmp_path / "run", runtime="sync", total_steps=1000, env__actor_threads=2))
    assert changed["updates"] > more["updates"]
