import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from twins import vtrace_rows

from headrace.ops.vtrace import vtrace
from headrace.types import TimeStep, transition_masks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tensorflow_probability uses deprecated JAX names
    import rlax

OPTIONS = [
    {},
    {"lambda_": 0.7},
    {"clip_rho": 2.0, "clip_pg_rho": 0.5},
    {"clip_rho": None, "clip_pg_rho": None, "clip_c": None},
    {"clip_c": 1.5, "lambda_": 0.9, "clip_rho": 1.2},
]


def stream(steps, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=steps + 1).astype(np.float32)
    rewards = rng.normal(size=steps + 1).astype(np.float32)
    log_rho = (0.7 * rng.normal(size=steps)).astype(np.float32)
    return values, rewards, log_rho


def rows(rewards, first, terminated, truncated):
    return TimeStep(
        (), rewards, np.asarray(first, bool), np.asarray(terminated, bool), np.asarray(truncated, bool)
    )


def run(values, log_rho, timestep, gamma, **options):
    discount_t, valid = transition_masks(timestep, gamma)
    return vtrace(values[:-1], values[1:], timestep.reward[1:], discount_t, log_rho, valid, **options)


def marks(length, last_rows):
    """First and last flags of rows 0 … length−1 where episodes end at ``last_rows``."""
    first, last = np.zeros(length, bool), np.zeros(length, bool)
    first[0] = True
    last[last_rows] = True
    first[[k + 1 for k in last_rows if k + 1 < length]] = True
    return first, last


def test_hand_worked():
    # γ = .5; ratios 2 (clipped to 1), .5, 1; values 1, 2, 4 and bootstrap 8; rewards 1, −1, 2.
    # δ2 = 2+4−4 = 2; δ1 = .5(−1+2−2) = −.5; δ0 = 1+1−1 = 1.
    # e2 = 2; e1 = −.5+.5·.5·2 = 0; e0 = 1+.5·1·0 = 1. vs = 2, 2, 6.
    # A0 = 1+.5·2−1 = 1; A1 = .5(−1+.5·6−2) = 0; A2 = 2+.5·8−4 = 2.
    values = np.array([1, 2, 4, 8], np.float32)
    out = vtrace(
        values[:-1],
        values[1:],
        np.array([1, -1, 2], np.float32),
        np.full(3, 0.5, np.float32),
        np.log(np.array([2, 0.5, 1], np.float32)),
        np.ones(3, np.float32),
    )
    np.testing.assert_allclose(out.vs_tm1, [2, 2, 6], atol=1e-6)
    np.testing.assert_allclose(out.errors, [1, 0, 2], atol=1e-6)
    np.testing.assert_allclose(out.pg_advantages, [1, 0, 2], atol=1e-6)


@pytest.mark.parametrize("lambda_", [1.0, 0.7])
@pytest.mark.parametrize("clip_rho", [1.0, 2.0])
@pytest.mark.parametrize("clip_pg_rho", [1.0, 0.5])
def test_equals_rlax_without_boundaries(lambda_, clip_rho, clip_pg_rho):
    values, rewards, log_rho = stream(23)
    discount = np.full(23, 0.9, np.float32)
    discount[7] = 0.0
    ours = vtrace(
        values[:-1],
        values[1:],
        rewards[1:],
        discount,
        log_rho,
        np.ones(23, bool),
        lambda_=lambda_,
        clip_rho=clip_rho,
        clip_pg_rho=clip_pg_rho,
    )
    theirs = rlax.vtrace_td_error_and_advantage(
        *(jnp.asarray(x) for x in (values[:-1], values[1:], rewards[1:], discount, np.exp(log_rho))),
        lambda_=jnp.float32(lambda_),
        clip_rho_threshold=clip_rho,
        clip_pg_rho_threshold=clip_pg_rho,
    )
    np.testing.assert_allclose(ours.errors, theirs.errors, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.vs_tm1, theirs.errors + values[:-1], rtol=1e-5, atol=1e-6)
    if lambda_ == 1.0:
        np.testing.assert_allclose(ours.pg_advantages, theirs.pg_advantage, rtol=1e-5, atol=1e-6)
    else:  # the documented departure
        assert np.abs(ours.pg_advantages - theirs.pg_advantage).max() > 1e-2


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_twin_across_episodes(options, seed):
    steps = 30
    values, rewards, log_rho = stream(steps, seed)
    # Episodes of two rows and of many; one cut at the trajectory's end.
    first, last = marks(steps + 1, [4, 6, 15, 22])
    first[0] = seed != 1  # the first part may be the middle of an episode
    terminated, truncated = last.copy(), last.copy()
    terminated[[6, 22]] = False
    truncated[4] = False  # row 15: both, which counts as terminated
    rewards[first] = 0.0
    out = run(values, log_rho, rows(rewards, first, terminated, truncated), 0.9, **options)
    targets, advantages = vtrace_rows(
        values.astype(np.float64), rewards, first, terminated, 0.9, np.exp(log_rho), **options
    )
    np.testing.assert_allclose(out.vs_tm1, targets, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out.pg_advantages, advantages, rtol=1e-4, atol=1e-5)
    for k in (4, 6, 15, 22):  # last rows: their own value
        assert out.vs_tm1[k] == values[k] and out.errors[k] == 0 and out.pg_advantages[k] == 0


def truncated_every_20(length=81):
    first, last = marks(length, list(range(20, length, 21)))
    rewards = np.where(first, 0.0, 1.0).astype(np.float32)
    return rows(rewards, first, np.zeros(length, bool), last)


def test_constant_reward_with_truncation_has_no_error():
    timestep = truncated_every_20()
    values = np.full(81, 10.0, np.float32)  # 1 / (1 − .9)
    out = run(values, np.zeros(80, np.float32), timestep, 0.9)
    np.testing.assert_allclose(out.errors, 0.0, atol=1e-5)
    np.testing.assert_allclose(out.pg_advantages, 0.0, atol=1e-5)
    np.testing.assert_allclose(out.vs_tm1, 10.0, atol=1e-5)


def test_masking_only_the_loss_would_be_wrong():
    timestep = truncated_every_20()
    values, ones = np.full(81, 10.0, np.float32), np.ones(80, np.float32)
    discount_t, valid = transition_masks(timestep, 0.9)
    naive = vtrace(values[:-1], values[1:], timestep.reward[1:], discount_t, np.zeros(80, np.float32), ones)
    errors = np.asarray(naive.errors) * valid
    # The transition into the reset has δ = −10; it flows back over the valid transition before the last row.
    np.testing.assert_allclose(errors[19], -9.0, atol=1e-4)
    assert valid[19] == 1 and valid[20] == 0


def test_nothing_crosses_an_episode_end():
    steps = 12
    values, rewards, log_rho = stream(steps, 5)
    first, truncated = marks(steps + 1, [6])
    rewards[first] = 0
    terminated = np.zeros(steps + 1, bool)
    base = run(values, log_rho, rows(rewards, first, terminated, truncated), 0.9)
    other_rewards, other_values, other_rho = rewards.copy(), values.copy(), log_rho.copy()
    other_rewards[8:], other_values[7:], other_rho[6:] = 1000.0, -500.0, 3.0
    other = run(other_values, other_rho, rows(other_rewards, first, terminated, truncated), 0.9)
    for a, b in zip(base, other, strict=True):
        np.testing.assert_array_equal(a[:7], b[:7])
        assert not np.array_equal(a[7:], b[7:])


def test_on_policy_is_the_n_step_return():
    values, rewards, _ = stream(6)
    out = vtrace(
        values[:-1], values[1:], rewards[1:], np.full(6, 0.9, np.float32), np.zeros(6, np.float32), np.ones(6)
    )
    g = float(values[-1])
    for k in reversed(range(6)):
        g = rewards[k + 1] + 0.9 * g
        np.testing.assert_allclose(out.vs_tm1[k], g, rtol=1e-5)
        np.testing.assert_allclose(out.pg_advantages[k], g - values[k], rtol=1e-4, atol=1e-5)


def test_gradient_flows_through_one_value_only():
    values, rewards, log_rho = stream(5)
    valid = np.array([1, 1, 0, 1, 1], np.float32)

    def outputs(v_tm1, v_t, log_rho):
        return vtrace(v_tm1, v_t, rewards[1:], 0.9 * valid, log_rho, valid)

    jacobian = jax.jacobian(outputs, argnums=(0, 1, 2))(values[:-1], values[1:], log_rho)
    for of in (jacobian.vs_tm1, jacobian.pg_advantages):
        assert all(not np.any(part) for part in of)
    np.testing.assert_array_equal(jacobian.errors[0], -np.diag(valid))
    assert not np.any(jacobian.errors[1]) and not np.any(jacobian.errors[2])


def test_ratio_of_an_invalid_row_is_ignored_and_large_ratios_are_stable():
    values, rewards, _ = stream(4)
    valid = np.array([1, 0, 1, 1], bool)
    log_rho = np.array([200.0, np.inf, np.nan, 0.0], np.float32)
    log_rho[2] = -200.0
    out = vtrace(values[:-1], values[1:], rewards[1:], 0.9 * valid.astype(np.float32), log_rho, valid)
    assert all(np.isfinite(x).all() for x in out)
    np.testing.assert_allclose(out.pg_advantages[2], 0.0)
    log_rho[1] = np.nan
    again = vtrace(values[:-1], values[1:], rewards[1:], 0.9 * valid.astype(np.float32), log_rho, valid)
    np.testing.assert_array_equal(out.vs_tm1, again.vs_tm1)


def test_vmaps_and_jits_over_a_batch_in_the_callers_axis():
    values, rewards, log_rho = (np.stack([stream(9, s)[i] for s in range(3)], 1) for i in range(3))
    args = (values[:-1], values[1:], rewards[1:], np.full((9, 3), 0.9, np.float32), log_rho, np.ones((9, 3)))
    batched = jax.jit(jax.vmap(vtrace, in_axes=1, out_axes=1))(*args)
    alone = vtrace(*(x[:, 2] for x in args))
    for a, b in zip(batched, alone, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a[:, 2], b, rtol=1e-5, atol=1e-6)


def test_strict_promotion_and_bfloat16():
    values, rewards, log_rho = (jnp.asarray(x, jnp.bfloat16) for x in stream(9))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        out = vtrace(values[:-1], values[1:], rewards[1:], jnp.full(9, 0.9), log_rho, jnp.ones(9, bool))
    assert out.vs_tm1.dtype == jnp.float32 and np.isfinite(out.vs_tm1).all()


def test_refuses_a_batch():
    x = np.zeros((4, 2), np.float32)
    with pytest.raises(ValueError, match="vmap over a batch"):
        vtrace(x, x, x, x, x, x)
    with pytest.raises(ValueError, match="one stream"):
        vtrace(x[:, 0], x[:, 0], x[:3, 0], x[:, 0], x[:, 0], x[:, 0])
