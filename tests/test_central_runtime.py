"""Runs with central inference: no hang and no thread left, repeatable in one thread, resumed across placements."""

import json
import threading
import time

import jax
import numpy as np
import pytest
from helpers import make_async, parts_of, tiny
from test_inference import CASES
from test_resume import killed_after
from test_runtime_sync import metrics
from test_runtime_threads import no_thread_is_left  # noqa: F401  (a fixture)

from headrace.errors import ConfigError, HeadraceError
from headrace.inference.messages import Request
from headrace.metrics import schema
from headrace.runtime.run import train
from headrace.runtime.sync import SyncRunner
from headrace.runtime.threads import ThreadsRunner

CENTRAL = {"inference__placement": "central"}
ALL_AT_ONCE = {**CENTRAL, "inference__min_batch": 4, "inference__deadline_ms": 3.0}
WAITS = {"wall_s", "steps_per_s", "inference_request_wait_ms_mean", "inference_request_wait_ms_max"}


def threads_of(**options):
    parts = parts_of(tiny(runtime="threads", **{**CENTRAL, **options}), threading.Condition())
    return parts, ThreadsRunner(parts)


@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("lag", [0, 3])
def test_more_than_can_wait_is_sent_at_the_deadline(lag, actors):
    """A minimum of all slots, though a group is often without leave, in a step, or held still."""
    parts, runner = threads_of(
        **ALL_AT_ONCE, env__groups=4, env__actor_threads=actors, experience__max_lag=lag, total_steps=600
    )
    versions, pauses = [], 0
    for finished in runner.updates():
        versions.append(finished.learned.published.version)
        assert finished.learned.batch.lag.max() <= lag
        if len(versions) % 8 == 0:
            with runner.paused() as remaining:
                versions += [f.learned.published.version for f in remaining]
                pauses += 1
    assert versions == list(range(1, len(versions) + 1)) and len(versions) >= 30 and pauses >= 3
    tally = parts.server.take_tally()
    assert tally.by_deadline > 0 and tally.rows_max <= 4 and tally.by_minimum == 0


def test_a_pause_does_not_wait_for_a_long_deadline():
    """Nobody else will come while the actors settle, so what waits is sent."""
    parts, runner = threads_of(
        env__groups=4, inference__min_batch=4, inference__deadline_ms=1e6, experience__max_lag=30,
        total_steps=10**9,
    )  # fmt: skip
    began, held = time.monotonic(), []
    updates = runner.updates()
    for _ in range(6):
        next(updates)
        with runner.paused() as remaining:
            list(remaining)
            before = parts.steps, [lane.get_state()["inference"] for lane in parts.lanes]
            time.sleep(0.05)
            after = parts.steps, [lane.get_state()["inference"] for lane in parts.lanes]
            np.testing.assert_equal(before, after)
            held.append(parts.server._batcher.rows)
    updates.close()
    assert time.monotonic() - began < 60 and held == [0] * 6
    assert parts.server.take_tally().by_deadline > 0 and not parts.left_behind


@pytest.mark.parametrize("pausing", [False, True])
def test_an_error_of_the_server_ends_the_run(pausing, monkeypatch):
    parts, runner = threads_of(total_steps=10**9)
    step, stepped = parts.server._bank.step, []

    def fail(*arguments):
        stepped.append(0)
        if len(stepped) > 40 and (not pausing or runner._pause):
            raise RuntimeError("the device is gone")
        return step(*arguments)

    parts.server._bank.step = fail
    with pytest.raises(RuntimeError, match="the device is gone") as caught:
        for _ in runner.updates():
            if pausing:
                with runner.paused() as remaining:
                    list(remaining)
    assert any("_serve" in str(t) for t in caught.traceback)  # it is the thread's own traceback
    assert not parts.left_behind


def test_a_caller_that_leaves_ends_the_server():
    """After the actors, whose last questions it answers without waiting for others."""
    parts, runner = threads_of(
        env__groups=4, inference__min_batch=4, inference__deadline_ms=1e6, experience__max_lag=30,
        total_steps=10**9,
    )  # fmt: skip
    updates = runner.updates()
    next(updates)
    assert [t.name for t in threading.enumerate()].count("inference") == 1
    updates.close()
    assert not any(t.name == "inference" for t in threading.enumerate()) and parts.server.closed
    assert runner._error is None and all(lane.pending is None for lane in parts.lanes)


def test_a_server_that_nobody_serves_is_an_error_not_a_hang(monkeypatch):
    parts, runner = threads_of(total_steps=10**9)
    monkeypatch.setattr(parts.server, "serve", lambda timeout_s, hurry: time.sleep(0.01))
    monkeypatch.setattr(parts.server, "_limit_s", 0.5)
    with pytest.raises(HeadraceError, match="for central inference to answer slots"):
        list(runner.updates())


def test_nothing_is_compiled_by_a_server_in_a_run():
    parts, runner = threads_of(env__groups=4, total_steps=600)
    seen = {parts.server.compilations}
    for _ in runner.updates():
        seen.add(parts.server.compilations)
    assert seen == {0, 5}  # batches of 1, 2 and 4; renewal; a group's slots


def test_asynchronous_slots_and_new_lives():
    config = tiny(runtime="threads", total_steps=800, experience__max_lag=4, **CENTRAL)
    parts = parts_of(config, threading.Condition())
    groups, rng = make_async(config, parts), np.random.default_rng(0)
    runner = ThreadsRunner(parts)
    for finished in runner.updates():
        assert finished.learned.batch.lag.max() <= 4
        if finished.learned.published.version % 10 == 0:
            with runner.paused() as remaining:
                list(remaining)
                if len(ready := groups[0].ready()):
                    groups[0].restart(int(rng.choice(ready)))
    assert parts.lanes[0].restarts > 0
    lives = parts.lanes[0].inference.get_state()["lives"]
    assert lives.max() > 0


def test_one_thread_repeats_itself_bit_for_bit(tmp_path):
    options = {**CENTRAL, "inference__min_batch": 2, "env__groups": 4, "total_steps": 200}
    first, again = train(tiny(tmp_path / "a", **options)), train(tiny(tmp_path / "b", **options))
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    for key in set(first) - WAITS - {"run"}:
        assert first[key] == again[key], key
    # All but what was asked last, which is answered alone.
    assert 1.95 < first["inference_rows_mean"] < 2 == first["inference_rows_max"]
    assert first["inference_by_deadline"] <= 2 and first["inference_compilations"] == 5
    line = json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    named = {name for name in schema.SCHEMA if name.startswith(("inference/", "time/inference/request"))}
    assert len(named) == 10 and named <= set(line)
    assert line["inference/compilations"] == 5 and line["inference/by_minimum"] > 0


def test_one_thread_asks_a_policy_that_is_never_older_than_beside_the_actors():
    """Where all wait for all, a batch goes out when the last lane has asked, with the params of then."""
    parts = parts_of(tiny(**ALL_AT_ONCE, experience__max_lag=2, total_steps=300))
    lags = np.concatenate([f.learned.batch.lag for f in SyncRunner(parts).updates()])
    assert lags.max() <= 2 and parts.server.take_tally().rows_max == 4


def test_a_killed_run_goes_on_exactly(tmp_path, monkeypatch):
    options = {
        **CENTRAL, "inference__min_batch": 3, "inference__max_batch": 3, "env__groups": 4, "total_steps": 112,
        "checkpoint__every_steps": 1,
    }  # fmt: skip
    expected = train(tiny(tmp_path / "whole", **options))
    config = tiny(tmp_path / "cut", **options)
    killed_after(monkeypatch, 5, config)
    got = train(config)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    for key in set(expected) - WAITS - {"run"}:
        assert got[key] == expected[key], key


@pytest.mark.parametrize("runtime", [pytest.param("sync", marks=pytest.mark.long), "threads"])
def test_a_run_is_resumed_with_the_other_placement(runtime, tmp_path):
    options = {"runtime": runtime, "checkpoint__every_steps": 64}
    before = train(tiny(tmp_path / "run", total_steps=120, **options))
    assert not any(name.startswith("inference") for name in before)
    central = train(tiny(tmp_path / "run", total_steps=240, **options, **ALL_AT_ONCE))
    assert central["updates"] > before["updates"] and central["inference_batches"] > 0
    after = train(tiny(tmp_path / "run", total_steps=360, **options))
    assert after["updates"] > central["updates"] and after["lag_max"] <= 4
    text = (tmp_path / "run" / "log.txt").read_text()
    assert text.count("resumed at") == 2 and "were reset" not in text


def test_slots_go_on_as_they_were_with_the_other_placement():
    """The same lanes, moved: what they answer next is the same, and not what slots without a past would."""
    options = {"env__max_episode_steps": 9, **CASES["stack longer than a trajectory"]}
    here = parts_of(tiny(**options))
    runner = SyncRunner(here)
    updates = runner.updates()
    for _ in range(4):
        next(updates)
    with runner.paused():
        states = [lane.get_state() for lane in here.lanes]
    there = parts_of(tiny(**options, **CENTRAL))
    there.newest.value = here.newest.value
    for a, b, state in zip(here.lanes, there.lanes, states, strict=True):
        timestep, ids = a.group.recv(10.0)
        request = Request(timestep, ids, a.group.run_ids()[ids])
        without_past = b.inference.answer(b.inference.submit(request), True)
        assert b.set_state(state)
        got = b.get_state()["inference"]
        jax.tree.map(np.testing.assert_array_equal, got, state["inference"])
        mine, moved = (x.inference.answer(x.inference.submit(request), True) for x in (a, b))
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(moved), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
        assert np.abs(without_past.extras - mine.extras).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inference__min_batch": 2}, "no effect with inference.placement actor"),
        ({"inference__max_batch": 2}, "no effect with inference.placement actor"),
        ({"inference__deadline_ms": 5.0}, "no effect with inference.placement actor"),
        ({**CENTRAL, "inference__min_batch": 3, "inference__max_batch": 2}, "1 <= min_batch <= max_batch"),
        ({**CENTRAL, "inference__max_batch": 0}, "1 <= min_batch <= max_batch"),
        ({**CENTRAL, "inference__min_batch": 0}, "1 <= min_batch <= max_batch"),
        ({**CENTRAL, "inference__deadline_ms": 0.0}, "milliseconds > 0"),
        ({**CENTRAL, "inference__deadline_ms": float("nan")}, "milliseconds > 0"),
        ({**CENTRAL, "inference__deadline_ms": float("inf")}, "milliseconds > 0"),
        ({**CENTRAL, "inference__min_batch": 5}, "more than env.num_envs 4"),
    ],
)
def test_bounds_that_cannot_hold_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny(**changes)
