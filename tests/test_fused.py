"""The policy and the environments in one program: the same rows as by send and recv, and nothing else to be seen."""

from dataclasses import replace

import jax
import jax_envs
import numpy as np
import pytest
from helpers import collect, parts_of, tiny
from test_resume import killed_after
from test_runtime_sync import metrics

from headrace.agents.impala import impala
from headrace.envs import describe
from headrace.envs.jax_group import JaxGroup
from headrace.errors import EnvironmentFailure
from headrace.inference import fused
from headrace.inference.actor import ActorInference
from headrace.inference.fused import FusedInference
from headrace.ops.distributions import distribution
from headrace.runtime.evaluate import Evaluator
from headrace.runtime.run import train


def parts_for(env, apart=False, **options):
    config = tiny(preset="impala", env__id=f"jax_envs:make_{env}", total_steps=10**6, **options)
    with pytest.MonkeyPatch.context() as patch:
        if apart:
            patch.setattr(fused, "can_trace", lambda agent: False)
        parts = parts_of(config)
    kinds = {type(lane.inference) for lane in parts.lanes}
    assert kinds == {ActorInference if apart else FusedInference}
    return parts


MEMORY = {"agent__network__core": "lstm", "agent__network__frame_stack": 3, "agent__burn_in": 2}


@pytest.mark.parametrize(
    "env, options",
    [
        ("walk", MEMORY),
        ("nested", {}),
        pytest.param("nested", {"agent__box_policy": "tanh_normal"}, marks=pytest.mark.long),
    ],
)
def test_the_same_rows_as_apart(env, options):
    batches = []
    for apart in (False, True):
        parts = parts_for(env, apart, **options)
        batches.append([batch.trajectory for batch in collect(parts, 12)])
        parts.close()
    # tanh is computed in float32 on the device, in float64 on the host.
    loose = {"rtol": 1e-5, "atol": 1e-6} if options.get("agent__box_policy") else {"rtol": 0, "atol": 0}
    for one, other in zip(*batches, strict=True):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, **loose)


def test_the_step_is_taken_once(monkeypatch):
    """By the fused program: the group's own is never called."""
    parts = parts_for("walk")
    for lane in parts.lanes:
        monkeypatch.setattr(lane.group, "_programs", lane.group._programs._replace(step=None))
    collect(parts, 3)
    parts.close()


def test_advance_wants_rows_that_were_received():
    group = JaxGroup(jax_envs.make_walk(), 2, lambda slot, life: slot, name="mine")
    with pytest.raises(ValueError, match="once after each recv"):
        group.advance(lambda slots, rows: (slots, rows, None))
    _, ids = group.recv(30.0)
    group.advance(lambda slots, rows: (slots, rows, None))
    with pytest.raises(ValueError, match="once after each recv"):
        group.advance(lambda slots, rows: (slots, rows, None))
    with pytest.raises(AssertionError):
        group.get_state()
    group.send(np.zeros(2, int), ids)
    assert group.get_state()["unread"]


def numpy_agent(config, spec):
    """IMPALA whose ``to_env`` is somebody's own, for NumPy alone."""
    agent = impala(config, spec)
    return replace(agent, to_env=lambda action: np.asarray(action) - 1)


def test_a_to_env_for_numpy_alone_stays_apart():
    config = tiny(preset="impala", env__id="jax_envs:make_walk", build_agent="test_fused:numpy_agent")
    parts = parts_of(config)
    assert {type(lane.inference) for lane in parts.lanes} == {ActorInference}
    collect(parts, 2)
    parts.close()


@pytest.mark.parametrize("box", ["clipped_normal", "tanh_normal"])
def test_traced_to_env_is_numpys(box):
    spec = describe("jax_envs:make_nested").action
    dist = distribution(spec, box=box)
    params = jax.random.normal(jax.random.key(0), (50, dist.size)) * 3
    action = jax.tree.map(np.asarray, jax.vmap(dist.sample)(params, jax.random.split(jax.random.key(1), 50)))
    traced, numpy = jax.jit(dist.to_env)(action), dist.to_env(action)
    for a, b in zip(jax.tree.leaves(traced), jax.tree.leaves(numpy), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"experience__max_lag": 0}, pytest.param({}, marks=pytest.mark.long)])
def test_a_killed_run_goes_on_exactly(options, tmp_path, monkeypatch):
    options = {
        "preset": "impala", "env__id": "jax_envs:make_walk", "total_steps": 112, "checkpoint__every_steps": 1,
        "eval__every_steps": 48, "eval__episodes": 2, **options,
    }  # fmt: skip
    expected = train(tiny(tmp_path / "whole", **options))
    config = tiny(tmp_path / "cut", **options)
    killed_after(monkeypatch, 4, config)
    got = train(config)
    assert "reset" not in (tmp_path / "cut" / "log.txt").read_text()
    assert got["params_sha256"] == expected["params_sha256"]
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def test_an_evaluation_drives_the_group_by_itself():
    """Five steps of reward 1 … 5 an episode, whatever the policy."""
    parts = parts_for("counter")
    evaluation = Evaluator(parts.config, parts.agent, parts.surveys).run(parts.newest(), 6)
    assert evaluation.returns == [15.0] * 6 and evaluation.lengths == [5] * 6
    parts.close()


@pytest.mark.parametrize(
    "options",
    [
        {"env__actor_threads": 2},
        {"inference__placement": "central"},
        {"env__id": "jax_envs:make_walk,jax_envs:make_walk_back"},
    ],
    ids=["fused", "central", "two ids"],
)
def test_threads_drive_the_groups(options, tmp_path):
    options = {
        "env__id": "jax_envs:make_walk",
        "env__num_envs": 8,
        "env__groups": 4,
        "total_steps": 2000,
        **options,
    }
    summary = train(tiny(tmp_path / "run", preset="impala", runtime="threads", **options))
    assert summary["steps"] >= 2000 and summary["lag_max"] <= 4 and summary["restarts"] == 0
    assert 0 <= summary["return_mean"] <= 1


def test_poison_ends_the_run_with_its_name(tmp_path):
    with pytest.raises(
        EnvironmentFailure, match=r"env jax_envs:make_poison slot 0 step 3: the reward is NaN"
    ):
        train(tiny(tmp_path / "run", preset="impala", env__id="jax_envs:make_poison"))
