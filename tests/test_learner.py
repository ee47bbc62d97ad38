"""The learner: its compiled stages are ``compose``, bad batches are skipped, nothing it was handed can be spoiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import collect, parts_of, tiny
from test_impala import SPEC, full_trajectory, linear_network

from headrace.agents.agent import Phase, Report, compose
from headrace.agents.impala import ImpalaConfig, impala
from headrace.agents.optim import OptimizerConfig
from headrace.errors import ConfigError, NonFiniteError
from headrace.experience.room import Batch
from headrace.learner.learner import Learner, LearnerConfig
from headrace.learner.stages import compile_update, copy_params
from headrace.networks.actor_critic import NetworkConfig
from headrace.types import Progress

START = Progress(np.float32(0.25), np.int32(3))


def agent_of(**options):
    network = None if "network" in options else linear_network()
    return impala(ImpalaConfig(**{"unroll_length": 5, "batch_size": 8, **options}), SPEC, network=network)


def batch_of(trajectory, steps=10):
    size = len(trajectory.slot_id)
    return Batch(trajectory, [], np.zeros(size, np.int64), steps)


def learner_of(agent, total=100, **options):
    return Learner(agent, 0, total, LearnerConfig(**options))


def leaves(tree):
    return [np.asarray(x).copy() for x in jax.tree.leaves(tree)]


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.long)])
def test_stage_by_stage_is_compose(parts):
    options = {
        "target_entropy": 0.5,
        "kl_cost": 0.1,
        "network": NetworkConfig(hidden=(8,), core="gru", core_size=4),
    }
    agent, whole = agent_of(micro_batches=parts, **options), agent_of(**options)
    staged, one = compile_update(agent), jax.jit(compose(agent))
    assert staged.__name__ == "update" and not hasattr(staged, "lower")  # programs dispatched one by one
    a, b, c = (x.init(jax.random.key(0)) for x in (agent, agent, whole))
    for seed in range(3):
        trajectory = full_trajectory(agent, seed)
        key = jax.random.key(seed)
        got, expected = staged(a, trajectory, START, key), one(b, trajectory, START, key)
        undivided = jax.jit(compose(whole))(c, trajectory, START, key)
        a, b, c = got.state, expected.state, undivided.state
        for other in (expected, undivided):
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got.state, other.state
            )
            assert got.metrics.keys() == other.metrics.keys()
            for name, value in got.metrics.items():
                np.testing.assert_allclose(value, other.metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)


def noisy_agent(micro_batches):
    """An agent whose preparation and two phases draw from their keys."""

    def prepare(state, batch, progress, key):
        return batch._replace(weight=batch.weight + jax.random.uniform(key, batch.weight.shape))

    def phase(number):
        def grads(state, batch, key):
            noise = jnp.sum(batch.weight) * jax.random.normal(key, ())
            return noise, jnp.sum(batch.weight), Report({"noise": noise}, {f"priority{number}": batch.weight})

        return Phase(grads, lambda state, g, w, progress: (state + (number + 1) * g / w, {}))

    return dataclasses.replace(
        agent_of(micro_batches=micro_batches),
        init=lambda key: jnp.zeros(()),
        prepare=prepare,
        phases=(phase(0), phase(1)),
    )


def test_stages_draw_the_keys_that_compose_draws():
    agent = noisy_agent(4)
    trajectory, states = full_trajectory(agent), set()
    for seed in range(2):
        args = (trajectory, START, jax.random.key(seed))
        got, expected = (u(agent.init(None), *args) for u in (compile_update(agent), jax.jit(compose(agent))))
        np.testing.assert_allclose(got.state, expected.state, rtol=1e-5)
        np.testing.assert_allclose(got.metrics["noise"], expected.metrics["noise"], rtol=1e-5)
        assert got.writes.keys() == expected.writes.keys() == {"priority1"}
        np.testing.assert_allclose(got.writes["priority1"], expected.writes["priority1"], rtol=1e-6)
        states.add(float(got.state))
    assert len(states) == 2


def spoilt(trajectory, value):
    reward = trajectory.rows.timestep.reward.copy()
    reward[2, :] = value
    timestep = trajectory.rows.timestep._replace(
        reward=reward, first=np.zeros_like(trajectory.rows.timestep.first)
    )
    return trajectory._replace(rows=trajectory.rows._replace(timestep=timestep))


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_a_batch_that_is_not_finite_is_skipped(micro, value):
    agent = agent_of(micro_batches=micro)
    learner = learner_of(agent)
    good = full_trajectory(agent)
    learner.read(learner.dispatch(batch_of(good)))
    before = leaves(learner.state)
    learned = learner.dispatch(batch_of(spoilt(good, value)))
    assert learner.read(learned)["skipped_updates"] == 1
    assert_same(leaves(learner.state), before)
    assert learned.published.version == 2 == learner.updates
    metrics = learner.read(learner.dispatch(batch_of(good)))
    assert metrics["skipped_updates"] == 0 and np.isfinite(metrics["loss/total"])
    assert any((x != y).any() for x, y in zip(leaves(learner.state), before, strict=True))
    assert all(np.isfinite(x).all() for x in leaves(learner.state))


@pytest.mark.parametrize("scale", 10.0 ** np.arange(14, 22))
def test_no_reward_makes_the_state_infinite(scale):
    """Between the largest squares that are finite and the largest losses lies no gap."""
    agent = agent_of(reduction="sum", baseline_cost=1e-6)
    learner = learner_of(agent)
    for _ in range(2):
        learner.read(learner.dispatch(batch_of(spoilt(full_trajectory(agent), scale))))
    assert all(np.isfinite(x).all() for x in leaves(learner.state))


def test_repeated_skips_end_the_run():
    agent = agent_of()
    learner = learner_of(agent, max_nonfinite=3)
    good = full_trajectory(agent)
    bad = spoilt(good, np.nan)
    for trajectory in (bad, bad, good, bad, bad):
        learner.read(learner.dispatch(batch_of(trajectory)))
    state = learner.get_state()
    state["state"] = jax.tree.map(np.array, state["state"])
    assert state["nonfinite_in_a_row"] == 2
    with pytest.raises(NonFiniteError, match="3 updates in a row"):
        learner.read(learner.dispatch(batch_of(bad)))
    other = learner_of(agent, max_nonfinite=3)
    other.set_state(state)
    with pytest.raises(NonFiniteError):
        other.read(other.dispatch(batch_of(bad)))


@pytest.mark.parametrize("micro", [1, 4])
def test_published_params_outlive_the_updates_after(micro):
    agent = agent_of(micro_batches=micro)
    learner = learner_of(agent)
    published = [learner.publish()]
    copies = [leaves(published[0].params)]
    for seed in range(5):
        published.append(learner.dispatch(batch_of(full_trajectory(agent, seed))).published)
        copies.append(leaves(published[-1].params))
    for p, copy in zip(published, copies, strict=True):
        assert_same(leaves(p.params), copy)
    assert [p.version for p in published] == list(range(6))
    assert all((a != b).any() for a, b in zip(copies[0], copies[1], strict=True))
    params = {"a": jnp.ones(3)}
    assert copy_params(params)["a"].unsafe_buffer_pointer() != params["a"].unsafe_buffer_pointer()


def test_schedules_follow_learned_steps():
    agent = agent_of(optimizer=OptimizerConfig(learning_rate=0.5, final_fraction=0.2))
    learner = learner_of(agent, total=40)
    rates, trajectory = [], full_trajectory(agent)
    for steps in (10, 10, 30, 10):
        rates.append(learner.read(learner.dispatch(batch_of(trajectory, steps)))["learning_rate"])
    np.testing.assert_allclose(rates, [0.5, 0.4, 0.3, 0.1], rtol=1e-6)
    assert learner.learned_steps == 60 and float(learner.progress().fraction) == 1.0


def test_state_continues_exactly():
    agent = agent_of(target_entropy=0.4)
    a, b = learner_of(agent), learner_of(agent)
    for seed in range(3):
        a.dispatch(batch_of(full_trajectory(agent, seed)))
    state = a.get_state()
    b.set_state({**state, "state": jax.tree.map(np.asarray, state["state"])})
    for seed in range(3, 6):
        x, y = (m.read(m.dispatch(batch_of(full_trajectory(agent, seed)))) for m in (a, b))
        assert x == y
    assert_same(leaves(a.state), leaves(b.state))
    assert learner_of(agent).updates == 0


def test_seeds_begin_with_other_params():
    agent = agent_of()
    a, b, c = (leaves(Learner(agent, seed, 10, LearnerConfig()).state.params) for seed in (0, 0, 1))
    assert_same(a, b)
    assert any((x != y).any() for x, y in zip(a, c, strict=True))


def test_settings_are_checked():
    for options in ({"staging": -1}, {"max_nonfinite": 0}):
        with pytest.raises(ConfigError):
            LearnerConfig(**options)


@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.long)])
def test_what_was_handed_over_is_not_read_again(micro):
    """The ring is written over right after an update was dispatched, many times, with a batch large enough to read late."""
    config = tiny(
        agent__batch_size=8, agent__unroll_length=32, agent__network__hidden=(128,), agent__micro_batches=micro,
        experience__max_lag=6, agent__network__core="lstm", agent__network__frame_stack=3,
    )  # fmt: skip
    parts = parts_of(config)
    batches = collect(parts, 2)
    store = parts.experience.store
    for item in batches[-1].items:
        store._held[item.slot].append(item.start)
    ring = store.get_state()
    clean = parts.learner.get_state()
    clean = {**clean, "state": jax.tree.map(np.asarray, clean["state"])}
    results = []
    for attempt in range(12):
        store.set_state(ring)
        parts.learner.set_state(clean)
        batch = parts.experience.collate(batches[-1].items, 0)
        if attempt % 2:
            batch = batch._replace(trajectory=jax.device_put(batch.trajectory))
        learned = parts.learner.dispatch(batch)
        for x in (*jax.tree.leaves(store._ring), *jax.tree.leaves(store._carry)):
            x.view(np.uint8)[...] = 1
        results.append(leaves(learned.published.params))
    for other in results[1:]:
        assert_same(results[0], other)
