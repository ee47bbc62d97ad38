"""Networks: unroll equals steps, resets, encodings of every kind of leaf, and what is refused."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headrace import networks, spaces, xla
from headrace.errors import ConfigError
from headrace.networks import GRU, LSTM, ActorCriticOutput, Input, NetworkConfig, actor_critic
from headrace.networks.torsos import encode, encode_previous, image_shape, scale_pixels, to_image

T, B = 7, 3
NESTED = gym.spaces.Dict(
    position=gym.spaces.Box(-1, 1, (2, 2)),
    place=gym.spaces.Tuple((gym.spaces.Discrete(3, start=5), gym.spaces.MultiBinary(4))),
    kinds=gym.spaces.MultiDiscrete([2, 3]),
)
ACTIONS = gym.spaces.Dict(move=gym.spaces.Box(-1, 1, (2,)), choose=gym.spaces.Discrete(4))
OBSERVATION, ACTION = spaces.from_gymnasium(NESTED), spaces.from_gymnasium(ACTIONS)


def _sample(spec, batch, rng):
    def leaf(leaf):
        if isinstance(leaf, spaces.DiscreteSpec):
            return rng.integers(0, leaf.n, batch).astype(np.int32)
        if isinstance(leaf, spaces.MultiDiscreteSpec):
            return rng.integers(0, leaf.nvec, (*batch, len(leaf.nvec))).astype(np.int32)
        if isinstance(leaf, spaces.MultiBinarySpec):
            return rng.integers(0, 2, (*batch, *leaf.shape)).astype(np.int8)
        if leaf.dtype == np.uint8:
            return rng.integers(0, 256, (*batch, *leaf.shape), dtype=np.uint8)
        return rng.normal(size=(*batch, *leaf.shape)).astype(np.float32)

    return spaces.map_leaves(leaf, spec)


def _inputs(observation=OBSERVATION, context=0, seed=0, shape=(T, B)):
    rng = np.random.default_rng(seed)
    stack = (context + 1,) if context else ()
    reward = rng.normal(size=shape).astype(np.float32)
    return Input(
        _sample(observation, (*shape, *stack), rng),
        _sample(ACTION, shape, rng),
        reward,
        rng.random(shape) < 0.3,
    )


def _noisy(params, seed=1):
    """Params without special zeros and small heads, so that every part of the input matters."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return tree.unflatten([leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32) for leaf in leaves])


CONFIGS = {
    "plain": NetworkConfig(hidden=(8,)),
    "separate": NetworkConfig(hidden=(8,), separate_value=True, activation="relu", init="lecun"),
    "stack": NetworkConfig(hidden=(8,), frame_stack=3, prev_action_reward=True),
    "lstm": NetworkConfig(hidden=(8,), core="lstm", core_size=5, prev_action_reward=True),
    "gru": NetworkConfig(hidden=(), core="gru", core_size=5),
    "lstm-separate": NetworkConfig(hidden=(8,), core="lstm", core_size=5, separate_value=True),
}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request):
    config = CONFIGS[request.param]
    network = actor_critic(config, OBSERVATION, ACTION, 6)
    fresh = network.init(jax.random.key(0))
    _check_plain_dict(fresh)
    return config, network, _noisy(fresh), _inputs(context=config.context)


def _check_plain_dict(node):
    assert type(node) is dict and node
    for key, value in node.items():
        assert type(key) is str
        if isinstance(value, dict):
            _check_plain_dict(value)
        else:
            assert isinstance(value, jax.Array) and value.dtype == np.float32


def _carry(network, seed=2):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda c: jnp.asarray(rng.normal(size=c.shape), c.dtype), network.initial_carry(B))


def test_unroll_equals_steps(case):
    _, network, params, x = case
    start = _carry(network)
    x.first[0] = [True, False, False]
    output, final = jax.jit(network.unroll)(params, x, start)
    step, carry = jax.jit(network.step), start
    for t in range(T):
        one, carry = step(params, jax.tree.map(lambda v, t=t: v[t], x), carry)
        np.testing.assert_allclose(one.policy, output.policy[t], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one.value, output.value[t], rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(carry), jax.tree.leaves(final), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert isinstance(output, ActorCriticOutput)
    assert output.policy.shape == (T, B, 6) and output.value.shape == (T, B)
    assert output.policy.dtype == output.value.dtype == np.float32
    assert jax.tree.structure(final) == jax.tree.structure(start)
    assert step._cache_size() == 1


def test_init_is_repeatable_and_every_key_gives_other_weights():
    """That the params are plain nested dicts of arrays is checked where ``case`` makes them."""
    network = actor_critic(CONFIGS["gru"], OBSERVATION, ACTION, 6)
    params, again, other = (network.init(jax.random.key(seed)) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    for name in ("core", "head"):
        kernels = [
            x for x in zip(*map(jax.tree.leaves, (params[name], other[name])), strict=True) if x[0].ndim == 2
        ]
        assert kernels and all(not np.allclose(a, b) for a, b in kernels)


def test_every_param_gets_a_gradient(case):
    _, network, params, x = case

    def loss(params):
        output, _ = network.unroll(params, x, network.initial_carry(B))
        return jnp.sum(output.policy**2) + jnp.sum(output.value**2)

    for path, g in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.isfinite(g).all() and np.abs(g).max() > 0, path


def test_what_came_before_first_has_no_influence(case):
    """At a first row the carry, the previous action and the reward may be anything, NaN included."""
    config, network, params, x = case
    if config.core == "none" and not config.prev_action_reward:
        assert network.initial_carry(B) == ()
        return
    x = jax.tree.map(lambda v: v[0], x)._replace(first=np.ones(B, bool))
    clean, _ = network.step(params, x, network.initial_carry(B))
    nan = jax.tree.map(lambda c: jnp.full_like(c, jnp.nan), network.initial_carry(B))
    action = {"move": np.full((B, 2), np.nan, np.float32), "choose": np.full(B, -7, np.int32)}
    dirty, carry = network.step(params, x._replace(prev_action=action, reward=np.full(B, np.nan, "f4")), nan)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert all(np.isfinite(c).all() for c in jax.tree.leaves(carry))
    kept, _ = network.step(params, x._replace(first=np.zeros(B, bool)), _carry(network))
    assert not np.allclose(kept.policy, clean.policy)


def test_lstm_and_gru_equal_the_cells_of_flax():
    rng = np.random.default_rng(0)
    x, h, c = (jnp.asarray(rng.normal(size=(B, n)), jnp.float32) for n in (4, 5, 5))
    cell, oracle = LSTM(5).make(4, nnx.Rngs(0)), nnx.OptimizedLSTMCell(4, 5, rngs=nnx.Rngs(1))
    oracle.dense_i.kernel[...], oracle.dense_h.kernel[...] = (
        cell.input.kernel[...],
        cell.recurrent.kernel[...],
    )
    oracle.dense_h.bias[...] = cell.input.bias[...]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        cell((c, h), cell.project(x)),
        oracle((c, h), x),
    )
    assert cell.input.bias[...].tolist() == [0] * 5 + [1] * 5 + [0] * 10
    cell, oracle = GRU(5).make(4, nnx.Rngs(0)), nnx.GRUCell(4, 5, rngs=nnx.Rngs(1))
    oracle.dense_i.kernel[...], oracle.dense_h.kernel[...] = (
        cell.input.kernel[...],
        cell.recurrent.kernel[...],
    )
    np.testing.assert_allclose(cell(h, cell.project(x))[0], oracle(h, x)[0], atol=1e-6)


def test_encodings_by_hand():
    discrete, binary = OBSERVATION["place"]
    assert encode(discrete, jnp.array([2])).tolist() == [[0, 0, 1]]
    assert encode(OBSERVATION["kinds"], jnp.array([[1, 0]])).tolist() == [[0, 1, 1, 0, 0]]
    assert encode(binary, jnp.array([[0, 1, 1, 0]], jnp.int8)).dtype == np.float32
    assert encode(OBSERVATION["position"], jnp.ones((2, 3, 2, 2))).shape == (2, 3, 4)
    previous = {"move": jnp.array([[0.0, 2.0]] * 2), "choose": jnp.array([3, 3])}
    got = encode_previous(ACTION, previous, jnp.array([-1.0, 5.0]), jnp.array([False, True]))
    np.testing.assert_allclose(got[0], [0, 0, 0, 1, 0, np.tanh(2.0), np.tanh(-1.0)], atol=1e-6)
    assert got[1].tolist() == [0] * 7


def _image(*shape, dtype=np.uint8):
    return spaces.from_gymnasium(gym.spaces.Box(0, 255, shape, dtype))


@pytest.mark.parametrize(
    ("leaf", "context", "expected"),
    [
        (_image(84, 84), 3, (84, 84, 4)),
        (_image(84, 96, 3), 0, (84, 96, 3)),
        (_image(84, 96, 3), 1, (84, 96, 6)),
        (_image(4, 84, 96), 0, (84, 96, 4)),
        (_image(36, 36), 0, (36, 36, 1)),
        (_image(35, 36), 0, None),
        (_image(7, 7, 3), 0, None),
        (_image(17, 84, 84), 0, None),
        (_image(128), 0, None),
        (_image(84, 84, 4, dtype=np.float32), 0, None),
    ],
)
def test_image_leaves(leaf, context, expected):
    assert image_shape(leaf, context) == expected


def test_images_are_laid_out_oldest_channels_first():
    rng = np.random.default_rng(0)
    flat, last, front = (
        rng.integers(0, 256, (2, 3, *s), dtype=np.uint8) for s in ((40, 44), (40, 44, 2), (2, 40, 44))
    )
    image = to_image(_image(40, 44), flat, 2)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image[..., 1], flat[:, 1])
    np.testing.assert_array_equal(to_image(_image(40, 44, 2), last, 2)[..., 2:4], last[:, 1])
    np.testing.assert_array_equal(to_image(_image(2, 40, 44), front, 2)[..., 3], front[:, 1, 1])
    np.testing.assert_array_equal(to_image(_image(40, 44), flat[:, 0])[..., 0], flat[:, 0])


def test_standard_pixels_have_mean_zero_and_deviation_one_in_each_image():
    images = np.random.default_rng(0).integers(0, 200, (3, 40, 44, 2), dtype=np.uint8)
    images[1] = 87  # blank
    got = np.asarray(scale_pixels(images, "standard"))
    x = images[0].astype(np.float64)
    np.testing.assert_allclose(got[0], (x - x.mean()) / x.std(), atol=1e-5)
    np.testing.assert_allclose(got[1], 0.0, atol=1e-5)
    np.testing.assert_allclose(scale_pixels(images + 50, "standard"), got, atol=1e-4)
    np.testing.assert_allclose(scale_pixels(images, "unit"), images / 255.0, rtol=1e-6)


def test_blank_frames_before_an_episode_count_in_its_first_stacks():
    """The statistics are the stack's: 3 blank frames and one of deviation s have mean m / 4."""
    frame = np.random.default_rng(0).integers(100, 200, (1, 40, 44, 1), dtype=np.uint8)
    stack = np.concatenate([np.zeros((1, 40, 44, 3), np.uint8), frame], axis=-1)
    got, m, second = np.asarray(scale_pixels(stack, "standard")), frame.mean(), np.square(frame / 1.0).mean()
    deviation = np.sqrt(second / 4 - m**2 / 16)
    np.testing.assert_allclose(got[..., :3], -m / 4 / deviation, rtol=1e-4)
    np.testing.assert_allclose(got[..., 3:], (frame - m / 4) / deviation, rtol=1e-4)


@pytest.mark.parametrize("pixels", ["unit", "standard"])
def test_the_network_scales_pixels_as_its_config_says(pixels):
    spec = _image(40, 44)
    network = actor_critic(NetworkConfig(cnn_dense=9, pixels=pixels), spec, ACTION, 3)
    params = network.init(jax.random.key(0))
    x = _inputs(spec, shape=(1, 2))
    lighter = x._replace(observation=x.observation // 2 + 100)
    x = x._replace(observation=x.observation // 2)
    values = [network.unroll(params, y, ())[0].value for y in (x, lighter)]
    assert np.allclose(*values, atol=1e-4) == (pixels == "standard")


def test_images_and_vectors_together():
    spec = spaces.from_gymnasium(
        gym.spaces.Dict(eye=gym.spaces.Box(0, 255, (36, 40), np.uint8), speed=gym.spaces.Box(-1, 1, (2,)))
    )
    config = NetworkConfig(hidden=(6,), frame_stack=2, cnn_dense=9)
    network = actor_critic(config, spec, ACTION, 3)
    assert network.context == 1
    params = network.init(jax.random.key(0))
    torso = params["torso"]
    assert torso["cnns"]["0"]["convs"]["0"]["kernel"].shape == (8, 8, 2, 32)
    assert torso["mlp"]["layers"]["0"]["kernel"].shape == (4, 6)
    assert params["head"]["policy"]["kernel"].shape == (15, 3)
    x = _inputs(spec, context=1, shape=(2, 2))
    unroll = xla.jit(network.unroll)
    output, _ = unroll(params, x, ())
    assert np.isfinite(output.policy).all()
    black = x._replace(observation={**x.observation, "eye": np.zeros_like(x.observation["eye"])})
    assert not np.allclose(unroll(params, black, ())[0].value, output.value)


def test_fresh_policy_is_near_uniform_and_the_value_is_not_small():
    network = actor_critic(NetworkConfig(), _image(8, dtype=np.float32), ACTION, 4)
    params = network.init(jax.random.key(0))
    kernels = params["head"]["policy"]["kernel"], params["head"]["value"]["kernel"]
    np.testing.assert_allclose(kernels[0].T @ kernels[0], 1e-4 * np.eye(4), atol=1e-7)
    np.testing.assert_allclose(jnp.linalg.norm(kernels[1]), 1.0, rtol=1e-5)
    hidden = params["torso"]["mlp"]["layers"]["1"]["kernel"]
    np.testing.assert_allclose(hidden.T @ hidden, 2 * np.eye(64), atol=1e-4)


class _Users(nnx.Module):
    """A module of a user's own, with a list of layers and no spec."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(12)])
        self.out_features = 2

    def __call__(self, x):
        y = x.observation
        for layer in self.layers:
            y = layer(y)
        return y


def test_a_users_module_and_more_than_ten_layers():
    network = networks.feed_forward(_Users)
    params = network.init(jax.random.key(0))
    x = Input(np.ones((T, B, 2), np.float32), (), np.zeros((T, B), np.float32), np.zeros((T, B), bool))
    output, carry = network.unroll(params, x, ())
    expected = x.observation
    for i in range(12):
        expected = expected @ params["layers"][str(i)]["kernel"] + params["layers"][str(i)]["bias"]
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-6)
    assert carry == ()


def test_refusals():
    class Forgetful(_Users):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)

    class Sizeless(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(2, 2, rngs=rngs)

    with pytest.raises(ValueError, match=r"norm\.mean \(BatchStat\)"):
        networks.feed_forward(Forgetful)
    with pytest.raises(ValueError, match="Sizeless has out_features = None"):
        networks.recurrent(Sizeless, LSTM(3), lambda rngs: nnx.Linear(3, 2, rngs=rngs))
    with pytest.raises(ValueError, match="contexts 0 and 2 differ"):
        networks.pair(networks.feed_forward(_Users), networks.feed_forward(_Users, 2), lambda a, b: a)
    with pytest.raises(ValueError, match="policy_size is 0"):
        actor_critic(NetworkConfig(), OBSERVATION, ACTION, 0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden": (64, 0)}, "hidden"),
        ({"activation": "softmax"}, "activation"),
        ({"core": "rnn"}, "core"),
        ({"core_size": 0}, "core_size"),
        ({"frame_stack": 0}, "frame_stack"),
        ({"cnn_dense": -1}, "cnn_dense"),
        ({"init": "zeros"}, "init"),
        ({"pixels": "centred"}, "pixels"),
    ],
)
def test_config_refuses(change, word):
    with pytest.raises(ConfigError, match=f"network.{word} is .*expected"):
        NetworkConfig(**change)
