"""From ids to groups, and what is said of ids, settings and environments that cannot be made."""

import sys
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from headrace.envs import describe, make_group, prefixes, registry
from headrace.envs.gym import GymGroup
from headrace.envs.gym_vector import VectorGroup
from headrace.errors import ConfigError, EnvironmentFailure, EnvironmentIdError, UnsupportedSpaceError
from headrace.spaces import DiscreteSpec


def seed_of(slot, life):
    return slot


MODULE = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

LIMIT = 3

def make_env(length=0.5):
    env = CartPoleEnv()
    env.length = length
    return env

def make_vec(num_envs):
    return gym.vector.SyncVectorEnv([CartPoleEnv] * num_envs)

def explode():
    raise OSError("no such scene")

def number():
    return 3

class Texty(CartPoleEnv):
    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Dict({"words": gym.spaces.Text(5)})

if "Headrace-Test-v0" not in gym.registry:
    gym.register("Headrace-Test-v0", CartPoleEnv, max_episode_steps=7)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_file_of_envs.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield "my_file_of_envs"
    sys.modules.pop("my_file_of_envs", None)
    gym.registry.pop("Headrace-Test-v0", None)


def length_of_episode(group):
    """Rows up to and with the first last row of slot 0."""
    for t in range(1000):
        timestep, ids = group.recv(10.0)
        if timestep.last[ids.tolist().index(0)]:
            return t
        group.send(np.arange(len(ids)) * 0 + t % 2, ids)
    raise AssertionError("no end")


def test_ids_of_each_form(here):
    path = list(sys.path)
    assert isinstance(make_group("CartPole-v1", 2, seed_of), GymGroup)
    assert isinstance(make_group("gym:CartPole-v1", 2, seed_of), GymGroup)
    assert isinstance(make_group("CartPole-v1", 2, seed_of, vectorization="vector"), VectorGroup)
    assert isinstance(make_group("vector:CartPole-v1", 2, seed_of), VectorGroup)
    group = make_group(f"{here}:make_env", 2, seed_of, kwargs={"length": 0.7})
    assert isinstance(group, GymGroup) and group._bare[0].length == 0.7
    assert isinstance(make_group(f"{here}:make_vec", 2, seed_of), VectorGroup)
    assert length_of_episode(make_group(f"{here}:Headrace-Test-v0", 2, seed_of)) == 7
    assert sys.path == path


def test_the_time_limit_can_be_set(here):
    for env_id in ("CartPole-v1", f"{here}:make_env", f"{here}:Headrace-Test-v0", "vector:CartPole-v1"):
        assert length_of_episode(make_group(env_id, 2, seed_of, max_episode_steps=4)) == 4


@pytest.mark.parametrize(
    "env_id, message",
    [
        ("CartPoel-v1", "nearest: CartPole-v1"),
        ("CartPole-v9", "nearest: CartPole-v1"),
        ("vector:CartPoel-v1", "nearest: CartPole-v1"),
        ("ALE/Nothing-v5", "nearest|pip install ale-py"),
        ("no_such_module_here:make_env", "there is no module 'no_such_module_here'"),
        ("HERE:make_evn", "nearest: make_env"),
        ("HERE:LIMIT", "is a int; expected a callable"),
        ("HERE:Headrace-Tset-v0", "nearest: Headrace-Test-v0"),
    ],
)
def test_unknown_ids_name_what_is_near(here, env_id, message):
    with pytest.raises(EnvironmentIdError, match=message) as caught:
        make_group(env_id.replace("HERE", here), 2, seed_of)
    assert "\n" not in str(caught.value)


def test_missing_packages_name_the_line_to_run(monkeypatch):
    def make(message):
        def make_env():
            raise message

        module = types.ModuleType("needy")
        module.make_env = make_env
        monkeypatch.setitem(sys.modules, "needy", module)
        with pytest.raises(EnvironmentIdError) as caught:
            make_group("needy:make_env", 1, seed_of)
        return str(caught.value)

    said = make(gym.error.DependencyNotInstalled('not there,\nrun `pip install "gymnasium[box2d]"`'))
    assert said == 'env needy:make_env: not there, run `pip install "gymnasium[box2d]"`'
    assert "pip install some_simulator" in make(ModuleNotFoundError("no", name="some_simulator"))


def test_settings_and_constructors_that_fail(here):
    with pytest.raises(ConfigError, match="takes no setting 'lenght'"):
        make_group(f"{here}:make_env", 1, seed_of, kwargs={"lenght": 1})
    with pytest.raises(ConfigError, match="takes no setting 'gravity_on_mars'"):
        make_group("CartPole-v1", 1, seed_of, kwargs={"gravity_on_mars": 1})
    with pytest.raises(ConfigError, match="setting of its own"):
        make_group("CartPole-v1", 1, seed_of, kwargs={"max_episode_steps": 1})
    with pytest.raises(ConfigError, match="num_threads=2"):
        make_group("CartPole-v1", 1, seed_of, num_threads=2)
    with pytest.raises(ConfigError, match="num_slots=0"):
        make_group("CartPole-v1", 0, seed_of)
    with pytest.raises(EnvironmentFailure, match="raised OSError: no such scene") as caught:
        make_group(f"{here}:explode", 1, seed_of)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(EnvironmentFailure, match=r"got a int; expected a gymnasium\.Env"):
        make_group(f"{here}:number", 1, seed_of)
    with pytest.raises(UnsupportedSpaceError, match=r"observation space\['words'\] is a Text"):
        make_group(f"{here}:Texty", 1, seed_of)


def test_a_vector_environment_of_another_size_is_refused(here, monkeypatch):
    module = types.ModuleType("sized")
    module.make = lambda num_envs: SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3)
    monkeypatch.setitem(sys.modules, "sized", module)
    with pytest.raises(EnvironmentFailure, match=r"of 3 environments; expected .* of num_envs=2"):
        make_group("sized:make", 2, seed_of)


def test_describe_and_prefixes(monkeypatch):
    spec = describe("Taxi-v4")
    assert (
        spec.observation == DiscreteSpec(500, 0, np.dtype(np.int64))
        and spec.action.n == 6
        and spec.name == "Taxi-v4"
    )
    assert set(prefixes()) >= {"gym", "vector", "envpool"} and all(prefixes().values())
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))

    def mine(request):
        """Things of mine: mine:Thing."""
        return ("made", request.target, request.num_slots)

    registry.register("mine", mine)
    assert make_group("mine:Thing", 3, seed_of) == ("made", "Thing", 3)
    assert prefixes()["mine"] == "Things of mine: mine:Thing."
    with pytest.raises(ConfigError, match="expected an identifier other than"):
        registry.register("gym", mine)


def test_all_environments_are_closed_when_one_cannot_be_made(monkeypatch):
    made = []

    class Env(gym.Env):
        observation_space = action_space = gym.spaces.Discrete(2)
        closed = False

        def __init__(self):
            made.append(self)
            if len(made) == 3:
                raise OSError("full")

        def close(self):
            self.closed = True

    module = types.ModuleType("third")
    module.Env = Env
    monkeypatch.setitem(sys.modules, "third", module)
    with pytest.raises(EnvironmentFailure, match="full"):
        make_group("third:Env", 4, seed_of)
    assert [env.closed for env in made] == [True, True, False]
