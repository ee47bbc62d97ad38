"""The conformance suite: every adapter keeps the contract, and groups broken on purpose are found."""

import gymnasium as gym
import numpy as np
import pytest

from headrace.envs import make_group
from headrace.envs.conformance import check_group
from headrace.envs.gym import GymGroup
from headrace.seeds import Role, stream_seed


def seed_of(slot, life):
    return stream_seed(1, Role.TRAIN_ENV, slot, life)


ADAPTERS = {
    "CartPole-v1": {},
    "gym:FrozenLake-v1": {},
    "Taxi-v4": {"max_episode_steps": 20},
    "Pendulum-v1": {"max_episode_steps": 30},
    "MountainCarContinuous-v0": {"max_episode_steps": 30},
    "vector:CartPole-v1": {},
    "vector:FrozenLake-v1": {"kwargs": {"vectorization_mode": "sync"}},
    "vector:Pendulum-v1": {
        "max_episode_steps": 30,
        "kwargs": {"vector_kwargs": {"autoreset_mode": "SameStep"}},
    },
    "vector:Acrobot-v1": {
        "max_episode_steps": 30,
        "kwargs": {"vector_kwargs": {"autoreset_mode": "Disabled"}},
    },
}


@pytest.mark.parametrize("env_id", ADAPTERS)
def test_adapters_keep_the_contract(env_id):
    assert check_group(lambda: make_group(env_id, 3, seed_of, **ADAPTERS[env_id]), steps=150) == []


def test_a_group_of_one_slot():
    assert check_group(lambda: make_group("CartPole-v1", 1, seed_of), steps=100) == []


class Broken(GymGroup):
    """A GymGroup with one fault."""

    def __init__(self, fault, seed_of=seed_of):
        super().__init__(lambda: gym.make("CartPole-v1"), 3, seed_of, name="broken")
        self.fault, self.count, self.kept = fault, 0, None

    def recv(self, timeout_s):
        timestep, ids = super().recv(timeout_s)
        self.count += 1
        return self.fault(self, timestep, ids)


def reuse(group, timestep, ids):
    if group.kept is None or len(ids) != 3:
        group.kept = np.array(timestep.observation)
    group.kept[:] = timestep.observation
    return timestep._replace(observation=group.kept), ids


def random_reward(group, timestep, ids):
    noise = np.float32(np.random.default_rng().random())
    return timestep._replace(reward=np.where(timestep.first, 0, noise).astype(np.float32)), ids


FAULTS = {
    "observation's form": lambda g, t, ids: (t._replace(observation=t.observation.astype(np.float64)), ids),
    "reward's form": lambda g, t, ids: (t._replace(reward=t.reward[:, None]), ids),
    "terminated's form": lambda g, t, ids: (t._replace(terminated=t.terminated.astype(np.int8)), ids),
    "slot ids' form": lambda g, t, ids: (t, ids.astype(np.int64)),
    "slot ids are unique and in range": lambda g, t, ids: (t, np.zeros_like(ids)),
    "reward of first rows": lambda g, t, ids: (t._replace(reward=np.ones_like(t.reward)), ids),
    "end flags of first rows": lambda g, t, ids: (t._replace(truncated=t.truncated | t.first), ids),
    "first follows last": lambda g, t, ids: (t._replace(first=t.first & (g.count == 1)), ids),
    "arrays are not written again": reuse,
    "equal seeds, equal rows": random_reward,
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_of_messages_are_found(what):
    found = check_group(lambda: Broken(FAULTS[what]), steps=80)
    assert what in {finding.what for finding in found}
    assert all(finding.got and finding.expected and finding.todo for finding in found)


def nothing(group, timestep, ids):
    return timestep, ids


def test_slots_that_draw_alike_are_found():
    found = check_group(lambda: Broken(nothing, lambda slot, life: 3), steps=80)
    assert [finding.what for finding in found] == ["slots differ"]


def test_a_reset_that_seeds_again_is_found():
    class Reseeding(gym.Wrapper):
        seed = None

        def reset(self, *, seed=None, options=None):
            self.seed = self.seed if seed is None else seed
            return self.env.reset(seed=self.seed)

    found = check_group(
        lambda: GymGroup(lambda: Reseeding(gym.make("CartPole-v1")), 2, seed_of, name="reseeding"), steps=120
    )
    assert "a reset does not re-seed" in [finding.what for finding in found]


def test_states_that_do_not_continue_or_cannot_be_kept_are_found():
    class Lying(Broken):
        def set_state(self, state):
            return True

    class Silent(Broken):
        def set_state(self, state):
            return False

    class Objects(Broken):
        def get_state(self):
            return {"env": self._envs[0]}

    def found(kind):
        return [finding.what for finding in check_group(lambda: kind(nothing), steps=40)]

    assert found(Lying) == ["set_state continues exactly"]
    assert found(Silent) == ["set_state that fails"]
    assert found(Objects) == ["state's form"]


def test_run_ids_and_missing_members_are_found():
    class Wrong(Broken):
        def run_ids(self):
            return np.zeros(3, np.int32)

    assert [f.what for f in check_group(lambda: Wrong(nothing), steps=5)] == ["run_ids' form"]


def test_a_slot_that_never_speaks_is_found():
    class Deaf(GymGroup):
        def recv(self, timeout_s):
            timestep, ids = super().recv(timeout_s)
            keep = ids != 2
            return type(timestep)(*(x[keep] for x in timestep[:5])), ids[keep]

    found = check_group(lambda: Deaf(lambda: gym.make("CartPole-v1"), 3, seed_of, name="deaf"), steps=20)
    assert "every slot speaks" in [finding.what for finding in found]
