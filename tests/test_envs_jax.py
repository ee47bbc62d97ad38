"""JAX environments behind the contract: rows, limits, seeds, state, and what is said of functions that lie."""

import threading
from pathlib import Path

import gymnasium as gym
import helpers  # noqa: F401  (compiled programs are kept)
import jax
import jax.numpy as jnp
import jax_envs
import numpy as np
import pytest

from headrace.bench import env_loops
from headrace.envs import describe, make_group
from headrace.envs.conformance import check_group
from headrace.envs.jax_env import JaxEnv
from headrace.envs.jax_group import JaxGroup
from headrace.errors import (
    ConfigError,
    EnvironmentFailure,
    EnvironmentIdError,
    UnsupportedSpaceError,
    WaitTimeoutError,
)
from headrace.runtime.watchdog import overdue
from headrace.seeds import Role, stream_seed

# One of each, because what is compiled is kept by the record.
COUNTER, WALK, NESTED = jax_envs.make_counter(3), jax_envs.make_walk(), jax_envs.make_nested()


def seed_of(slot, life):
    return 100 * life + slot


def group_of(env, slots=2, **options):
    return JaxGroup(env, slots, seed_of, name="mine", **options)


def played(group, steps, action=0):
    """Rows ``(observation leaf 0, reward, first, terminated, truncated)`` of each slot."""
    rows = [[] for _ in range(group.num_slots)]
    for _ in range(steps):
        timestep, ids = group.recv(30.0)
        leaf = jax.tree.leaves(timestep.observation)[0]
        for k, slot in enumerate(ids):
            rows[slot].append((leaf[k].tolist(), *(x[k].item() for x in timestep[1:5])))
        group.send(np.full(len(ids), action), ids)
    return rows


@pytest.mark.parametrize("name", ["counter", "nested", "walk"])
def test_contract(name):
    assert check_group(lambda: make_group(f"jax_envs:make_{name}", 3, seed_of), steps=60) == []


def test_rows_of_two_episodes_by_hand():
    rows = played(group_of(jax_envs.make_counter(length=2)), 5)[0]
    x, y = rows[0][0][0], rows[3][0][0]
    assert x != y
    assert rows == [
        ([x, 0], 0.0, True, False, False),
        ([x, 1], 1.0, False, False, False),
        ([x, 2], 2.0, False, True, False),  # the true final observation
        ([y, 0], 0.0, True, False, False),  # and what was sent in answer to it went nowhere
        ([y, 1], 1.0, False, False, False),
    ]


@pytest.mark.parametrize(
    "limit, override, ends",
    [
        (None, None, (4, True, False)),
        (3, None, (3, False, True)),
        (4, None, (4, True, True)),  # the task's end on the limit's step is an end of the task
        (3, 2, (2, False, True)),
        (3, 9, (4, True, False)),
    ],
)
def test_limit_and_end(limit, override, ends):
    group = group_of(jax_envs.make_counter(4, limit), max_episode_steps=override)
    for rows in played(group, 12):
        assert [(obs[1], t, u) for obs, _, _, t, u in rows if t or u][:2] == [ends, ends]


def test_h3_reset_does_not_reseed():
    def draws(seed, groups):
        """The numbers drawn by two slots, five episodes each, in so many groups."""
        size, found = 2 // groups, []
        for first in range(0, 2, size):

            def seeds(slot, life, first=first):
                return stream_seed(seed, Role.TRAIN_ENV, first + slot, life)

            group = JaxGroup(COUNTER, size, seeds, name="h3", first_slot=first)
            found += [[obs[0] for obs, _, begins, *_ in rows if begins] for rows in played(group, 20)]
        return found

    one = draws(123, 1)
    assert [len(x) for x in one] == [5, 5] and len({*one[0], *one[1]}) == 10
    assert one == draws(123, 1) == draws(123, 2)
    other = draws(124, 1)
    assert not {*one[0], *one[1]} & {*other[0], *other[1]}
    assert draws(0, 1) == draws(0, 1) and not {*draws(0, 1)[0]} & {*one[0], *one[1]}


def test_a_life_has_seeds_of_its_own():
    group = group_of(COUNTER)
    before = group.recv(30.0)[0].observation
    state = group.get_state()
    state["device"].pop("0")
    assert group.set_state(state) is False
    assert (group.run_ids() == 1).all()
    timestep, _ = group.recv(30.0)
    assert timestep.first.all() and not (timestep.observation[:, 0] == before[:, 0]).any()


def test_slots_may_be_answered_one_by_one():
    group, whole = (group_of(WALK, 3) for _ in range(2))
    for action in ([1, 0, -1], [0, 1, 1]):
        _, ids = group.recv(30.0)
        whole.recv(30.0)
        for slot in (2, 0):
            group.send(np.array(action)[[slot]], ids[[slot]])
        with pytest.raises(WaitTimeoutError, match="answer to slot 1"):
            group.recv(1.0)
        with pytest.raises(ValueError, match="twice"):
            group.send(np.array(action)[[0]], ids[[0]])
        group.send(np.array(action)[[1]], ids[[1]])
        whole.send(np.array(action), ids)
    np.testing.assert_array_equal(group.recv(30.0)[0].observation, whole.recv(30.0)[0].observation)


def nested_action(slots):
    return {"go": np.full(slots, 6), "push": np.zeros((slots, 2)), "many": np.ones((slots, 2), int)}


@pytest.mark.parametrize("when", ["received", "half answered", "answered"])
def test_state_continues_exactly(when):
    """From any place between two messages; keys and bfloat16 in the state included."""
    one, other = (JaxGroup(NESTED, 3, seed, name="n") for seed in (seed_of, lambda s, life: 7))
    action = nested_action(3)
    for _ in range(4):
        _, ids = one.recv(30.0)
        one.send(action, ids)
    if when != "answered":
        _, ids = one.recv(30.0)
    if when == "half answered":
        one.send(jax.tree.map(lambda x: x[:1], action), ids[:1])
    state = one.get_state()
    assert other.set_state(state) is True
    for group in (one, other):
        if when == "received":
            group.send(action, ids)
        if when == "half answered":
            group.send(jax.tree.map(lambda x: x[1:], action), ids[1:])
    for _ in range(12):
        a, b = one.recv(30.0)[0], other.recv(30.0)[0]
        jax.tree.map(np.testing.assert_array_equal, a, b)
        one.send(action, ids)
        other.send(action, ids)
    with pytest.raises(ConfigError, match="3 slots of env n; expected 3 of mine"):
        group_of(NESTED, 3).set_state(state)


@pytest.mark.parametrize("what, shown", [("reward", "NaN"), ("observation", "inf")])
def test_poison_is_an_error_that_names_it(what, shown):
    group = group_of(jax_envs.make_poison(3, what), first_slot=8)
    with pytest.raises(EnvironmentFailure, match=f"env mine slot 8 step 3: the {what} is {shown}"):
        played(group, 5)


class Never:
    def is_ready(self):
        return False


def test_rows_that_do_not_come():
    group = group_of(WALK, first_slot=4)
    there, group._timestep = group._timestep, (Never(),)
    with pytest.raises(WaitTimeoutError, match=r"env mine: slots 4 … 5 did not step within 0.01 s"):
        group.recv(0.01)
    assert group.stepping is None
    group._timestep = there
    assert group.recv(30.0)[0].first.all()  # a later wait finds them


def test_a_step_that_takes_long_is_told_of():
    """On the CPU the call itself may last as long as the step; a watcher in another thread hears of it all the same."""
    group = group_of(jax_envs.make_slow(), first_slot=4)
    _, ids = group.recv(30.0)
    group.send(np.zeros(2, int), ids)  # compiles
    group.recv(120.0)
    stepping = threading.Thread(target=lambda: (group.send(np.zeros(2, int), ids), group.recv(120.0)))
    stepping.start()
    said = []
    while stepping.is_alive():
        said.append(overdue([(group, 4)], 0.05))
    stepping.join()
    assert any("env mine slot 4 has been in one step" in (message or "") for message in said)
    assert group.stepping is None


def test_actions_of_another_form_are_refused():
    group = group_of(WALK)
    _, ids = group.recv(30.0)
    with pytest.raises(ValueError, match="float32"):
        group.send(np.zeros(2, np.float32), ids)
    with pytest.raises(ValueError, match="shape"):
        group.send(np.zeros((2, 1), int), ids)


def env_with(reset=None, step=None, observation=None, action=None):
    space = gym.spaces.Box(-1, 1, (2,)) if observation is None else observation
    return JaxEnv(
        reset or (lambda key: (jnp.int32(0), jnp.zeros(2))),
        step or (lambda key, state, action: (state, jnp.zeros(2), 0.0, jnp.bool_(False))),
        space,
        gym.spaces.Discrete(2) if action is None else action,
    )


@pytest.mark.parametrize(
    "env, error, message",
    [
        (env_with(reset=lambda k: jnp.zeros(2)), EnvironmentFailure, r"reset gives a .*; expected \(state, observation"),
        (
            env_with(step=lambda k, s, a: (s, jnp.zeros(2), 0.0)),
            EnvironmentFailure,
            r"step gives a tuple of 3; expected \(state, observation, reward, terminated\)",
        ),
        (
            env_with(reset=lambda k: ({"x": jnp.int32(0)}, jnp.zeros(2)), step=lambda k, s, a: (
                {"x": s["x"] + 0.5}, jnp.zeros(2), 0.0, False)),
            EnvironmentFailure,
            r"step gives state\['x'\] as float32 \(\); expected int32 \(\) as reset gave it",
        ),
        (
            env_with(step=lambda k, s, a: ({"x": s}, jnp.zeros(2), 0.0, False)),
            EnvironmentFailure,
            "step gives a state of .*; expected that of reset",
        ),
        (
            env_with(reset=lambda k: (jnp.int32(0), jnp.zeros(3))),
            EnvironmentFailure,
            r"reset gives observation as float32 \(3,\); expected float32 \(2,\) as its space says",
        ),
        (
            env_with(observation=gym.spaces.Dict({"a": gym.spaces.Discrete(2)})),
            EnvironmentFailure,
            "reset gives an observation of .*; expected the structure",
        ),
        (
            env_with(step=lambda k, s, a: (s, jnp.zeros(2), jnp.zeros(3), False)),
            EnvironmentFailure,
            "step gives reward .*; expected one number",
        ),
        (
            env_with(step=lambda k, s, a: (s, jnp.zeros(2), 0.0, 1)),
            EnvironmentFailure,
            "step gives terminated .*; expected one bool",
        ),
        (
            env_with(observation=gym.spaces.Box(0, 9, (2,), np.uint32)),
            UnsupportedSpaceError,
            "observation space holds a Box of uint32",
        ),
    ],
)  # fmt: skip
def test_functions_that_lie_are_told_at_once(env, error, message):
    with pytest.raises(error, match=message):
        group_of(env)


def test_ids_of_functions():
    groups = [make_group("jax_envs:make_counter", 2, seed_of, kwargs={"length": 3}) for _ in range(2)]
    assert all(isinstance(group, JaxGroup) for group in groups)
    assert groups[0].env_step is groups[1].env_step  # made and compiled once
    assert max(obs[1] for obs, *_ in played(groups[0], 9)[0]) == 3
    limited = make_group("jax_envs:make_counter", 2, seed_of, max_episode_steps=2, bounds="ignore")
    assert max(obs[1] for obs, *_ in played(limited, 9)[0]) == 2
    spec = describe("jax_envs:make_nested")
    assert spec.action["go"].env_dtype == np.int32 and spec.observation["seen"][1].env_dtype == np.float32


@pytest.mark.parametrize(
    "name, options, error, message",
    [
        ("unannotated", {}, EnvironmentFailure, "got a JaxEnv; .*Annotate its function with `-> JaxEnv`"),
        ("other", {}, EnvironmentFailure, "got a int; expected the JaxEnv that its annotation says"),
        (
            "counter",
            {"vectorization": "vector"},
            ConfigError,
            "got vectorization='vector'; leave it out: .*one batch on the device",
        ),
        ("counter", {"on_bad_value": "restart"}, ConfigError, "got on_bad_value='restart'; leave it out"),
        ("counter", {"bounds": "error"}, ConfigError, "got bounds='error'; leave it out"),
        ("counter", {"batch_size": 1}, ConfigError, "got batch_size=1; leave it out"),
        (
            "counter",
            {"workers": 1},
            ConfigError,
            "cannot be stepped in worker processes: it comes as one for many",
        ),
        ("counter", {"num_threads": 2}, ConfigError, "num_threads=2"),
        ("counter", {"kwargs": {"lenght": 3}}, ConfigError, "takes no setting 'lenght'"),
        ("counter", {"kwargs": {"length": np.zeros(2)}}, ConfigError, "expected JSON values"),
        ("conter", {}, EnvironmentIdError, "nearest: make_counter"),
    ],
)
def test_what_is_refused(name, options, error, message):
    with pytest.raises(error, match=message):
        make_group(f"jax_envs:make_{name}", 2, seed_of, **options)


def test_the_environment_of_the_docs(tmp_path, monkeypatch):
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    (tmp_path / "line.py").write_text(page.partition("```python\n# line.py\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    make = lambda: make_group("line:make_line", 3, seed_of, kwargs={"length": 5})  # noqa: E731
    assert check_group(make, steps=40) == []


def test_the_bare_loop_counts_steps_and_no_resets():
    turns = env_loops.jax_turns(group_of(COUNTER, 4))
    assert [next(turns) for _ in range(8)] == [4, 4, 4, 0, 4, 4, 4, 0]
