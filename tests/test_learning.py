"""Learning, short: a wrong sign, a value that looks past a limit, or a policy that never hears of updates fails here."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import headrace


@pytest.fixture
def here_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def quiet(run, **changes):
    return {"run": str(run), "log.panel": False, "log.tensorboard": False, **changes}


def test_value_of_a_truncated_constant_reward(tmp_path, here_importable):
    """Truncated after 20 steps and never terminated, γ = 0.9: 1 / (1 − 0.9) = 10, not (1 − 0.9²⁰) · 10 = 8.8 and less."""
    changes = quiet(tmp_path / "run", **{"env.id": "learning_envs:ConstantReward", "agent.discount": 0.9})
    headrace.train(headrace.config("impala", total_steps=250_000, runtime="sync", **changes))
    policy = headrace.load(tmp_path / "run")
    for observation in np.random.default_rng(0).uniform(-0.5, 0.5, (5, 2)).astype(np.float32):
        assert policy.value(observation, policy.initial_carry()) == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("runtime", ["sync", "threads"])
def test_cartpole_improves(tmp_path, runtime):
    """A random policy gets 22, one trained with the wrong sign 9; 60,000 steps give well above 100 with either runner."""
    changes = quiet(tmp_path / "run", seed=1, runtime=runtime, total_steps=60_000)
    summary = headrace.train(headrace.config("cartpole", **changes))
    assert summary["return_mean"] > 100
    assert headrace.evaluate(tmp_path / "run", episodes=10)["return_mean"] > 100


HYBRID = {
    "env.id": "learning_envs:Hybrid",
    "env.groups": 1,
    "env.workers": 0,  # here, where what they were told can be looked at
    "agent.box_policy": "tanh_normal",
    "agent.discount": 0.5,
    "agent.batch_size": 8,
    "agent.unroll_length": 10,
    "agent.entropy_cost": 0.003,
    "agent.optimizer.learning_rate": 2e-3,
    "agent.optimizer.eps": 1e-5,
}


def outside():
    """Actions that were not in their space, of all environments made; and steps, that it is known to count."""
    from learning_envs import Hybrid

    total = sum(env.outside for env in Hybrid.made), sum(env.steps for env in Hybrid.made)
    Hybrid.made.clear()
    return total


def test_hybrid_actions_of_nested_spaces_improve(tmp_path, here_importable):
    """At best 10; a random policy gets 2.9, and one trained with the wrong sign less."""
    changes = quiet(tmp_path / "run", runtime="sync", total_steps=12_000, **HYBRID)
    summary = headrace.train(headrace.config("impala", **changes))
    assert summary["return_mean"] > 4.5
    wrong, steps = outside()
    assert wrong == 0 and steps >= 12_000


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hybrid_actions_of_nested_spaces_are_learned(tmp_path, here_importable, seed):
    """80 % of the maximum within 150,000 steps, and no action outside of its space."""
    changes = quiet(tmp_path / "run", seed=seed, total_steps=150_000, **HYBRID)
    headrace.train(headrace.config("impala", **changes))
    assert headrace.evaluate(tmp_path / "run", episodes=50)["return_mean"] >= 8.0
    wrong, steps = outside()
    assert wrong == 0 and steps >= 150_000


def headrace_command(*words):
    command = [sys.executable, "-m", "headrace.cli.main", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runtime", ["threads", "sync"])
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_cartpole_is_solved(tmp_path, runtime, seed):
    words = ("--seed", seed, "--run", tmp_path / "run", "--runtime", runtime)
    assert headrace_command("train", "cartpole", *words)["steps"] <= 500_000
    assert headrace_command("eval", tmp_path / "run")["return_mean"] >= 475


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_is_needed_and_used(tmp_path):
    headrace_command("train", "cartpole-memory", "--run", tmp_path / "lstm")
    headrace_command("train", "cartpole-memory", "--run", tmp_path / "none", "--agent.network.core", "none")
    assert headrace_command("eval", tmp_path / "lstm")["return_mean"] >= 450
    assert headrace_command("eval", tmp_path / "none")["return_mean"] < 200
