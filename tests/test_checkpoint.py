"""Checkpoints: exact, whole or absent, and a restorable one at every moment."""

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from headrace.checkpoint import Checkpointer, flatten, join, kept, split, storage, unflatten
from headrace.checkpoint.marks import MARK
from headrace.errors import ConfigError, HeadraceError, RunDirectoryError, WaitTimeoutError


class Pair(NamedTuple):
    left: np.ndarray
    right: np.ndarray


def tree() -> dict:
    return {
        "u8": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "i64": np.array([2**53 + 1, -(2**62)], np.int64),
        "u64": np.array([2**64 - 1], np.uint64),
        "f64": np.array([np.pi, np.nan, -np.inf, 5e-324]),
        "bool": np.array([True, False]),
        "bf16": np.array([1.5, -2.0], ml_dtypes.bfloat16),
        "scalar": np.array(7, np.int32),
        "empty": np.zeros((0, 3), np.float32),
        "odd / name.['x']": {"deep": [np.float16([1, 2]), {"": np.array(1.0)}]},
        "pair": Pair(np.arange(3), np.arange(2.0)),
        "tuple": (np.zeros(2, np.complex64), np.ones((1, 2, 1), np.float32)),
    }


def assert_same(a, b):
    leaves_a, leaves_b = jax.tree.leaves(a), jax.tree.leaves(b)
    assert len(leaves_a) == len(leaves_b) > 0
    for x, y in zip(leaves_a, leaves_b, strict=True):
        assert type(y) is np.ndarray
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def saved(directory: Path, *steps: int, **options) -> None:
    with Checkpointer(directory, keep_latest=9, **options) as c:
        for step in steps:
            c.save(step, {"w": np.full(1000, step, np.float32), "n": np.array(step)}, {"step": step})


def test_round_trip_is_exact_with_and_without_a_structure(tmp_path):
    meta = {"text": "é\n", "list": [1, 2.5, None, True, {"a": []}], "inf": float("inf"), "big": 2**60}
    with Checkpointer(tmp_path / "c") as c:
        c.save(3, tree(), meta, metric=1.0)
        alike, bare = c.restore(like=tree()), c.restore()
    assert alike.step == bare.step == 3
    assert alike.meta == bare.meta == meta
    assert jax.tree.structure(alike.arrays) == jax.tree.structure(tree())
    assert_same(tree(), alike.arrays)
    expected = tree()
    expected["pair"] = expected["pair"]._asdict()
    expected["tuple"] = list(expected["tuple"])
    assert jax.tree.structure(bare.arrays) == jax.tree.structure(expected)
    assert_same(expected, bare.arrays)


def test_optimiser_states_and_keys(tmp_path):
    params = {"layer": {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}}
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = {"params": params, "opt": optimiser.init(params), "none": None, "empty": (), "e": {}}
    state["key"] = jax.random.key_data(jax.random.key(5))
    with Checkpointer(tmp_path) as c:
        c.save(1, state)
        back = c.restore(like=state).arrays
        assert jax.tree.structure(back) == jax.tree.structure(state)
        assert_same(jax.tree.map(np.asarray, state), back)
        with pytest.raises(ConfigError, match=r"\['key'\] is a typed PRNG key.*key_data"):
            c.save(2, {"key": jax.random.key(0)})
        with pytest.raises(ConfigError, match=r"\['a'\]\[0\] is a str"):
            c.save(2, {"a": ["text"]})
        with pytest.raises(ConfigError, match=r"meta\['a'\]\[1\] is a float32.*JSON"):
            c.save(2, {}, {"a": [1, np.float32(1)]})
        with pytest.raises(ConfigError, match="key 3; expected a string"):
            c.save(2, {}, {"a": {3: 1}})
        c.save(2, {}, {"only": "text"})
        assert c.restore() == (2, {}, {"only": "text"})


def test_what_does_not_fit_is_named():
    flat = flatten({"a": np.zeros(2), "b": np.zeros(3), "c": np.zeros(1, np.int32), "x": np.zeros(1)})
    like = {"a": np.zeros(2), "b": np.zeros(4), "c": np.zeros(1, np.int64), "d": np.zeros(1)}
    with pytest.raises(ConfigError) as error:
        unflatten(like, flat)
    text = str(error.value)
    assert "missing ['d']" in text and "unexpected ['x']" in text and "['a']" not in text
    assert "['b'] is float64[3], expected float64[4]" in text
    assert "['c'] is int32[1], expected int64[1]" in text
    shapes = {"a": jax.ShapeDtypeStruct((2,), np.float32)}
    assert unflatten(shapes, {"['a']": np.ones(2, np.float32)})["a"].sum() == 2


def test_the_caller_may_write_and_donate_at_once(tmp_path):
    host, device = np.zeros(2_000_000, np.float32), jnp.zeros(500_000)
    meta = {"list": [1]}
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    with Checkpointer(tmp_path) as c:
        gate = threading.Event()
        c._worker.submit(gate.wait, 20)  # the writing begins after all that follows
        c.save(1, {"host": host, "device": device}, meta)
        host[:] = 1
        device = bump(device)
        meta["list"].append(2)
        gate.set()
        back = c.restore()
    assert not back.arrays["host"].any() and not back.arrays["device"].any() and device[0] == 1
    assert back.meta == {"list": [1]}


def test_states_of_arrays_and_text_are_parted_and_joined(tmp_path):
    state = {"rng": {"name": "PCG64", "array": [1, np.arange(3), None]}, "dict": {}, "x": np.zeros(())}
    arrays, document = split(state)
    with Checkpointer(tmp_path) as c:
        c.save(1, arrays, {"state": document})
        back = c.restore()
    again = join(back.arrays, back.meta["state"])
    assert again["rng"]["name"] == "PCG64" and again["dict"] == {} and again["x"].shape == ()
    assert again["rng"]["array"][0] == 1 and again["rng"]["array"][2] is None
    assert (again["rng"]["array"][1] == np.arange(3)).all()


def test_kept_steps():
    options = {"keep_latest": 2, "keep_best": True, "milestone_every": 100}
    steps = [90, 110, 190, 205, 290, 310, 390]
    # milestones: 110 (first >= 100), 205, 310; latest 310, 390; best 190
    assert kept(steps, {90: 1.0, 190: 3.0, 290: 2.0}, **options) == {110, 190, 205, 310, 390}
    assert kept(steps, {90: 3.0, 190: 3.0}, **{**options, "milestone_every": None}) == {190, 310, 390}
    assert kept(steps, {90: 3.0}, keep_latest=1, keep_best=False, milestone_every=None) == {390}
    assert kept([], {}, **options) == set()


def test_latest_best_and_milestones_stay_on_disk(tmp_path):
    scores = {10: 1.0, 20: 9.0, 30: float("nan"), 40: None, 50: 2.0, 60: 3.0}
    with Checkpointer(tmp_path, milestone_every=25) as c:
        for step, score in scores.items():
            c.save(step, {"x": np.array(step)}, metric=score)
        c.wait()
        assert c.steps() == [20, 30, 50, 60] and c.best_step() == 20
    with Checkpointer(tmp_path, keep_latest=1, keep_best=False) as c:
        assert c.best_step() == 20
        c.save(70, {"x": np.array(70)})
        c.wait()
        assert c.steps() == [70] and c.best_step() is None
    assert [p.name for p in tmp_path.iterdir()] == ["70"]


def all_files(step_dir: Path) -> list[Path]:
    return sorted(p for p in step_dir.rglob("*") if p.is_file())


def test_h14b_any_file_of_the_newest_step_removed(tmp_path):
    saved(tmp_path / "good", 10, 20, 30)
    names = [p.relative_to(tmp_path / "good/30") for p in all_files(tmp_path / "good/30")]
    assert Path(MARK) in names and len(names) > 5
    for i, name in enumerate(names):
        run = tmp_path / str(i)
        shutil.copytree(tmp_path / "good", run)
        (run / "30" / name).unlink()
        told: list[str] = []
        with Checkpointer(run, keep_latest=9, warn=told.append) as c:
            assert c.steps() == [10, 20]
            back = c.restore()
            assert back.step == 20 and (back.arrays["w"] == 20).all() and back.meta == {"step": 20}
            assert len(told) == 1 and "checkpoint 30" in told[0] and "deleted" in told[0]
            assert ("mark is gone" if name == Path(MARK) else f"{name} is missing") in told[0]
            assert not (run / "30").exists()
            c.save(30, {"w": np.full(3, 31.0)})
            back = c.restore()
            assert back.step == 30 and back.arrays["w"][0] == 31.0 and len(told) == 1


def test_h14b_random_truncation_and_flipped_bits(tmp_path):
    rng = random.Random(0)
    saved(tmp_path / "good", 10, 20, 30)
    for i in range(12):
        run = tmp_path / str(i)
        shutil.copytree(tmp_path / "good", run)
        file = rng.choice([p for p in all_files(run / "30") if p.stat().st_size])
        data = bytearray(file.read_bytes())
        at = rng.randrange(len(data))
        if i % 2:
            data[at] ^= 1 << rng.randrange(8)
        else:
            del data[at:]
        file.write_bytes(data)
        told: list[str] = []
        with Checkpointer(run, keep_latest=9, warn=told.append) as c:
            back = c.restore()
        if file.name == MARK and i % 2 and not told:
            assert back.step == 30  # the metric or a blank changed: what was saved is still whole
            continue
        assert back.step == 20 and (back.arrays["w"] == 20).all() and len(told) == 1, file


def test_h14b_saving_at_a_damaged_step_without_restoring_first(tmp_path):
    saved(tmp_path, 10, 20, 30)
    (tmp_path / "30" / "_CHECKPOINT_METADATA").unlink()
    with Checkpointer(tmp_path, keep_latest=2) as c:
        with pytest.warns(RuntimeWarning, match="checkpoint 30 .* is damaged"):
            c.save(30, {"x": np.array(1)})
        c.wait()
        assert c.steps() == [20, 30]
        assert c.restore().arrays["x"] == 1


def test_nothing_left_says_what_to_do(tmp_path):
    with Checkpointer(tmp_path / "a") as c, pytest.raises(RunDirectoryError, match=r"there is none.*new run"):
        c.restore()
    saved(tmp_path / "b", 10, 20)
    for step in ("10", "20"):
        (tmp_path / "b" / step / MARK).unlink()
    told: list[str] = []
    with Checkpointer(tmp_path / "b", warn=told.append) as c:
        with pytest.raises(RunDirectoryError, match="all 2 are damaged"):
            c.restore()
        assert told == [] and c.steps() == []
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "10",
        "20",
    ]  # the last that is left is not deleted


def test_a_step_asked_for_by_number(tmp_path):
    saved(tmp_path, 10, 20, 30)
    (tmp_path / "20" / "_CHECKPOINT_METADATA").unlink()
    with Checkpointer(tmp_path, keep_latest=9, warn=lambda _: None) as c:
        assert c.restore(10).meta == {"step": 10}
        with pytest.raises(RunDirectoryError, match=r"step 20 .*_CHECKPOINT_METADATA is missing.*\[10, 30\]"):
            c.restore(20)
        assert (tmp_path / "20").exists()
        with pytest.raises(RunDirectoryError, match=r"step 25 .*not there"):
            c.restore(25)
        with pytest.raises(RunDirectoryError, match="newer step 30"):
            c.save(25, {})
        with pytest.raises(ConfigError, match="does not fit"):
            c.restore(like={"w": np.zeros(1)})
        assert c.steps() == [10, 30]


def test_read_only_touches_nothing(tmp_path):
    saved(tmp_path / "a", 10, 20)
    (tmp_path / "a/20" / MARK).unlink()
    (tmp_path / "a/30.orbax-checkpoint-tmp").mkdir()
    before = sorted(tmp_path.rglob("*"))
    told: list[str] = []
    with Checkpointer(tmp_path / "a", read_only=True, warn=told.append) as c:
        assert c.restore().step == 10
        with pytest.raises(RunDirectoryError, match="read-only"):
            c.save(40, {})
    with Checkpointer(tmp_path / "none", read_only=True) as c, pytest.raises(RunDirectoryError):
        c.restore()
    assert sorted(tmp_path.rglob("*")) == before and "passed over" in told[0]


def test_a_step_saved_again_is_replaced_whole(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as c:
        c.save(10, {"x": np.array(1)})
        c.save(10, {"x": np.array(2)})
        assert c.restore().arrays["x"] == 2
        monkeypatch.setattr(storage, "write_mark", failing)
        c.save(10, {"x": np.array(3)})
        with pytest.raises(RunDirectoryError):
            c.wait()
        assert c.restore().arrays["x"] == 2
        monkeypatch.undo()
    # killed after the old one was set aside, before the new one was complete
    (tmp_path / "10").rename(tmp_path / "10.replaced")
    for leftover in ("9.deleted", "11.orbax-checkpoint-tmp"):
        (tmp_path / leftover / "arrays").mkdir(parents=True)
    with Checkpointer(tmp_path) as c:
        assert c.restore().arrays["x"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["10"]


def failing(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failing_write_is_one_clear_error_and_earlier_steps_stay(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as c:
        c.save(10, {"x": np.array(1)})
        c.wait()
        monkeypatch.setattr(storage, "write_mark", failing)
        c.save(20, {"x": np.array(2)})
        with pytest.raises(
            RunDirectoryError, match=r"checkpoint 20 could not.*No space left.*intact"
        ) as error:
            c.wait()
        assert "\n" not in str(error.value)
        assert c.steps() == [10] and [p.name for p in tmp_path.iterdir()] == ["10"]
        c.wait()
        monkeypatch.undo()
        c.save(20, {"x": np.array(2)})
        assert c.restore().step == 20
        monkeypatch.setattr("orbax.checkpoint.CheckpointManager.save", lambda *_, **__: False)
        c.save(30, {})
        with pytest.raises(RunDirectoryError, match="declined to save step 30"):
            c.save(40, {})


def test_full_disk(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here; the test above covers the error")
    rng = np.random.default_rng(0)
    try:
        with Checkpointer(tmp_path) as c:
            for step in (10, 20):
                c.save(step, {"x": rng.normal(size=250_000)}, {"step": step})
            c.save(30, {"x": rng.normal(size=900_000)})
            with pytest.raises(RunDirectoryError, match="checkpoint 30 could not be written") as error:
                c.wait()
            assert "\n" not in str(error.value)
            assert c.steps() == [10, 20] and c.restore().meta == {"step": 20}
            c.save(30, {"x": rng.normal(size=250_000)})
            assert c.restore().step == 30
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, capture_output=True)


def test_waits_end_and_threads_too(tmp_path, monkeypatch):
    gate = threading.Event()
    before = set(threading.enumerate())
    c = Checkpointer(tmp_path)
    original = storage.write_mark
    monkeypatch.setattr(storage, "write_mark", lambda *a: (gate.wait(20), original(*a)))
    start = time.perf_counter()
    c.save(1, {"x": np.zeros(10)})
    assert time.perf_counter() - start < 5 and c.steps() == []
    with pytest.raises(WaitTimeoutError, match=r"waited 0\.05 s for the checkpoint"):
        c.wait(0.05)
    gate.set()
    c.close()
    c.close()
    assert c.steps() == [1] and set(threading.enumerate()) == before
    with pytest.raises(HeadraceError, match="closed"):
        c.save(2, {})
    with pytest.raises(ConfigError, match="keep_latest is 0"):
        Checkpointer(tmp_path, keep_latest=0)


KILLS = """
import os, random, signal, sys, time, warnings
import numpy as np
from headrace.checkpoint import Checkpointer

directory, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
warnings.simplefilter("ignore")  # forking after importing jax: no backend was started

def values(step):
    return {f"w{i}": np.full((50_000,), step * 10 + i, np.float32) for i in range(4)}

def save_for_ever():
    c = Checkpointer(directory, keep_latest=1)
    step = (c.steps() or [0])[-1]
    while True:
        step += 1
        c.save(step, values(step), {"step": step}, metric=-step)

def check(least):
    with Checkpointer(directory, read_only=True) as c:
        back = c.restore()
    assert back.step >= max(least, 1) and back.meta == {"step": back.step}, (back.step, least)
    assert all((back.arrays[k] == v).all() for k, v in values(back.step).items())
    with open(directory + ".step", "w") as file:
        file.write(str(back.step))

def forked(function, *args):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function(*args)
            code = 0
        finally:
            os._exit(code)
    return pid

with Checkpointer(directory, keep_latest=1) as c:
    pass
rng, least = random.Random(seed), 0
for kill in range(kills):
    pid = forked(save_for_ever)
    if kill == 0:
        while not any(n.isdecimal() and os.path.exists(f"{directory}/{n}/headrace_mark.json")
                      for n in os.listdir(directory)):
            time.sleep(0.01)
    time.sleep(rng.uniform(0.05, 0.6))
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "the saver ended by itself"
    assert os.waitpid(forked(check, least), 0)[1] == 0, f"nothing to restore after kill {kill}"
    least = int(open(directory + ".step").read())
print(least)
"""


def kill_while_saving(directory: Path, kills: int, seed: int, timeout_s: float) -> int:
    command = [sys.executable, "-c", KILLS, str(directory), str(kills), str(seed)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout.split()[-1])


def test_h14b_killed_while_saving_leaves_a_step_to_restore(tmp_path):
    assert kill_while_saving(tmp_path / "c", kills=12, seed=0, timeout_s=120) >= 12


@pytest.mark.long
def test_h14b_killed_many_times(tmp_path):
    assert kill_while_saving(tmp_path / "c", kills=100, seed=1, timeout_s=900) >= 100
