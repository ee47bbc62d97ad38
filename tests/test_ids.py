"""Several ids in one run, and evaluations by name. Episodes of ``one`` return 1, those of ``nine`` 9."""

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from helpers import ScriptedEnv, parts_of, tiny
from test_resume import killed_after
from test_runtime_sync import metrics

from headrace import evaluate
from headrace.cli.main import run as command
from headrace.envs import describe
from headrace.envs.agree import check_agreement
from headrace.errors import ConfigError
from headrace.runtime.run import train
from headrace.runtime.targets import targets
from headrace.seeds import Role, stream_seed

ONE, NINE, CART, DRAWN, DRAWN_TOO = (
    f"id_envs:make_{name}" for name in ("one", "nine", "cart", "drawn", "drawn_too")
)
BOTH = f"{ONE},{NINE}"


def lines(run: Path, having: str) -> list[dict[str, Any]]:
    read = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in read if having in line]


def first_draw(seed: int) -> float:
    return float(np.float32(np.random.Generator(np.random.PCG64(seed)).random()))


# Training.


def test_metrics_by_id(tmp_path):
    summary = train(tiny(tmp_path / "run", env__id=BOTH))
    last = lines(tmp_path / "run", "episodes")[-1]
    for name, length in ((ONE, 1.0), (NINE, 9.0)):
        for figure in ("return_mean", "return_min", "return_max", "length_mean"):
            assert last[f"env/{name}/{figure}"] == length
        steps, episodes = last[f"env/{name}/steps"], last[f"env/{name}/episodes"]
        slots = 2  # of each id; each may be in the midst of an episode
        assert episodes > 5 and 0 <= steps - length * episodes <= slots * (length - 1)
        assert summary[f"env/{name}/return_mean"] == length
        assert summary[f"env/{name}/episodes"] == episodes
    assert last["steps"] == last[f"env/{ONE}/steps"] + last[f"env/{NINE}/steps"] == last["frames"]
    assert last["episodes"] == last[f"env/{ONE}/episodes"] + last[f"env/{NINE}/episodes"]
    assert (last["return_min"], last["return_max"]) == (1.0, 9.0) and 1 < last["return_mean"] < 9


def test_one_id_has_no_metrics_by_id(tmp_path):
    summary = train(tiny(tmp_path / "run", env__id=ONE, total_steps=64))
    assert not [name for line in lines(tmp_path / "run", "steps") for name in line if name.startswith("env/")]
    assert not [name for name in summary if name.startswith("env/")]


@pytest.mark.parametrize(
    "changes",
    [
        {"eval__every_steps": 48, "eval__episodes": 2, "total_steps": 240},
        pytest.param({"env__workers": 2, "total_steps": 120}, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_of_two_ids_goes_on_exactly(changes, tmp_path, monkeypatch):
    """In workers rows wait to be received when a checkpoint is taken, and their infos with them."""
    options = {
        "env__id": f"{DRAWN},{DRAWN_TOO}",
        "checkpoint__every_steps": 1,
        "log__every_steps": 16,
        **changes,
    }
    expected = train(tiny(tmp_path / "whole", **options))
    config = tiny(tmp_path / "cut", **options)
    killed_after(monkeypatch, options["total_steps"] // 27, config)
    got = train(config)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    last = lines(tmp_path / "whole", "episodes")[-1]
    assert last[f"env/{DRAWN}/length_mean"] == 3.0 and last[f"env/{DRAWN_TOO}/length_mean"] == 5.0
    assert last["episode/done"] == 1.0 and 0 < last[f"env/{DRAWN}/episode/drawn"] < 1
    assert last[f"env/{DRAWN}/episode/drawn"] != last[f"env/{DRAWN_TOO}/episode/drawn"]
    for key in set(expected) - {"run", "wall_s", "steps_per_s"}:
        assert got[key] == expected[key], key


def test_ids_take_turns_over_the_groups_and_h3b_seeds_stay_those_of_the_slot():
    parts = parts_of(tiny(env__id=f"{DRAWN},{NINE}", env__groups=4, env__num_envs=8))
    assert [lane.group.spec.name for lane in parts.lanes] == [DRAWN, NINE, DRAWN, NINE]
    for index in (0, 2):
        timestep, ids = parts.lanes[index].group.recv(1.0)
        seeds = [stream_seed(0, Role.TRAIN_ENV, 2 * index + slot, 0) for slot in ids]
        assert timestep.observation[:, 0].tolist() == [first_draw(seed) for seed in seeds]
    parts.close()


def test_arguments_of_all_or_by_id():
    for kwargs, lengths in (({}, [1, 9]), ({"length": 4}, [4, 4]), ({NINE: {"length": 5}}, [1, 5])):
        parts = parts_of(tiny(env__id=BOTH, env__kwargs=kwargs))
        assert [lane.group._envs[0].length for lane in parts.lanes] == lengths
        assert [t.config.env.kwargs for t in targets(parts.config)] == [
            kwargs if NINE not in kwargs else kwargs.get(name, {}) for name in (ONE, NINE)
        ]
        parts.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"env.id": BOTH, "env.groups": 1, "env.num_envs": 8},
            "groups 1 .* the 2 ids .* set --env.groups 2$",
        ),
        ({"env.id": "a,b,c", "env.groups": 4, "env.num_envs": 12}, "set --env.groups 6$"),
        ({"env.id": "a,b,c", "env.num_envs": 8}, "set --env.groups 3 --env.num-envs 9$"),
        ({"env.id": "a,b,c", "env.num_envs": 12, "env.actor_threads": 2}, "set --env.groups 6$"),
        ({"env.id": "a,,b"}, "'a,,b' has an empty id"),
        ({"env.id": "a,"}, "'a,' has an empty id"),
        ({"env.id": "a,b, a"}, "names 'a' twice"),
        ({"env.id": "a,b c"}, "'b c' has a blank"),
        ({"env.id": "a,b", "env.kwargs": {"a": {}, "size": 3}}, "has ids and the argument 'size'"),
        ({"env.id": "a,b", "env.kwargs": {"a": 3}}, r"env.kwargs\['a'\] is 3; expected a JSON object"),
        ({"eval.envs": {"x": "CartPole-v1"}}, r"eval.envs\['x'\] is 'CartPole-v1'; expected an object"),
        ({"eval.envs": {"x": {"id": ""}}}, "expected an object"),
        ({"eval.envs": {"x": {"id": "a,b"}}}, "expected one id"),
        ({"eval.envs": {"x": {"id": "a", "kw": {}}}}, "has 'kw'; expected only id, kwargs"),
        ({"eval.envs": {"x": {"id": "a", "kwargs": 3}}}, "its kwargs are 3"),
        ({"eval.envs": {"x": {"id": "a", "max_episode_steps": 0}}}, "its max_episode_steps is 0"),
        ({"eval.envs": {"x y": {"id": "a"}}}, "name 'x y'; expected one without blanks"),
        ({"eval.envs": {"episode": {"id": "a"}}}, "other than 'episode'"),
        ({"eval.envs": {"a": {"id": "c"}}, "env.id": "a,b"}, "'a' is an id of env.id"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        tiny(**{name.replace(".", "__"): value for name, value in settings.items()})
    assert "\n" not in str(error.value)


class Spaces(ScriptedEnv):
    """Any spaces; never stepped."""

    def __init__(self, observation: gym.Space, action: gym.Space) -> None:
        super().__init__()
        self.observation_space, self.action_space = observation, action

    def reset(self, **options: Any) -> Any:
        return self.observation_space.sample(), {}


BOX, UNIT = spaces.Box(-9, 9, (2,), np.float64), spaces.Box(0, 1, (2,), np.float32)
NESTED = spaces.Dict({"a": BOX, "b": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])})
SHIFTED = spaces.Dict({"a": UNIT, "b": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)])})
SMALLER = spaces.Dict({"a": BOX, "b": spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(1)])})


def spec_of(observation, action):
    from headrace.envs.gym import GymGroup

    group = GymGroup(lambda: Spaces(observation, action), 1, lambda slot, life: 0, name="spaces")
    group.close()
    return group.spec


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (SHIFTED, UNIT, None),  # what the policy sees is the same
        (
            SMALLER,
            UNIT,
            r"observation space\['b'\]\[1\] of other: got MultiBinary\(\[1\]\), expected MultiBinary\(\[2\]\)",
        ),
        (spaces.Dict({"a": BOX}), UNIT, r"observation space\['b'\]\[0\] of other: got nothing, expected Discrete\(3\)"),
        (BOX, UNIT, r"observation space of other: got Box of float32 \[2\], expected nothing"),
        (NESTED, BOX, "action space of other: got Box of float64 .* from -9 to 9, expected .*float32 .* from 0 to 1"),
        (NESTED, spaces.Box(0, 2, (2,), np.float32), "action space of other: got Box .* from 0 to 2, expected .* 0 to 1"),
        (NESTED, spaces.Discrete(2, start=1), r"got Discrete\(2, start 1\) of int64, expected Box"),
    ],
)  # fmt: skip
def test_spaces_that_one_policy_cannot_serve(observation, action, message):
    expected, got = spec_of(NESTED, UNIT), spec_of(observation, action)
    if message is None:
        check_agreement(expected, got, "first", "other")
        return
    with pytest.raises(ConfigError, match=message) as error:
        check_agreement(expected, got, "first", "other")
    assert "as first has it" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [{"env__id": f"{ONE},{CART}"}, {"env__id": ONE, "eval__envs": {"cart": {"id": CART}}}],
)
def test_other_spaces_are_refused_before_a_directory_is_made(changes, tmp_path):
    with pytest.raises(ConfigError, match=rf"of {CART}.*got Box of float32 \[4\], expected .*\[2\] as {ONE}"):
        train(tiny(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_described_environment_is_made_once_an_id(monkeypatch):
    made = []
    monkeypatch.setattr(
        "headrace.runtime.survey.describe", lambda env_id, **o: made.append(env_id) or describe(env_id, **o)
    )
    parts_of(tiny(env__id=BOTH, eval__envs={"far": {"id": ONE, "kwargs": {"length": 30}}})).close()
    assert made == [ONE, NINE, ONE]


# Evaluations.

EVAL = {"eval__every_steps": 64, "eval__episodes": 4, "eval__num_envs": 2, "total_steps": 128}
FAR = {"id": ONE, "kwargs": {"length": 30}, "max_episode_steps": 20}


def test_each_evaluation_plays_every_id_and_every_name(tmp_path):
    run = tmp_path / "run"
    train(tiny(run, env__id=BOTH, eval__envs={"far": FAR}, **EVAL))
    evaluations = lines(run, "eval/return_mean")
    assert len(evaluations) >= 1
    for line in evaluations:
        assert [line[f"eval/{n}/return_mean"] for n in (ONE, NINE, "far")] == [1.0, 9.0, 20.0]
        assert [line[f"eval/{n}/episodes"] for n in (ONE, NINE, "far")] == [4, 4, 4]
        # Over the ids that are trained on: the mean of their means.
        figures = ("return_mean", "return_std", "return_min", "return_max", "length_mean", "episodes")
        assert [line[f"eval/{name}"] for name in figures] == [5.0, 4.0, 1.0, 9.0, 5.0, 8]
    result = evaluate(run, episodes=4)
    assert (result["return_mean"], result[f"{NINE}/return_mean"], result["far/length_mean"]) == (
        5.0,
        9.0,
        20.0,
    )
    other = evaluate(run, episodes=4, env_id=NINE, env_kwargs={"length": 7})
    assert (other["return_mean"], other["episodes"]) == (7.0, 4)
    assert [name for name in other if "/" in name] == ["episode/final"]
    with pytest.raises(ConfigError, match="give the id as well"):
        evaluate(run, env_kwargs={"length": 7})


def test_the_best_checkpoint_is_that_of_the_ids_trained_on(tmp_path, monkeypatch):
    from headrace.runtime.book import Book

    merits = set()
    inner = Book.figure_of_merit
    monkeypatch.setattr(Book, "figure_of_merit", lambda book: merits.add(inner(book)) or inner(book))
    train(tiny(tmp_path / "run", env__id=BOTH, eval__envs={"far": FAR}, checkpoint__every_steps=32, **EVAL))
    assert 5.0 in merits and max(merits - {None}) < 9.0


def test_another_evaluation_changes_no_other_and_no_training(tmp_path):
    """On an environment whose returns hang on its seeds."""
    last, other = {"id": DRAWN}, {"id": DRAWN_TOO}
    summaries, seen = [], []
    for name, envs in {"one": {"last": last}, "two": {"other": other, "last": last}}.items():
        summaries.append(
            train(tiny(tmp_path / name, env__id=f"{DRAWN},{DRAWN_TOO}", eval__envs=envs, **EVAL))
        )
        seen.append([json.loads(line) for line in metrics(tmp_path / name)])
    assert summaries[0]["params_sha256"] == summaries[1]["params_sha256"]
    without = [{k: v for k, v in line.items() if not k.startswith("eval/other/")} for line in seen[1]]
    assert without == seen[0] != seen[1]
    evaluations = [line for line in seen[0] if "eval/return_mean" in line]
    returns = [[x[f"eval/{n}/return_mean"] for n in ("last", DRAWN)] for x in evaluations]
    assert (
        len({x for pair in returns for x in pair}) == 2 * len(returns) >= 2
    )  # of the same environment, other seeds


def test_evaluations_have_streams_of_their_own():
    names = {name: {"id": ONE} for name in ("a", "b", "c")}
    branches = [t.branch for t in targets(tiny(env__id=BOTH, eval__envs=names))]
    assert branches[:2] == [0, 1] and len(set(branches)) == 5 and min(branches[2:]) >= 2**31
    again = [t.branch for t in targets(tiny(env__id=BOTH, eval__envs={"c": {"id": NINE}}))]
    assert again[2] == branches[4]
    seeds = {
        stream_seed(0, Role.EVAL_ENV, slot, life, b) for slot in (0, 1) for life in (0, 1) for b in branches
    }
    assert len(seeds) == 4 * len(branches)
    assert stream_seed(0, Role.EVAL_ENV, 1, 2, 0) == stream_seed(0, Role.EVAL_ENV, 1, 2)


def test_eval_on_another_environment_from_the_command_line(tmp_path, capsys):
    run = str(tmp_path / "run")
    train(tiny(run, env__id=ONE, total_steps=32))

    def returns(*words: str) -> float:
        assert command(["eval", run, "--episodes", "2", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["return_mean"]

    assert returns() == 1.0
    assert returns("--id", NINE) == 9.0
    assert returns("--id", NINE, "--kwargs", '{"length": 3}') == 3.0
    assert returns("--kwargs", '{"length": 4}') == 4.0
    for words, message in (
        (["--id", CART], f"of {CART}: got Box of float32 [4], expected Box of float32 [2] as {ONE} has it"),
        (["--id", BOTH], "expected one id"),
        (["--kwargs", "3"], "expected a JSON object"),
    ):
        assert command(["eval", run, *words]) == 2
        assert message in capsys.readouterr().err
