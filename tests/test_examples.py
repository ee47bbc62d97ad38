"""The examples run as their first lines say, from the repository's root and from their own folder."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ARGUMENTS = {
    "own_environment": ["--total-steps", "3000"],
    "own_encoder": ["--total-steps", "2000"],
    "own_network": ["--total-steps", "2000"],
    "own_loss": ["--total-steps", "2000", "--seeds", "1"],
    "two_ids": ["--total-steps", "17000"],
}
FOLDERS = {
    "own_environment": EXAMPLES.parent,
    "own_encoder": EXAMPLES.parent,
    "own_network": EXAMPLES,
    "own_loss": EXAMPLES.parent,
    "two_ids": EXAMPLES,
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """The lines that each example prints. They run side by side: most of their time is one-threaded compilation."""
    home = tmp_path_factory.mktemp("examples")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "JAX_PLATFORMS": "cpu"}
    running = {
        name: subprocess.Popen(
            [sys.executable, str((EXAMPLES / f"{name}.py").relative_to(folder)), *ARGUMENTS[name]],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, folder in FOLDERS.items()
    }
    try:
        lines = {}
        for name, process in running.items():
            out, errors = process.communicate(timeout=120)
            assert process.returncode == 0, f"{name}: {errors}"
            lines[name] = out.splitlines()
        yield lines
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


def test_every_example_is_tested() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(ARGUMENTS) == set(FOLDERS)


def test_own_environment(printed: dict[str, list[str]]) -> None:
    lines = printed["own_environment"]
    last = next(line for line in lines if line.startswith("trained, greedy:"))
    greedy, best = map(float, re.findall(r"-\d+\.\d", last))
    assert -50.0 <= greedy <= -1.0
    assert best == -6.0  # 2 · (80/9)/3 over pairs of different tiles
    assert re.fullmatch(r"me \[.*\], lamp \[.*\]: it walks \[ ?-?[01] +-?[01]\]", lines[-1])


def test_two_ids(printed: dict[str, list[str]]) -> None:
    cartpole, acrobot = (line.split() for line in printed["two_ids"][1:])
    assert (cartpole[0], acrobot[0]) == ("two_ids:cartpole", "two_ids:acrobot")
    assert int(cartpole[1]) > int(acrobot[1]) >= 16  # episodes of at most 500 steps
    assert 8 <= float(cartpole[2]) <= 500 and 8 <= float(cartpole[3]) <= 500
    assert -500 <= float(acrobot[2]) <= -60 and -500 <= float(acrobot[3]) <= -60
    assert all(0 <= float(line[4]) <= 1 for line in (cartpole, acrobot))


def test_own_network(printed: dict[str, list[str]]) -> None:
    lines = printed["own_network"]
    assert [line.split(",")[0] for line in lines] == ["built-in network", "own network"]


def test_own_encoder(printed: dict[str, list[str]]) -> None:
    lines = printed["own_encoder"]
    assert [line.split(",")[0] for line in lines] == ["built-in encoder", "own encoder"]


def test_own_loss(printed: dict[str, list[str]]) -> None:
    lines = printed["own_loss"]
    assert [line.split()[0] for line in lines[1:3]] == ["built-in", "clipped"]
    shares = [float(x) for x in lines[-1].partition(":")[2].split()]
    assert shares and all(0.0 <= x <= 1.0 for x in shares)
    assert max(shares) > 0.0


def test_the_clipped_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """One transition a column: ratio within the clip, above it with A > 0, above it with A < 0, and weight 0."""
    import numpy as np

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import own_loss

    from headrace.agents.impala import ImpalaConfig, Terms
    from headrace.ops import VTrace, distribution
    from headrace.spaces import DiscreteSpec

    half, most = np.log([0.5, 0.5]), np.log([0.9, 0.1])
    policy = np.array([[half, most, most, most]], np.float32)
    behaviour = np.array([[half, half, half, half]], np.float32)  # ratios of action 0: 1, 1.8, 1.8, 1.8
    advantage = np.array([[2.0, 1.0, -1.0, 5.0]], np.float32)
    weight = np.array([[1.0, 1.0, 1.0, 0.0]], np.float32)
    terms = Terms(
        policy=policy,
        behaviour=behaviour,
        action=np.zeros((1, 4), np.int32),
        value=np.zeros((1, 4), np.float32),
        log_rho=np.zeros((1, 4), np.float32),
        vtrace=VTrace(advantage, advantage, advantage),
        weight=weight,
        entropy_cost=np.float32(0.0),
    )
    dist = distribution(DiscreteSpec(2, 0, np.dtype(np.int64)))
    total, sums = own_loss.clipped_loss(ImpalaConfig(baseline_cost=0.0), dist, terms)
    # min(1·2, 1·2) = 2; min(1.8, 1.2) = 1.2; min(-1.8, -1.2) = -1.8; the last does not count.
    assert float(total) == pytest.approx(-(2.0 + 1.2 - 1.8), abs=1e-6)
    assert float(sums["agent/clip_fraction"]) == 2.0
    assert float(sums["loss/value"]) == pytest.approx(0.5 * (4.0 + 1.0 + 1.0))
