"""Action masks: their numbers, their way from the environment to the loss, and what is refused."""

import math
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import collect, parts_of, tiny
from learning_envs import Forbidding
from test_resume import killed_after
from test_runtime_sync import metrics

import headrace
from headrace import spaces
from headrace.envs import make_group
from headrace.envs.conformance import check_group
from headrace.envs.gym import GymGroup
from headrace.envs.gym_vector import VectorGroup
from headrace.envs.masks import MaskError, Masks, convert, mask_spec
from headrace.errors import ConfigError, EnvironmentFailure
from headrace.ops import distribution, masked
from headrace.seeds import Role, SlotSeeds, stream_seed

ACTION = Dict({"b": Tuple((Box(-1, 1, (1,)), MultiDiscrete([2, 3]))), "a": Discrete(3, start=4)})
SPEC = spaces.from_gymnasium(ACTION)
KEY = jax.random.key(0)


@pytest.fixture
def here_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def seed_of(slot, life):
    return stream_seed(3, Role.TRAIN_ENV, slot, life)


# The numbers. Parameters in the order of the leaves: a (3 logits), b[0] (mean, raw std), b[1] (2 + 3 logits).

MASK = {"a": np.array([1, 1, 0], bool), "b": ((), np.array([0, 1, 1, 0, 1], bool))}
PARAMS = jnp.array([0, math.log(3), 9, 0, 0, 5, 1, 0, 7, 0])  # a: ¼, ¾ | N(0, 1) | 1 | ½, ½
NORMAL_ENTROPY = 0.5 * math.log(2 * math.pi * math.e)
QUARTER_ENTROPY = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))


def numbers(params, scale, key):
    """All that is said of the masked distribution; π has the logit of a = 1 scaled by ``scale``."""
    d = distribution(SPEC)
    action = {"a": jnp.int32(1), "b": (jnp.zeros(1), jnp.array([1, 2]))}

    def terms(params):
        p, q = d.mask(params, MASK), d.mask(params.at[1].multiply(scale), MASK)
        return {
            "log_prob": d.log_prob(p, action),
            "entropy": d.entropy(p),
            "kl": d.kl(p, q),
            "back": d.kl(q, p),
        }

    p = d.mask(params, MASK)
    forbidden = [d.log_prob(p, {**action, "a": jnp.int32(2)})]
    forbidden.append(d.log_prob(p, {**action, "b": (jnp.zeros(1), jnp.array([0, 2]))}))
    slope = jax.grad(lambda x: sum(terms(x).values()))(params)
    draws = jax.vmap(d.sample, (None, 0))(p, jax.random.split(key, 2000))
    return {
        **terms(params),
        "mode": d.mode(p),
        "forbidden": jnp.exp(jnp.stack(forbidden)),
        "slope": slope,
        "draws": draws,
    }


@pytest.fixture(scope="module")
def by_hand():
    compiled = jax.jit(numbers)
    return {scale: jax.device_get(compiled(PARAMS, scale, KEY)) for scale in (0.0, 0.5, 1e4)}


def test_masked_numbers_by_hand(by_hand):
    got = by_hand[0.0]
    at_mean = -0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(got["log_prob"], math.log(0.75) + at_mean + math.log(0.5), rtol=1e-5)
    np.testing.assert_allclose(got["entropy"], QUARTER_ENTROPY + NORMAL_ENTROPY + math.log(2), rtol=1e-5)
    np.testing.assert_allclose(got["kl"], 0.25 * math.log(0.5) + 0.75 * math.log(1.5), rtol=1e-5)
    np.testing.assert_allclose(got["back"], 0.5 * math.log(2) + 0.5 * math.log(2 / 3), rtol=1e-5)
    # Not a = 2, whose logit is 9, nor the first of b, whose logit is 5.
    assert got["mode"]["a"] == 1 and got["mode"]["b"][1].tolist() == [1, 0]


def test_forbidden_categories_have_probability_and_gradient_0(by_hand):
    drawn = by_hand[0.0]["draws"]
    assert set(np.unique(drawn["a"])) == {0, 1} and set(np.unique(drawn["b"][1][:, 1])) == {0, 2}
    assert set(np.unique(drawn["b"][1][:, 0])) == {1}
    np.testing.assert_allclose(np.mean(drawn["a"] == 1), 0.75, atol=0.04)
    forbidden = np.concatenate([~MASK["a"], [False, False], ~MASK["b"][1]])
    for got in by_hand.values():
        assert got["forbidden"].tolist() == [0.0, 0.0]
        assert np.isfinite(got["slope"]).all()
        assert not got["slope"][forbidden].any() and got["slope"][:2].any()


def test_masked_params_without_a_mask_are_the_params():
    d = distribution(SPEC)
    assert masked(d, PARAMS, ()) is PARAMS and masked(d, PARAMS, {"task": 1}) is PARAMS
    np.testing.assert_array_equal(masked(d, PARAMS, {"action_mask": MASK}), d.mask(PARAMS, MASK))
    with pytest.raises(ValueError, match="only categories"):
        d.mask(PARAMS, {**MASK, "b": (np.ones(1, bool), MASK["b"][1])})


# Their form.

GRID = MultiDiscrete([[2, 3], [2, 2]])
FORMS = {
    "array": (Discrete(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
    "bools": (Discrete(3), np.array([True, False, True]), [1, 0, 1]),
    "list": (Discrete(3), [0, 0, 1], [0, 0, 1]),
    "tuple": (MultiDiscrete([2, 3]), (np.array([1, 0]), np.array([0, 1, 1])), [1, 0, 0, 1, 1]),
    "equal": (MultiDiscrete([2, 2]), np.array([[1, 0], [0, 1]]), [1, 0, 0, 1]),
    "grid": (GRID, (([1, 0], [0, 1, 1]), ([1, 1], [0, 1])), [1, 0, 0, 1, 1, 1, 1, 0, 1]),
}


@pytest.mark.parametrize("name", FORMS)
def test_masks_in_gymnasiums_form(name):
    space, mask, expected = FORMS[name]
    spec = spaces.from_gymnasium(space)
    got = convert(spec, mask, (), np.bool_(False))
    assert got.dtype == np.bool_ and got.tolist() == [bool(x) for x in expected]
    assert mask_spec(spec).shape == got.shape
    space.seed(0)  # Gymnasium reads it alike
    as_int8 = jax.tree.map(lambda x: np.asarray(x, np.int8), mask, is_leaf=lambda x: not isinstance(x, tuple))
    if name != "equal":
        batch = jax.tree.map(lambda x: np.asarray(x)[None], as_int8)
        np.testing.assert_array_equal(convert(spec, batch, (1,), np.zeros(1, bool))[0], got)
        chosen = np.ravel(spaces.to_agent(spec, space.sample(as_int8)))
        starts = np.cumsum([0, *getattr(spec, "nvec", ())][: chosen.size])
        assert got[starts + chosen].all()


def test_nested_masks_allow_what_they_leave_out():
    everything = convert(SPEC, {}, (2,), np.zeros(2, bool))
    assert everything["a"].all() and everything["b"][0] == () and everything["b"][1].shape == (2, 5)
    some = convert(SPEC, {"b": (None, (np.array([0, 1]), np.array([1, 0, 0])))}, (), np.bool_(False))
    assert some["a"].all() and some["b"][1].tolist() == [False, True, True, False, False]


@pytest.mark.parametrize(
    "space, mask, words",
    [
        (Discrete(3), np.zeros(3, np.int8), "allows nothing"),
        (Discrete(3), np.ones(4, np.int8), r"int8 \[4\]; expected int8 or bool \[3\]"),
        (Discrete(3), np.ones(3), r"float64 \[3\]; expected"),
        (Discrete(3), np.array([1, 2, 0]), "numbers besides 0 and 1"),
        (
            MultiDiscrete([2, 3]),
            np.ones(5, np.int8),
            r"5 parts; expected a tuple of 2 arrays of the sizes \(2, 3\)",
        ),
        (MultiDiscrete([2, 3]), (np.ones(2, np.int8), np.zeros(3, np.int8)), "allows nothing"),
        (MultiDiscrete([2, 3]), 1, "is a int; expected a tuple"),
        (ACTION, {"c": [1, 1]}, r"\"'c'\".*keys among"),
        (ACTION, [1, 1], "is a list; expected a dict"),
        (ACTION, {"b": ([1, 1],)}, r"\['b'\] is a tuple; expected a tuple of 2"),
        (ACTION, {"b": ([1, 1], None)}, r"\['b'\]\[0\] masks a Box"),
    ],
)
def test_masks_that_cannot_be_used(space, mask, words):
    with pytest.raises(MaskError, match=words):
        convert(spaces.from_gymnasium(space), mask, (), np.bool_(False))


# Their way through the adapters.


class Masked(gym.Env):
    """Episodes of 3 steps; step t of them may be answered with ``t`` and ``(draw, 1)`` only; all zero at the end."""

    action_space = Dict({"a": Discrete(5, start=1), "b": MultiDiscrete([3, 2])})
    observation_space = Dict(
        {
            "x": Box(0, 9, (1,)),
            "may": Dict({"a": MultiBinary(5), "b": Tuple((MultiBinary(3), MultiBinary(2)))}),
        }
    )

    def __init__(self, broken=None, at=2):
        self.broken, self.at, self.total = broken, at, 0

    def _say(self):
        a, b = np.zeros(5, np.int8), (np.zeros(3, np.int8), np.zeros(2, np.int8))
        if self.t < 3:
            self.draw = int(self.np_random.integers(3))
            a[self.t] = b[0][self.draw] = b[1][1] = 1
        mask = said = {"a": a, "b": b}
        if self.broken and self.total == self.at:
            said = {"zero": {**mask, "a": a * 0}, "shape": {**mask, "a": a[:4]}, "none": None}[self.broken]
        seen = said if said is not mask and self.broken == "zero" else mask
        self.broken = self.broken if said is mask else None  # once
        return {"x": np.array([self.t], np.float32), "may": seen}, {"action_mask": said}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._say()

    def step(self, action):
        assert action["a"] == 1 + self.t and action["b"].tolist() == [self.draw, 1], action
        self.t, self.total = self.t + 1, self.total + 1
        observation, info = self._say()
        return observation, 1.0, self.t == 3, False, info


def masked_actions(extra):
    """What alone is allowed, in the environment's coordinates."""
    mask = extra["action_mask"]
    b = np.stack([mask["b"][:, :3].argmax(1), mask["b"][:, 3:].argmax(1)], 1)
    return {"a": 1 + mask["a"].argmax(1), "b": b}


def rows_of(group, messages):
    by_slot = [[] for _ in range(group.num_slots)]
    for _ in range(messages):
        timestep, ids = group.recv(10.0)
        for k, slot in enumerate(ids.tolist()):
            row = (timestep.first[k], timestep.last[k], timestep.extra["action_mask"]["a"][k])
            by_slot[slot].append(tuple(np.array(x) for x in (*row, timestep.extra["action_mask"]["b"][k])))
        group.send(masked_actions(timestep.extra), ids)
    return by_slot


def single(source, **options):
    return GymGroup(lambda: Masked(**options), 3, seed_of, name="masked", action_mask=source, first_slot=10)


SOURCES = ["info.action_mask", "observation.may"]


@pytest.mark.parametrize("source", SOURCES)
def test_single_environments_give_their_masks(source):
    rows = rows_of(single(source), 60)
    for slot_rows in rows:
        for t, (first, last, a, b) in enumerate(slot_rows):
            assert first == (t % 4 == 0) and last == (t % 4 == 3)
            assert a.dtype == b.dtype == np.bool_ and (
                a.all() if last else a.tolist() == [k == t % 4 for k in range(5)]
            )
            assert b.all() if last else b.sum() == 2


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_vector_environments_give_the_same_masks(mode, source):
    env = SyncVectorEnv([Masked] * 3, autoreset_mode=mode)
    if (
        mode is AutoresetMode.NEXT_STEP
    ):  # its sub-environments see no action at a reset, but this group's see one
        pass
    group = VectorGroup(env, seed_of, name="masked", action_mask=source)
    np.testing.assert_equal(
        [r[:40] for r in rows_of(group, 60)], [r[:40] for r in rows_of(single(source), 40)]
    )


class Lenient(Masked):
    def step(self, action):
        return super().step({"a": 1 + self.t, "b": np.array([self.draw, 1])})


@pytest.mark.parametrize("source", SOURCES)
def test_masks_keep_the_contract_and_continue_exactly(source):
    make = lambda: GymGroup(Lenient, 2, seed_of, name="lenient", action_mask=source)  # noqa: E731
    assert check_group(make, steps=30) == []
    for steps in (1, 4, 6):  # at its start, after an end, in an episode
        one, other = make(), make()
        rows_of(one, steps)
        assert other.set_state(one.get_state())
        np.testing.assert_equal(rows_of(one, 9), rows_of(other, 9))


def test_the_mask_of_a_first_row_that_waits_is_there_after_a_resume():
    class Blind(Lenient):
        """Shows nothing of its state, and of its episodes only those with a seed can be replayed."""

        def reset(self, *, seed=None, options=None):
            self._np_random = np.random.default_rng() if seed is None else None
            return self.hidden(*super().reset(seed=seed))

        def step(self, action):
            observation, _, terminated, truncated, info = super().step(action)
            observation, info = self.hidden(observation, info)
            return observation, 0.0, terminated, truncated, info

        def hidden(self, observation, info):
            return jax.tree.map(np.zeros_like, observation), info

    make = lambda: GymGroup(Blind, 2, seed_of, name="blind", action_mask="info.action_mask")  # noqa: E731
    one, other, third = make(), make(), make()
    rows_of(one, 6)  # in the second episode
    assert not other.set_state(one.get_state())  # new lives, whose first rows wait
    third._first_extra["action_mask"]["b"][:] = False
    assert third.set_state(other.get_state())
    np.testing.assert_equal(rows_of(other, 3), rows_of(third, 3))


def test_worker_processes_give_the_same_masks(here_importable):
    def told(workers):
        seeds = SlotSeeds(3, Role.TRAIN_ENV)
        options = {"workers": workers, "action_mask": "info.action_mask"}
        group, by_slot = make_group("learning_envs:Forbidding", 3, seeds, **options), [[] for _ in range(3)]
        try:
            for _ in range(25):
                timestep, ids = group.recv(10.0)
                mask = timestep.extra["action_mask"]
                for k, slot in enumerate(ids.tolist()):
                    by_slot[slot].append((mask[k].tolist(), timestep.observation[k].tolist()))
                group.send(3 + mask.argmax(1), ids)
        finally:
            group.close()
        return by_slot

    in_workers = told(2)
    assert in_workers == told(0)
    assert sum(all(mask) for rows in in_workers for mask, _ in rows) == 6  # two last rows each


@pytest.mark.parametrize("source", SOURCES)
def test_a_row_whose_mask_cannot_be_used_is_left_out_where_that_is_asked_for(source):
    made = iter(range(3))
    make = lambda: Masked(broken="zero" if next(made) == 1 else None)  # noqa: E731
    options = {"name": "masked", "action_mask": source, "on_bad_value": "restart"}
    group = GymGroup(make, 3, seed_of, **options)
    rows = rows_of(group, 9)
    assert [(f.slot, f.reason, f.steps) for f in group.take_failures()] == [(1, "bad_value", 2)]
    assert group.run_ids().tolist() == [0, 1, 0]
    first = [bool(row[0]) for row in rows[1]]
    assert first == [True, False, True, False, False, False, True, False, False]  # its row 2 is a reset


def test_an_extra_of_another_form_is_found():
    group = GymGroup(Lenient, 2, seed_of, name="lenient", action_mask="info.action_mask")
    recv = group.recv
    group.recv = lambda timeout_s: (lambda t, ids: (t._replace(extra=()), ids))(*recv(timeout_s))
    assert [f.what for f in check_group(lambda: group, steps=5)] == ["extra's structure"]


@pytest.mark.parametrize(
    "broken, vector, words",
    [
        ("zero", False, r"the action mask\['a'\] allows nothing"),
        ("zero", True, r"the action mask\['a'\] allows nothing"),
        ("shape", False, r"\['a'\] is int8 \[4\]; expected int8 or bool \[5\]"),
        ("none", False, "the action mask is None"),
    ],
)
def test_a_broken_mask_names_env_slot_and_step(broken, vector, words):
    made = iter(range(3))
    make = lambda: Masked(broken=broken if next(made) == 1 else None)  # noqa: E731
    options = {"name": "masked", "action_mask": "info.action_mask", "first_slot": 10}
    group = (
        VectorGroup(SyncVectorEnv([make] * 3), seed_of, **options)
        if vector
        else GymGroup(make, 3, seed_of, **options)
    )
    with pytest.raises(EnvironmentFailure, match=rf"env masked slot 11 step 2: .*{words}"):
        rows_of(group, 5)


def test_a_missing_mask_and_one_in_the_observation_that_allows_nothing():
    class Silent(Lenient):
        def step(self, action):
            return (*super().step(action)[:4], {})

    options = {"name": "silent", "action_mask": "info.action_mask"}
    for group in (
        GymGroup(Silent, 2, seed_of, **options),
        VectorGroup(SyncVectorEnv([Silent] * 2), seed_of, **options),
    ):
        with pytest.raises(EnvironmentFailure, match=r"env silent slot 0 step 1: .*info: no 'action_mask'"):
            rows_of(group, 3)
    with pytest.raises(
        EnvironmentFailure, match=r"env masked slot 10 step 2: the action mask\['a'\] allows nothing"
    ):
        rows_of(single("observation.may", broken="zero"), 5)


def test_sources_that_cannot_be():
    spec = spaces.from_gymnasium(Masked.observation_space)
    for source, words in {
        "observation.my": "no 'my'; there is 'may', 'x'",
        "observation.may.c": "no 'may.c'; there is 'a', 'b'",
        "observation.x": r"is a ndarray; expected a dict",
    }.items():
        with pytest.raises(ConfigError, match=f"env masked: env.action_mask is .*{words}"):
            Masks(source, spec, spaces.from_gymnasium(Masked.action_space), name="masked")
    with pytest.raises(ConfigError, match="no part of its action space can be masked"):
        Masks("info.m", spec, spaces.from_gymnasium(Box(-1, 1, (2,))), name="masked")
    for source in ("infos.action_mask", "info", "observation."):
        with pytest.raises(ConfigError, match=r"expected info.action_mask, or observation.KEY"):
            tiny(env__action_mask=source)


def test_groups_that_give_no_masks_say_so():
    from headrace.envs import registry

    registry.register("unmasked", lambda r: GymGroup(Lenient, r.num_slots, r.seed_of, name="x"))
    try:
        with pytest.raises(ConfigError, match="its GymGroup gives no action masks"):
            make_group("unmasked:x", 1, seed_of, action_mask="info.action_mask")
    finally:
        del registry._FACTORIES["unmasked"]
    pytest.importorskip("envpool")
    with pytest.raises(ConfigError, match="EnvPool's infos hold no masks"):
        make_group("envpool:CartPole-v1", 1, seed_of, action_mask="info.action_mask")


# Their way to the loss.


def test_the_loss_sees_the_masks_that_were_acted_under(here_importable):
    config = tiny(env__id="learning_envs:Forbidding", env__action_mask="info.action_mask")
    parts = parts_of(config)
    try:
        batches = collect(parts, 3)
        agent, forbidden = parts.agent, 0
        grads = jax.jit(agent.phases[0].grads)
        for batch in batches:
            rows = batch.trajectory.rows
            mask = rows.timestep.extra["action_mask"][:-1]
            valid = ~rows.timestep.last[:-1]
            assert mask.dtype == np.bool_ and mask[rows.timestep.last[:-1]].all()
            assert np.take_along_axis(mask, rows.action[:-1, :, None], -1)[valid].all()
            probability = np.asarray(jax.nn.softmax(rows.extras[:-1]))
            assert not probability[~mask].any()
            forbidden += int((~mask).sum())
            # Learning with the params that acted: where the mask is the same, π is μ.
            sums = grads(parts.learner.state, batch.trajectory, KEY)[2].metrics
            weight = float(valid.sum())
            np.testing.assert_allclose(sums["rho_clipped"] / weight, 1.0, rtol=1e-5)
            assert abs(sums["kl"] / weight) < 1e-6
        assert forbidden > 50
    finally:
        parts.close()


def test_what_is_forbidden_is_never_done(tmp_path, here_importable):
    """Forbidden actions cost 10; among those allowed one pays 1. A random choice of them gets 3."""
    Forbidding.made.clear()
    changes = {
        "env.id": "learning_envs:Forbidding",
        "env.action_mask": "info.action_mask",
        "env.workers": 0,
        "log.panel": False,
    }
    config = headrace.config("impala", total_steps=8000, runtime="sync", run=str(tmp_path / "run"), **changes)
    headrace.train(config)
    assert headrace.evaluate(tmp_path / "run", episodes=20)["return_mean"] > 6.0
    assert sum(env.steps for env in Forbidding.made) >= 8000
    assert sum(env.forbidden for env in Forbidding.made) == 0


def test_taxi_goes_on_exactly_and_its_policy_takes_masks(tmp_path, monkeypatch):
    options = {"env__id": "Taxi-v4", "env__action_mask": "info.action_mask", "total_steps": 96}
    options["checkpoint__every_steps"] = 1
    expected = headrace.train(tiny(tmp_path / "whole", **options))
    killed_after(monkeypatch, 4, tiny(tmp_path / "cut", **options))
    assert headrace.train(tiny(tmp_path / "cut", **options))["params_sha256"] == expected["params_sha256"]
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")

    policy, env = headrace.load(tmp_path / "cut"), gym.make("Taxi-v4")
    (observation, info), carry = env.reset(seed=1), policy.initial_carry()
    for _ in range(10):
        mask = info["action_mask"]
        action, carry = policy.act(observation, carry, action_mask=mask)
        assert mask[action] == 1
        observation, _, _, _, info = env.step(action)
    assert math.isfinite(policy.value(observation, carry, action_mask=info["action_mask"]))
    with pytest.raises(ValueError, match=r"masks from info.action_mask; expected action_mask="):
        policy.act(observation, carry)
    with pytest.raises(ValueError, match="allows nothing"):
        policy.act(observation, carry, action_mask=np.zeros(6, np.int8))
