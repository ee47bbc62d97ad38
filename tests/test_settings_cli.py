"""Settings from Python, JSON files and the command line; what the command line prints and exits with."""

import dataclasses
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import Uneven, tiny

import headrace
from headrace.cli.arguments import parse_train
from headrace.cli.main import run as command
from headrace.errors import ConfigError
from headrace.runtime.directory import MAY_CHANGE, as_json, compare
from headrace.settings.config import Config
from headrace.settings.fields import fields_of, replace_fields
from headrace.settings.presets import PRESETS, preset

TRAIN_KEYS = {
    "run", "steps", "frames", "updates", "wall_s", "steps_per_s", "episodes", "return_mean", "lag_mean", "lag_max",
    "restarts", "failures", "params_sha256",
}  # fmt: skip
EVAL_KEYS = {"episodes", "return_mean", "return_std", "return_min", "return_max", "length_mean"}
SMALL = [
    "--env.num-envs", "4", "--agent.batch-size", "4", "--agent.unroll-length", "4", "--agent.network.hidden", "8",
    "--total-steps", "64", "--runtime", "sync", "--log.no-tensorboard", "--log.panel", "0",
]  # fmt: skip


def parsed(*words):
    return parse_train(["cartpole", *words]).config


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--log.panel", "false"], "log.panel", False),
        (["--log.panel", "False"], "log.panel", False),
        (["--log.panel", "0"], "log.panel", False),
        (["--log.panel=0"], "log.panel", False),
        (["--log.no-panel"], "log.panel", False),
        (["--no-log.panel"], "log.panel", False),
        (["--no-resume"], "resume", False),
        (["--resume", "true"], "resume", True),
        (["--log.no-panel", "--log.panel"], "log.panel", True),
        (["--log.panel", "1", "--seed", "4"], "log.panel", True),
        (["--agent.network.prev-action-reward"], "agent.network.prev_action_reward", True),
        (["--agent.network.prev_action_reward", "TRUE"], "agent.network.prev_action_reward", True),
        (["--total-steps", "1e6"], "total_steps", 1_000_000),
        (["--total_steps=1e6"], "total_steps", 1_000_000),
        (["--total-steps", "2.5e3"], "total_steps", 2500),
        (["--total-steps", "12345678901234567"], "total_steps", 12345678901234567),
        (["--agent.network.hidden", "8", "16"], "agent.network.hidden", (8, 16)),
        (["--agent.network.hidden", "1e2"], "agent.network.hidden", (100,)),
        (["--agent.network.hidden"], "agent.network.hidden", ()),
        (["--agent.clip-rho", "None"], "agent.clip_rho", None),
        (["--agent.clip-rho", "2"], "agent.clip_rho", 2.0),
        (["--agent.optimizer.max-grad-norm", "1e-3"], "agent.optimizer.max_grad_norm", 1e-3),
        (["--agent.target-entropy", "-1.5"], "agent.target_entropy", -1.5),
        (["--env.max-episode-steps", "1e2"], "env.max_episode_steps", 100),
        (
            ["--env.kwargs", '{"gravity": 9.8, "a": {"b": [1]}}'],
            "env.kwargs",
            {"gravity": 9.8, "a": {"b": [1]}},
        ),
        (["--env.kwargs={}"], "env.kwargs", {}),
        (["--run", "a b/c=d"], "run", "a b/c=d"),
        (["--runtime", "sync"], "runtime", "sync"),
        (["--env.id", "vector:CartPole-v1"], "env.id", "vector:CartPole-v1"),
    ],
)
def test_h15c_words_to_values(words, name, value):
    got = fields_of(parsed(*words))
    assert got[name] == value and type(got[name]) is type(value)
    others = {k: v for k, v in fields_of(preset("cartpole")).items() if k not in (name, "seed")}
    assert {k: got[k] for k in others} == others


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log.panel", "maybe"], r"log\.panel.*maybe.*true, false, 1 or 0"),
        (["--resume=2"], "resume.*2"),
        (["--total-steps", "1.5"], r"total_steps.*1\.5.*whole number"),
        (["--total-steps", "inf"], "total_steps"),
        (["--total-steps", "many"], "total_steps.*many"),
        (["--total-steps"], "--total-steps needs a value"),
        (["--agent.optimizer.learning-rte", "1"], "did you mean --agent.optimizer.learning-rate"),
        (["--learning_rte", "1"], r"learning[-_]rate"),
        (["--num-envs", "8"], r"env\.num-envs"),
        (["--runtime", "ray"], "runtime.*'ray'.*'threads', 'sync'"),
        (["--agent.discount", "much"], "agent.discount.*much.*float"),
        (["--agent.network.core", "lsmt"], "core"),
        (["--env.kwargs", "gravity"], "env.kwargs.*JSON object"),
        (["--seed", "None"], "seed"),
        (["--seed", "true"], "seed"),
        (["--env.num-envs", "3", "--env.groups", "2"], "num_envs 3 is not a multiple"),
        (["8"], "'8'.*option"),
        (["--preset", "pong"], "preset"),
        (["--config-file", "nowhere.json"], "nowhere.json"),
        (["--inference.min-batch", "4"], "inference.placement central"),
        (["--inference.placement", "central", "--inference.max-batch", "0"], "min_batch <= max_batch"),
        (["--no-seed"], "no-seed"),
    ],
)
def test_h15c_bad_words_are_refused_in_a_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(["train", "cartpole", "--total-steps", "8", *words]) == 2
    assert not list(tmp_path.iterdir())
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert err.startswith("headrace: error: ") and re.search(message, err), err


def test_unknown_names_are_met_with_the_nearest(capsys):
    for words, near in {
        ("trian",): "'train'",
        ("train", "cartpol"): "'cartpole'",
        ("train", "--seed", "1"): "cartpole",
        ("eval", "x", "--episode", "3"): "--episodes",
    }.items():
        assert command(list(words)) == 2
        err = capsys.readouterr().err
        assert near in err and len(err.strip().splitlines()) == 1, err


def test_config_files(tmp_path, capsys):
    file = tmp_path / "settings.json"
    file.write_text(
        json.dumps(
            {"agent": {"optimizer": {"learning_rate": 0.1}}, "env.kwargs": {"a": 1}, "total_steps": 1e3}
        )
    )
    config = parsed("--config-file", str(file), "--agent.optimizer.learning-rate", "0.2")
    assert (
        config.agent.optimizer.learning_rate == 0.2
        and config.total_steps == 1000
        and config.env.kwargs == {"a": 1}
    )
    assert parsed(f"--config_file={file}").agent.optimizer.learning_rate == 0.1
    file.write_text(json.dumps(as_json(tiny())))  # a run's config.json
    assert parsed("--config-file", str(file)) == dataclasses.replace(tiny(), preset="cartpole")
    for content, message in {
        '{"agent": {"optimizer": {"learning_rte": 0.1}}}': "agent.optimizer.learning_rate",
        '{"agent": 3}': "agent",
        '{"agent": {"optimizer": {"learning_rate": {"a": 1}}}}': "learning_rate",
        "[1]": "JSON object",
        "{": "JSON",
        '{"total_steps": 1.5}': "total_steps",
        '{"total_steps": true}': "total_steps",
        '{"log": {"panel": "maybe"}}': "log.panel",
    }.items():
        file.write_text(content)
        assert command(["train", "cartpole", "--config-file", str(file)]) == 2, content
        err = capsys.readouterr().err
        assert message in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err, err


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json_and_the_command_line(name):
    config = preset(name)
    assert replace_fields(preset("impala"), {**as_json(config), "preset": name}) == config
    assert parse_train([name]).config == config


def test_python_names():
    config = headrace.config("cartpole", **{"env.num_envs": 64, "agent.network.hidden": [3], "seed": "7"})
    assert (config.env.num_envs, config.agent.network.hidden, config.seed) == (64, (3,), 7)
    for changes, message in {
        ("env.num_env", 1): "env.num_envs",
        ("seed", 1.5): "whole",
        ("seed", -1): "seed",
        ("agent", 3): "agent",
        ("seed", None): "None",
        ("total_steps", 0): "total_steps",
    }.items():
        with pytest.raises(ConfigError, match=message):
            headrace.config("cartpole", **dict([changes]))
    with pytest.raises(ConfigError, match="cartpole"):
        headrace.config("cartpol")


def test_what_may_change_exists():
    names = set(fields_of(Config()))
    for name in MAY_CHANGE:
        assert name in names or (name.endswith(".") and any(n.startswith(name) for n in names)), name
    assert compare(tiny(), tiny(total_steps=5, eval__every_steps=3, runtime="threads")) == []
    assert compare(tiny(), tiny(seed=5)) == ["seed: 0 there, 5 here"]


def last_json(text):
    return json.loads(text.rstrip("\n").splitlines()[-1])


def test_train_and_eval_print_json(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert command(["train", "cartpole", "--run", run, "--json", *SMALL]) == 0
    summary = last_json(capsys.readouterr().out)
    assert set(summary) == TRAIN_KEYS
    assert (
        summary["run"] == run
        and summary["steps"] >= 64
        and summary["updates"] >= 3
        and len(summary["params_sha256"]) == 64
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert command(["train", "cartpole", "--run", run, "--json", *SMALL]) == 0
    assert last_json(capsys.readouterr().out) == summary
    assert command(["train", "cartpole", "--run", run, *SMALL, "--agent.discount", "0.5"]) == 2
    assert "agent.discount" in capsys.readouterr().err
    assert command(["eval", run, "--episodes", "3", "--json"]) == 0
    result = last_json(capsys.readouterr().out)
    assert (
        set(result) == EVAL_KEYS
        and result["episodes"] == 3
        and result["return_mean"] == result["length_mean"]
    )
    assert command(["eval", run, "--episodes", "3"]) == 0
    assert "return_mean" in capsys.readouterr().out
    assert command(["eval", run, "--episodes", "0"]) == 2
    capsys.readouterr()


def test_errors_exit_1_with_one_line(tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x").write_text("x")
    for words in (
        ["eval", str(tmp_path / "nowhere")],
        ["eval", str(tmp_path / "notes")],
        ["train", "cartpole", "--run", str(tmp_path / "notes"), *SMALL],
        ["train", "cartpole", "--run", str(tmp_path / "r"), "--env.id", "CartPoll-v1", *SMALL],
    ):
        assert command(words) == 1, words
        out, err = capsys.readouterr()
        assert out == "" and len(err.strip().splitlines()) == 1 and "Traceback" not in err, err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("words", [["train", "cartpole"], ["eval", "run"]])
def test_ctrl_c_before_a_run_and_in_an_evaluation_is_one_line(words, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.runtime.run.train", interrupted)
    monkeypatch.setattr("headrace.runtime.policy.evaluate", interrupted)
    assert command(words) == 130
    assert capsys.readouterr().err == "headrace: interrupted\n"


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    code = "import sys; from headrace.cli.main import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", code, "train", "cartpole", "--help"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_traceback_of_users_code_alone(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import helpers\n"
        "class Raises(helpers.ScriptedEnv):\n"
        "    def step(self, action): raise RuntimeError('rope')\n"
        "class OldStep(helpers.ScriptedEnv):\n"
        "    def step(self, action): return super().step(action)[:4]\n"
        "class NoSpace(helpers.ScriptedEnv):\n"
        "    def __init__(self): super().__init__(); self.observation_space = None\n"
    )
    monkeypatch.chdir(tmp_path)
    for name, message, lines in [
        ("Raises", "RuntimeError: rope", None),
        ("OldStep", "step must return (observation, reward, terminated, truncated, info)", 1),
        ("NoSpace", "its observation_space is None; expected one of gymnasium.spaces", 1),
    ]:
        assert (
            command(["train", "impala", "--env.id", f"mine:{name}", "--runtime", "sync", "--run", name]) == 1
        )
        said = capsys.readouterr().err.splitlines()
        error = next(i for i, line in enumerate(said) if line.startswith("headrace: error"))
        assert message in said[error]
        assert len(said) - error == lines if lines else any("mine.py" in line for line in said[error:])


def test_help_and_lists(capsys):
    assert command([]) == 2 and command(["--help"]) == 0 and command(["--version"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(headrace.__version__)
    assert command(["list", "--json"]) == 0
    listed = last_json(capsys.readouterr().out)
    assert {"agents", "presets", "environments"} == set(listed) and "impala" in listed["agents"]
    for words in (["train", "--help"], ["train", "cartpole", "--help"], ["eval", "--help"]):
        with pytest.raises(SystemExit) as left:
            command(words)
        assert left.value.code == 0
    assert "--agent.optimizer.learning-rate" in capsys.readouterr().out


def test_h15a_evaluation_is_fair(tmp_path):
    from headrace.agents.registry import build_agent
    from headrace.inference.actor import Published
    from headrace.runtime.evaluate import Evaluator
    from headrace.runtime.targets import survey_targets
    from headrace.types import Progress

    config = tiny(env__id="helpers:make_uneven", eval__num_envs=2)
    surveys = survey_targets(config)
    agent = build_agent(config.agent, surveys[0].spec)
    published = Published(
        agent.policy_params(agent.init(jax.random.key(0))), 0, Progress(np.float32(0), np.int32(0))
    )
    evaluator = Evaluator(config, agent, surveys)
    Uneven.made = 0
    result = evaluator.run(published, 10)
    assert result.returns == [1.0] * 5 + [9.0] * 5 and result.lengths == [1] * 5 + [9] * 5
    assert result.summary() | {"return_std": 0} == {
        "episodes": 10, "return_mean": 5.0, "return_std": 0, "return_min": 1.0, "return_max": 9.0, "length_mean": 5.0
    }  # fmt: skip
    Uneven.made = 0
    assert evaluator.run(published, 3).returns == [1.0, 1.0, 9.0]
    Uneven.made = 0
    assert evaluator.run(published, 1).returns == [1.0]


def test_h16b_importing_is_light():
    code = """
import sys
import headrace.types, headrace.envs.contract, headrace.errors, headrace.seeds, headrace.spaces
assert "jax" not in sys.modules, "the words import jax"
import headrace
assert headrace.Config and headrace.train and headrace.load and headrace.config("cartpole")
heavy = {"ray", "torch", "tensorflow", "cv2", "pygame", "envpool"} & set(sys.modules)
assert not heavy, heavy
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was initialised"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
