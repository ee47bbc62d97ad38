"""What a run directory protects: what was saved, and whoever trains in it."""

import errno
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
from helpers import tiny

import headrace
from headrace.errors import ConfigError, HeadraceError, RunDirectoryError
from headrace.runtime import directory
from headrace.runtime import run as runs
from headrace.runtime.directory import claim, read_config
from headrace.runtime.run import train
from headrace.settings.config import Config
from headrace.settings.fields import fields_of
from headrace.settings.presets import config


def damage_all(run):
    """Truncate a file of each checkpoint's arrays."""
    for step in (run / "checkpoints").glob("[0-9]*"):
        largest = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-7])


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_alone(tmp_path):
    run = tmp_path / "run"
    train(tiny(run))
    damage_all(run)
    (run / "summary.json").unlink()
    before = sorted(str(p) for p in run.rglob("*")), (run / "metrics.jsonl").read_bytes()
    with pytest.raises(RunDirectoryError, match="are damaged"):
        train(tiny(run))
    assert (sorted(str(p) for p in run.rglob("*")), (run / "metrics.jsonl").read_bytes()) == before


def test_a_start_that_fails_leaves_nothing_that_blocks_the_next(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(HeadraceError):
        train(tiny(run, init_from=str(tmp_path / "nowhere")))
    assert not run.exists()
    assert train(tiny(run))["steps"] > 0


def test_without_a_checkpoint_other_settings_may_be_given(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"preset": "impala", "seed": 5}))
    assert train(tiny(run, seed=6))["steps"] > 0
    with pytest.raises(ConfigError, match="seed: 6 there, 7 here"):
        train(tiny(run, seed=7))


def test_no_resume_refuses_also_a_run_without_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"preset": "impala", "seed": 5}))
    (run / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunDirectoryError, match="leave out --no-resume"):
        train(tiny(run, resume=False))
    assert (run / "metrics.jsonl").read_text() == "{}\n"


def test_a_finished_run_without_its_checkpoints_is_left_alone(tmp_path):
    run = tmp_path / "run"
    summary = train(tiny(run))
    shutil.rmtree(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="seed: 0 there, 1 here"):
        train(tiny(run, seed=1))
    with pytest.raises(RunDirectoryError, match="finished run without its checkpoints"):
        train(tiny(run, total_steps=512))
    assert train(tiny(run)) == summary
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", [name for name in fields_of(config("pong")) if name != "preset"])
def test_a_setting_younger_than_the_run_has_its_default(name, tmp_path):
    """Not what today's preset gives it."""
    saved = fields_of(config("pong"))
    del saved[name]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    read = fields_of(read_config(tmp_path))
    assert read[name] == fields_of(Config())[name]
    assert all(read[other] == value for other, value in saved.items())


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{}", '{"preset": "pong", "sead": 3}', '{"preset": "pong", "seed": "x"}']
)
def test_what_is_not_the_settings_of_a_run_is_refused_in_a_line(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunDirectoryError, match="cannot be read as the settings of a run"):
        read_config(tmp_path)


def test_a_run_that_another_process_began_meanwhile_is_left_alone(tmp_path, monkeypatch):
    """Both found the directory empty; the other came and ended while this one made its parts."""
    run = tmp_path / "run"
    build = runs.build

    def slow_build(*arguments):
        monkeypatch.setattr(runs, "build", build)
        train(tiny(run))
        return build(*arguments)

    monkeypatch.setattr(runs, "build", slow_build)
    with pytest.raises(RunDirectoryError, match=r"begun a run in .* meanwhile"):
        train(tiny(run, seed=3))
    assert json.loads((run / "config.json").read_text())["seed"] == 0


def test_a_file_system_without_locks_is_no_other_process(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory.fcntl, "flock", fail)
    number = errno.ENOLCK
    with ExitStack() as stack:
        claim(stack, tmp_path / "run")
    number = errno.EIO
    with ExitStack() as stack, pytest.raises(RunDirectoryError, match=r"cannot be locked \(Input/output"):
        claim(stack, tmp_path / "run")


def test_a_run_that_another_process_continued_meanwhile_is_looked_at_again(tmp_path, monkeypatch):
    """When this one looked there was no checkpoint yet; then the other wrote one and ended."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"preset": "impala"}))

    def slow_claim(*arguments, **options):
        monkeypatch.undo()
        train(tiny(run))
        claim(*arguments, **options)

    monkeypatch.setattr(runs, "claim", slow_claim)
    with pytest.raises(ConfigError, match="seed: 0 there, 3 here"):
        train(tiny(run, seed=3))


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="not empty and not a run"):
        train(tiny(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_two_processes_do_not_train_in_one_directory(tmp_path):
    run = tmp_path / "run"
    code = (
        "import sys, pathlib, contextlib, headrace.runtime.directory as d\n"
        "with contextlib.ExitStack() as s:\n"
        "    d.claim(s, pathlib.Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "mine\n"
    with ExitStack() as stack, pytest.raises(RunDirectoryError, match="another process"):
        claim(stack, run)
    other.communicate("", timeout=30)
    with ExitStack() as stack:
        claim(stack, run)  # free when its owner has ended


def test_h2a_nan_reward_names_the_environment_among_all(tmp_path, monkeypatch):
    """4 environments in 2 groups; the third one's 7th reward is NaN."""
    monkeypatch.syspath_prepend(str(__import__("pathlib").Path(__file__).parent))
    settings = headrace.config(
        "impala",
        **{
            "env.id": "learning_envs:make_nan_in_slot_2",
            "env.workers": 0,  # the environments count themselves in this process
            "env.num_envs": 4,
            "agent.batch_size": 4,
            "total_steps": 2000,
            "runtime": "sync",
            "run": str(tmp_path / "run"),
            "log.panel": False,
        },
    )
    with pytest.raises(HeadraceError, match="slot 2 step 7: the reward is NaN"):
        train(settings)
