import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.ops.rewards import reward_transform
from headrace.ops.schedules import ScheduleConfig, constant, cosine, exponential, linear, make_schedule
from headrace.types import Progress

REWARDS = np.array([-20.0, -5.0, -0.5, 0.0, 0.5, 5.0, 20.0], np.float32)
# 5·tanh(1) = 3.807971, 5·tanh(4) = 4.996646, 5·tanh(.1) = .498340; negatives × .3
EXPECTED = {
    ("none", None): REWARDS,
    ("abs_one", None): [-1, -1, -0.5, 0, 0.5, 1, 1],
    ("soft_asymmetric", None): [-1.498994, -1.142391, -0.149502, 0, 0.498340, 3.807971, 4.996646],
    ("max_abs", 6.0): [-6, -5, -0.5, 0, 0.5, 5, 6],
}


@pytest.mark.parametrize("kind, max_abs", EXPECTED)
@pytest.mark.parametrize("module", [np, jnp])
def test_rewards_by_hand(kind, max_abs, module):
    rewards = module.asarray(REWARDS)
    out = reward_transform(kind, max_abs)(rewards)
    assert type(out) is type(rewards) and out.dtype == np.float32
    np.testing.assert_allclose(out, EXPECTED[kind, max_abs], atol=1e-6)
    assert np.array_equal(rewards, REWARDS)
    nan = reward_transform(kind, max_abs)(module.asarray(np.array([np.nan], np.float32)))
    assert np.isnan(nan).all()


def test_rewards_inside_jit():
    out = jax.jit(reward_transform("soft_asymmetric"))(REWARDS)
    np.testing.assert_allclose(out, EXPECTED["soft_asymmetric", None], atol=1e-6)


def test_rewards_refused():
    with pytest.raises(ConfigError, match=r"'abs_on'.*abs_one.*soft_asymmetric"):
        reward_transform("abs_on")
    for kind, max_abs in [("max_abs", None), ("abs_one", 2.0), ("max_abs", 0.0), ("max_abs", float("nan"))]:
        with pytest.raises(ConfigError, match="max_abs"):
            reward_transform(kind, max_abs)


def at(schedule, fraction, updates=0):
    return float(schedule(Progress(np.float32(fraction), np.int32(updates))))


@pytest.mark.parametrize(
    "schedule, values",
    [  # at 0, ¼, ½, 1
        (constant(3.0), [3, 3, 3, 3]),
        (linear(0.4, 1.0), [0.4, 0.55, 0.7, 1.0]),  # the annealed β of H7
        (linear(1.0, 0.0, 0.5), [1, 0.5, 0, 0]),
        (cosine(2.0, 0.0), [2, 1.7071068, 1, 0]),  # 1 + cos 45° = 1.7071
        (exponential(1.0, 0.0001), [1, 0.1, 0.01, 0.0001]),
        (make_schedule(ScheduleConfig("constant", 2.0, warmup_fraction=0.5)), [0, 1, 2, 2]),
        (make_schedule(ScheduleConfig("linear", 4.0, 0.0, warmup_fraction=0.5)), [0, 1.5, 2, 0]),
    ],
)
def test_schedules_by_hand(schedule, values):
    np.testing.assert_allclose([at(schedule, f) for f in (0, 0.25, 0.5, 1)], values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [linear, cosine, exponential])
@pytest.mark.parametrize("start, end", [(0.4, 1.0), (4.8e-4, 1e-7), (0.3, 0.1)])
def test_ends_are_exact_and_never_passed(make, start, end):
    schedule = jax.jit(make(start, end))
    out = np.array([at(schedule, f) for f in (-3.0, 0.0, *np.linspace(0, 1, 101), 1.0, 1.5, 1e9)])
    low, high = np.float32(min(start, end)), np.float32(max(start, end))
    assert (out >= low).all() and (out <= high).all()
    assert (out[-3:] == np.float32(end)).all() and out[1] == out[0]
    np.testing.assert_allclose(out[0], start, rtol=1e-6)
    steps = np.diff(out) * np.sign(end - start)
    assert (steps >= -1e-7).all() and (steps > 0).sum() > 90


def test_schedule_gives_f32_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        for make in (linear, cosine, exponential):
            out = jax.jit(make(1.0, 0.5))(Progress(np.float32(0.5), np.int32(3)))
            assert out.dtype == jnp.float32 and out.shape == ()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"kind": "linea"}, "'linea'.*linear"),
        ({"kind": "linear"}, "needs an end"),
        ({"kind": "constant", "end": 1.0}, "constant schedule has no end"),
        ({"kind": "constant", "end_fraction": 0.5}, "constant schedule has no end"),
        ({"kind": "linear", "end": 1.0, "end_fraction": 0.0}, "end_fraction=0.0"),
        ({"kind": "linear", "end": 1.0, "warmup_fraction": 1.0}, "warmup_fraction=1.0"),
        ({"kind": "linear", "end": float("inf")}, "finite"),
        ({"kind": "exponential", "start": 1.0, "end": 0.0}, "> 0"),
    ],
)
def test_schedules_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        ScheduleConfig(**settings)
