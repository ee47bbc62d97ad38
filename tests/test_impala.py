"""IMPALA's loss and step against a slow float64 twin, option by option."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from helpers import tiny
from twins import log_softmax, vtrace_rows

from headrace.agents.agent import compose
from headrace.agents.impala import ImpalaConfig, impala
from headrace.agents.optim import OptimizerConfig
from headrace.envs.contract import EnvSpec
from headrace.errors import ConfigError
from headrace.networks.actor_critic import ActorCriticOutput, NetworkConfig
from headrace.networks.network import Network
from headrace.spaces import BoxSpec, DiscreteSpec
from headrace.types import Context, Progress, Row, TimeStep, Trajectory

D, A, T, B = 3, 4, 9, 6
SPEC = EnvSpec(
    BoxSpec((D,), np.dtype(np.float32), np.dtype(np.float32), np.full(D, -np.inf), np.full(D, np.inf)),
    DiscreteSpec(A, 0, np.dtype(np.int64)),
)
BOX = dataclasses.replace(
    SPEC, action=BoxSpec((2,), np.dtype(np.float32), np.dtype(np.float32), np.full(2, -1.0), np.full(2, 1.0))
)
START = Progress(np.float32(0), np.int32(0))


def linear_network():
    """Policy logits x·p and value x·v."""

    def unroll(params, x, carry):
        return ActorCriticOutput(x.observation @ params["p"], x.observation @ params["v"]), carry

    def init(key):
        a, b = jax.random.split(key)
        return {"p": jax.random.normal(a, (D, A)), "v": jax.random.normal(b, (D,))}

    return Network(init, lambda b: (), unroll, unroll)


def trajectory(seed=0, length=T, size=B, action=None):
    """Episodes that are terminated, truncated and cut by the ends, some of one row."""
    rng = np.random.default_rng(seed)
    first = rng.random((length + 1, size)) < 0.3
    first[1:4, 0] = True, False, True
    last = np.concatenate([first[1:], rng.random((1, size)) < 0.5])
    terminated = last & (rng.random(last.shape) < 0.5)
    reward = np.where(first, 0, rng.normal(size=first.shape) * 3).astype(np.float32)
    observation = rng.normal(size=(length + 1, size, D)).astype(np.float32)
    timestep = TimeStep(observation, reward, first, terminated, last & ~terminated)
    if action is None:
        action = rng.integers(0, A, (length + 1, size)).astype(np.int32)
    extras = rng.normal(size=(length + 1, size, A)).astype(np.float32)
    version = np.zeros((length + 1, size), np.int32)
    none = Context(np.zeros((0, size, D), np.float32), np.zeros((0, size), bool))
    return Trajectory(
        Row(timestep, action, extras, version), none, (), np.zeros(action.shape[1:], action.dtype),
        np.arange(size, dtype=np.int32), (), np.ones(size, np.float32),
    )  # fmt: skip


def twin_loss(config, params, at, batch):
    """The loss sum and Σ weight by definition, V-trace taken at params ``at``."""
    t, total, weights = batch.rows.timestep, 0.0, 0.0
    clip = {"none": lambda r: r, "abs_one": lambda r: np.clip(r, -1, 1)}[config.reward_clip]
    for i in range(batch.weight.shape[0]):
        x = t.observation[:, i].astype(np.float64)
        actions = batch.rows.action[:, i]
        new = [log_softmax(row @ params["p"]) for row in x]
        now = [log_softmax(row @ at["p"]) for row in x]
        old = [log_softmax(row.astype(np.float64)) for row in batch.rows.extras[:, i]]
        steps = len(x) - 1
        ratios = [np.exp(now[k][actions[k]] - old[k][actions[k]]) for k in range(steps)]
        targets, advantages = vtrace_rows(
            x @ at["v"], clip(t.reward[:, i]), t.first[:, i], t.terminated[:, i], config.discount, ratios,
            lambda_=config.vtrace_lambda, clip_rho=config.clip_rho, clip_pg_rho=config.clip_pg_rho, clip_c=config.clip_c,
        )  # fmt: skip
        for k in range(steps):
            if t.first[k + 1, i]:
                continue
            row = -new[k][actions[k]] * advantages[k]
            row += config.baseline_cost * 0.5 * (targets[k] - x[k] @ params["v"]) ** 2
            row -= config.entropy_cost * -(np.exp(new[k]) @ new[k])
            row += config.kl_cost * (np.exp(old[k]) @ (old[k] - new[k]))
            total += batch.weight[i] * row
            weights += batch.weight[i]
    return total, weights


def twin_gradient(config, params, batch, step=1e-5):
    at = {k: np.asarray(v, np.float64) for k, v in params.items()}
    gradient = {k: np.zeros_like(v) for k, v in at.items()}
    for name, array in at.items():
        for index in np.ndindex(array.shape):
            sides = []
            for sign in (1, -1):
                moved = {k: v.copy() for k, v in at.items()}
                moved[name][index] += sign * step
                sides.append(twin_loss(config, moved, at, batch)[0])
            gradient[name][index] = (sides[0] - sides[1]) / (2 * step)
    return gradient


CONFIGS = {
    "plain": {},
    "all terms": {
        "kl_cost": 0.3,
        "entropy_cost": 0.2,
        "baseline_cost": 0.7,
        "vtrace_lambda": 0.9,
        "discount": 0.8,
    },
    "no clips": {"clip_rho": None, "clip_pg_rho": None, "clip_c": None, "discount": 0.9},
    "other clips": {"clip_rho": 0.5, "clip_pg_rho": 2.0, "clip_c": 0.8, "reward_clip": "abs_one"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gradient_is_that_of_the_twin(name):
    config = ImpalaConfig(unroll_length=T, batch_size=B, **CONFIGS[name])
    agent = impala(config, SPEC, network=linear_network())
    state, batch = agent.init(jax.random.key(1)), trajectory()
    batch = batch._replace(weight=np.array([1, 2, 0.5, 1, 0, 1], np.float32))
    grads, weight, report = jax.jit(agent.phases[0].grads)(state, batch, jax.random.key(0))
    total, weights = twin_loss(
        config, *[{k: np.asarray(v, np.float64) for k, v in state.params.items()}] * 2, batch
    )
    np.testing.assert_allclose(weight, weights)
    np.testing.assert_allclose(report.metrics["loss/total"], total, rtol=1e-4)
    expected = twin_gradient(config, state.params, batch)
    for key in ("p", "v"):
        np.testing.assert_allclose(grads["params"][key], expected[key], rtol=2e-4, atol=2e-4)


def test_metrics_are_those_of_the_twin():
    """By row: entropy of π, KL(μ ‖ π), V, and min(1, π/μ) of the action taken."""
    config = ImpalaConfig(unroll_length=T, batch_size=B)
    params = impala(config, SPEC, network=linear_network()).init(jax.random.key(1)).params
    p, v = (np.asarray(params[k], np.float64) for k in ("p", "v"))
    batch = trajectory()
    t, expected = batch.rows.timestep, dict.fromkeys(("entropy", "kl", "value_mean", "rho_clipped"), 0.0)
    for i, k in np.argwhere(~t.first[1:].T):
        x = t.observation[k, i].astype(np.float64)
        new, old = log_softmax(x @ p), log_softmax(batch.rows.extras[k, i].astype(np.float64))
        action = batch.rows.action[k, i]
        expected["entropy"] -= np.exp(new) @ new
        expected["kl"] += np.exp(old) @ (old - new)
        expected["value_mean"] += x @ v
        expected["rho_clipped"] += min(1.0, np.exp(new[action] - old[action]))
    metrics = sums(config, batch)[2].metrics
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


def sums(config, batch):
    agent = impala(config, SPEC, network=linear_network())
    return jax.jit(agent.phases[0].grads)(agent.init(jax.random.key(1)), batch, jax.random.key(0))


def select(batch, index):
    from headrace.agents.agent import select

    return select(batch, index)


def test_halves_add_up_to_the_whole():
    config = ImpalaConfig(unroll_length=T, batch_size=B, kl_cost=0.1, target_entropy=0.5)
    batch = trajectory()._replace(item_id=np.arange(B))
    whole = sums(config, batch)
    halves = [sums(config, select(batch, np.arange(i, i + B // 2))) for i in (0, B // 2)]
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a, b + c, rtol=1e-5, atol=1e-4), whole, *halves)


def test_invalid_transitions_teach_nothing():
    """Junk in what a last row answered and in the row that it leads to changes no sum."""
    config = ImpalaConfig(unroll_length=T, batch_size=B, kl_cost=0.1)
    batch = trajectory()
    first, t = batch.rows.timestep.first, batch.rows.timestep
    into = np.concatenate([first[1:], np.ones((1, B), bool)])  # row k answers for nothing
    assert 5 < into[:-1].sum() < into[:-1].size - 5
    action = np.where(into, (batch.rows.action + 1) % A, batch.rows.action)
    extras = np.where(into[..., None], batch.rows.extras * 0 + [1e6, -1e6, 3, 0], batch.rows.extras).astype(
        np.float32
    )
    reward = np.where(first, 1e20, t.reward).astype(np.float32)
    junk = batch._replace(
        rows=batch.rows._replace(action=action, extras=extras, timestep=t._replace(reward=reward))
    )
    a, b = sums(config, batch), sums(config, junk)
    assert np.isfinite(a[2].metrics["loss/total"])
    jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(lambda x: np.testing.assert_array_equal(np.isfinite(x), True), b)


def test_a_batch_without_valid_transitions_is_finite():
    config = ImpalaConfig(unroll_length=T, batch_size=B)
    batch = trajectory()
    t = batch.rows.timestep
    batch = batch._replace(rows=batch.rows._replace(timestep=t._replace(first=np.ones_like(t.first))))
    agent = impala(config, SPEC, network=linear_network())
    update = jax.jit(compose(agent))(agent.init(jax.random.key(1)), batch, START, jax.random.key(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(update.state))
    assert float(update.metrics["skipped_updates"]) == 0


@functools.cache
def update_once(config, batch=None, spec=SPEC, progress=START, updates=1):
    agent = impala(config, spec, network=linear_network())
    if batch is None:
        batch = full_trajectory(agent)
    state, update = agent.init(jax.random.key(1)), None
    for _ in range(updates):
        update = jax.jit(compose(agent))(state, batch, progress, jax.random.key(0))
        state = update.state
    return update


def full_trajectory(agent, seed=0):
    """A trajectory in the shapes that an agent wants."""
    spec, rng = agent.experience, np.random.default_rng(seed)
    action = np.asarray(agent.action)
    size = (spec.length + 1, spec.batch_size, *action.shape)
    actions = rng.integers(0, A, size).astype(np.int32) if action.dtype == np.int32 else rng.normal(size=size)
    batch = trajectory(seed, spec.length, spec.batch_size, actions.astype(action.dtype))
    extras = rng.normal(size=(*size[:2], *np.shape(agent.extras))).astype(np.float32) * 0.1
    n = spec.context
    context = Context(
        rng.normal(size=(n, spec.batch_size, D)).astype(np.float32), np.zeros((n, spec.batch_size), bool)
    )
    return batch._replace(
        rows=batch.rows._replace(extras=extras), context=context, carry=agent.initial_carry(spec.batch_size)
    )


def params_of(update):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(update.state.params)])


SMALL = {"unroll_length": 4, "batch_size": 4, "network": NetworkConfig(hidden=(8,))}
OTHER = {
    "discount": 0.5,
    "vtrace_lambda": 0.5,
    "clip_rho": 0.3,
    "clip_pg_rho": 0.3,
    "clip_c": 0.3,
    "baseline_cost": 0.1,
    "entropy_cost": 0.5,
    "kl_cost": 0.5,
    "reduction": "sum",
    "reward_clip": "abs_one",
}
OPTIMIZERS = {
    "name": ({}, {"name": "rmsprop"}),
    "learning_rate": ({}, {"learning_rate": 1e-2}),
    "final_fraction": ({}, {"final_fraction": 1.0}),
    "b1": ({}, {"b1": 0.5}),
    "b2": ({}, {"b2": 0.5}),
    "rms_decay": ({"name": "rmsprop"}, {"name": "rmsprop", "rms_decay": 0.5}),
    "momentum": ({"name": "rmsprop"}, {"name": "rmsprop", "momentum": 0.5}),
    "eps": ({}, {"eps": 1e-2}),
    "max_grad_norm": ({}, {"max_grad_norm": 1e-3}),
}
LATE = Progress(np.float32(0.5), np.int32(7))


def impala_config(**options):
    return ImpalaConfig(**{**SMALL, "optimizer": OptimizerConfig(eps=1e-3), "entropy_cost": 0.01, **options})


@pytest.fixture(scope="module")
def plain():
    return params_of(update_once(impala_config(), progress=LATE, updates=2))


@pytest.mark.parametrize("name", OTHER)
def test_every_setting_of_the_loss_changes_the_step(name, plain):
    changed = params_of(update_once(impala_config(**{name: OTHER[name]}), progress=LATE, updates=2))
    assert np.isfinite(changed).all() and np.abs(changed - plain).max() > 1e-7


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_of_the_optimizer_changes_the_step(name):
    a, b = (
        params_of(
            update_once(
                impala_config(optimizer=OptimizerConfig(**{"eps": 1e-3, **o})), progress=LATE, updates=2
            )
        )
        for o in OPTIMIZERS[name]
    )
    assert np.abs(a - b).max() > 1e-7


def test_no_setting_is_forgotten_here():
    shapes = {"unroll_length", "batch_size", "burn_in", "network", "optimizer"}
    equal = {"micro_batches"}  # must change nothing: see test_learner
    elsewhere = {"target_entropy", "entropy_speed", "max_abs_reward", "box_policy"}
    assert {f.name for f in dataclasses.fields(ImpalaConfig)} == set(OTHER) | shapes | equal | elsewhere
    assert {f.name for f in dataclasses.fields(OptimizerConfig)} == set(OPTIMIZERS)


def test_the_other_settings_change_something_too():
    a, b = (impala_config(reward_clip="max_abs", max_abs_reward=x) for x in (0.1, 2.0))
    assert np.abs(params_of(update_once(a)) - params_of(update_once(b))).max() > 1e-7
    # An adapted entropy weight acts late, and first moves itself.
    a, b = (impala_config(target_entropy=x, entropy_cost=1.0, entropy_speed=50.0) for x in (0.1, 1.2))
    a, b = (params_of(update_once(x, updates=4)) for x in (a, b))
    assert np.abs(a - b).max() > 1e-7
    a, b = (impala_config(target_entropy=0.1, entropy_speed=x) for x in (1.0, 20.0))
    costs = [float(update_once(c, updates=3).metrics["entropy_cost"]) for c in (a, b)]
    assert abs(costs[0] - costs[1]) > 1e-7
    a, b = (impala_config(box_policy=x) for x in ("clipped_normal", "tanh_normal"))
    assert np.abs(params_of(update_once(a, spec=BOX)) - params_of(update_once(b, spec=BOX))).max() > 1e-7
    network = NetworkConfig(hidden=(8,), core="gru", core_size=4)
    agent = impala(impala_config(burn_in=2, network=network), SPEC)
    assert (agent.experience.length, agent.experience.overlap, agent.experience.burn_in) == (6, 2, 2)


def test_what_contradicts_itself_is_refused():
    for options in (
        {"burn_in": -1}, {"discount": 1.1}, {"batch_size": 3, "micro_batches": 2}, {"entropy_cost": -1.0},
        {"target_entropy": 0.1, "entropy_cost": 0.0}, {"unroll_length": 0}, {"clip_rho": -1.0}, {"entropy_speed": 0.0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            ImpalaConfig(**options)
    for options in ({"reward_clip": "max_abs"}, {"max_abs_reward": 2.0}, {"burn_in": 2}):
        with pytest.raises(ConfigError):
            impala(ImpalaConfig(**options), SPEC)


@pytest.mark.parametrize(("target", "direction"), [(1.3, 1), (0.01, -1)])
def test_the_entropy_weight_moves_towards_its_target(target, direction):
    config = impala_config(target_entropy=target, optimizer=OptimizerConfig(learning_rate=1e-2))
    agent = impala(config, SPEC, network=linear_network())
    state, batch, costs, entropies = agent.init(jax.random.key(1)), full_trajectory(agent), [], []
    scale = 2.0 if direction > 0 else 0.1  # a sharp policy for the first case
    state = state._replace(params=jax.tree.map(lambda x: x * scale, state.params))
    update = jax.jit(compose(agent))
    for _ in range(5):
        result = update(state, batch, START, jax.random.key(0))
        state = result.state
        costs.append(float(result.metrics["entropy_cost"]))
        entropies.append(float(result.metrics["entropy"]))
    assert costs[0] == pytest.approx(config.entropy_cost, rel=1e-5)
    assert (np.sign(np.diff(costs)) == np.sign(target - np.array(entropies[:-1]))).all()
    assert np.sign(target - entropies[0]) == direction


def test_reduction_sum_is_mean_times_the_count():
    """With plain gradient clipping at work, only the direction is left; without, the gradients differ by the count."""
    batch = trajectory()
    norms, agent = {}, None
    for reduction in ("mean", "sum"):
        config = ImpalaConfig(unroll_length=T, batch_size=B, reduction=reduction)
        agent = impala(config, SPEC, network=linear_network())
        result = jax.jit(compose(agent))(agent.init(jax.random.key(1)), batch, START, jax.random.key(0))
        norms[reduction] = float(result.metrics["grad_norm"])
    count = float((~batch.rows.timestep.first[1:]).sum())
    assert norms["sum"] == pytest.approx(norms["mean"] * count, rel=1e-5)


def test_the_learning_rate_follows_progress():
    config = impala_config(optimizer=OptimizerConfig(learning_rate=1.0, final_fraction=0.2))
    rates = [
        float(update_once(config, progress=Progress(np.float32(f), np.int32(0))).metrics["learning_rate"])
        for f in (0.0, 0.5, 1.0)
    ]
    np.testing.assert_allclose(rates, [1.0, 0.6, 0.2], rtol=1e-6)


def test_first_ratio_is_one_where_nothing_was_learned():
    """Acting's parameters are stored, so the ratio of π to μ is 1 before any update, and KL is 0."""
    agent = impala(ImpalaConfig(unroll_length=T, batch_size=B), SPEC, network=linear_network())
    state, batch = agent.init(jax.random.key(1)), trajectory()
    extras = np.asarray(batch.rows.timestep.observation @ state.params["p"])
    _, weight, report = agent.phases[0].grads(
        state, batch._replace(rows=batch.rows._replace(extras=extras)), None
    )
    assert abs(float(report.metrics["kl"] / weight)) < 1e-6
    np.testing.assert_allclose(report.metrics["rho_clipped"] / weight, 1.0, rtol=1e-6)


assert tiny  # its module turns on the compilation cache
