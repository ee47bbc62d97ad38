"""gymnax's environments. What they say is compared with their own functions, called one by one."""

import helpers  # noqa: F401  (compiled programs are kept)
import jax
import numpy as np
import pytest

from headrace.envs import describe, make_group
from headrace.envs.conformance import check_group, sample
from headrace.errors import ConfigError, EnvironmentIdError

gymnax = pytest.importorskip("gymnax")


def seed_of(slot, life):
    return 100 * life + slot


@pytest.mark.parametrize("env_id", ["Catch-bsuite", "Breakout-MinAtar", "Pendulum-v1"])
def test_contract(env_id):
    make = lambda: make_group(f"gymnax:{env_id}", 3, seed_of, max_episode_steps=20)  # noqa: E731
    assert check_group(make, steps=60) == []


SOME = ["Catch-bsuite", "DeepSea-bsuite", "DiscountingChain-bsuite", "FrozenLake-misc"]
WITH_DOWNLOAD = {"MNISTBandit-bsuite"}


@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(name, marks=() if name in SOME else pytest.mark.long)
        for name in gymnax.registered_envs
        if name not in WITH_DOWNLOAD
    ],
)
def test_rows_are_the_environments_own(env_id):
    """Terminated is the task's end, truncated the limit's, by gymnax's own functions; the final observation is true."""
    limit = 12
    group = make_group(f"gymnax:{env_id}", 1, lambda slot, life: 5, max_episode_steps=limit)
    env, params = gymnax.make(env_id)
    params = params.replace(max_steps_in_episode=limit)
    reset, step = jax.jit(env.reset_env), jax.jit(env.step_env)
    rng, state, last, kinds = np.random.default_rng(0), None, True, set()
    for count in range(40):
        timestep, ids = group.recv(30.0)
        key = jax.random.fold_in(jax.random.key(5), count)
        if last:
            (observation, state), reward, ends = reset(key, params), 0.0, (False, False)
        else:
            observation, state, reward, done, _ = step(key, state, action, params)
            ends = (bool(done), bool(env.is_truncated(state, params)))
        assert timestep.first[0] == last
        np.testing.assert_allclose(np.asarray(observation), timestep.observation[0], rtol=1e-5, atol=1e-5)
        assert timestep.reward[0] == pytest.approx(float(reward), rel=1e-5, abs=1e-6)
        assert (timestep.terminated[0], timestep.truncated[0]) == ends
        last = any(ends)
        kinds.add(ends)
        action = sample(group.spec.action, rng)
        group.send(np.asarray(action)[None], ids)
    assert len(kinds) > 1, "no episode ended"


def test_a_limit_that_the_environment_shows_follows_ours():
    """DiscountingChain shows t / limit: were its limit put out of reach, it would show nothing."""
    group = make_group("gymnax:DiscountingChain-bsuite", 1, seed_of, max_episode_steps=4)
    shown = []
    for _ in range(5):
        timestep, ids = group.recv(30.0)
        shown.append(float(timestep.observation[0, 1]))
        group.send(np.zeros(1, int), ids)
    assert shown == [0.0, 0.25, 0.5, 0.75, 1.0] and timestep.truncated[0]


def test_the_end_of_the_task_on_the_step_of_its_limit_is_both():
    """DeepSea ends after ``size`` steps, and its own limit is ``size``."""
    group = make_group("gymnax:DeepSea-bsuite", 1, seed_of, kwargs={"size": 3})
    for _ in range(4):
        timestep, ids = group.recv(30.0)
        group.send(np.zeros(1, int), ids)
    assert timestep.terminated[0] and timestep.truncated[0]


def test_settings_of_constructor_and_params():
    assert describe("gymnax:Catch-bsuite", kwargs={"rows": 6, "columns": 4}).observation.shape == (6, 4)
    light, heavy = (
        make_group("gymnax:CartPole-v1", 1, seed_of, kwargs={"force_mag": force}) for force in (1, 20.0)
    )
    speeds = []
    for group in (light, heavy):
        first, ids = group.recv(30.0)
        group.send(np.ones(1, int), ids)
        speeds.append(group.recv(30.0)[0].observation[0, 1] - first.observation[0, 1])
    assert 15 < speeds[1] / speeds[0] < 25
    spec = describe("gymnax:Catch-bsuite")  # declares int32, gives float32
    assert spec.observation.dtype == np.float32 and spec.observation.high.max() == 1
    assert spec.action.n == 3 and spec.action.env_dtype == np.int32


@pytest.mark.parametrize(
    "target, kwargs, error, message",
    [
        (
            "Catch-bsuit",
            {},
            EnvironmentIdError,
            "gymnax has no environment 'Catch-bsuit'; nearest: Catch-bsuite",
        ),
        ("CartPole-v1", {"gravty": 1}, ConfigError, "takes no setting 'gravty'; nearest: gravity"),
        ("Catch-bsuite", {"rwos": 1}, ConfigError, "takes no setting 'rwos'; nearest: rows"),
        ("CartPole-v1", {"max_steps_in_episode": 9}, ConfigError, "use env.max_episode_steps"),
        ("CartPole-v1", {"gravity": "strong"}, ConfigError, "gravity is 'strong'; expected float"),
        ("CartPole-v1", {"gravity": [1, 2]}, ConfigError, r"gravity is \[1, 2\]; expected float"),
        ("MemoryChain-bsuite", {"memory_length": 2.5}, ConfigError, "memory_length is 2.5; expected int64"),
    ],
)
def test_what_is_refused(target, kwargs, error, message):
    with pytest.raises(error, match=message):
        make_group(f"gymnax:{target}", 1, seed_of, kwargs=kwargs)


def test_gymnax_that_is_too_old_or_missing(monkeypatch):
    from gymnax.environments.environment import Environment

    with monkeypatch.context() as patch:
        patch.delattr(Environment, "is_truncated")
        with pytest.raises(EnvironmentIdError, match=r'1.0 or newer, run: pip install "headrace\[gymnax\]"'):
            make_group("gymnax:Acrobot-v1", 1, seed_of)
    monkeypatch.setitem(__import__("sys").modules, "gymnax", None)
    with pytest.raises(EnvironmentIdError, match=r'not installed; run: pip install "headrace\[gymnax\]"'):
        make_group("gymnax:Acrobot-v1", 1, seed_of)
