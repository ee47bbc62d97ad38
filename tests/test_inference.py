"""Acting: what a slot is answered depends on its own history alone, and learning sees what acting saw."""

import jax
import numpy as np
import pytest
from helpers import collect, make_async, parts_of, tiny

from headrace.inference.actor import ActorInference, bucket, compile_inference
from headrace.inference.messages import Request
from headrace.networks.actor_critic import actor_critic
from headrace.networks.trajectory import input_of_trajectory
from headrace.ops.distributions import distribution
from headrace.runtime.driver import Driver
from headrace.seeds import Role
from headrace.types import TimeStep

CASES = {
    "gru, previous action": {"agent__network__core": "gru", "agent__network__prev_action_reward": True},
    "stack longer than a trajectory": {
        "agent__network__frame_stack": 8,
        "agent__network__prev_action_reward": True,
    },
    "lstm, burn-in": {"agent__network__core": "lstm", "agent__burn_in": 3},
    "all": {
        "agent__network__core": "lstm",
        "agent__burn_in": 6,
        "agent__network__frame_stack": 3,
        "agent__network__prev_action_reward": True,
        "agent__network__separate_value": True,
    },
}


def network_of(parts):
    config, spec = parts.config.agent, parts.spec
    return actor_critic(
        config.network, spec.observation, spec.action, distribution(spec.action, box=config.box_policy).size
    )


def assert_reproduced(parts, batches):
    """Unrolled from the stored carry, the params that acted give the policy that acted at every row but the last."""
    network = network_of(parts)
    unroll = jax.jit(lambda b: network.unroll(parts.learner.state.params, input_of_trajectory(b), b.carry)[0])
    middle_first = 0
    for batch in batches:
        trajectory = batch.trajectory
        got = np.asarray(unroll(trajectory).policy)
        np.testing.assert_allclose(got[:-1], trajectory.rows.extras[:-1], rtol=1e-5, atol=1e-5)
        assert not trajectory.rows.extras[-1].any()
        middle_first += int(trajectory.rows.timestep.first[1:-1].sum())
    assert middle_first > 5
    assert np.std(got[:-1], axis=(0, 1)).max() > 0.03  # the policies are not all alike


@pytest.mark.parametrize(
    ("case", "env"),
    [
        ("gru, previous action", "Pendulum-v1"),
        ("stack longer than a trajectory", "CartPole-v1"),
        ("lstm, burn-in", "CartPole-v1"),
        ("all", "Pendulum-v1"),
    ],
)
def test_unroll_reproduces_the_policy_that_acted(case, env):
    config = tiny(env__id=env, env__max_episode_steps=6, experience__max_lag=9, **CASES[case])
    parts = parts_of(config)
    assert_reproduced(parts, collect(parts, 24))


def test_unroll_reproduces_asynchronous_slots_and_new_lives():
    config = tiny(env__id="Pendulum-v1", env__max_episode_steps=6, experience__max_lag=30, **CASES["all"])
    parts = parts_of(config)
    groups = make_async(config, parts)
    driver, batches, rng = Driver(parts.lanes), [], np.random.default_rng(1)
    while len(batches) < 25:
        assert driver.turn()
        while items := parts.experience.take(0):
            batches.append(parts.experience.collate(items, 0))
            parts.experience.finished(items)
        if rng.random() < 0.1:
            group = groups[rng.integers(2)]
            if len(ready := group.ready()):
                group.restart(int(rng.choice(ready)))
    assert parts.experience.cut > 3
    assert_reproduced(parts, batches)


def histories(batches):
    """Rows of each slot in order of item, ``{slot: [(action, reward)]}``, and the policies."""
    rows, policies = {}, {}
    for batch in batches:
        t = batch.trajectory
        for i, item in enumerate(batch.items):
            rows.setdefault(item.slot, []).append(
                (item.start, t.rows.action[:-1, i], t.rows.timestep.reward[:, i])
            )
            policies.setdefault(item.slot, []).append(t.rows.extras[:-1, i])
    return rows, policies


def test_grouping_and_order_change_no_slot():
    options = {"env__max_episode_steps": 6, "experience__max_lag": 30, "agent__batch_size": 1, **CASES["all"]}
    config = tiny(**options)
    lockstep, asynchronous, one_group = (
        parts_of(c) for c in (config, config, tiny(env__groups=1, **options))
    )
    make_async(config, asynchronous)
    rows, policies = histories(collect(lockstep, 40))
    for other in (asynchronous, one_group):
        rows2, policies2 = histories(collect(other, 60))
        for slot in range(4):
            n = min(len(rows[slot]), len(rows2[slot]))
            assert n >= 5
            for a, b in zip(rows[slot][:n], rows2[slot][:n], strict=True):
                assert a[0] == b[0]
                np.testing.assert_array_equal(a[1], b[1])
                np.testing.assert_array_equal(a[2], b[2])
            np.testing.assert_allclose(policies[slot][:n], policies2[slot][:n], rtol=1e-5, atol=1e-5)
    assert len({tuple(np.concatenate([r[1] for r in rows[s][:5]])) for s in range(4)}) == 4


def message(rng, ids, first=False):
    n, no = len(ids), np.zeros(len(ids), bool)
    return TimeStep(
        rng.normal(size=(n, 4)).astype(np.float32), np.ones(n, np.float32), np.full(n, first), no, no
    )


def inference_of(parts, slots, training=True, seed=0):
    return ActorInference(
        parts.agent, parts.spec, np.arange(slots), compile_inference(parts.agent, training), parts.newest, seed,
        Role.TRAIN_ACTION,
    )  # fmt: skip


@pytest.fixture(scope="module")
def lstm_parts():
    return parts_of(tiny(agent__network__core="lstm", agent__network__frame_stack=2))


def answers(inference, timestep, ids, lives=None):
    ids = np.asarray(ids, np.int32)
    lives = np.zeros(len(ids), np.int64) if lives is None else np.asarray(lives)
    return inference.answer(inference.submit(Request(timestep, ids, lives)), with_carry=True)


def test_buckets():
    assert [bucket(n, 12) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]
    assert [bucket(n, 3) for n in (1, 2, 3)] == [1, 2, 3]


def test_subsets_answer_as_the_whole_does(lstm_parts):
    rng = np.random.default_rng(0)
    whole, parted = inference_of(lstm_parts, 5), inference_of(lstm_parts, 5)
    for turn in range(6):
        timestep = message(rng, range(5), first=turn in (0, 3))
        expected = answers(whole, timestep, range(5))
        order = rng.permutation(5)
        cuts = np.split(order, sorted(rng.choice(np.arange(1, 5), 2, replace=False)))
        for ids in cuts:
            got = answers(parted, jax.tree.map(lambda x, i=ids: x[i], timestep), ids)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                assert len(a) == len(ids)
                np.testing.assert_allclose(a, b[ids], rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(got.action, expected.action[ids])


def test_a_new_life_forgets_and_draws_other_noise(lstm_parts):
    rng = np.random.default_rng(0)
    inference, fresh = inference_of(lstm_parts, 3), inference_of(lstm_parts, 3)
    for _ in range(4):
        timestep = message(rng, range(3))  # no row is first: only the run id tells
        before = answers(inference, timestep, range(3))
    timestep = message(rng, range(3))
    after = answers(inference, timestep, range(3), [0, 7, 0])
    new = answers(fresh, timestep, range(3))
    assert any(np.abs(x[0]).max() > 0 for x in jax.tree.leaves(before.carry))
    for carry in jax.tree.leaves(after.carry):
        assert not carry[1].any() and carry[0].any() and carry[2].any()
    np.testing.assert_allclose(after.extras[1], new.extras[1], rtol=1e-5)  # as if nothing had been seen
    assert np.abs(after.extras[0] - new.extras[0]).max() > 1e-4
    key = np.asarray(inference._slots.key)
    assert (key[0] == np.asarray(fresh._slots.key)[0]).all() and (
        key[1] != np.asarray(fresh._slots.key)[1]
    ).any()
    assert np.asarray(inference._slots.count).tolist() == [5, 1, 5]


def test_state_continues_exactly(lstm_parts):
    rng = np.random.default_rng(0)
    a, b = inference_of(lstm_parts, 3), inference_of(lstm_parts, 3)
    for _ in range(3):
        answers(a, message(rng, range(3)), range(3), [0, 2, 1])
    state = a.get_state()
    b.set_state(state)
    for _ in range(3):
        timestep = message(rng, range(3))
        x, y = answers(a, timestep, range(3), [0, 2, 1]), answers(b, timestep, range(3), [0, 2, 1])
        jax.tree.map(np.testing.assert_array_equal, x, y)
    assert all(x.flags.owndata or x.base is not None for x in state["slots"])


def test_greedy_ignores_the_seed_and_sampling_does_not(lstm_parts):
    rng = np.random.default_rng(0)
    messages = [message(rng, range(3)) for _ in range(30)]

    def actions(training, seed):
        inference = inference_of(lstm_parts, 3, training, seed)
        return np.stack([answers(inference, m, range(3)).action for m in messages])

    np.testing.assert_array_equal(actions(False, 0), actions(False, 1))
    assert (actions(True, 0) != actions(True, 1)).mean() > 0.05
    np.testing.assert_array_equal(actions(True, 3), actions(True, 3))


def test_answers_use_the_newest_params_and_name_their_version(lstm_parts):
    from headrace.inference.actor import Published

    inference = inference_of(lstm_parts, 3)
    rng, old = np.random.default_rng(0), lstm_parts.newest.value
    timestep = message(rng, range(3), first=True)
    before = answers(inference, timestep, range(3))
    changed = Published(jax.tree.map(lambda x: x * 2 + 0.1, old.params), 17, old.progress)
    lstm_parts.newest.value = changed
    try:
        pending = inference.submit(Request(timestep, np.arange(3, dtype=np.int32), np.zeros(3, np.int64)))
        assert pending.version == 17
        assert np.abs(inference.answer(pending, False).extras - before.extras).max() > 1e-3
    finally:
        lstm_parts.newest.value = old
