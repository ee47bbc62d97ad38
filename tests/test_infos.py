"""The numbers in the infos of last steps, from the environment to the metrics."""

import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import ScriptedEnv, parts_of, tiny
from test_episodes import ids, message

from headrace.envs import make_group
from headrace.envs.contract import infos_of
from headrace.envs.gym_vector import VectorGroup
from headrace.metrics.episodes import EpisodeTracker, EpisodeWindow
from headrace.metrics.infos import MOST_NAMES, InfoNames, means, metric_name, usable
from headrace.metrics.schema import find
from headrace.metrics.sinks import MetricsWriter
from headrace.runtime.driver import Driver
from headrace.runtime.run import train
from headrace.seeds import Role, SlotSeeds, stream_seed


class Finals(ScriptedEnv):
    """Says the step in each info, counted from 0 as in H3, and something else at a reset."""

    def __init__(self, length: int = 3, names: int = 1) -> None:
        super().__init__(length)
        self._names = names

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0], {"final": 99.0, "reset_only": 1.0}

    def step(self, action: Any) -> Any:
        row = super().step(action)
        more = {f"n{i:03}": float(i) for i in range(1, self._names)}
        return *row[:4], {"final": self._t - 1, "text": "x", "TimeLimit.truncated": True, **more}


def make_finals(length: int = 3, names: int = 1) -> gym.Env:
    return Finals(length, names)


def make_vector(num_envs: int, mode: str) -> gym.vector.VectorEnv:
    return SyncVectorEnv([Finals] * num_envs, autoreset_mode=AutoresetMode[mode])


H3 = {
    "single": {"env__id": "test_infos:make_finals"},
    "next step": {"env__id": "test_infos:make_vector", "env__kwargs": {"mode": "NEXT_STEP"}},
    "same step": {"env__id": "test_infos:make_vector", "env__kwargs": {"mode": "SAME_STEP"}},
    "disabled": {"env__id": "test_infos:make_vector", "env__kwargs": {"mode": "DISABLED"}},
}


@pytest.mark.parametrize("case", H3)
def test_h3c_the_info_of_the_last_step_reaches_the_episode(case):
    """Value 2 in every episode, not missing, and not of the next episode's reset."""
    parts = parts_of(tiny(experience__max_lag=30, **H3[case]))
    driver = Driver(parts.lanes)
    for _ in range(30):
        assert driver.turn()
    for lane in parts.lanes:
        episodes = lane.episodes.take()
        assert len(episodes) >= 6 and {e.slot_id for e in episodes} == {0, 1}
        assert [dict(e.infos) for e in episodes] == [{"final": 2.0}] * len(episodes)
    parts.close()


def test_h3c_in_the_metrics_of_a_run_and_its_evaluations(tmp_path):
    train(
        tiny(
            tmp_path / "run", env__id="test_infos:make_finals", eval__every_steps=64, eval__episodes=2,
            eval__envs={"long": {"id": "test_infos:make_finals", "kwargs": {"length": 8}}},
        )
    )  # fmt: skip
    read = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(read) if "episodes" in line)
    names = [name for name in last if "episode/" in name]
    assert names == ["episode/final"] and last["episode/final"] == 2.0
    evaluation = next(line for line in read if "eval/return_mean" in line)
    assert (evaluation["eval/episode/final"], evaluation["eval/long/episode/final"]) == (2.0, 7.0)


def test_more_names_than_are_written_are_told_once(tmp_path):
    options = {"env__id": "test_infos:make_finals", "env__kwargs": {"names": 40}}
    train(tiny(tmp_path / "run", total_steps=64, **options))
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert len([name for name in line if name.startswith("episode/")]) == MOST_NAMES
    assert line["episode/n031"] == 31.0 and "episode/n032" not in line
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("'n032' and perhaps more that is not written") == 1


def test_a_message_gives_each_episode_its_own_info():
    tracker = EpisodeTracker(3)
    tracker.update(
        message([1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 1]), ids(2, 0, 1), [(1, {"a": 1.0}), (2, {"a": 2.0})]
    )
    tracker.update(message([1], [0], [1], [0]), ids(0))
    assert [(e.slot_id, dict(e.infos)) for e in tracker.take()] == [(2, {"a": 2.0}), (1, {"a": 1.0}), (0, {})]


def test_a_window_averages_what_was_given_through_a_checkpoint():
    tracker, window = EpisodeTracker(1), EpisodeWindow(3)
    infos = [{"a b": 100.0}, {"a b": 1.0, "c": 5.0}, {}, {"c": 7.0, "a_b": 8.0, "d": math.inf}]
    for info in infos:
        tracker.update(message([1], [0], [1], [0]), ids(0), [(0, info)])
    state = tracker.get_state()
    tracker = EpisodeTracker(1)
    tracker.set_state(state)
    window.add(tracker.take())
    for _ in range(2):
        figures = {k: v for k, v in window.metrics().items() if "/" in k}
        # The first episode has left the window; "a_b" is spelled like "a b", which came before it.
        assert figures == {"episode/a_b": 1.0, "episode/c": 6.0} and window.episodes == 4
        state, window = window.get_state(), EpisodeWindow(3)
        window.set_state(state)
    assert state["written"] == ["a b", "c"]
    window.add([])
    old = {key: state[key] for key in ("recent", "episodes")}  # of a checkpoint from before there were infos
    window.set_state(old)
    assert window.metrics()["length_mean"] == 1.0 and not [k for k in window.metrics() if "/" in k]


def test_names_of_infos():
    assert metric_name("is success?") == "is_success_" and metric_name("/rew/Total.x-1/") == "rew/Total.x-1"
    assert usable({"a": 1.0, "b": math.nan, "TimeLimit.truncated": 1.0}) == {"a": 1.0}
    names = InfoNames()
    assert names.pick({"a?": 1.0, "ä": 2.0}) == {"a_": 1.0, "_": 2.0} and names.left_out is None
    assert names.pick({"a!": 3.0, "?": 4.0, "a?": 5.0, "/": 6.0}) == {"a_": 5.0} and names.left_out == "a!"
    many = InfoNames()
    assert len(many.pick({str(i): 0.0 for i in range(99)})) == MOST_NAMES and many.left_out == str(MOST_NAMES)
    assert len(InfoNames(many.names).pick({str(i): 0.0 for i in range(99)})) == MOST_NAMES
    assert means([{"a": 1.0}, {"a": 2.0, "b": 0.0}, {}]) == {"episode/a": 1.5, "episode/b": 0.0}
    for name in (
        "episode/rew/Total.x-1",
        "eval/episode/a",
        "env/a:b/c-v1/episode/x",
        "eval/hard.1/episode/x",
    ):
        assert find(name).unit == "1"
    assert find("eval/episode/return_mean").name == "eval/episode/<info>"


def test_names_in_tensorboard(tmp_path):
    from test_metrics import scalars

    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"env/a.b:make/return_mean": 2.0, "episode/x": 3.0})
    assert scalars(tmp_path) == [(1, "env/a.b_make/return_mean", 2.0), (1, "episode/x", 3.0)]
    assert "env/a.b:make/return_mean" in (Path(tmp_path) / "metrics.jsonl").read_text()


def test_more_slots_than_are_kept_for_nobody_lose_nothing():
    def make(n: int) -> Any:
        yield make_group("test_infos:make_finals", n, lambda slot, life: slot, kwargs={"length": 1})
        yield VectorGroup(SyncVectorEnv([lambda: Finals(1)] * n), lambda slot, life: slot, name="v")

    for group in make(300):
        for _ in range(2):
            _, slots = group.recv(1.0)
            group.send(np.zeros(len(slots)), slots)
        assert [slot for slot, _ in infos_of(group)] == list(range(300)) and infos_of(group) == []
        group.close()


def test_infos_come_with_their_rows_out_of_workers():
    """A worker tells infos before their row is ready; meanwhile another's row may be received."""
    group = make_group("id_envs:make_one", 2, SlotSeeds(0, Role.TRAIN_ENV), workers=2, batch_size=1)
    try:
        for _ in range(1000):
            timestep, slots = group.recv(10.0)
            assert infos_of(group) == [(slot, {"final": 0.0}) for slot in slots[timestep.last]]
            group.send(np.zeros(len(slots)), slots)
    finally:
        group.close()


def test_infos_of_rows_that_nobody_received_come_back_from_a_checkpoint():
    def made() -> Any:
        return make_group("id_envs:make_drawn", 2, SlotSeeds(0, Role.TRAIN_ENV), workers=1)

    group, other = made(), made()
    try:
        for _ in range(3):
            _, slots = group.recv(10.0)
            group.send(np.zeros(2), slots)
        assert other.set_state(group.get_state())  # the third steps are made, their rows wait
        timestep, _ = other.recv(10.0)
        assert timestep.last.all() and [info["done"] for _, info in infos_of(other)] == [1.0, 1.0]
        group.recv(10.0)
        group.send(np.zeros(2), slots)
        assert other.set_state(group.get_state())  # first rows wait: nothing is told twice
        assert other.recv(10.0)[0].first.all() and infos_of(other) == []
    finally:
        group.close()
        other.close()


# EnvPool.


def play(group: Any, steps: int) -> tuple[list[float], list[tuple[int, dict[str, float]]]]:
    """Returns of the first slot's episodes, and all infos."""
    rng, total, returns, infos = np.random.default_rng(0), 0.0, [], []
    for _ in range(steps):
        timestep, slots = group.recv(60.0)
        total += float(timestep.reward[0])
        if timestep.last[0]:
            returns.append(total)
            total = 0.0
        infos += infos_of(group)
        group.send(rng.integers(0, 3, len(slots)), slots)
    group.close()
    return returns, infos


def test_envpool_gives_the_raw_return_under_clipping_and_no_noise():
    pytest.importorskip("envpool")

    def made(**kwargs: Any) -> Any:
        return make_group(
            "envpool:MsPacman-v5",
            2,
            lambda slot, life: stream_seed(0, Role.TRAIN_ENV, slot, life),
            kwargs=kwargs,
            max_episode_steps=60,
        )

    returns, nothing = play(made(), 150)
    clipped, infos = play(made(reward_clip=True), 150)
    raw = [info["raw_return"] for slot, info in infos if slot == 0]
    assert len(returns) == 2 and raw == returns and max(raw) > max(clipped) > 0
    assert all(info == {} for _, info in nothing) and len(nothing) == 4
    assert all(set(info) == {"raw_return"} for _, info in infos)
