"""Encoders of one's own: chosen by name or predicate, seen by what they give, and refused where they do not fit."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import headrace
from headrace import spaces
from headrace.agents.impala import ImpalaConfig, impala
from headrace.cli.arguments import parse_train
from headrace.envs.contract import EnvSpec
from headrace.errors import ConfigError
from headrace.networks import Input, NetworkConfig, actor_critic, feed_forward
from headrace.spaces import BoxSpec, DiscreteSpec

SPACE = gym.spaces.Dict(
    {
        "eye": gym.spaces.Box(0, 255, (40, 40), np.uint8),
        "arm": gym.spaces.Tuple((gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(4))),
    }
)
OBSERVATION = spaces.from_gymnasium(SPACE)
ACTION = spaces.from_gymnasium(gym.spaces.Discrete(2))


class Mean(nnx.Module):
    """The mean over everything but the rows, in two units. Sees raw values: uint8 of images."""

    seen: tuple = ()

    def __init__(self, leaf, context, rngs):
        self.layer, self.out_features = nnx.Linear(1, 2, rngs=rngs), 2

    def __call__(self, x):
        Mean.seen = (x.dtype, x.shape)
        return self.layer(x.astype(jnp.float32).reshape(x.shape[0], -1).mean(1, keepdims=True))


class Count(Mean):
    """What a Discrete is, as a number."""


def rows_of(context=0, rows=5):
    rng = np.random.default_rng(0)
    stack = (context + 1,) if context else ()
    seen = {
        "eye": rng.integers(0, 256, (rows, *stack, 40, 40), dtype=np.uint8),
        "arm": (
            rng.normal(size=(rows, *stack, 3)).astype(np.float32),
            rng.integers(0, 4, (rows, *stack)).astype(np.int32),
        ),
    }
    return Input(seen, np.zeros(rows, np.int32), np.zeros(rows, np.float32), np.zeros(rows, bool))


def made(encoders, **config):
    network = actor_critic(
        NetworkConfig(hidden=(8,), cnn_dense=6, **config), OBSERVATION, ACTION, 2, encoders
    )
    return network, network.init(jax.random.key(0))


def test_the_own_encoder_is_what_sees_its_part_and_the_others_stay():
    network, params = made({"eye": Mean})
    assert Mean.seen == (jnp.uint8, (2, 40, 40))
    torso = params["torso"]
    assert "cnns" not in torso and torso["mlp"]["layers"]["0"]["kernel"].shape == (3 + 4, 8)
    assert torso["encoders"]["0"]["layer"]["kernel"].shape == (1, 2)
    assert params["head"]["value"]["kernel"].shape == (2 + 8, 1)
    x = rows_of()
    value = network.step(params, x, ())[0].value
    brighter = x._replace(observation={**x.observation, "eye": x.observation["eye"] // 2})
    shuffled = x._replace(observation={**x.observation, "eye": x.observation["eye"][:, ::-1]})
    assert not np.allclose(network.step(params, brighter, ())[0].value, value, atol=1e-3)
    np.testing.assert_allclose(network.step(params, shuffled, ())[0].value, value, rtol=1e-4)


def test_predicates_come_after_names_and_parts_in_tuples_have_names():
    def number(leaf):
        return isinstance(leaf, BoxSpec) and leaf.dtype == np.float32

    encoders = {number: Mean, lambda leaf: True: Count, "arm.1": Mean}
    network, params = made(encoders, separate_value=True)
    for side in ("first", "second"):  # policy and value each have encoders of their own
        torso = params[side]["torso"]
        assert set(torso) == {"encoders"} and len(torso["encoders"]) == 3
    kinds = [type(m).__name__ for m in _modules(encoders)]
    assert kinds == ["Mean", "Mean", "Count"]  # arm.0 by its kind, arm.1 by name, eye by what holds of all
    assert np.isfinite(network.step(params, rows_of(), ((), ()))[0].policy).all()


def _modules(encoders):
    from headrace.networks.torsos import Torso, TorsoConfig

    return list(Torso(TorsoConfig(), OBSERVATION, ACTION, nnx.Rngs(0), encoders).encoders)


def test_stacked_frames_reach_the_encoder_as_they_are():
    network, params = made({"eye": Mean, "arm.0": Mean}, frame_stack=3)
    x = rows_of(context=2)
    network.step(params, x, ())
    assert Mean.seen == (jnp.uint8, (5, 3, 40, 40)) and network.context == 2


def test_a_bare_observation_is_called_observation():
    network = actor_critic(NetworkConfig(), ACTION, ACTION, 2, {"observation": Count})
    assert network.init(jax.random.key(0))["torso"].keys() == {"encoders"}


class Wide(Mean):
    def __call__(self, x):
        return jnp.concatenate([super().__call__(x)] * 2, axis=-1)


class Whole(Mean):
    def __call__(self, x):
        return x.reshape(x.shape[0], -1)[:, :2]


class Sizeless(Mean):
    def __init__(self, leaf, context, rngs):
        self.layer = nnx.Linear(1, 2, rngs=rngs)


class Broken(Mean):
    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    "encoders, words",
    [
        ({"eyes": Mean}, r"no part 'eyes'; did you mean 'eye'\? There is 'arm.0', 'arm.1', 'eye'"),
        ({lambda leaf: leaf.shape == (7,): Mean}, "no part of the observation satisfies"),
        (
            {"eye": Wide},
            r"encoder Wide of observation 'eye' gives float32\[2, 4\] .*expected floats \[2, 2\]",
        ),
        ({"eye": Whole}, r"gives uint8\[2, 2\] .*expected floats"),
        ({"eye": Sizeless}, r"out_features=None; expected a module with an int out_features"),
        ({"eye": Broken}, r"encoder Broken of observation 'eye' failed on uint8\[2, 40, 40\]: "),
        ({"eye": lambda leaf: None}, r"failed on uint8.*TypeError"),
    ],
)
def test_encoders_that_do_not_fit_are_refused_at_the_start(encoders, words):
    with pytest.raises(ConfigError, match=words):
        actor_critic(NetworkConfig(), OBSERVATION, ACTION, 2, encoders)


SPEC = EnvSpec(OBSERVATION, DiscreteSpec(2, 0, np.dtype(np.int64)))


def test_from_settings_and_from_python():
    by_name = NetworkConfig(hidden=(8,), cnn_dense=6, encoders={"eye": "test_encoders:Mean"})
    hash(by_name)
    for agent in (
        impala(ImpalaConfig(network=by_name), SPEC),
        impala(ImpalaConfig(network=NetworkConfig(hidden=(8,))), SPEC, encoders={"eye": Mean}),
    ):
        params = jax.eval_shape(agent.init, jax.random.key(0)).params
        assert set(params["torso"]) == {"encoders", "mlp"}
    with pytest.raises(ConfigError, match="no 'Men'"):
        impala(ImpalaConfig(network=NetworkConfig(encoders={"eye": "test_encoders:Men"})), SPEC)
    with pytest.raises(ConfigError, match=r"encoders\['eye'\] is 3; expected my_module:MakeEncoder"):
        NetworkConfig(encoders={"eye": 3})
    with pytest.raises(ConfigError, match="got a network and encoders"):
        network = feed_forward(lambda rngs: nnx.Linear(1, 1, rngs=rngs))
        impala(ImpalaConfig(), SPEC, network=network, encoders={"eye": Mean})


def test_from_the_command_line():
    words = ["impala", "--agent.network.encoders", '{"eye": "my_module:MyCNN"}']
    assert parse_train(words).config.agent.network.encoders == {"eye": "my_module:MyCNN"}
    with pytest.raises(ConfigError, match="expected a JSON object"):
        parse_train(["impala", "--agent.network.encoders", "eye"])
    assert headrace.config("impala", **{"agent.network.encoders": {"a": "b:c"}}).agent.network.encoders == {
        "a": "b:c"
    }
