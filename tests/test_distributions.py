import dataclasses
import math
import warnings

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from twins import log_softmax, tanh_normal_entropy, tanh_normal_log_prob

from headrace import spaces
from headrace.errors import ConfigError, UnsupportedSpaceError
from headrace.ops import families, normals
from headrace.ops.distributions import distribution
from headrace.ops.families import mask_logits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tensorflow_probability uses deprecated JAX names
    import distrax

KEY = jax.random.key(0)
BOX = gym.spaces.Box(np.array([-2, 0], np.float32), np.array([0, 10], np.float32))
HYBRID = gym.spaces.Dict(
    {
        "b": gym.spaces.Tuple((gym.spaces.Discrete(3, start=5), gym.spaces.MultiDiscrete([2, 4, 3]))),
        "a": gym.spaces.Box(-1.0, 3.0, (2, 2), np.float64),
        "c": gym.spaces.MultiBinary((2, 3)),
    }
)
SPACES = {
    "discrete": gym.spaces.Discrete(4, start=-2),
    "discrete1": gym.spaces.Discrete(1),
    "multidiscrete": gym.spaces.MultiDiscrete([2, 5, 3]),
    "multidiscrete equal": gym.spaces.MultiDiscrete(
        np.array([[3, 3], [3, 3]]), start=np.array([[1, 0], [2, -1]])
    ),
    "multibinary": gym.spaces.MultiBinary(5),
    "box": BOX,
    "scalar box": gym.spaces.Box(-1.0, 1.0, (), np.float64),
    "half": gym.spaces.Box(-2.0, 1.0, (3,), np.float16),
    "integer box": gym.spaces.Box(-3, 7, (2,), np.int64),
    "uint8 box": gym.spaces.Box(0, 255, (2,), np.uint8),
    "hybrid": HYBRID,
}
BOXES = ["clipped_normal", "tanh_normal"]


CASES = [(name, BOXES[0]) for name in SPACES] + [
    (n, BOXES[1]) for n in SPACES if "box" in n or n in ("half", "hybrid")
]


def make(space, box="clipped_normal"):
    d = distribution(spaces.from_gymnasium(space), box=box)
    names = ("sample", "mode", "log_prob", "entropy", "kl")
    return dataclasses.replace(d, **{name: jax.jit(getattr(d, name)) for name in names})


def params_of(d, batch=(7,), seed=0, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), (*batch, d.size))


def everything(d, params, key):
    action = d.sample(params, key)
    return action, d.log_prob(params, action), d.entropy(params), d.kl(params, params[::-1]), d.mode(params)


def same(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


# --- one table: every space × every behaviour ---


@pytest.mark.parametrize("name, box", CASES)
def test_shapes_dtypes_and_space_membership(name, box):
    space = SPACES[name]
    d = make(space, box)
    params = params_of(d, (64,), scale=3.0)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        action, log_prob, entropy, kl, mode = jax.jit(everything, static_argnums=0)(d, params, KEY)
    for scalar in (log_prob, entropy, kl):
        assert scalar.shape == (64,) and scalar.dtype == jnp.float32 and np.isfinite(scalar).all()
    zeros = d.zeros((64,))
    for a in (action, mode):
        assert jax.tree.structure(a) == jax.tree.structure(zeros)
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(a)] == [
            (z.shape, z.dtype) for z in jax.tree.leaves(zeros)
        ]
    env_action = d.to_env(action)
    for i in range(64):
        one = jax.tree.map(lambda x, i=i: x[i], env_action)
        if not isinstance(space, gym.spaces.Dict):
            one = space.dtype.type(one) if np.ndim(one) == 0 and space.shape == () else one
            one = np.asarray(one) if isinstance(space, gym.spaces.Box) else one
        assert space.contains(one), one


@pytest.mark.parametrize("name, box", CASES)
def test_foreign_actions_go_there_and_back(name, box):
    space = SPACES[name]
    d = make(space, box)
    space.seed(1)
    samples = [space.sample() for _ in range(20)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *[dict(s) if isinstance(s, dict) else s for s in samples])
    action = d.from_env(stacked)
    assert np.isfinite(d.log_prob(params_of(d, (20,)), action)).all()
    assert [x.dtype for x in jax.tree.leaves(action)] == [x.dtype for x in jax.tree.leaves(d.zeros())]
    back = d.to_env(action)
    assert [x.dtype for x in jax.tree.leaves(back)] == [x.dtype for x in jax.tree.leaves(stacked)]
    same(back, stacked, rtol=2e-3 if name == "half" else 1e-5, atol=1e-5)


def test_vmapped_keys_scan_and_leading_axes():
    d = make(gym.spaces.Tuple((gym.spaces.Discrete(3), BOX)), "tanh_normal")
    sample, log_prob = d.sample, d.log_prob
    params, keys = np.asarray(params_of(d, (5,))), jax.random.split(KEY, 5)
    action = jax.tree.map(np.asarray, jax.jit(jax.vmap(d.sample))(params, keys))
    one = jax.tree.map(lambda x: x[3], action)
    same(one, sample(params[3], keys[3]), rtol=1e-6)
    twice = jax.tree.map(lambda x: np.stack([x, x]), action)
    of_twice = log_prob(np.stack([params, params]), twice)
    assert of_twice.shape == (2, 5)
    same(of_twice[1, 3], log_prob(params[3], one), rtol=1e-5)
    scanned = jax.jit(lambda: jax.lax.scan(lambda c, k: (c, d.sample(params[0], k)), 0, keys)[1])()
    same(jax.tree.map(lambda x: np.asarray(x)[2], scanned), sample(params[0], keys[2]), rtol=1e-6)


def test_leaves_of_a_composite_draw_from_different_keys():
    d = make(gym.spaces.Tuple((gym.spaces.Box(-1, 1, (4,)), gym.spaces.Box(-1, 1, (4,)))))
    a, b = d.sample(jnp.zeros(d.size), KEY)
    assert not np.isclose(a, b).any()


def test_composite_is_the_sum_of_its_leaves_in_sorted_order():
    d = make(HYBRID)
    leaves = [distribution(leaf) for _, leaf in spaces.leaves(spaces.from_gymnasium(HYBRID))]
    assert [leaf.size for leaf in leaves] == [8, 3, 9, 6] and d.size == 26
    p, q = params_of(d), params_of(d, seed=1)
    action = d.sample(p, KEY)
    cut = np.cumsum([8, 3, 9])
    parts = list(zip(leaves, jnp.split(p, cut, -1), jnp.split(q, cut, -1), strict=True))
    ordered = [action["a"], *action["b"], action["c"]]
    same(
        d.log_prob(p, action),
        sum(f.log_prob(x, a) for (f, x, _), a in zip(parts, ordered, strict=True)),
        rtol=1e-5,
    )
    same(d.entropy(p), sum(f.entropy(x) for f, x, _ in parts), rtol=1e-5)
    same(d.kl(p, q), sum(f.kl(x, y) for f, x, y in parts), rtol=1e-5)
    same(d.mode(p)["b"][0], jnp.argmax(p[:, 8:11], -1))


# --- oracles ---


def check_against(d, p, q, oracle_p, oracle_q, action, oracle_action=None, entropy=True):
    oracle_action = action if oracle_action is None else oracle_action
    same(d.log_prob(p, action), oracle_p.log_prob(oracle_action), rtol=1e-4, atol=1e-5)
    same(d.kl(p, q), oracle_p.kl_divergence(oracle_q), rtol=1e-4, atol=1e-5)
    if entropy:
        same(d.entropy(p), oracle_p.entropy(), rtol=1e-4, atol=1e-5)


def test_categorical_against_distrax():
    d = make(gym.spaces.Discrete(6))
    p, q = params_of(d, scale=2.0), params_of(d, seed=1)
    check_against(d, p, q, distrax.Categorical(p), distrax.Categorical(q), d.sample(p, KEY))


def test_multi_categorical_with_unequal_sizes_against_distrax():
    d = make(gym.spaces.MultiDiscrete([2, 5, 3]))
    p, q = params_of(d, scale=2.0), params_of(d, seed=1)
    action = d.sample(jnp.broadcast_to(p[:1], (7, 10)), KEY)
    rows = [slice(0, 2), slice(2, 7), slice(7, 10)]
    of = [[distrax.Categorical(x[:, r]) for r in rows] for x in (p, q)]
    same(d.log_prob(p, action), sum(o.log_prob(action[:, i]) for i, o in enumerate(of[0])), rtol=1e-5)
    same(d.entropy(p), sum(o.entropy() for o in of[0]), rtol=1e-5)
    same(d.kl(p, q), sum(o.kl_divergence(r) for o, r in zip(*of, strict=True)), rtol=1e-5)
    np.testing.assert_array_equal(d.mode(p), np.stack([p[:, r].argmax(-1) for r in rows], -1))
    # Twin, by hand: logits 0, ln 3 | 0 … | 0 …
    by_hand = log_softmax(np.array([0, np.log(3)]))[1] - np.log(5) - np.log(3)
    same(d.log_prob(jnp.zeros(10).at[1].set(math.log(3)), np.array([1, 4, 2])), by_hand, rtol=1e-6)


def test_bernoulli_against_distrax():
    d = make(gym.spaces.MultiBinary((2, 3)))
    p, q = params_of(d, scale=2.0), params_of(d, seed=1)
    action = d.sample(p, KEY)
    of = [distrax.Independent(distrax.Bernoulli(x.reshape(7, 2, 3)), 2) for x in (p, q)]
    check_against(d, p, q, *of, action)
    np.testing.assert_array_equal(d.mode(p), p.reshape(7, 2, 3) > 0)
    extreme = jnp.array([200.0, -200.0, 20.0, 0, 0, 0])
    assert np.isfinite(d.entropy(extreme)) and np.isfinite(d.kl(extreme, -extreme))
    # p log(1/p) of logit 20: e^−20·(20+1) = 4.3e-8 in float32, the rest 3·ln 2.
    np.testing.assert_allclose(d.entropy(jnp.full(6, 20.0)), 6 * 21 * math.exp(-20), rtol=1e-3)


def test_normals_against_distrax():
    p, q = params_of(make(BOX)), params_of(make(BOX), seed=1)
    for box, cap in zip(BOXES, (normals.MAX_STD_CLIPPED, normals.MAX_STD_SQUASHED), strict=True):
        d = make(BOX, box)
        of = [distrax.MultivariateNormalDiag(*normals.normal_params(x, cap)) for x in (p, q)]
        if box == "tanh_normal":
            of = [distrax.Transformed(o, distrax.Block(distrax.Tanh(), 1)) for o in of]
            x = d.sample(p, KEY)
            check_against(d, p, q, *of, x, jnp.tanh(x), entropy=False)
        else:
            check_against(d, p, q, *of, d.sample(p, KEY))


def test_sampling_statistics():
    d = make(HYBRID)
    params = params_of(d, ())
    action = jax.jit(jax.vmap(d.sample, (None, 0)))(params, jax.random.split(KEY, 20_000))
    mean, std = normals.normal_params(params[:8], 99.0)
    np.testing.assert_allclose(action["a"].mean(0).ravel(), mean, atol=0.05)
    np.testing.assert_allclose(action["a"].std(0).ravel(), std, rtol=0.03)
    for row, cut in ((action["b"][0], slice(8, 11)), (action["b"][1][:, 1], slice(13, 17))):
        frequency = np.bincount(row, minlength=cut.stop - cut.start) / 20_000
        np.testing.assert_allclose(frequency, np.exp(log_softmax(np.asarray(params[cut]))), atol=0.015)
    bits = jax.nn.sigmoid(params[20:])
    np.testing.assert_allclose(action["c"].astype(float).mean(0).ravel(), bits, atol=0.015)
    log_prob = jax.vmap(d.log_prob, (None, 0))(params, action)  # Monte Carlo: H = −E log p
    np.testing.assert_allclose(d.entropy(params), -log_prob.mean(), atol=0.06)


@pytest.mark.parametrize(
    "mean, std, tolerance",
    [(0, 1e-4, 1e-4), (0.7, 0.5, 1e-5), (-3, 1, 1e-5), (2, 2, 1e-5), (0, 7.389, 0.015)],
)
def test_tanh_entropy_against_integration(mean, std, tolerance):
    d = make(gym.spaces.Box(-1, 1, (1,)), "tanh_normal")
    params = head([mean], [std])
    np.testing.assert_allclose(d.entropy(params), tanh_normal_entropy(mean, std), atol=tolerance)
    slope = jax.grad(d.entropy)(params)
    assert np.isfinite(slope).all()
    if std == 2:
        step = 1e-3
        numeric = (tanh_normal_entropy(mean + step, std) - tanh_normal_entropy(mean - step, std)) / (2 * step)
        np.testing.assert_allclose(slope[0], numeric, rtol=1e-3)


def head(mean, std):
    """Parameters whose normals have this mean and this std (exact up to float32)."""
    raw = np.log(np.expm1(np.maximum(np.asarray(std, np.float64) - normals.MIN_STD, 1e-12)))
    return jnp.asarray(np.concatenate([mean, raw - normals._RAW_STD_SHIFT]), jnp.float32)


def test_std_has_unit_start_floor_and_cap():
    params = jnp.array([0.0] * 4 + [0.0, -100.0, 100.0, 1e30])
    _, std = normals.normal_params(params, normals.MAX_STD_SQUASHED)
    np.testing.assert_allclose(std, [1.0, normals.MIN_STD, math.exp(2), math.exp(2)], rtol=1e-6)


def test_small_kl_of_std_keeps_its_digits():
    d = make(gym.spaces.Box(-1, 1, (1,)))
    ratio = 1.001  # KL = ½(r² − 1 − 2 ln r) = 9.9967e-7
    p, q = head([0.0], [1.001]), head([0.0], [1.0])
    np.testing.assert_allclose(d.kl(p, q), 0.5 * (ratio**2 - 1 - 2 * math.log(ratio)), rtol=2e-3)
    assert d.kl(p, p) == 0


# --- the cases ---


def test_h1_box_maps_per_dimension():
    leaf = spaces.from_gymnasium(BOX)
    for u, a in [((-1, -1), (-2, 0)), ((0, 0), (-1, 5)), ((1, 1), (0, 10)), ((0.5, -0.5), (-0.5, 2.5))]:
        np.testing.assert_allclose(normals.squashed_to_box(leaf, np.array(u)), a)
    np.testing.assert_allclose(normals.box_to_squashed(leaf, np.array([-1.5, 7.5])), [-0.5, 0.5])
    d = make(BOX, "tanh_normal")
    np.testing.assert_allclose(d.to_env(np.arctanh(np.array([0.5, -0.5]))), [-0.5, 2.5], rtol=1e-6)
    np.testing.assert_allclose(d.from_env(np.array([-1.5, 7.5])), np.arctanh([-0.5, 0.5]), rtol=1e-6)
    noisy = np.array([-0.1, 9.9], np.float32) + np.float32(0.5)
    np.testing.assert_array_equal(spaces.to_env(leaf, noisy), [0, 10])


def test_h1_a_thousand_actions_stay_inside_to_the_ulp():
    rng = np.random.default_rng(0)
    odd = gym.spaces.Box(np.array([-0.1, 1 / 3, -1e-3], np.float32), np.array([0.7, 0.9, 1e3], np.float32))
    for space in (BOX, odd):
        d = make(space, "tanh_normal")
        u = rng.uniform(-1, 1, (1000, *space.shape))
        u[:2] = [[-1] * space.shape[0], [1] * space.shape[0]]
        with np.errstate(divide="ignore"):
            actions = d.to_env(np.arctanh(u))
        assert all(space.contains(a) for a in actions)
        np.testing.assert_array_equal(actions[:2], [space.low, space.high])


def test_h1_ppo_stores_the_raw_sample():
    d = make(BOX)
    raw = np.array([0.7, 11.0], np.float32)
    np.testing.assert_array_equal(d.to_env(raw), [0, 10])
    np.testing.assert_array_equal(d.from_env(raw), raw)
    params = params_of(d, (64,))
    acting = jax.jit(jax.vmap(lambda p, k: (a := d.sample(p, k), d.log_prob(p, a))))
    action, behaviour = acting(params, jax.random.split(KEY, 64))
    log_ratio = d.log_prob(params, action) - behaviour
    assert np.abs(np.exp(log_ratio) - 1).max() < 1e-5
    assert abs(np.mean(np.exp(log_ratio) - 1 - log_ratio)) < 1e-6
    # Of the clipped action it would not be 1, so the test can fail.
    assert np.abs(np.exp(d.log_prob(params, d.to_env(action)) - behaviour) - 1).max() > 0.1


def test_h8_tanh_log_prob_at_saturation():
    d = make(gym.spaces.Box(-3, 3, (1,)), "tanh_normal")
    for mean, x, expected in [(0, 0, -0.918939), (0, 2, -0.268933), (20, 20, 37.694767)]:
        got = d.log_prob(head([mean], [1.0]), np.array([x], np.float32))
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        np.testing.assert_allclose(got, tanh_normal_log_prob(mean, 1.0, x), rtol=1e-5)
    np.testing.assert_allclose(d.to_env(np.array([2.0], np.float32)), 2.892083, rtol=1e-6)


@pytest.mark.parametrize("x, slope", [(20.0, 2.0), (0.5, 0.924234), (-20.0, -2.0)])
def test_h8_reparametrised_gradient(x, slope):
    d = make(gym.spaces.Box(-3, 3, (1,)), "tanh_normal")

    def log_prob(mean):
        params = jnp.stack([mean, jnp.zeros(())])  # raw 0: σ = 1
        noise = x - jax.lax.stop_gradient(mean)
        return d.log_prob(params, (mean + noise)[None])

    np.testing.assert_allclose(jax.grad(log_prob)(jnp.float32(x - 0.3)), slope, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_h8_stored_bounds_and_extreme_std_are_finite(dtype):
    d = make(BOX, "tanh_normal")
    corners = d.from_env(np.array([[-2, 0], [0, 10], [-2, 10]], np.float32))
    np.testing.assert_allclose(np.abs(corners), 8.664, rtol=1e-3)
    np.testing.assert_allclose(d.to_env(corners), [[-2, 0], [0, 10], [-2, 10]], atol=1e-6)
    both = jax.jit(jax.vmap(jax.value_and_grad(lambda p: (d.log_prob(p, corners) + d.entropy(p)).sum())))
    heads = [[mean, mean, raw, raw] for raw in (-1e4, -20, 0, 20, 1e4) for mean in (-50, 0, 50)]
    value, slope = both(jnp.array([[h] * 3 for h in heads], dtype))
    assert np.isfinite(value).all() and np.isfinite(slope).all() and slope.dtype == dtype


def test_h8_a_thousand_steps_at_both_bounds_of_the_std():
    d = make(gym.spaces.Box(-3, 3, (1,)), "tanh_normal")

    def step(params, inputs):
        key, sign = inputs

        def loss(
            p,
        ):  # SAC's policy loss with a critic that pushes the action outwards, and entropy up or down
            x = d.sample(p, key)
            return (sign * d.log_prob(p, x) - jnp.tanh(x).sum()) + sign * p[1]

        value, slope = jax.value_and_grad(loss)(params)
        return params - 0.5 * slope, (value, slope)

    for sign in (1.0, -1.0):
        keys = jax.random.split(KEY, 1000)
        params, outputs = jax.lax.scan(step, jnp.array([0.0, -10.0 * sign]), (keys, jnp.full(1000, sign)))
        assert np.isfinite(params).all() and all(np.isfinite(x).all() for x in outputs)
        _, std = normals.normal_params(params, normals.MAX_STD_SQUASHED)
        np.testing.assert_allclose(std, normals.MIN_STD if sign > 0 else math.exp(2), rtol=1e-3)


# --- masks ---


def test_masked_logits():
    d = make(gym.spaces.Discrete(4))
    logits = jnp.array([[0.0, math.log(3), 9.0, 1.0], [5.0, 1.0, 2.0, 3.0]])
    mask = np.array([[1, 1, 0, 0], [0, 0, 1, 0]], np.int8)
    masked = mask_logits(logits, mask)
    quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    np.testing.assert_allclose(d.entropy(masked), [quarter, 0.0], atol=1e-6)
    np.testing.assert_allclose(d.log_prob(masked, np.array([1, 2])), [math.log(0.75), 0.0], atol=1e-6)
    np.testing.assert_array_equal(d.mode(masked), [1, 2])
    np.testing.assert_allclose(
        d.kl(masked, mask_logits(logits * 0, mask)), [math.log(2) - quarter, 0], atol=1e-6
    )
    draws = jax.vmap(d.sample, (None, 0))(masked, jax.random.split(KEY, 2000))
    assert set(np.unique(draws[:, 0])) == {0, 1} and set(np.unique(draws[:, 1])) == {2}
    slope = jax.grad(
        lambda p: (
            d.entropy(mask_logits(p, mask)) + d.log_prob(mask_logits(p, mask), jnp.array([1, 2]))
        ).sum()
    )(logits)
    assert np.isfinite(slope).all() and not np.any(slope[np.array(mask) == 0]) and np.any(slope[0])


def test_mask_of_nothing_is_uniform_and_shapes_must_agree():
    d = make(gym.spaces.Discrete(4))
    np.testing.assert_allclose(
        d.entropy(mask_logits(jnp.arange(4.0), np.zeros(4, bool))), math.log(4), rtol=1e-6
    )
    assert mask_logits(jnp.zeros(4, jnp.bfloat16), np.ones(4, bool)).dtype == jnp.float32
    with pytest.raises(ValueError, match="equal shapes"):
        mask_logits(jnp.zeros((2, 4)), np.ones(4, bool))


# --- what is refused ---


def test_unbounded_boxes():
    space = gym.spaces.Dict(
        {"arm": gym.spaces.Box(np.array([-np.inf, 0]), np.array([np.inf, 1]), dtype=np.float64)}
    )
    np.testing.assert_array_equal(make(space).to_env({"arm": np.array([-1e6, 3.0])})["arm"], [-1e6, 1.0])
    with pytest.raises(UnsupportedSpaceError, match=r"action\['arm'\].*clipped_normal"):
        make(space, "tanh_normal")


def test_refusals_say_what_to_do():
    with pytest.raises(ConfigError, match=r"'beta'.*clipped_normal.*tanh_normal"):
        make(BOX, "beta")
    with pytest.raises(UnsupportedSpaceError, match="float32 cannot count"):
        make(gym.spaces.Box(-(2**40), 2**40, (1,), np.int64))
    with pytest.raises(UnsupportedSpaceError, match="no leaves"):
        distribution({})
    with pytest.raises(UnsupportedSpaceError, match="action is a str"):
        distribution("box")
    with pytest.raises(ValueError, match=r"expected \[.., 4\]"):
        make(BOX).entropy(jnp.zeros(5))


@pytest.mark.parametrize(
    "space, box, value, words",
    [
        (gym.spaces.Discrete(4, start=2), "clipped_normal", np.array([2, 6]), "not in"),
        (gym.spaces.Discrete(4), "clipped_normal", np.array([1.5]), "not in"),
        (gym.spaces.Discrete(4), "clipped_normal", np.array([2**32]), "not in"),
        (gym.spaces.MultiDiscrete([2, 3]), "clipped_normal", np.array([[2, 2]]), "not in"),
        (gym.spaces.MultiBinary(2), "clipped_normal", np.array([[0, 2]]), "not in"),
        (BOX, "tanh_normal", np.array([-1.0, 11.0]), "clip the data"),
        (BOX, "clipped_normal", np.array([np.nan, 1.0]), "NaN"),
        (BOX, "tanh_normal", np.array([np.nan, 1.0]), "NaN"),
    ],
)
def test_foreign_actions_outside_the_space_are_refused(space, box, value, words):
    with pytest.raises(ValueError, match=words):
        make(space, box).from_env(value)


def test_degenerate_dimension_maps_to_its_only_value():
    d = make(gym.spaces.Box(np.array([1.0, -1.0]), np.array([1.0, 1.0]), dtype=np.float64), "tanh_normal")
    np.testing.assert_array_equal(d.to_env(np.array([5.0, 0.0]))[0], 1.0)
    np.testing.assert_array_equal(d.from_env(np.array([1.0, 0.0])), [0.0, 0.0])


def test_masked_logit_is_finite_in_every_dtype_used():
    assert np.isfinite(jnp.asarray(families.MASKED_LOGIT, jnp.bfloat16)) and np.isfinite(
        np.float32(families.MASKED_LOGIT)
    )
