"""The one-thread runner: the order of its loop, and that the same seed gives the same run."""

import json
import signal
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from helpers import ScriptedEnv, make_async, parts_of, tiny

from headrace.errors import ConfigError, EnvironmentFailure, HeadraceError, WaitTimeoutError
from headrace.experience.room import NoGuard
from headrace.runtime.parts import build
from headrace.runtime.run import train
from headrace.runtime.sync import SyncRunner
from headrace.runtime.watchdog import step_limit


def metrics(run):
    """Lines of metrics.jsonl without the time/ columns."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [json.dumps({k: v for k, v in json.loads(x).items() if not k.startswith("time/")}) for x in lines]


def tape_of(parts):
    """Record the calls of the loop in order."""
    tape = []

    def record(owner, name, label, when=lambda *a: True):
        inner = getattr(owner, name)

        def wrapped(*args, **kwargs):
            at = len(tape)
            tape.append(label)
            result = inner(*args, **kwargs)
            if not when(result):
                tape[at] = f"{label}:no"
            return result

        setattr(owner, name, wrapped)

    for index, lane in enumerate(parts.lanes):
        record(lane.group, "recv", f"recv{index}")
        record(lane.group, "send", f"send{index}")
        record(lane.inference, "submit", f"submit{index}")
        record(lane.inference, "answer", f"answer{index}")
    record(parts.experience, "observe", "observe")
    record(parts.experience, "begin", "begin", lambda leave: leave)
    record(parts.experience, "take", "take", lambda items: items)
    record(parts.experience, "finished", "finished")
    record(parts.learner, "dispatch", "dispatch")
    record(parts.learner, "read", "read")
    record(parts.learner, "publish", "publish")
    return tape


def test_tape_of_two_lanes_with_lag_zero():
    """One transition a trajectory, two lanes of two slots, batches of four: every turn is written down by hand."""
    parts = parts_of(tiny(agent__unroll_length=1, experience__max_lag=0, total_steps=4))
    tape = tape_of(parts)
    got = list(SyncRunner(parts).updates())
    lane = ["recv0", "observe", "begin", "submit0"], ["recv1", "observe", "begin", "submit1"]
    learn = ["take", "dispatch", "publish", "finished", "read", "take:no"]
    assert tape == [
        "take:no",  # nothing was left by a checkpoint
        *lane[0], "take:no",  # lane 1's environments step while lane 0's question is on its way
        *lane[1], "answer0", "send0", "take:no",
        # Lane 0's ranges are complete, but to begin others there is no leave; so lane 1 is answered.
        "recv0", "observe", "begin:no", "answer1", "send1", "take:no",
        # Lane 0 asks again in vain; lane 1's row completes the batch.
        "begin:no", "recv1", "observe", "begin:no", *learn,
        "take:no",
    ]  # fmt: skip
    assert len(got) == 1 and got[0].learned.batch.lag.tolist() == [0, 0, 0, 0]


def test_params_are_published_before_ranges_are_given_back():
    parts = parts_of(tiny(experience__max_lag=0))
    finished, learner = parts.experience.finished, parts.learner
    versions = []
    parts.experience.finished = lambda items: (versions.append(parts.newest.value.version), finished(items))
    assert len(list(SyncRunner(parts).updates())) == learner.updates == len(versions)
    assert versions == list(range(1, len(versions) + 1))


@pytest.mark.parametrize("lag", [0, 2])
def test_lag_stays_within_its_bound(lag):
    parts = parts_of(tiny(experience__max_lag=lag, total_steps=512, agent__batch_size=2))
    lags = np.concatenate([f.learned.batch.lag for f in SyncRunner(parts).updates()])
    assert lags.max() <= lag and (lag == 0 or lags.max() > 0)
    assert parts.experience.dropped() == {"queue_full": 0, "lag": 0, "life_cut": 0}


@pytest.mark.parametrize("on_full", ["wait", "drop_oldest"])
def test_asynchronous_slots_train(on_full):
    config = tiny(
        experience__max_lag=4, experience__on_full=on_full, total_steps=512, env__max_episode_steps=6
    )
    parts = parts_of(config)
    groups = make_async(config, parts)
    rng = np.random.default_rng(0)
    for finished in SyncRunner(parts).updates():
        assert finished.learned.batch.lag.max() <= 4
        if rng.random() < 0.3 and len(ready := groups[0].ready()):
            groups[0].restart(int(rng.choice(ready)))
    assert parts.steps >= 512 and parts.experience.cut > 0 and parts.lanes[0].restarts > 0
    queue, store = parts.experience.queue, parts.experience.store
    held = sum(map(len, store._held))
    assert 0 <= queue.in_flight - held <= 4 and len(queue) == held
    lengths = [e.length for lane in parts.lanes for e in lane.episodes.take()]
    assert len(lengths) > 20 and set(lengths) == {6}  # no episode goes on into another life


def test_overlapping_trajectories_train_or_are_refused():
    lstm = {"agent__network__core": "lstm", "agent__burn_in": 6}
    parts = parts_of(tiny(experience__max_lag=2, **lstm))
    assert len(list(SyncRunner(parts).updates())) >= 10
    with pytest.raises(ConfigError, match="max_lag"):
        parts_of(tiny(experience__max_lag=1, **lstm))


def test_waiting_for_each_other_is_an_error_not_a_hang():
    parts = parts_of(tiny())
    parts.experience.begin = lambda slots: False
    with pytest.raises(HeadraceError, match="wait for each other"):
        list(SyncRunner(parts).updates())


def test_learned_steps_are_steps_that_were_collected():
    parts = parts_of(tiny(env__max_episode_steps=5, total_steps=200))
    last = list(SyncRunner(parts).updates())[-1].learned
    assert 200 - 4 * 8 <= last.learned_steps <= parts.steps
    unlearned = sum(lane.steps for lane in parts.lanes) - last.learned_steps
    assert unlearned < 4 * 5  # less than a trajectory a slot is left over


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Summary and metrics of a run of a few updates."""
    run = tmp_path_factory.mktemp("runs") / "reference"
    return train(tiny(run)), metrics(run)


def test_the_same_seed_gives_the_same_run(reference, tmp_path):
    summary = train(tiny(tmp_path / "again"))
    assert summary["params_sha256"] == reference[0]["params_sha256"]
    assert metrics(tmp_path / "again") == reference[1] and len(reference[1]) > 5
    other = train(tiny(tmp_path / "other", seed=1))
    assert other["params_sha256"] != summary["params_sha256"]


def test_evaluation_and_checkpoints_change_no_training(reference, tmp_path):
    options = {
        "eval__every_steps": 48,
        "eval__episodes": 2,
        "eval__num_envs": 2,
        "checkpoint__every_steps": 40,
    }
    summary = train(tiny(tmp_path / "eval", **options))
    assert summary["params_sha256"] == reference[0]["params_sha256"]
    lines = [x for x in metrics(tmp_path / "eval") if "eval/" not in x]
    assert len(lines) < len(metrics(tmp_path / "eval")) and lines == reference[1]
    for key in ("steps", "episodes", "return_mean", "lag_mean"):
        assert summary[key] == reference[0][key]


class Sleeper(ScriptedEnv):
    """Hangs in its eighth step, and believes that it can handle any error."""

    def step(self, action):
        if self._t == 7:
            try:
                time.sleep(60)
            except Exception:
                time.sleep(60)
        return super().step(action)


def make_sleeper():
    return Sleeper(length=20)


def test_a_hanging_step_is_interrupted():
    config = tiny(env__id="test_runtime_sync:make_sleeper", env__step_timeout_s=0.4, experience__max_lag=0)
    parts = build(config, NoGuard())
    handler, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"make_sleeper slot 0 .* env.step_timeout_s = 0.4 s"):
        list(SyncRunner(parts).updates())
    assert time.monotonic() - began < 20
    assert signal.getsignal(signal.SIGALRM) is handler
    assert not [t for t in threading.enumerate() if t.name == "step-limit"]


def test_an_alarm_of_somebody_else_is_passed_on():
    calls = []
    before = signal.signal(signal.SIGALRM, lambda *a: calls.append(a[0]))
    try:
        with step_limit([], 10.0):
            signal.raise_signal(signal.SIGALRM)
        assert calls == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_slow_step_within_the_limit_is_left_alone():
    class Group:
        stepping = (0, time.monotonic())

    before = time.monotonic()
    with step_limit([(Group(), 0)], 5.0):
        time.sleep(0.6)
    assert time.monotonic() - before >= 0.6  # the sleep was not cut short


class Raiser(ScriptedEnv):
    """Raises in its fourth step."""

    def step(self, action):
        if self._t == 3:
            raise RuntimeError("the rope broke")
        return super().step(action)


def make_raiser():
    return Raiser()


def test_an_environment_that_raises_ends_the_run(tmp_path):
    config = tiny(tmp_path / "run", env__id="test_runtime_sync:make_raiser")
    with pytest.raises(EnvironmentFailure, match=r"slot 0 step 4.*the rope broke") as caught:
        train(config)
    assert "the rope broke" in str(caught.value.__cause__)


class Nan(ScriptedEnv):
    """A reward that is not finite in the seventh step of its first episode."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.float32("nan") if (self._t, self._episode) == (7, 0) else reward, *rest


def make_nan() -> gym.Env:
    return Nan(length=9)


def test_h2a_a_reward_of_nan_ends_the_run(tmp_path):
    with pytest.raises(
        EnvironmentFailure, match=r"(?i)slot 0.*step 7.*reward.*nan|reward.*nan.*slot 0.*step 7"
    ):
        train(tiny(tmp_path / "run", env__id="test_runtime_sync:make_nan"))
