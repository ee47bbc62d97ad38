"""Every kind of space along the whole path: what the environment says is what is learned from, in the types of the spec, and
every action it gets is in its space.
"""

import warnings
from pathlib import Path
from typing import ClassVar

import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import SyncVectorEnv
from helpers import collect, parts_of, tiny

from headrace import spaces
from headrace.envs.conformance import sample

F32, F64 = np.float32, np.float64
SIGNED = {f"int{n}": Box(-100, 100, (2,), np.dtype(f"int{n}").type) for n in (8, 16, 32, 64)}
UNSIGNED = {f"uint{n}": Box(1, 200, (1, 2), np.dtype(f"uint{n}").type) for n in (8, 16, 32, 64)}
PARTS = {
    "floats": Tuple(
        (
            Box(np.array([-2, 0], F32), np.array([0, 10], F32)),
            Box(-0.1, 1 / 3, (2, 2), F64),
            Box(-0.3, 0.7, (2,), np.float16),
            Box(-1, 1, (), F32),
            Box(0, 1, (3,), np.bool_),
        )
    ),
    "integers": Dict({**SIGNED, **UNSIGNED}),
    "categories": Tuple(
        (
            Discrete(3, start=-2),
            Discrete(1),
            Discrete(5, start=2**40),
            Discrete(6, start=240, dtype=np.uint8),
            MultiDiscrete([2, 5, 3], start=[0, -1, 7]),
            MultiDiscrete([[2, 3], [4, 2]], dtype=np.uint8),
            MultiBinary(3),
            MultiBinary((2, 2)),
        )
    ),
    "nested": Dict(
        {
            "z": Tuple((Dict({"b": Discrete(2), "a": Box(0, 1, (1,))}), MultiBinary(2))),
            "a": Dict({10: Discrete(3, start=1), 9: Tuple((MultiDiscrete([2, 2]), Box(-1, 1, (2,))))}),
        }
    ),
    "pixels": Dict({"eye": Box(0, 255, (3, 4, 2), np.uint8), "go": Discrete(4, start=1)}),
}
KINDS = {
    "everything": Dict(PARTS),
    "scalar": Box(-0.1, 0.7, (), F64),
    "matrix": MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [2, 0]]),
}


class Recorder(gym.Env):
    """Says draws of its space, which is that of its actions too, and writes down what it said and was told."""

    made: ClassVar[list["Recorder"]] = []

    def __init__(self, kind):
        self.observation_space = self.action_space = KINDS[kind]
        self.spec_of = spaces.from_gymnasium(KINDS[kind])
        self.said, self.told, self.wrong = [], [], []
        Recorder.made.append(self)

    def _say(self):
        self.said.append(sample(self.spec_of, self.np_random))
        return spaces.map_leaves(lambda _, x: x.copy(), self.spec_of, self.said[-1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._say(), {}

    def step(self, action):
        with warnings.catch_warnings():
            # Of a scalar Box, Gymnasium's own vector environments hand out NumPy scalars, at which it wonders itself.
            warnings.filterwarnings("ignore", ".*Casting input x to numpy array")
            if not self.action_space.contains(action):
                self.wrong.append(action)
        self.told.append(action)
        self.t += 1
        return self._say(), 1.0, self.t == 5, False, {}


def make_recorder(kind):
    return Recorder(kind)


def make_recorders(kind, num_envs):
    return SyncVectorEnv([lambda: Recorder(kind)] * num_envs)


def path_of(monkeypatch, maker, kind, **changes):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    Recorder.made.clear()
    kwargs = {"env__id": f"test_spaces_path:{maker}", "env__kwargs": {"kind": kind}, **changes}
    parts = parts_of(tiny(**kwargs))
    return parts, Recorder.made[-4:]  # the first one was asked for its spaces


CASES = [("make_recorder", kind) for kind in KINDS] + [("make_recorders", kind) for kind in KINDS]


@pytest.mark.parametrize("maker, kind", CASES)
def test_what_is_said_arrives_and_what_is_done_is_allowed(maker, kind, monkeypatch):
    parts, envs = path_of(monkeypatch, maker, kind)
    try:
        spec = parts.spec.observation
        batches = collect(parts, 3)
    finally:
        parts.close()
    ring = parts.experience.store._ring
    spaces.map_leaves(lambda leaf, x: _is(leaf, x, 2), spec, ring.timestep.observation)
    for batch in batches:
        observation = batch.trajectory.rows.timestep.observation
        spaces.map_leaves(lambda leaf, x: _is(leaf, x, 2), spec, observation)
        on_device = jax.device_put(observation)
        spaces.map_leaves(lambda leaf, x: _is(leaf, x, 2), spec, on_device)
        for column, item in enumerate(batch.items):
            for k in range(parts.experience.store.layout.length + 1):
                said = spaces.map_leaves(
                    lambda _, x: np.asarray(x)[None], spec, envs[item.slot].said[item.start + k]
                )
                got = spaces.map_leaves(lambda _, x, k=k, c=column: x[k, c], spec, observation)
                spaces.map_leaves(_same, spec, spaces.to_agent(spec, said), got)
    for env in envs:
        assert len(env.told) >= 8 and env.wrong == []
        space = env.action_space
        for told in env.told[:2]:
            spaces.map_leaves(lambda leaf, part, x: _own_dtype(leaf, x), env.spec_of, tree_of(space), told)


def tree_of(space):
    if isinstance(space, Dict):
        return {k: tree_of(v) for k, v in space.spaces.items()}
    return tuple(tree_of(v) for v in space.spaces) if isinstance(space, Tuple) else space


def _is(leaf, value, axes):
    assert value.dtype == leaf.dtype and value.shape[axes:] == leaf.shape


def _same(leaf, said, got):
    np.testing.assert_array_equal(said[0], got)
    if leaf.env_dtype == np.float64:
        assert got.dtype == np.float32


def _own_dtype(leaf, value):
    # Gymnasium's categories are Python integers as well.
    assert isinstance(value, int) or np.asarray(value).dtype == leaf.env_dtype, (leaf, value)


H1 = Box(np.array([-2, 0], F32), np.array([0, 10], F32))


@pytest.mark.parametrize("family", ["clipped_normal", "tanh_normal"])
def test_h1_bounds_and_stored_actions_along_the_path(family, monkeypatch):
    """The raw sample is stored, the environment gets it clipped (or squashed) dimension by dimension, every ratio is 1."""
    monkeypatch.setitem(KINDS, "h1", H1)
    parts, envs = path_of(monkeypatch, "make_recorder", "h1", agent__box_policy=family)
    try:
        batches = collect(parts, 4)
        grads = jax.jit(parts.agent.phases[0].grads)
        beyond = 0
        for batch in batches:
            rows = batch.trajectory.rows
            for column, item in enumerate(batch.items):
                length = parts.experience.store.layout.length
                raw = rows.action[:-1, column]
                # An answer to a last row is ignored: the environment is not stepped there.
                done = [k for k in range(length) if not rows.timestep.last[k, column]]
                # Rows of an episode are 6, its steps 5.
                told = [envs[item.slot].told[(item.start + k) // 6 * 5 + (item.start + k) % 6] for k in done]
                u = np.tanh(raw[done].astype(np.float64))
                scaled = H1.low + (u + 1) / 2 * (H1.high - H1.low.astype(np.float64))
                expected = np.clip(raw[done], H1.low, H1.high) if family == "clipped_normal" else scaled
                np.testing.assert_allclose(told, expected, rtol=1e-6, atol=1e-6)
                beyond += int(((raw < H1.low) | (raw > H1.high)).sum())
            sums = grads(parts.learner.state, batch.trajectory, jax.random.key(0))[2].metrics
            weight = float((~rows.timestep.first[1:]).sum())
            np.testing.assert_allclose(sums["rho_clipped"] / weight, 1.0, atol=1e-5)
            assert abs(float(sums["kl"])) / weight < 1e-6
        assert beyond > 10 and all(env.wrong == [] for env in envs)
    finally:
        parts.close()
