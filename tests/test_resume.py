"""A run that was cut off goes on as if nothing had happened, or says what it could not restore."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import parts_of, tiny
from test_runtime_sync import metrics

from headrace.errors import ConfigError, RunDirectoryError
from headrace.experience.room import NoGuard
from headrace.runtime import snapshot
from headrace.runtime.book import Book
from headrace.runtime.directory import find
from headrace.runtime.parts import build
from headrace.runtime.run import Stopped, train
from headrace.runtime.sync import SyncRunner

HERE = Path(__file__).parent


class Killed(BaseException):
    """Ends a run as suddenly as SIGKILL does."""


def killed_after(monkeypatch, updates, config):
    """Train until so many updates were recorded, then drop everything."""
    record = Book.record

    def die(self, finished):
        record(self, finished)
        if finished.learned.published.version >= updates:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Book, "record", die)
        with pytest.raises(Killed):
            train(config)


CASES = {
    "two lanes": {},
    "four batches a turn": {"env__groups": 1, "env__num_envs": 8, "agent__batch_size": 2},
    "lag 0": {"experience__max_lag": 0},
    "memory": {
        "agent__network__core": "lstm",
        "agent__network__frame_stack": 3,
        "agent__network__prev_action_reward": True,
        "agent__burn_in": 2,
        "env__max_episode_steps": 6,
        "experience__max_reuse": 2,
    },
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=pytest.mark.long if name in ("two lanes", "lag 0") else ()) for name in CASES],
)
@pytest.mark.parametrize("kills", [(5,), pytest.param((3, 6), marks=pytest.mark.long)])
def test_a_killed_run_goes_on_exactly(case, kills, tmp_path, monkeypatch):
    options = {**CASES[case], "total_steps": 112, "checkpoint__every_steps": 1}
    expected = train(tiny(tmp_path / "whole", **options))
    config = tiny(tmp_path / "cut", **options)
    for updates in kills:
        killed_after(monkeypatch, updates, config)
    got = train(config)
    assert got["params_sha256"] == expected["params_sha256"]
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    for key in set(expected) - {"run", "wall_s", "steps_per_s"}:
        assert got[key] == expected[key], key


def test_settings_that_may_change_change_nothing_else(tmp_path, monkeypatch):
    expected = train(tiny(tmp_path / "whole", total_steps=160))
    config = tiny(tmp_path / "cut", total_steps=160, checkpoint__every_steps=16)
    killed_after(monkeypatch, 4, config)
    got = train(
        tiny(
            tmp_path / "cut",
            total_steps=160,
            checkpoint__every_steps=1000,
            eval__every_steps=64,
            eval__episodes=1,
        )
    )
    assert got["params_sha256"] == expected["params_sha256"]


@pytest.mark.long
def test_sigkill_of_a_process(tmp_path):
    """The same through the command line: SIGKILL at any moment, then the same command."""
    words = [
        "cartpole", "--runtime", "sync", "--total-steps", "3000", "--env.num-envs", "4", "--agent.batch-size", "4",
        "--agent.unroll-length", "4", "--agent.network.hidden", "8", "--log.no-tensorboard", "--log.no-panel",
        "--log.every-steps", "64", "--checkpoint.every-steps", "64", "--json",
    ]  # fmt: skip

    def command(run):
        return [sys.executable, "-m", "headrace.cli.main", "train", *words, "--run", str(tmp_path / run)]

    whole = subprocess.run(command("whole"), check=True, capture_output=True, text=True, timeout=120)
    process = subprocess.Popen(command("cut"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoints, deadline = tmp_path / "cut" / "checkpoints", time.monotonic() + 100
    while not (checkpoints.is_dir() and any(p.name.isdecimal() for p in checkpoints.iterdir())):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    again = subprocess.run(command("cut"), check=True, capture_output=True, text=True, timeout=120)
    a, b = (json.loads(x.stdout.splitlines()[-1]) for x in (whole, again))
    assert a["params_sha256"] == b["params_sha256"] and a["updates"] == b["updates"]
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert "resumed at" in (tmp_path / "cut" / "log.txt").read_text()


def log(run):
    return (Path(run) / "log.txt").read_text()


@pytest.mark.parametrize("lag", [0, pytest.param(4, marks=pytest.mark.long)])
def test_environments_whose_state_cannot_be_had_are_reset(lag, tmp_path, monkeypatch):
    config = tiny(
        tmp_path / "run", env__id="helpers:make_without_state", agent__network__frame_stack=3,
        agent__network__core="gru", total_steps=128, checkpoint__every_steps=1, experience__max_lag=lag,
    )  # fmt: skip
    killed_after(monkeypatch, 5, config)
    summary = train(config)
    assert summary["steps"] >= 128
    assert log(tmp_path / "run").count("environments were reset") == 1


def at_update(updates, **options):
    """Parts of a run paused after so many updates, and its runner."""
    parts = parts_of(tiny(**options))
    runner = SyncRunner(parts)
    updating = runner.updates()
    for _ in range(updates):
        next(updating)
    return parts, runner, updating


@pytest.mark.parametrize("lag", [0, 1])
def test_reset_environments_keep_the_count_of_what_is_in_flight(lag):
    """Rows that wait for leave when the checkpoint is taken end complete ranges and begin none."""
    parts, runner, updating = at_update(
        2, experience__max_lag=lag, agent__batch_size=4, env__id="helpers:make_without_state"
    )
    with runner.paused():
        states = [{**lane.get_state(), "env": None} for lane in parts.lanes]
        experience = parts.experience.get_state()
    updating.close()
    other = build(parts.config, NoGuard(), states)
    other.experience.set_state(experience)
    assert not any([lane.set_state(s) for lane, s in zip(other.lanes, states, strict=True)])
    runner = SyncRunner(other, [0])
    queue, store = other.experience.queue, other.experience.store
    for finished in runner.updates():
        age = store._age(np.arange(4))
        waiting = [
            lane.received is not None and age[lane.first_slot] % 4 == 0
            for lane in other.lanes
            for _ in range(2)
        ]
        collecting = [s for s in range(4) if not waiting[s] and (age[s] or store._observed[s])]
        assert queue.in_flight == sum(map(len, store._held)) + len(collecting) <= queue.limits.permits
        t = finished.learned.batch.trajectory.rows.timestep
        assert finished.learned.batch.lag.max() <= lag
        assert (t.first[0] | ~t.first[0]).all()
    assert other.experience.queue.in_flight >= 0


def test_a_finished_run_prints_its_summary(tmp_path):
    config = tiny(tmp_path / "run", total_steps=64)
    first = train(config)
    before = metrics(tmp_path / "run")
    assert train(config) == first and metrics(tmp_path / "run") == before
    more = train(tiny(tmp_path / "run", total_steps=96))
    assert more["steps"] >= 96 > first["steps"] and more["updates"] > first["updates"]


def test_a_run_killed_between_its_last_checkpoint_and_its_summary(tmp_path):
    config = tiny(tmp_path / "run", total_steps=64)
    first, lines = train(config), metrics(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    again = train(config)
    assert again["params_sha256"] == first["params_sha256"] and again["updates"] == first["updates"]
    assert metrics(tmp_path / "run") == lines


def test_contradictions_are_refused_by_name(tmp_path):
    train(tiny(tmp_path / "run", total_steps=64))
    for name, value in {"agent.discount": 0.5, "env.num_envs": 8, "seed": 3, "env.kwargs": {"a": 1}}.items():
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            train(tiny(tmp_path / "run", total_steps=96, **{name.replace(".", "__"): value}))
    with pytest.raises(RunDirectoryError, match="holds a run"):
        train(tiny(tmp_path / "run", resume=False))


def test_directories_that_are_no_runs(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for name in ("file", "other"):
        with pytest.raises(RunDirectoryError, match=name):
            train(tiny(tmp_path / name))
    assert (tmp_path / "other" / "notes.txt").read_text() == "x"
    (tmp_path / "empty").mkdir()
    assert train(tiny(tmp_path / "empty", total_steps=32))["steps"] >= 32
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"config\.json"):
        train(tiny(tmp_path / "empty", total_steps=64))


def test_fresh_names_are_taken_at_once(tmp_path, monkeypatch):
    """H14: two runs started in the same second have directories of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "now")
    names = [find(tiny())[0].run for _ in range(3)]
    assert names == [f"runs/cartpole-now{x}" for x in ("", "-1", "-2")]
    with pytest.raises(ConfigError):
        train(tiny(experience__max_lag=0, agent__batch_size=3))
    assert sorted(p.name for p in Path("runs").iterdir()) == [
        "cartpole-now",
        "cartpole-now-1",
        "cartpole-now-2",
    ]


def test_a_bad_setting_makes_no_directory(tmp_path):
    with pytest.raises(ConfigError):
        train(tiny(tmp_path / "run", experience__max_lag=0, agent__batch_size=3))
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "source"
    config = tiny(path, total_steps=128, checkpoint__every_steps=32, checkpoint__keep_latest=9)
    return path, train(config)


def steps_of(path):
    return sorted(int(p.name) for p in (path / "checkpoints").iterdir() if p.name.isdecimal())


def test_a_damaged_checkpoint_is_passed_over(finished_run, tmp_path):
    path, summary = tmp_path / "run", finished_run[1]
    shutil.copytree(finished_run[0], path)
    (path / "summary.json").unlink()
    newest = steps_of(path)[-1]
    largest = max(
        (p for p in (path / "checkpoints" / str(newest)).rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    largest.write_bytes(b"")
    again = train(tiny(path, total_steps=128, checkpoint__every_steps=32, checkpoint__keep_latest=9))
    assert f"checkpoint {newest}" in log(path) and "damaged" in log(path)
    assert again["params_sha256"] == summary["params_sha256"]
    assert metrics(path) == metrics(finished_run[0])


def test_init_from_another_run(finished_run, tmp_path):
    path, _ = finished_run
    step = steps_of(path)[1]
    parts = parts_of(tiny(total_steps=64))
    fresh = snapshot.digest(parts.learner.state.params)
    digests = set()
    for reference in (str(path), f"{path}@{step}"):
        snapshot.init_params_from(parts, reference)
        digests.add(snapshot.digest(parts.learner.state.params))
        assert snapshot.digest(parts.newest.value.params) == snapshot.digest(parts.learner.state.params)
    assert len(digests | {fresh}) == 3 and finished_run[1]["params_sha256"] in digests
    summary = train(tiny(tmp_path / "new", total_steps=64, init_from=f"{path}@{step}"))
    assert f"{path}@{step}" in log(tmp_path / "new") and summary["updates"] > 0
    for reference, message in {
        f"{path}@x": "whole number",
        f"{path}@{step + 1}": f"step {step + 1}",
        str(tmp_path / "nothing"): "no run",
    }.items():
        with pytest.raises((ConfigError, RunDirectoryError), match=message):
            snapshot.init_params_from(parts, reference)
    with pytest.raises(ConfigError, match=r"kernel.*expected"):
        train(tiny(tmp_path / "wide", init_from=str(path), agent__network__hidden=(9,)))


def test_load_and_evaluate(finished_run):
    from headrace import evaluate, load

    policy = load(finished_run[0])
    assert snapshot.digest(policy.params) == finished_run[1]["params_sha256"]
    for wrong in (np.zeros(5), np.zeros((1, 4)), {"a": np.zeros(4)}, "four"):
        with pytest.raises(ValueError, match="the observation does not fit"):
            policy.act(wrong, policy.initial_carry())
    action, carry = policy.act(np.zeros(4, np.float32), policy.initial_carry())
    assert int(action) in (0, 1) and not carry.fresh
    assert isinstance(policy.value(np.zeros(4, np.float32), carry), float)
    a, b = (evaluate(finished_run[0], episodes=3, seed=s) for s in (None, 0))
    assert a == b and a["episodes"] == 3 and set(a) == {
        "episodes", "return_mean", "return_std", "return_min", "return_max", "length_mean"
    }  # fmt: skip


@pytest.mark.parametrize("runtime", ["threads", "sync"])
def test_a_stop_saves_and_the_same_call_goes_on(runtime, tmp_path, monkeypatch):
    config = tiny(tmp_path / "run", runtime=runtime, total_steps=256)
    record = Book.record

    def interrupt(self, finished):
        record(self, finished)
        if finished.learned.published.version == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Book, "record", interrupt)
    with pytest.raises(Stopped) as stopped:
        train(config)
    assert stopped.value.signal_number == signal.SIGTERM
    assert stopped.value.summary["updates"] >= 4 and steps_of(tmp_path / "run")
    monkeypatch.undo()
    summary = train(config)
    assert summary["steps"] >= 256 and summary["updates"] > stopped.value.summary["updates"]
    assert "resumed at" in log(tmp_path / "run") and "stopped at" in log(tmp_path / "run")
    if runtime == "sync":
        whole = train(tiny(tmp_path / "whole", runtime=runtime, total_steps=256))
        assert whole["params_sha256"] == summary["params_sha256"]
        assert metrics(tmp_path / "whole") == metrics(tmp_path / "run")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_signals_leave_with_their_exit_status(number, code, tmp_path):
    command = [
        sys.executable, "-m", "headrace.cli.main", "train", "cartpole", "--run", str(tmp_path / "run"),
        "--env.num-envs", "4", "--agent.batch-size", "4", "--agent.network.hidden", "8", "--log.no-tensorboard",
        "--total-steps", "1e9", "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while (
        not (tmp_path / "run" / "metrics.jsonl").exists()
        or not (tmp_path / "run" / "metrics.jsonl").stat().st_size
    ):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err and "the same command" in err
    summary = json.loads(out.splitlines()[-1])
    assert steps_of(tmp_path / "run") and summary["steps"] > 0
