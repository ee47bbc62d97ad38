"""Specs and the conversions between the environment's types and the agent's."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Text, Tuple

from headrace import spaces
from headrace.errors import UnsupportedSpaceError

NESTED = Dict(
    {
        "image": Box(0, 255, (4, 4, 1), np.uint8),
        "pair": Tuple((Discrete(3, start=-1), MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [2, 0]]))),
        "state": Box(-1.0, 1.0, (3,), np.float64),
        "bits": MultiBinary((2, 2)),
    }
)


def test_specs_of_all_kinds():
    spec = spaces.from_gymnasium(NESTED)
    assert spec["image"].dtype == np.uint8 and spec["image"].shape == (4, 4, 1) and spec["image"].bounded
    assert spec["state"].dtype == np.float32 and spec["state"].env_dtype == np.float64
    discrete, multi = spec["pair"]
    assert (discrete.n, discrete.start, discrete.shape, discrete.dtype) == (3, -1, (), np.int32)
    assert (multi.nvec, multi.start, multi.env_shape, multi.shape) == (
        (2, 3, 4, 5),
        (1, 0, 2, 0),
        (2, 2),
        (4,),
    )
    assert spec["bits"].shape == (2, 2) and spec["bits"].dtype == np.int8
    assert [path for path, _ in spaces.leaves(spec)] == [
        "['bits']",
        "['image']",
        "['pair'][0]",
        "['pair'][1]",
        "['state']",
    ]


@pytest.mark.parametrize(
    "env, agent",
    [
        ("float16", "float32"),
        ("float64", "float32"),
        ("uint8", "uint8"),
        ("int16", "int16"),
        ("uint16", "uint16"),
        ("int32", "int32"),
        ("int8", "int8"),
        ("uint32", "int32"),
        ("uint64", "int32"),
        ("int64", "int32"),
        ("bool", "bool"),
    ],
)
def test_box_dtypes(env, agent):
    spec = spaces.from_gymnasium(Box(0, 1, (2,), np.dtype(env).type))
    value = spaces.to_agent(spec, np.ones((3, 2), env))
    assert spec.dtype == agent and value.dtype == agent and (value == 1).all()
    assert spaces.to_env(spec, value).dtype == env


def test_int64_is_range_checked():
    spec = spaces.from_gymnasium(Box(-(2**40), 2**40, (1,), np.int64))
    assert spaces.to_agent(spec, np.array([[2**31 - 1], [-(2**31)]])).tolist() == [[2**31 - 1], [-(2**31)]]
    for outside in (2**31, -(2**31) - 1):
        with pytest.raises(ValueError, match="outside int32"):
            spaces.to_agent(spec, np.array([[outside]]))


def test_indices_start_at_zero_on_the_agents_side():
    spec = spaces.from_gymnasium(NESTED["pair"])
    value = (np.array([-1, 1]), np.array([[[1, 0], [2, 0]], [[2, 2], [5, 4]]]))
    index, vector = spaces.to_agent(spec, value)
    assert index.tolist() == [0, 2] and vector.tolist() == [[0, 0, 0, 0], [1, 2, 3, 4]]
    back = spaces.to_env(spec, (index, vector))
    np.testing.assert_equal(back, value)
    assert back[0].dtype == np.int64


def test_h1_boxes_are_clipped_per_dimension():
    spec = spaces.from_gymnasium(Box(np.array([-2.0, 0.0]), np.array([0.0, 10.0]), dtype=np.float64))
    clipped = spaces.to_env(spec, np.array([[0.4, 10.4], [-3.0, -1.0]], np.float32))
    assert clipped.tolist() == [[0.0, 10.0], [-2.0, 0.0]] and clipped.dtype == np.float64
    assert not spaces.from_gymnasium(Box(0, np.inf, (1,))).bounded


def test_every_sample_goes_there_and_back():
    spec = spaces.from_gymnasium(NESTED)
    NESTED.seed(0)
    for _ in range(50):
        sample = NESTED.sample()
        batch = spaces.map_leaves(lambda _, v: np.asarray(v)[None], spec, sample)
        agent = spaces.to_agent(spec, batch)
        spaces.map_leaves(lambda leaf, v: _has_form(leaf, v), spec, agent)
        back = spaces.to_env(spec, agent)
        single = spaces.map_leaves(lambda _, v: v[0], spec, back)
        np.testing.assert_allclose(single["state"], sample["state"], atol=1e-7)
        np.testing.assert_equal(
            {k: v for k, v in single.items() if k != "state"},
            {k: v for k, v in sample.items() if k != "state"},
        )


def _has_form(leaf, value):
    assert value.shape == (1, *leaf.shape) and value.dtype == leaf.dtype


def test_names_of_leaves():
    assert [name for name, _ in spaces.names(spaces.from_gymnasium(NESTED))] == [
        "bits",
        "image",
        "pair.0",
        "pair.1",
        "state",
    ]
    assert [name for name, _ in spaces.names(spaces.from_gymnasium(Discrete(2)))] == ["observation"]


def test_starts_outside_the_dtypes_in_between():
    far = spaces.from_gymnasium(Discrete(3, start=2**40))
    assert spaces.to_env(far, np.array([2], np.int32)).tolist() == [2**40 + 2]
    assert spaces.to_agent(far, np.array([2**40 + 1])).tolist() == [1]
    low = spaces.from_gymnasium(MultiDiscrete([2, 3], start=[-1, -128], dtype=np.int8))
    value = spaces.to_agent(low, np.array([[0, -126]], np.int8))
    assert value.tolist() == [[1, 2]] and spaces.to_env(low, value).tolist() == [[0, -126]]
    byte = spaces.from_gymnasium(MultiDiscrete([200, 2], start=[50, 0], dtype=np.uint8))
    assert spaces.to_env(byte, np.array([[199, 1]], np.int32)).tolist() == [[249, 1]]


def test_zeros_have_the_form_of_observations():
    spec = spaces.from_gymnasium(NESTED)
    zeros = spaces.zeros(spec, (2, 5))
    assert zeros["image"].shape == (2, 5, 4, 4, 1) and zeros["image"].dtype == np.uint8
    assert zeros["pair"][1].shape == (2, 5, 4) and zeros["bits"].dtype == np.int8


@pytest.mark.parametrize(
    "space, message",
    [
        (Dict({"a": Tuple((Discrete(2), Text(3)))}), r"space\['a'\]\[1\] is a Text"),
        (Graph(Box(0, 1, (1,)), None), "space is a Graph"),
        (gym.spaces.Sequence(Discrete(2)), "space is a Sequence"),
        (Tuple((OneOf([Discrete(2), Box(0, 1)]),)), r"space\[0\] is a OneOf"),
        (Dict({"a": Dict()}), r"space\['a'\] is Dict\(\), which holds nothing; leave it out"),
        (Tuple(()), r"space is Tuple\(\), which holds nothing"),
        (Tuple((Discrete(2), Box(0, 1, (2, 0)))), r"space\[1\] is Box\(.*which holds nothing"),
        (MultiDiscrete([]), "which holds nothing"),
        (Dict({1: Discrete(2), "a": Discrete(2)}), "a Dict with the keys 1, 'a', which cannot be sorted"),
        (Discrete(2**40), r"space has 1099511627776 categories; expected at most 2\*\*31"),
    ],
)
def test_unsupported_spaces_are_named_by_their_path(space, message):
    with pytest.raises(UnsupportedSpaceError, match=message):
        spaces.from_gymnasium(space)
