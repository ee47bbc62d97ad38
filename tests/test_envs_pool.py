"""Environments in worker processes: the contract, equality with the thread, and every way to fail."""

import gc
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest

from headrace.envs import gym_state
from headrace.envs.conformance import check_group
from headrace.envs.pool import memory
from headrace.envs.pool.memory import Field
from headrace.envs.pool.probe import Probe
from headrace.envs.registry import describe, make_group, measure, steps_in_thread
from headrace.errors import ConfigError, EnvironmentFailure, EnvironmentIdError, UnsupportedSpaceError
from headrace.runtime.survey import share_of, workers_for
from headrace.seeds import Role, SlotSeeds

SEEDS = SlotSeeds(5, Role.TRAIN_ENV)
NESTED = "headrace.envs.memory:make_cartpole_without_velocities"


def pool(name="Counting", slots=4, workers=2, seeds=SEEDS, **options):
    return make_group(f"hostile_envs:{name}", slots, seeds, workers=workers, **options)


def children():
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def nothing_left():
    before = {(p.pid, p.create_time()) for p in children()}
    shm = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    gc.collect()
    until = time.monotonic() + 15
    while {(p.pid, p.create_time()) for p in children()} - before and time.monotonic() < until:
        time.sleep(0.05)
    assert {(p.pid, p.create_time()) for p in children()} <= before
    assert not os.path.isdir("/dev/shm") or set(os.listdir("/dev/shm")) <= shm


def play(group, messages, per_slot_actions=True):
    """Rows by slot, each (life, observation…, reward, first, terminated, truncated); actions from one stream a slot."""
    streams = [np.random.default_rng((7, slot)) for slot in range(group.num_slots)]
    told = [[] for _ in range(group.num_slots)]
    for _ in range(messages):
        timestep, ids = group.recv(10.0)
        lives = group.run_ids()
        for k, slot in enumerate(ids.tolist()):
            leaves = np.ravel(timestep.observation[k]).tolist()
            flags = [x[k].item() for x in timestep[1:5]]
            told[slot].append((int(lives[slot]), *leaves, *flags))
        group.send(np.array([streams[slot].integers(2) for slot in ids]), ids)
    return told


def test_the_contract_is_kept():
    assert check_group(lambda: pool(), steps=100) == []


def test_the_contract_is_kept_by_first_ready_batches():
    assert check_group(lambda: pool("SlowSometimes", batch_size=2), steps=40) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_rows_are_those_of_the_thread(workers):
    in_thread = make_group("CartPole-v1", 5, SEEDS, max_episode_steps=30)
    pooled = make_group("CartPole-v1", 5, SEEDS, max_episode_steps=30, workers=workers)
    try:
        assert play(pooled, 120) == play(in_thread, 120)
    finally:
        pooled.close()
        in_thread.close()


def test_h3_the_number_of_workers_changes_no_environment():
    lists = []
    for workers in (1, 2):
        group = make_group("hostile_envs:Counting", 2, SEEDS, workers=workers, kwargs={"length": 3})
        try:
            lists.append([[row[2] for row in rows if row[4]] for rows in play(group, 20)])
        finally:
            group.close()
    assert lists[0] == lists[1] and len(lists[0][0]) == 5
    assert len({x for rows in lists[0] for x in rows}) == 10


def test_first_ready_batches_do_not_wait_for_the_slow():
    group = pool("SlowSometimes", slots=4, workers=4, batch_size=1, seeds=SlotSeeds(11, Role.TRAIN_ENV))
    try:
        told = play(group, 60)
        counts = [len(rows) for rows in told]
        assert max(counts) > 2 * min(counts) > 0
    finally:
        group.close()


def test_infos_of_last_rows_come_through():
    group = make_group("hostile_envs:Counting", 2, SEEDS, workers=2, kwargs={"length": 3})
    try:
        play(group, 5)
        assert sorted(group.take_infos()) == [(0, {"final": 3.0}), (1, {"final": 3.0})]
        assert group.take_infos() == []
    finally:
        group.close()


# Failures.


@pytest.mark.parametrize("name", ["Raises", "Quits"])
@pytest.mark.parametrize("workers", [0, 2])
def test_one_that_raises_is_made_anew(name, workers):
    group = pool(name, workers=workers, max_restarts=3)
    try:
        told = play(group, 12)
        failures = group.take_failures()
    finally:
        group.close()
    assert sorted((f.slot, f.reason, f.steps) for f in failures) == [(s, "raised", 6) for s in range(4)]
    assert all(f"hostile_envs:{name} slot {f.slot} step 7: step() raised" in f.message for f in failures)
    for rows in told:
        assert [row[0] for row in rows] == [0] * 7 + [1] * 5  # first and six steps, then a new life
        assert [row[4] for row in rows] == [True] + [False] * 6 + [True] + [False] * 4
        assert [row[1] for row in rows] == [*range(7), *range(5)]
        assert rows[0][2] != rows[7][2]  # another seed


@pytest.mark.parametrize("workers", [0, 1])
def test_beyond_the_budget_the_traceback_is_told(workers):
    group = make_group("hostile_envs:Raises", 1, SEEDS, workers=workers, max_restarts=2, kwargs={"at": 3})
    try:
        with pytest.raises(
            EnvironmentFailure, match=r"slot 0 step 3: .* started anew 2 times in a row"
        ) as caught:
            play(group, 100)
        assert caught.value.__cause__ is not None
        assert "the simulator lost its way" in str(caught.value.__cause__)
        if workers:
            assert 'hostile_envs.py", line' in str(caught.value.__cause__)
    finally:
        group.close()


def test_a_process_that_dies_is_started_anew_and_the_others_go_on(tmp_path):
    group = make_group(
        "hostile_envs:DiesOnce", 4, SEEDS, workers=2, max_restarts=1, kwargs={"folder": str(tmp_path)}
    )
    try:
        told = play(group, 30)
        (failure,) = group.take_failures()
    finally:
        group.close()
    assert failure.reason == "died" and "exit status 7" in failure.message
    assert f"slot {failure.slot} step 7" in failure.message
    share = (0, 1) if failure.slot < 2 else (2, 3)
    for slot, rows in enumerate(told):
        lives = [row[0] for row in rows]
        assert lives == ([0] * 7 + [1] * 23 if slot in share else [0] * 30)
        assert all(
            row[4] for row, life, before in zip(rows, lives, [None, *lives], strict=False) if life != before
        )


def test_one_that_hangs_is_killed_and_the_rest_go_on(tmp_path):
    group = make_group(
        "hostile_envs:SleepsOnce", 2, SEEDS, workers=2, max_restarts=1, batch_size=1, step_timeout_s=1.0,
        kwargs={"folder": str(tmp_path)},
    )  # fmt: skip
    try:
        before, told = time.monotonic(), [0, 0]
        while not (failures := group.take_failures()):
            _, ids = group.recv(10.0)
            told[ids[0]] += 1
            group.send(np.zeros(len(ids), np.int64), ids)
            assert time.monotonic() - before < 60
        (failure,) = failures
        assert failure.reason == "hung" and "env.step_timeout_s = 1 s" in failure.message
        assert told[1 - failure.slot] > 20  # did not wait
        play(group, 10)
    finally:
        group.close()


def test_where_it_hung_is_told():
    group = make_group("hostile_envs:Sleeps", 1, SEEDS, workers=1, step_timeout_s=0.5)
    try:
        with pytest.raises(EnvironmentFailure, match=r"slot 0 step 7: hung") as caught:
            play(group, 10)
        assert "misbehave" in str(caught.value.__cause__)
    finally:
        group.close()


def test_a_loop_that_holds_the_interpreter_is_killed_too():
    group = make_group("hostile_envs:HoldsTheInterpreter", 1, SEEDS, workers=1, step_timeout_s=0.5)
    try:
        with pytest.raises(EnvironmentFailure, match=r"slot 0 step 7: hung"):
            play(group, 10)
    finally:
        group.close()


def test_an_answer_to_a_life_that_ended_goes_nowhere():
    group = pool("Counting", slots=2, workers=1, max_restarts=1)
    try:
        _, ids = group.recv(10.0)
        os.kill(group._workers[0].pid, signal.SIGKILL)
        group.send(np.zeros(2, np.int64), ids)
        timestep, ids = group.recv(10.0)
        assert timestep.first.all() and ids.tolist() == [0, 1] and group.run_ids().tolist() == [1, 1]
        (failure,) = group.take_failures()
        assert failure.reason == "died" and "SIGKILL" in failure.message
    finally:
        group.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_one_that_cannot_start(workers):
    before = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"no licence server.* started anew 2 times"):
        pool("CannotStart", workers=workers, max_restarts=2)
    assert time.monotonic() - before < 30


@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_starts_at_the_second_try(workers, tmp_path):
    group = pool(
        "StartsAtTheSecondTry", slots=1, workers=workers, max_restarts=1, kwargs={"folder": str(tmp_path)}
    )
    try:
        play(group, 3)
    finally:
        group.close()


def test_one_that_dies_at_its_start():
    with pytest.raises(EnvironmentFailure, match="exit status 9"):
        pool("DiesAtStart", max_restarts=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_one_whose_reset_raises(workers):
    with pytest.raises(EnvironmentFailure, match=r"slot 0 step 0: reset\(\) raised RuntimeError: no level"):
        pool("ResetRaises", workers=workers, max_restarts=1)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("workers", [0, 2])
def test_h2a_a_bad_reward_is_left_out_and_counted(workers, value):
    options = {"kwargs": {"value": value, "length": 50}, "on_bad_value": "restart"}
    group = make_group("hostile_envs:NotANumber", 4, SEEDS, workers=workers, **options)
    try:
        told = play(group, 20)
        failures = group.take_failures()
    finally:
        group.close()
    assert [(f.slot, f.reason) for f in sorted(failures)] == [(slot, "bad_value") for slot in range(4)]
    assert all("step 7: the reward is" in f.message for f in failures)
    for rows in told:
        assert np.isfinite([row[3] for row in rows]).all()
        assert [row[0] for row in rows] == [0] * 7 + [1] * 13  # the seventh step is nowhere
        assert rows[7][1] == 0 and rows[7][4]


@pytest.mark.parametrize("workers", [0, 2])
def test_h2a_a_bad_reward_ends_the_run_naming_it(workers):
    group = make_group("hostile_envs:NotANumber", 4, SEEDS, workers=workers, first_slot=8)
    try:
        with pytest.raises(
            EnvironmentFailure, match=r"slot (8|10) step 7: the reward is NaN; expected a finite"
        ):
            play(group, 20)
    finally:
        group.close()


def test_h2b_a_close_that_never_returns_is_killed_and_named():
    group = pool("NeverCloses", slots=2, workers=2)
    play(group, 3)
    before = time.monotonic()
    with pytest.warns(
        RuntimeWarning, match=r"worker \d, at slot \d, did not close within 5 s and was killed"
    ):
        group.close()
    assert time.monotonic() - before < 15


def test_what_an_environment_started_ends_with_it():
    group = pool("Spawns", slots=1, workers=1)
    (sleep,) = [p for p in children() if p.name() == "sleep"]
    group.close()
    _, alive = psutil.wait_procs([sleep], timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("hostile_envs:Nowhere", EnvironmentIdError, "has no 'Nowhere'"),
        ("no_such_module:make", EnvironmentIdError, "no module"),
        ("NoSuchEnv-v0", EnvironmentIdError, "no environment"),
        ("__main__:make", ConfigError, "__main__ is another module"),
        ("vector:CartPole-v1", ConfigError, "cannot be stepped in worker processes"),
    ],
)
def test_what_is_no_environment_is_said_as_in_the_thread(name, error, match):
    with pytest.raises(error, match=match):
        make_group(name, 2, SEEDS, workers=1)


def test_a_space_that_cannot_be_carried_is_named():
    with pytest.raises(UnsupportedSpaceError, match="Text"):
        make_group("test_envs_pool:Textual", 1, SEEDS, workers=1)


class Textual:
    def __new__(cls):
        import gymnasium as gym
        from hostile_envs import Counting

        env = Counting()
        env.observation_space = gym.spaces.Text(5)
        return env


def test_h14a_what_does_not_fit_is_refused_with_both_sizes():
    with pytest.raises(
        ConfigError, match=r"2 slots needs \d{13,} bytes of shared memory, of which \d+ are free"
    ):
        pool("Counting", slots=2, spec=huge_spec())


def huge_spec():
    from hostile_envs import Counting

    from headrace.envs.contract import EnvSpec
    from headrace.spaces import BoxSpec, from_gymnasium

    dtype = np.dtype(np.float32)
    leaf = BoxSpec((1 << 40,), dtype, dtype, np.float32(-1), np.float32(1))
    return EnvSpec(leaf, from_gymnasium(Counting.action_space), 1, "huge")


def test_h14a_when_the_parent_is_killed_its_workers_die(tmp_path):
    code = (
        "import sys, time, os; sys.path.insert(0, sys.argv[1])\n"
        "from headrace.envs.registry import make_group\n"
        "from headrace.seeds import Role, SlotSeeds\n"
        "import numpy as np\n"
        "g = make_group('hostile_envs:Sleeps', 2, SlotSeeds(0, Role.TRAIN_ENV), workers=2, kwargs={'at': 2})\n"
        "for _ in range(2):\n"
        "    _, ids = g.recv(9.0); g.send(np.zeros(len(ids), np.int64), ids)\n"
        "print(*[p.pid for p in g._workers], flush=True); time.sleep(3600)\n"
    )
    here = str(Path(__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", code, here], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=15)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


# State.


def state_after(workers, messages=33):
    group = make_group("CartPole-v1", 5, SEEDS, max_episode_steps=25, workers=workers)
    play(group, messages)
    return group, group.get_state()


@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (2, 3), (0, 2), (2, 0)])
def test_state_goes_on_exactly_whatever_the_number_of_workers(saved, resumed):
    group, state = state_after(saved)
    other = make_group("CartPole-v1", 5, SEEDS, max_episode_steps=25, workers=resumed)
    try:
        assert other.set_state(state)
        assert play(other, 40) == play(group, 40)
    finally:
        group.close()
        other.close()


def test_parts_of_a_state_join_to_the_whole():
    group, state = state_after(0)
    group.close()
    parts = gym_state.split(state, [2, 0, 3])
    assert [part["num_slots"] for part in parts] == [2, 0, 3]
    joined = gym_state.join(parts)
    assert joined.keys() == state.keys()
    np.testing.assert_equal(joined, state)


def test_state_that_cannot_be_reproduced_begins_new_lives():
    group, state = state_after(2)
    state["last_reward"] = state["last_reward"] + 1
    other = make_group("CartPole-v1", 5, SEEDS, max_episode_steps=25, workers=2)
    try:
        assert not other.set_state(state)
        assert (other.run_ids() == 1).all()
        timestep, ids = other.recv(10.0)
        assert timestep.first.all() and len(ids) == 5
    finally:
        group.close()
        other.close()


# What is measured, and where environments are stepped.


def test_describe_and_measure_in_a_process():
    spec = describe("hostile_envs:Counting", workers=1)
    assert spec.observation.shape == (2,) and spec.name == "hostile_envs:Counting"
    slow = measure("hostile_envs:SlowSometimes")
    assert slow.spec == describe("hostile_envs:SlowSometimes", workers=1)
    assert slow.step_s > 0 and slow.cpu_s >= 0


@pytest.mark.parametrize(
    ("step_s", "cpu_s", "cores", "expected"),
    [(2e-3, 2e-3, 2, 2), (2e-3, 1.9e-3, 2, 2), (2e-3, 1e-3, 2, 4), (1.0, 1e-6, 2, 16), (0.0, 0.0, 4, 4)],
)
def test_one_worker_a_core_and_more_where_steps_wait(step_s, cpu_s, cores, expected):
    assert workers_for(Probe(None, step_s, cpu_s), cores) == expected


def test_workers_are_shared_evenly():
    assert [share_of(3, 2, index, 8) for index in range(2)] == [2, 1]
    assert [share_of(1, 2, index, 8) for index in range(2)] == [1, 1]
    assert share_of(9, 1, 0, 4) == 4 and share_of(0, 1, 0, 4) == 0


@pytest.mark.parametrize(
    ("name", "in_thread"),
    [
        ("CartPole-v1", True), ("gym:Acrobot-v1", True), ("FrozenLake-v1", True), ("envpool:Pong-v5", True),
        ("vector:CartPole-v1", True), (NESTED, True), ("__main__:make", True), ("hostile_envs:Counting", False),
        ("LunarLander-v3", False), ("Ant-v5", False),
    ],
)  # fmt: skip
def test_what_a_user_brings_is_stepped_in_workers(name, in_thread):
    assert steps_in_thread(name) is in_thread
    assert steps_in_thread(name, "vector")


def test_a_block_holds_its_arrays_apart():
    fields = [Field("a", (3,), np.dtype(np.uint8)), Field("b", (2, 2), np.dtype(np.float64))]
    fd = memory.allocate(fields, "a test")
    one, other = memory.arrays(fd, fields), memory.arrays(fd, fields)
    os.close(fd)
    one["a"][:], one["b"][:] = 255, 1.5
    assert other["a"].tolist() == [255] * 3 and (other["b"] == 1.5).all()


def test_standard_output_is_left_alone(capfd):
    with warnings.catch_warnings():
        group = pool(slots=1, workers=1)
        group.close()
    assert capfd.readouterr().out == ""
