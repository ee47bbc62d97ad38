"""The bench of the path: its formula, its bare loops, and a short measurement. No test depends on how fast anything is."""

import itertools
import json
from typing import Any

import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from headrace.agents.registry import build_agent
from headrace.bench import env_loops, path, rooms
from headrace.bench.path import Bare, bench_path, fastest, limit, table
from headrace.errors import ConfigError
from headrace.experience.room import NoGuard
from headrace.experience.store import Range
from headrace.metrics.meter import ROOMS, Reading
from headrace.runtime.book import Lags
from headrace.runtime.parts import build
from headrace.runtime.survey import env_spec
from headrace.settings.presets import config

TINY = {"env.num_envs": 4, "agent.batch_size": 4, "agent.unroll_length": 5, "agent.network.hidden": [8]}


def test_limit_adds_the_time_of_each_room() -> None:
    assert limit({"envs": 2.0, "learner": 2.0}) == 1.0
    # 1/100 + 1/50 + 1/25 + 1/100 = 8/100
    assert limit({"a": 100.0, "b": 50.0, "c": 25.0, "d": 100.0}) == pytest.approx(12.5, rel=1e-12)
    for rates in ({}, {"envs": 0.0, "learner": 1.0}):
        with pytest.raises(ValueError, match="positive"):
            limit(rates)


def test_fastest_is_the_form_with_the_highest_median_over_all_times() -> None:
    before = {"one": Bare([1.0, 9.0, 1.0], [0.0]), "two": Bare([2.0, 2.0, 2.0], [0.0])}
    after = {"one": Bare([1.0, 9.0, 3.0], [0.0]), "two": Bare([2.5, 2.5, 2.5], [0.0])}
    assert fastest(before) == "two"
    assert fastest(before, after) == "two"  # medians 2 and 2.25
    assert fastest(after) == "one"


def test_a_learner_that_reuses_makes_fewer_new_steps() -> None:
    rooms_ = {"learner": {"one": Bare([30.0], [0.1])}, "envs": {"one": Bare([5.0], [0.2])}}
    found = path._per_step(rooms_, 3)
    assert found["learner"]["one"].rates == [10.0] and found["learner"]["one"].cpu_s == [pytest.approx(0.3)]
    assert found["envs"] == rooms_["envs"]


def test_a_window_lasts_until_there_are_rows() -> None:
    turns = (rows for rows in [0, 0, 6, 6])
    rate, cpu_s = path._window(turns, 0.0)  # type: ignore[arg-type]
    assert rate > 0 and cpu_s >= 0
    assert list(turns) == [6]


def test_path_figures_by_hand() -> None:
    def mark(time_s: float, cpu_s: float, learned: int, steps: int) -> Any:
        reading = Reading(time_s, 0, 0, time_s / 4, time_s / 2, 1)
        return path._Mark(time_s, cpu_s, learned, steps, dict.fromkeys(ROOMS, reading))

    lags = Lags()
    lags.add(np.array([1, 3]))
    found = path._path([mark(10, 5, 100, 150), mark(12, 8, 300, 340), mark(14, 9, 400, 470)], lags)
    assert found.rates == [100.0, 50.0]
    assert found.collected_per_s == 80.0 and found.seconds == 4.0
    assert found.cores_busy == 1.0 and found.cpu_s_per_step == pytest.approx(4 / 300)
    assert found.waits["envs"] == {"wait_in": 0.25, "wait_out": 0.5}
    assert (found.lags.mean, found.lags.most) == (2.0, 3)


def test_a_short_measurement_of_cartpole() -> None:
    result = bench_path("cartpole", 0.5, TINY)
    keys = {
        "preset",
        "steps_per_s",
        "efficiency",
        "limit",
        "rates",
        "cpu_s_per_step",
        "lag_mean",
        "lag_max",
        "cores",
    }
    assert keys | {"machine", "versions", "seconds"} <= set(result)
    assert tuple(result["rates"]) == ROOMS
    assert result["limit"] == limit(result["rates"])
    assert result["efficiency"] == result["steps_per_s"] / result["limit"]
    assert 0 < result["efficiency"] < 1.5
    assert 0 <= result["lag_mean"] <= result["lag_max"] <= config("cartpole").experience.max_lag
    assert result["seconds"] >= 0.5 and result["cpu_s_per_step"] > 0
    assert len(result["steps_per_s_windows"]) == path.REPEATS and min(result["steps_per_s_windows"]) > 0
    assert json.loads(json.dumps(result)) == result
    text = table(result)
    assert all(any(line.startswith(room) for line in text.splitlines()) for room in (*ROOMS, "limit", "path"))


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.num_envs"):
        bench_path("cartpole", 1.0, {"env.num_env": 4})
    with pytest.raises(ConfigError, match="threads"):
        bench_path("cartpole", 1.0, {"runtime": "sync"})
    with pytest.raises(ConfigError, match="seconds"):
        bench_path("cartpole", 0.0)


def test_pipelined_keeps_depth_under_way_and_finishes_the_rest() -> None:
    tape: list[str] = []
    count = itertools.count()
    turns = rooms.pipelined(lambda: next(count), lambda k: tape.append(f"{next(count)}>{k}"), 2, 7)
    assert [next(turns), next(turns)] == [7, 7]
    assert tape == ["2>0", "4>1"]  # 0 1 start, 2 finishes 0; 3 starts, 4 finishes 1
    turns.close()
    assert tape == ["2>0", "4>1", "5>3"]


@pytest.mark.parametrize(("start", "filled"), [(0, 0), (3, 1), (5, 3)])
def test_copied_ranges_are_those_of_a_slow_twin(start: int, filled: int) -> None:
    ring = np.random.default_rng(0).integers(0, 99, (6, 5, 2))
    out = np.zeros((4, 4, 2), ring.dtype)
    rooms._copy_ranges(ring, start, out, filled)
    slow = np.zeros_like(out)
    for slot in range(5):
        for k in range(4):
            slow[k, (filled + slot) % 4] = ring[(start + k) % 6, slot]
    np.testing.assert_array_equal(out, slow)


@pytest.mark.parametrize(
    ("name", "changes"), [("cartpole-memory", {}), ("cartpole", {"agent.network.frame_stack": 3})]
)
def test_the_learners_batch_is_of_the_types_that_the_run_collates(name: str, changes: dict[str, Any]) -> None:
    settings = config(name, **TINY, **changes)
    parts = build(settings, NoGuard())
    try:
        items = [Range(0, slot, 4, 0, 0) for slot in range(4)]
        collated = parts.experience.store.collate(items)._replace(item_id=())
        sizes = rooms.sizes_of(settings, parts.agent)
        batch = rooms.random_trajectory(parts.agent, parts.spec, sizes, np.random.default_rng(0))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), batch) == jax.tree.map(
            lambda x: (x.shape, x.dtype), collated
        )
    finally:
        parts.close()


def test_rows_of_the_experience_loop() -> None:
    settings = config(
        "cartpole", **(TINY | {"agent.network.frame_stack": 2, "agent.batch_size": 6, "env.groups": 2})
    )
    spec = env_spec(settings)
    agent = build_agent(settings.agent, spec)
    turns = rooms.experience_turns(rooms.blank_row(agent, spec), rooms.sizes_of(settings, agent))
    # 4 environments in 2 groups; batches of 6 wrap round
    assert [next(turns) for _ in range(100)] == [2] * 100


class _Short(gym.Env):
    """Ends every third step."""

    action_space = gym.spaces.Discrete(2, start=3)

    def __init__(self) -> None:
        self.tape: list[Any] = []

    def reset(self, **_: Any) -> Any:
        self.tape.append("reset")
        return 0, {}

    def step(self, action: Any) -> Any:
        self.tape.append(action)
        return 0, 0.0, sum(a != "reset" for a in self.tape) % 3 == 0, False, {}


def test_single_environments_are_reset_at_their_ends_and_steps_alone_counted() -> None:
    envs = [_Short(), _Short()]
    turns = env_loops.gym_turns(envs)
    assert [next(turns) for _ in range(4)] == [2] * 4
    assert [a == "reset" for a in envs[0].tape] == [False, False, False, True, False]
    assert {type(a) for a in envs[0].tape} == {int, str} and {a for a in envs[0].tape if a != "reset"} <= {
        3,
        4,
    }


class _Pool:
    """Two environments of which the second one's episodes last one step."""

    action_space = gym.spaces.Discrete(2)
    single_action_space = action_space
    num_envs = 2

    def __init__(self, mode: AutoresetMode) -> None:
        self.metadata, self._last = {"autoreset_mode": mode}, np.array([False, True])
        self.resets = 0

    def recv(self) -> Any:
        self._last = np.array([False, not self._last[1]])
        return None, None, self._last, np.zeros(2, bool), {"env_id": np.arange(2)}

    def send(self, action: np.ndarray, ids: np.ndarray) -> None:
        assert action.shape == ids.shape == (2,)

    def step(self, action: Any) -> Any:
        return self.recv()

    def reset(self, options: dict[str, Any]) -> None:
        assert options["reset_mask"].tolist() == [False, True]
        self.resets += 1


def test_rows_of_resets_are_not_counted_as_steps() -> None:
    pool = env_loops.envpool_turns([_Pool(AutoresetMode.NEXT_STEP)], 2)
    # All reset; then the second slot ends and is reset in turn.
    assert [next(pool) for _ in range(5)] == [0, 2, 1, 2, 1]
    vector = _Pool(AutoresetMode.NEXT_STEP)
    turns = env_loops.vector_turns(vector)  # type: ignore[arg-type]
    assert [next(turns) for _ in range(4)] == [2, 2, 1, 2]
    disabled = _Pool(AutoresetMode.DISABLED)
    turns = env_loops.vector_turns(disabled)  # type: ignore[arg-type]
    assert [next(turns) for _ in range(5)] == [2] * 5 and disabled.resets == 2
