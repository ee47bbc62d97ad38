"""VectorGroup in the three autoreset modes, against single environments with the same seeds and actions."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from headrace.envs import make_group
from headrace.envs.conformance import check_group
from headrace.envs.gym_vector import VectorGroup
from headrace.errors import ConfigError, EnvironmentFailure, WaitTimeoutError
from headrace.seeds import Role, stream_seed

MODES = list(AutoresetMode)


def seed_of(slot, life):
    return stream_seed(5, Role.TRAIN_ENV, slot, life)


class Count(gym.Env):
    """Counts its steps from a number drawn at reset; ends after ``length`` steps."""

    observation_space = Dict(
        {
            "n": Box(0, 1e6, (2,), np.float64),
            "pair": Tuple((Discrete(9, start=2), Box(0, 255, (1,), np.uint8))),
        }
    )
    action_space = Dict({"a": Discrete(3, start=1), "b": Box(-1, 1, (2,), np.float32)})

    def __init__(self, length=3, reward=1.0):
        self.length, self.reward = length, reward

    def _say(self):
        return {
            "n": np.full(2, self.base + self.t, np.float64),
            "pair": (np.int64(2 + self.t), np.array([self.t], np.uint8)),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.base, self.t = float(self.np_random.integers(1000)) * 100, 0
        return self._say(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        end = self.t == self.length
        return self._say(), self.reward, False, end, {"final": self.t} if end else {}


def group_of(mode, make=Count, slots=3, copy=True):
    return VectorGroup(SyncVectorEnv([make] * slots, copy=copy, autoreset_mode=mode), seed_of, name="count")


def by_slot(group, steps):
    """Rows of each slot; the action is a function of slot and its number of rows."""
    rows = [[] for _ in range(group.num_slots)]
    for _ in range(steps):
        timestep, ids = group.recv(10.0)
        for k, slot in enumerate(ids.tolist()):
            rows[slot].append(tuple(np.array(x[k]) for x in timestep[:5]))
        group.send(np.array([(len(rows[slot]) // 3 + slot) % 2 for slot in ids.tolist()]), ids)
    return rows


@pytest.mark.parametrize("mode", MODES)
def test_same_rows_as_single_environments(mode):
    single = by_slot(make_group("CartPole-v1", 3, seed_of, max_episode_steps=15), 150)
    vector = by_slot(
        make_group(
            "vector:CartPole-v1",
            3,
            seed_of,
            max_episode_steps=15,
            kwargs={"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": mode}},
        ),
        200,
    )
    assert any(row[3] for rows in single for row in rows) and any(row[4] for rows in single for row in rows)
    for one, other in zip(single, vector, strict=True):
        n = min(len(one), len(other))
        assert n >= 100
        for a, b in zip(one[:n], other[:n], strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_contract(mode, copy):
    assert check_group(lambda: group_of(mode, copy=copy), steps=60) == []


@pytest.mark.parametrize("mode", MODES)
def test_last_rows_hold_the_final_observation_and_infos(mode):
    lengths = iter([3, 5])
    env = SyncVectorEnv([lambda: Count(next(lengths))] * 2, autoreset_mode=mode)
    group = VectorGroup(env, seed_of, name="count")
    received = []
    for _ in range(7):
        timestep, ids = group.recv(1.0)
        received.append(
            (
                ids.tolist(),
                timestep.first.tolist(),
                timestep.truncated.tolist(),
                timestep.observation["pair"][0].tolist(),
            )
        )
        group.send({"a": np.ones(len(ids), int), "b": np.zeros((len(ids), 2))}, ids)
    assert received[0] == ([0, 1], [True, True], [False, False], [0, 0])
    assert received[3] == ([0, 1], [False, False], [True, False], [3, 3])
    if mode is AutoresetMode.NEXT_STEP:
        assert received[4:6] == [
            ([0, 1], [True, False], [False, False], [0, 4]),
            ([0, 1], [False, False], [False, True], [1, 5]),
        ]
    else:
        assert received[4:7] == [
            ([0], [True], [False], [0]),
            ([0, 1], [False, False], [False, False], [1, 4]),
            ([0, 1], [False, False], [False, True], [2, 5]),
        ]
    assert group.take_infos() == [(0, {"final": 3.0}), (1, {"final": 5.0})] and group.take_infos() == []


def test_next_step_ignores_a_reward_beside_a_reset():
    class Paying(SyncVectorEnv):
        def step(self, actions):
            obs, reward, terminated, truncated, infos = super().step(actions)
            return obs, reward + 7, terminated, truncated, infos

    group = VectorGroup(Paying([Count] * 2), seed_of, name="paying")
    for t in range(6):
        timestep, ids = group.recv(1.0)
        assert timestep.reward.tolist() == [0.0 if t in (0, 4) else 8.0] * 2
        group.send({"a": np.ones(2, int), "b": np.zeros((2, 2))}, ids)


def test_a_vector_environment_that_does_not_say_how_it_resets():
    env = SyncVectorEnv([Count])
    env.metadata = {}
    with pytest.raises(ConfigError, match="autoreset_mode"):
        VectorGroup(env, seed_of, name="silent")


def test_same_step_without_a_final_observation_is_refused():
    class Forgetful(SyncVectorEnv):
        def step(self, actions):
            return (*super().step(actions)[:4], {})

    group = VectorGroup(Forgetful([Count] * 2, autoreset_mode="SameStep"), seed_of, name="forgetful")
    with pytest.raises(EnvironmentFailure, match=r"slot 0 step 3: .*final_obs"):
        check_group(lambda: group, steps=10)


def test_failures_and_waits_are_named():
    group = group_of("NextStep", make=lambda: Count(reward=np.nan))
    _, ids = group.recv(1.0)
    action = {"a": np.ones(2, int), "b": np.zeros((2, 2))}
    group.send(action, ids[:2])
    with pytest.raises(WaitTimeoutError, match="slot 2"):
        group.recv(0.1)
    group.send({"a": np.ones(1, int), "b": np.zeros((1, 2))}, ids[2:])
    with pytest.raises(EnvironmentFailure, match="slot 0 step 1: the reward is NaN"):
        group.recv(1.0)
    broken = group_of("NextStep")
    _, ids = broken.recv(1.0)
    broken.send({"a": np.full(3, 9), "b": np.zeros((3, 2))}, ids)
    with pytest.raises(EnvironmentFailure, match=r"step\(\) raised AssertionError"):
        broken.recv(1.0)


def test_an_environment_with_one_generator_takes_one_seed():
    def rows(seed):
        group = make_group("vector:CartPole-v1", 4, lambda slot, life: seed + slot)  # its vector entry point
        assert type(group._env.unwrapped).__name__ == "CartPoleVectorEnv"
        return by_slot(group, 80)

    np.testing.assert_equal(rows(0), rows(0))
    assert rows(0)[0][0][0].tolist() != rows(1)[0][0][0].tolist()


def test_set_state_begins_new_lives():
    group = group_of("NextStep")
    before = group.recv(1.0)[0].observation["n"]
    assert group.get_state() is None and not group.set_state({})
    assert group.run_ids().tolist() == [1, 1, 1]
    assert (group.recv(1.0)[0].observation["n"] != before).all()
