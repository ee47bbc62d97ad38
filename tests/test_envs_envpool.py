"""EnvPoolGroup. EnvPool's own environments only; skipped where it is not installed."""

import itertools

import numpy as np
import pytest

from headrace.envs import describe, make_group
from headrace.envs.conformance import check_group
from headrace.errors import ConfigError, EnvironmentIdError, WaitTimeoutError
from headrace.seeds import Role, stream_seed

pytest.importorskip("envpool")


def seed_of(slot, life):
    return stream_seed(2, Role.TRAIN_ENV, slot, life)


@pytest.mark.parametrize(
    "env_id, steps", [("CartPole-v1", 300), ("FrozenLake-v1", 200), ("Pendulum-v1", 250), ("Pong-v5", 30)]
)
def test_contract(env_id, steps):
    assert check_group(lambda: make_group(f"envpool:{env_id}", 4, seed_of), steps=steps) == []


def test_atari_gives_single_frames_and_counts_them():
    spec = describe("envpool:Pong-v5")
    assert spec.observation.shape == (84, 84) and spec.observation.dtype == np.uint8
    assert spec.observation.low.shape == (84, 84) and spec.frame_skip == 4 and spec.action.n == 6
    assert describe("envpool:Pong-v5", kwargs={"stack_num": 3}).observation.shape == (3, 84, 84)
    assert describe("envpool:Pong-v5", kwargs={"gray_scale": False}).observation.shape == (3, 84, 84)
    assert describe("envpool:Pong-v5", kwargs={"frame_skip": 2}).frame_skip == 2
    assert describe("envpool:Pendulum-v1").frame_skip == 1


def test_received_arrays_are_never_written_again():
    group = make_group("envpool:Pong-v5", 4, seed_of, num_threads=2)
    rng, held, copies = np.random.default_rng(0), [], []
    for _ in range(50):
        timestep, ids = group.recv(10.0)
        held.append(timestep)
        copies.append([np.array(x) for x in timestep[:5]])
        group.send(rng.integers(0, 6, 4), ids)
    group.close()
    for now, then in zip(held, copies, strict=True):
        for x, y in zip(now[:5], then, strict=True):
            np.testing.assert_array_equal(x, y)
    frames = [t.observation for t in held]
    assert any((a != b).any() for a, b in itertools.pairwise(frames))
    assert not any(np.shares_memory(a, b) for a, b in itertools.pairwise(frames))


def test_seeds_are_by_slot_and_not_by_the_group():
    def first(slots, offset=0):
        return (
            make_group("envpool:CartPole-v1", slots, lambda s, life: seed_of(s + offset, life))
            .recv(10.0)[0]
            .observation
        )

    whole = first(4)
    assert len(np.unique(whole[:, 0])) == 4
    np.testing.assert_array_equal(first(2, offset=2), whole[2:])


def test_limit_truncations_are_counted_and_first_follows_last():
    group = make_group("envpool:Pendulum-v1", 3, seed_of, max_episode_steps=5)
    for t in range(13):
        timestep, ids = group.recv(10.0)
        assert timestep.first.tolist() == [t in (0, 6, 12)] * 3
        assert timestep.truncated.tolist() == [t in (5, 11)] * 3 and not timestep.terminated.any()
        assert (timestep.reward[timestep.first] == 0).all()
        group.send(np.zeros((3, 1)), ids)
    assert group.limit_truncations == 6


def test_answers_may_come_in_parts_and_out_of_order():
    whole, parts = (make_group("envpool:CartPole-v1", 3, seed_of) for _ in range(2))
    for _ in range(40):
        (a, ids), (b, ids_b) = whole.recv(10.0), parts.recv(10.0)
        np.testing.assert_array_equal(ids, ids_b)
        np.testing.assert_array_equal(a.observation, b.observation)
        whole.send(np.array([0, 1, 1]), ids)
        parts.send(np.array([1, 0]), np.array([2, 0], np.int32))
        with pytest.raises(WaitTimeoutError, match="slot 1"):
            parts.recv(0.1)
        parts.send(np.array([1]), np.array([1], np.int32))


def test_set_state_begins_new_lives():
    group = make_group("envpool:CartPole-v1", 2, seed_of)
    before = group.recv(10.0)[0].observation
    group.send(np.zeros(2, int), np.arange(2, dtype=np.int32))
    assert group.get_state() is None and not group.set_state({})
    assert group.run_ids().tolist() == [1, 1]
    timestep, _ = group.recv(10.0)
    assert timestep.first.all() and (timestep.observation != before).any()
    group.close()
    group.close()


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"episodic_life": True}, "episodic_life=True is not supported"),
        ({"frameskip": 4}, "nearest: frame_skip"),
        ({"batch_size": 2}, "sets itself"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        make_group("envpool:Pong-v5", 2, seed_of, kwargs=kwargs)


def test_unknown_task_names_the_nearest():
    with pytest.raises(EnvironmentIdError, match="Pong-v5"):
        make_group("envpool:Pnog-v5", 2, seed_of)


def test_without_envpool_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "envpool", None)
    with pytest.raises(EnvironmentIdError, match=r'pip install "headrace\[envpool\]"'):
        make_group("envpool:Pong-v5", 2, seed_of)
