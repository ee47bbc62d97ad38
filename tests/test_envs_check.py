"""``headrace envs check``: each fault is named by its own rule, healthy environments by none, and nothing stays behind."""

import contextlib
import fnmatch
import functools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import broken_envs
import numpy as np
import psutil
import pytest

from headrace.cli.main import run as command
from headrace.envs.check import Finding, Report, check, child
from headrace.envs.check.calls import Beat, described, place_in
from headrace.envs.check.report import RULES, breach, markdown
from headrace.envs.check.single import Episode, _endings
from headrace.envs.check.text import duration, report_text, spec_text
from headrace.errors import ConfigError
from headrace.spaces import from_gymnasium

REQUEST = {"kwargs": {}, "steps": 300, "seed": 0, "max_episode_steps": None}
DOCS = Path(__file__).parents[1] / "docs"


def checked(env_id, **changes):
    """The findings of a check within this process, and all that was told."""
    told = []
    child.run({**REQUEST, "id": env_id, **changes}, Beat(), told.append)
    return [Finding(**line["finding"]) for line in told if "finding" in line], told


@functools.cache
def found(name):
    """The findings on an environment of ``broken_envs``."""
    return checked(f"broken_envs:{name}")[0]


def rules_of(findings):
    return [finding.rule for finding in findings]


@pytest.mark.parametrize("name", ["Walk", "Healthy", "Start", "Grid", "limited"])
def test_healthy_environments_have_no_findings(name):
    assert checked(f"broken_envs:{name}")[0] == []


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "gym:Taxi-v4", "Pendulum-v1", "vector:CartPole-v1"])
def test_gymnasiums_own_have_no_findings(env_id):
    findings, told = checked(env_id)
    assert findings == []
    facts = {key: value for line in told for key, value in line.get("facts", {}).items()}
    assert facts["steps"] > 100 and facts["step_s"] > 0 and facts["stepped_in"] == "thread"


def test_pong_has_no_findings():
    pytest.importorskip("envpool")
    findings, told = checked("envpool:Pong-v5", steps=30)
    assert findings == []
    assert {"observation_space": "Box(0 … 255, (84, 84), uint8)", "action_space": "Discrete(6)"} in [
        line.get("facts") for line in told
    ]


def test_cartpole_has_no_findings(capsys):
    assert command(["envs", "check", "CartPole-v1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["id"] == "CartPole-v1" and told["ok"] and told["findings"] == []
    assert told["observation_space"] == "Box([-inf to -0.418879] … [0.418879 to inf], (4,), float32)"
    assert told["step_s"] > 0 and told["reset_s"] > 0 and told["time_limit"] == 500


@pytest.mark.parametrize("name", broken_envs.FAULTS)
def test_each_fault_is_named_by_its_rule_alone(name):
    findings = found(name)
    assert rules_of(findings) == [broken_envs.FAULTS[name]]
    assert all(
        (f.severity, bool(f.got and f.expected and f.todo)) == (RULES[f.rule].severity, True)
        for f in findings
    )


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("nan", "reward is NaN at step 7 of episode 1"),
        ("inf", "reward is inf at step 7 of episode 1"),
        ("-inf", "reward is -inf at step 7 of episode 1"),
        ("1e300", "reward is 1e+300 at step 7 of episode 1"),
        ("none", "reward is None, of type NoneType, at step 7 of episode 1"),
        ("array", "reward is array([1.]), of type ndarray, at step 7 of episode 1"),
        ("word", "reward is 'one', of type str, at step 7 of episode 1"),
    ],
)
def test_h2a_a_bad_reward_is_named_with_its_step(reward, said):
    findings, _ = checked("broken_envs:BadReward", kwargs={"reward": reward})
    assert [(f.rule, f.got) for f in findings] == [("reward", said)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("OutOfRange", "observation is 4* at step 4 of episode 1"),
        ("MissingPart", "observation['eye'] is missing at the reset of episode 1"),
        ("OutOfDial", "observation['dials'][0] is 2 at the reset of episode 1"),
        ("OutOfBounds", "observation[1] is 23.0 at step 3 of episode 1"),
        ("AsList", "observation is a list of float64 at the reset of episode 1"),
        ("RaisesAt7", "step() at step 7 of episode 1 raised ValueError: the rope tore (broken_envs.py:*)"),
        ("NoResetWithin", "reset() of episode *, in the middle of the one before, raised AssertionError: *"),
        (
            "NoResetTwice",
            "reset() of episode *, in the middle of the one before, raised AssertionError: nothing to *",
        ),
        ("OwnGenerator", "set_state continues exactly: slot * row *"),
        ("Unequal", "the spaces of the second environment differ from the first's"),
        ("TextSpace", "observation space['words'] is a Text"),
        ("LimitTerminates", "all 6 episodes ended terminated at step 50, whatever the actions"),
    ],
)
def test_what_was_got_says_which_leaf_and_step(name, said):
    pattern = said.replace("[", "[[]")
    assert fnmatch.fnmatchcase(found(name)[0].got, pattern)


def test_h3_unequal_trajectories_of_one_seed_are_told_by_step_and_leaf():
    (finding,) = found("Unseeded")
    assert finding.got.startswith("observation[1] is ") and " at step 1 of episode 1," in finding.got


def test_a_time_limit_of_the_users_ends_the_warning():
    assert checked("broken_envs:NeverEnds", max_episode_steps=40)[0] == []


def test_ids_and_arguments_that_make_nothing():
    for env_id, kwargs, said in [
        ("nowhere:make", {}, "there is no module 'nowhere'"),
        ("broken_envs:Nothing", {}, "module broken_envs has no 'Nothing'"),
        ("CartPol-v1", {}, "nearest: CartPole-v1"),
        ("CartPole-v1", {"wheels": 4}, "takes no setting 'wheels'"),
        ("vector:Nothing-v1", {}, "no environment 'vector:Nothing-v1'"),
    ]:
        findings, _ = checked(env_id, kwargs=kwargs)
        assert rules_of(findings) == ["made"] and said in findings[0].got


def test_a_group_that_breaks_the_contract_is_found(monkeypatch):
    from headrace.envs import registry
    from headrace.envs.gym import GymGroup

    class Late(GymGroup):
        def recv(self, timeout_s):
            timestep, slot_ids = super().recv(timeout_s)
            return timestep._replace(reward=timestep.reward + timestep.first), slot_ids

    def make(request):
        return Late(broken_envs.Grid, request.num_slots, request.seed_of, name="late")

    monkeypatch.setitem(registry._FACTORIES, "late", make)
    findings, _ = checked("late:any")
    assert rules_of(findings)[0] == "group" and findings[0].got.startswith("reward of first rows: ")
    monkeypatch.setattr(Late, "recv", lambda self, timeout_s: 1 / 0)
    (finding,), _ = checked("late:any")
    assert (
        finding.rule == "raises"
        and "recv() of a group of 3 slots, message 0 raised ZeroDivision" in finding.got
    )


def test_single_environments_without_errors_go_through_the_contract_of_groups(monkeypatch):
    def suite(make, calls, messages, seed, spec):
        with contextlib.closing(make()) as made:
            return [breach("group", f"{made.num_slots} slots, {messages} messages")], {}

    monkeypatch.setattr("headrace.envs.check.group.check", suite)
    assert [f.got for f in checked("broken_envs:Walk")[0]] == ["3 slots, 200 messages"]
    assert rules_of(checked("broken_envs:Float64")[0]) == ["observation-precision", "group"]
    assert rules_of(checked("broken_envs:IntegerFlags")[0]) == ["end-flags"]


# In a process of its own.

HOSTILE = {
    "Hangs": ("returns", "step() at step 3 of episode 1 did not return within 5 s, at broken_envs.py:"),
    "CloseHangs": ("returns", "close() did not return within 5 s, at broken_envs.py:"),
    "Exits": ("alive", "exit status 9 in step() at step 1 of episode 1; it last printed: out of fuel"),
    "Crashes": ("alive", "killed by SIGSEGV in step() at step 1 of episode 1, at broken_envs.py:"),
    "Noisy": None,
}


@pytest.fixture(scope="module")
def hostile():
    """Reports of the hostile environments, checked side by side, and what is left of their processes."""
    with ThreadPoolExecutor(len(HOSTILE)) as pool:
        names = [f"broken_envs:{name}" for name in HOSTILE]
        limits = [5.0 if "Hangs" in name else 60.0 for name in names]
        reports = list(pool.map(lambda name, limit: check(name, steps=200, timeout_s=limit), names, limits))
    return dict(zip(HOSTILE, reports, strict=True)), survivors()


def survivors():
    """Command lines of processes that the environments or the checks left."""
    alive = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    return [line for line in alive if "broken_envs:" in line or "3600 + 7" in line]


@pytest.mark.parametrize("name", HOSTILE)
def test_h2b_what_hangs_or_ends_the_process_is_a_finding(hostile, name):
    report = hostile[0][name]
    if HOSTILE[name] is None:
        assert report.ok and report.findings == () and report.facts["steps"] == 200
        return
    rule, said = HOSTILE[name]
    assert rules_of(report.findings) == [rule] and said in report.findings[0].got and not report.ok


def test_no_process_stays_behind(hostile):
    assert hostile[1] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_killed_parent_leave_nothing(number, tmp_path):
    # What the environment itself has started ends with the check, but for a check that was killed.
    kwargs = {"mark": str(tmp_path / "mark"), "child": number == signal.SIGINT}
    code = "import sys; from headrace.cli.main import main; main(sys.argv[1:])"
    words = ["envs", "check", "broken_envs:Hangs", "--timeout-s", "600", "--kwargs", json.dumps(kwargs)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    cli = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "mark").exists() and time.monotonic() < deadline and cli.poll() is None:
        time.sleep(0.05)
    children = psutil.Process(cli.pid).children(recursive=True)
    cli.send_signal(number)
    _, errors = cli.communicate(timeout=60)
    assert len(children) == (2 if number == signal.SIGINT else 1)
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert cli.returncode == (130 if number == signal.SIGINT else -9)
    assert errors == ("headrace: interrupted\n" if number == signal.SIGINT else "")


def test_a_fault_of_the_check_itself_is_not_blamed_on_the_environment(monkeypatch):
    monkeypatch.setattr("headrace.envs.check.watch._CODE", CRASHING)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        check("CartPole-v1")


CRASHING = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from headrace.envs.check import child; child.run = lambda *_: 1 / 0; child.main(request)"
)


# What is told.


def test_command_line(capsys):
    for words, status in ((["envs"], 2), (["envs", "--help"], 0), (["envs", "chek", "CartPole-v1"], 2)):
        assert command(words) == status
    said = capsys.readouterr()
    assert said.out.count("usage: headrace envs check ID") == 2 and "headrace envs check ID" in said.err
    assert command(["envs", "check"]) == 2 and command(["envs", "check", "CartPole-v1", "--stps", "3"]) == 2
    assert "--steps" in capsys.readouterr().err
    assert command(["envs", "check", "CartPole-v1", "--steps", "0"]) == 2
    assert command(["envs", "check", "broken_envs:BadReward", "--kwargs", '{"reward": "nan"}', "--json"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told) >= {"id", "ok", "findings", "observation_space", "action_space", "step_s", "reset_s"}
    assert not told["ok"] and set(told["findings"][0]) == {"severity", "rule", "got", "expected", "todo"}
    assert command(["envs", "check", "broken_envs:Float64", "--steps", "200"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("warning  observation-precision\n  got       observation is an array of float64")
    assert "broken_envs:Float64: 0 errors, 1 warning; observation Box(-20 … 20, (2,), float32)" in text
    assert text.rstrip().endswith("stepped in a worker process")


def test_numbers_that_cannot_be_meant():
    for words in (
        {"steps": 0},
        {"seed": -1},
        {"timeout_s": 0.0},
        {"timeout_s": np.nan},
        {"max_episode_steps": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(words))):
            check("CartPole-v1", **words)


def test_report_and_its_text():
    warning, error = breach("close", "close() a second time raised"), breach("reward", "reward is NaN")
    assert Report("a", (warning,)).ok and not Report("a", (warning, error)).ok
    facts = {"steps": 5, "step_s": 0.002, "reset_s": 1.5, "observation_space": "O", "action_space": "A"}
    text = report_text(Report("a", (error,), facts, ("a step takes long",)))
    assert text.splitlines()[0] == "error    reward" and "note     a step takes long" in text
    last = "a: 1 error, 0 warnings; observation O, action A; 500 steps/s, a step 2 ms, a reset 1.5 s (over 5 steps)"
    assert text.splitlines()[-1] == last
    assert [duration(s) for s in (2.0, 0.0123, 4.5e-6)] == ["2 s", "12.3 ms", "4.5 µs"]


def test_spaces_as_text():
    space = broken_envs.Healthy.observation_space
    assert spec_text(from_gymnasium(space)) == (
        "Dict(dials: MultiDiscrete([2, 5]), eye: Box(0 … 255, (6, 5), uint8), far: Box(0 … 2147483647, (1,), int64), "
        "keys: MultiBinary((3,)), place: Tuple(Discrete(3, start=-1), Box(-inf … inf, (), float32)))"
    )


def test_slow_steps_and_resets_are_notes():
    assert child._notes(0.001, 0.009) == [] and child._notes(1e-5, 1e-3) == []
    assert "a step takes 80 ms" in child._notes(0.08, 0.1)[0]
    assert "as long as 50 steps (50 ms)" in child._notes(0.001, 0.05)[0]


def test_endings():
    alike = [Episode(30, True, False)] * 5
    assert rules_of(_endings(alike, 150, None)) == ["limit-terminates"]
    for episodes in (alike[:4], [*alike, Episode(29, True, False)], [*alike, Episode(30, True, True)]):
        assert _endings(episodes, 150, None) == []
    assert _endings([Episode(9, True, False)] * 20, 180, None) == []  # a small game, such as Catch
    assert rules_of(_endings([], 300, None)) == ["episode-ends"] and _endings([], 300, 500) == []


def test_places_in_traces():
    trace = f'Current thread 0x1:\n  File "{os.__file__}", line 5 in f\n  File "/a/mine.py", line 7 in step\n'
    assert (
        place_in(trace) == "mine.py:7" and place_in(trace.splitlines()[1]) == "os.py:5" and place_in("") == ""
    )

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert described(Mute()) == "Mute: (its text cannot be had)" and described(KeyError()) == "KeyError"


def test_the_page_has_the_rules():
    assert markdown() in (DOCS / "environments.md").read_text(), "put the output of report.markdown() there"
