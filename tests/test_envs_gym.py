"""GymGroup: seeding, ends, failures, state, and spaces of all kinds."""

import json
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from headrace.envs import make_group
from headrace.envs.conformance import check_group, sample
from headrace.envs.gym import GymGroup
from headrace.errors import ConfigError, EnvironmentFailure, WaitTimeoutError
from headrace.seeds import Role, stream_seed
from headrace.spaces import map_leaves


def seeds(seed=0, offset=0):
    return lambda slot, life: stream_seed(seed, Role.TRAIN_ENV, slot + offset, life)


class Draw(gym.Env):
    """Shows what it drew at reset; an episode has 3 steps; the last one's info is {"final": 2}."""

    observation_space = Box(0, 2**31, (1,), np.int64)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.integers(2**31 - 1, size=1), 0
        return self.x, {"final": -1}

    def step(self, action):
        self.t += 1
        return self.x, 1.0, False, self.t == 3, {"final": self.t - 1} if self.t == 3 else {}


class Scripted(gym.Env):
    """Gives what ``script(t)`` says at step t (from 1)."""

    observation_space = Box(-10, 10, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, script):
        self.script, self.t, self.observation = script, 0, np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return self.script(self.t)


def fine(t):
    return np.zeros(2, np.float32), 1.0, False, False, {}


def scripted_group(bad, slots=4, at=2):
    made = iter(range(slots))
    return GymGroup(lambda: Scripted(bad if next(made) == at else fine), slots, seeds(), name="scripted")


def drive(group, steps, rng=None, action=0):
    """Messages of ``steps`` receives, answering all."""
    out = []
    for _ in range(steps):
        timestep, ids = group.recv(10.0)
        out.append((timestep, ids))
        group.send(np.full(len(ids), action) if rng is None else rng.integers(0, 2, len(ids)), ids)
    return out


def draws(seed, num_slots, groups=1):
    """What each of ``num_slots`` environments drew in 5 episodes, spread over ``groups`` groups."""
    per, lists, infos = num_slots // groups, [], []
    for g in range(groups):
        group = GymGroup(Draw, per, seeds(seed, g * per), name="draw")
        steps = [t for t, _ in drive(group, 20)]
        lists += [[int(t.observation[k, 0]) for t in steps if t.first[k]] for k in range(per)]
        infos += group.take_infos()
        group.close()
    return lists, infos


def test_h3_seeds_and_step_infos():
    one, infos = draws(123, 2)
    assert [len(x) for x in one] == [5, 5]
    assert len({x for xs in one for x in xs}) == 10
    assert draws(123, 2)[0] == one
    other = draws(124, 2)[0]
    assert not {x for xs in one for x in xs} & {x for xs in other for x in xs}
    zero = draws(0, 2)[0]
    assert draws(0, 2)[0] == zero and zero != one
    assert draws(123, 2, groups=2)[0] == one
    assert len(infos) == 10 and all(info == {"final": 2.0} for _, info in infos)


@pytest.mark.parametrize(
    "value, shown", [(np.nan, "NaN"), (np.inf, "inf"), (-np.inf, "-inf"), (1e39, "1e+39")]
)
def test_h2a_reward_not_finite(value, shown):
    group = scripted_group(lambda t: (np.zeros(2, np.float32), value if t == 7 else 1.0, False, False, {}))
    with pytest.raises(EnvironmentFailure) as caught:
        drive(group, 10)
    for word in ("reward", shown, "slot 2", "step 7"):
        assert word in str(caught.value)


def test_h2a_other_slots_keep_their_returns_until_then():
    group = scripted_group(lambda t: (np.zeros(2, np.float32), np.nan if t == 7 else 1.0, False, False, {}))
    steps = drive(group, 7)
    assert np.sum([t.reward for t, _ in steps], axis=0).tolist() == [6.0] * 4


def test_h2a_observation_not_finite():
    group = scripted_group(lambda t: (np.array([0, np.nan], np.float32), 1.0, False, False, {}), at=1)
    with pytest.raises(EnvironmentFailure, match=r"slot 1 step 1: the observation is NaN"):
        drive(group, 3)


def raises(t):
    raise RuntimeError("out of fuel")


def test_step_that_raises_is_named_with_its_cause():
    group = scripted_group(lambda t: raises(t) if t == 4 else fine(t), at=3)
    with pytest.raises(
        EnvironmentFailure, match=r"env scripted slot 3 step 4: step\(\) raised RuntimeError"
    ) as caught:
        drive(group, 10)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert group.stepping is None


@pytest.mark.parametrize(
    "observation, message",
    [
        (np.zeros(1, np.float32), r"shape \(1,\)"),  # NumPy would broadcast it
        (np.zeros((2, 2), np.float32), r"shape \(2, 2\)"),
        (np.array(["a", "b"]), "is of <U1"),
    ],
)
def test_observation_of_a_wrong_form_is_named(observation, message):
    group = scripted_group(lambda t: (observation, 1.0, False, False, {}), at=0)
    with pytest.raises(EnvironmentFailure, match=message):
        drive(group, 3)


def test_int64_observation_outside_int32_is_refused():
    class Large(Draw):
        def step(self, action):
            return np.array([2**31]), 0.0, False, False, {}

    group = GymGroup(Large, 1, seeds(), name="large")
    with pytest.raises(EnvironmentFailure, match="as int32 holds"):
        drive(group, 2)


def test_end_on_the_limit_step_keeps_both_flags():
    group = scripted_group(lambda t: (np.ones(2, np.float32), 5.0, True, True, {}), slots=1, at=0)
    steps = [t for t, _ in drive(group, 3)]
    assert [bool(t.first[0]) for t in steps] == [True, False, True]
    assert steps[1].terminated[0] and steps[1].truncated[0] and steps[1].reward[0] == 5.0
    assert (
        steps[1].observation[0, 0] == 1.0 and steps[2].observation[0, 0] == 0.0 and steps[2].reward[0] == 0.0
    )


def test_an_environment_that_reuses_its_buffer_and_writes_into_its_action():
    class Rude(gym.Env):
        observation_space, action_space = Box(-9, 9, (2,), np.float64), Box(-1, 1, (2,), np.float64)

        def __init__(self):
            self.buffer = np.zeros(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.buffer[:] = 0
            return self.buffer, {}

        def step(self, action):
            self.buffer += action
            action *= 0
            return self.buffer, 0.0, False, False, {}

    group = GymGroup(Rude, 2, seeds(), name="rude")
    seen, action = [], np.full((2, 2), 0.5)
    for _ in range(4):
        timestep, ids = group.recv(1.0)
        seen.append(timestep.observation)
        group.send(action, ids)
    assert [float(x[1, 0]) for x in seen] == [0.0, 0.5, 1.0, 1.5]
    assert (action == 0.5).all()
    assert seen[0].dtype == np.float32


def test_subsets_are_served_alone_and_in_any_order():
    group = GymGroup(Draw, 3, seeds(), name="draw")
    _, ids = group.recv(1.0)
    group.send(np.zeros(2, int), np.array([2, 0], np.int32))
    timestep, ids = group.recv(1.0)
    assert ids.tolist() == [0, 2] and not timestep.first.any()
    with pytest.raises(ValueError, match="came twice"):
        group.send(np.zeros(2, int), np.array([1, 1], np.int32))
    with pytest.raises(ValueError, match="expected 0 … 2"):
        group.send(np.zeros(1, int), np.array([3], np.int32))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        group.send(np.zeros(3, int), np.array([1, 2], np.int32))
    with pytest.raises(WaitTimeoutError, match="none was sent"):
        group.recv(0.1)


def test_stepping_names_the_slot_while_it_steps():
    seen = []
    group = scripted_group(lambda t: (seen.append(group.stepping), fine(t))[1], at=2)
    drive(group, 2)
    group.recv(1.0)
    assert [slot for slot, _ in seen] == [2, 2]
    assert all(0 <= time.monotonic() - since < 60 for _, since in seen) and group.stepping is None


def test_close_names_one_that_raises_and_closes_the_rest():
    closed = []

    class Stubborn(Draw):
        def close(self):
            closed.append(self)
            if len(closed) == 1:
                raise OSError("jammed")

    group = GymGroup(Stubborn, 3, seeds(), name="stubborn")
    with pytest.warns(RuntimeWarning, match="slot 0: close"):
        group.close()
    group.close()
    assert len(closed) == 3


# Spaces of all kinds.

SPACES = {
    "dict": (Dict({"b": Box(-1, 1, (2,), np.float64), "a": Discrete(3, start=5)}), Discrete(4, start=-1)),
    "tuple": (
        Tuple((Box(0, 255, (4, 4), np.uint8), MultiBinary(3))),
        Tuple((Discrete(2), Box(-2, 1, (2,), np.float32))),
    ),
    "hybrid": (
        Dict({"x": Tuple((Discrete(2), MultiDiscrete([2, 3], start=[1, 0])))}),
        Dict({"move": Box(-1, 1, (2,), np.float32), "kind": Discrete(3, start=1), "bits": MultiBinary(2)}),
    ),
    "matrix": (MultiDiscrete([[2, 3], [4, 5]]), MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [0, 0]])),
    "scalar": (Box(-1, 1, (), np.float32), Box(-1, 1, (), np.float32)),
}


class Sampler(gym.Env):
    """Says a draw of its observation space, and refuses an action that its action space does not hold."""

    def __init__(self, kind):
        self.observation_space, self.action_space = SPACES[kind]

    def _draw(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        end = self.np_random.random() < 0.2
        return self._draw(), float(self.np_random.random()), bool(end), False, {}


@pytest.mark.parametrize("kind", SPACES)
def test_spaces_of_all_kinds_keep_the_contract(kind):
    assert check_group(lambda: GymGroup(lambda: Sampler(kind), 3, seeds(), name=kind), steps=60) == []


def test_composite_observations_arrive_in_agent_types():
    group = GymGroup(lambda: Sampler("dict"), 3, seeds(), name="dict")
    timestep, _ = group.recv(1.0)
    twin = Sampler("dict")
    expected, _ = twin.reset(seed=seeds()(1, 0))
    assert timestep.observation["a"].dtype == np.int32 and timestep.observation["a"][1] == expected["a"] - 5
    np.testing.assert_allclose(timestep.observation["b"][1], expected["b"].astype(np.float32))


# State.


def continue_both(one, other, steps=500):
    streams = [np.random.default_rng(7), np.random.default_rng(7)]
    for t in range(steps):
        rows = []
        for group, rng in zip((one, other), streams, strict=True):
            timestep, ids = group.recv(1.0)
            rows.append((timestep, ids))
            action = [sample(group.spec.action, rng) for _ in ids]
            group.send(map_leaves(lambda _, *v: np.stack(v), group.spec.action, *action), ids)
        (a, ids_a), (b, ids_b) = rows
        np.testing.assert_array_equal(ids_a, ids_b)
        for x, y in zip(a[:5], b[:5], strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"step {t}")


def through_a_file(state):
    """As a checkpoint does it: arrays beside, the rest as JSON."""

    def check(value):
        if isinstance(value, dict):
            return {k: check(v) for k, v in value.items()}
        if isinstance(value, list):
            return [check(v) for v in value]
        return np.array(value) if isinstance(value, np.ndarray) else json.loads(json.dumps(value))

    return check(state)


@pytest.mark.parametrize("before", [1, 2, 37, 203])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Taxi-v4", "Pendulum-v1"])
def test_state_continues_exactly(env_id, before):
    one, other = (make_group(env_id, 4, seeds(3)) for _ in range(2))
    rng = np.random.default_rng(1)
    for _ in range(before):
        _, ids = one.recv(1.0)
        one.send(np.stack([sample(one.spec.action, rng) for _ in ids]), ids)
    state = through_a_file(one.get_state())
    drive_elsewhere = np.random.default_rng(9)  # the other one's own past must not matter
    for _ in range(5):
        _, ids = other.recv(1.0)
        other.send(np.stack([sample(one.spec.action, drive_elsewhere) for _ in ids]), ids)
    assert other.set_state(state)
    np.testing.assert_array_equal(one.run_ids(), other.run_ids())
    continue_both(one, other)
    assert make_group(env_id, 4, seeds(3)).set_state(through_a_file(other.get_state()))  # and once more


def test_state_of_an_environment_that_cannot_be_replayed_begins_new_lives():
    class Hidden(Draw):
        """Draws from a generator of its own: its first life's first episode is exact, no other."""

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            if seed is not None:
                self.own = np.random.default_rng(seed)
            self.x = self.own.integers(2**31 - 1, size=1)
            return self.x, {}

    one, other = (GymGroup(Hidden, 2, seeds(), name="hidden") for _ in range(2))
    drive(one, 11)  # in the third episode
    assert not other.set_state(one.get_state())
    assert other.run_ids().tolist() == [1, 1]
    timestep, ids = other.recv(1.0)
    assert ids.tolist() == [0, 1] and timestep.first.all()
    expected = [np.random.default_rng(seeds()(slot, 1)).integers(2**31 - 1) for slot in range(2)]
    assert timestep.observation[:, 0].tolist() == expected


def test_state_without_a_generator_begins_new_lives_only_there():
    class Bare(Draw):
        def reset(self, *, seed=None, options=None):
            self.x, self.t = np.array([4]), 0
            return self.x, {}

    def group():
        made = iter([Draw, Bare, Draw])
        return GymGroup(lambda: next(made)(), 3, seeds(), name="mixed")

    one, other = group(), group()
    drive(one, 6)
    assert not other.set_state(one.get_state())
    assert other.run_ids().tolist() == [0, 1, 0]
    timestep, ids = other.recv(1.0)
    expected, _ = one.recv(1.0)
    assert ids.tolist() == [0, 1, 2] and timestep.first.tolist() == [False, True, False]
    np.testing.assert_array_equal(timestep.observation[[0, 2]], expected.observation[[0, 2]])


def test_state_of_an_episode_too_long_to_keep(monkeypatch):
    monkeypatch.setattr("headrace.envs.gym_state.MAX_REPLAY", 5)
    one, other = (make_group("Pendulum-v1", 1, seeds()) for _ in range(2))
    for _ in range(8):
        _, ids = one.recv(1.0)
        one.send(np.zeros((1, 1), np.float32), ids)
    assert not other.set_state(one.get_state()) and other.run_ids().tolist() == [1]


def test_the_log_does_not_grow_with_the_run():
    group = GymGroup(Draw, 2, seeds(), name="draw")
    drive(group, 5000)
    assert len(group._slots.log._entries) <= 1024


def test_state_of_another_group_is_refused():
    one = GymGroup(Draw, 2, seeds(), name="draw")
    drive(one, 2)
    with pytest.raises(ConfigError, match="2 slots of env draw; expected 3"):
        GymGroup(Draw, 3, seeds(), name="draw").set_state(one.get_state())
