"""Claim: the scores in README and docs. Trains a preset with several seeds, evaluates each, and writes the result as data.

python bench/scores.py cartpole
python bench/scores.py cartpole-sync
python bench/scores.py cartpole-memory
python bench/scores.py cartpole-memory-feedforward
python bench/scores.py pong
python bench/scores.py pong-unit
python bench/scores.py catch
python bench/scores.py breakout-minatar
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import headrace
from headrace.bench.machine import machine, versions

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TASKS: dict[str, dict[str, Any]] = {
    "cartpole": {"preset": "cartpole", "seeds": [1, 2, 3, 4, 5]},
    "cartpole-sync": {"preset": "cartpole", "seeds": [1, 2, 3, 4, 5], "runtime": "sync"},
    "cartpole-memory": {"preset": "cartpole-memory", "seeds": [1, 2, 3, 4, 5]},
    "cartpole-memory-feedforward": {
        "preset": "cartpole-memory",
        "seeds": [1, 2, 3],
        "agent.network.core": "none",
    },
    "pong": {"preset": "pong", "seeds": [1, 2, 3]},
    "catch": {"preset": "catch", "seeds": [1, 2, 3]},
    "breakout-minatar": {"preset": "breakout-minatar", "seeds": [1, 2, 3]},
    "pong-unit": {"preset": "pong", "seeds": [1], "agent.network.pixels": "unit"},
}
"""By name: the preset, the seeds, and what is changed."""


def run_seed(task: dict[str, Any], seed: int, directory: Path, episodes: int) -> dict[str, Any]:
    """Train one seed and evaluate its final params; returns the summary, the evaluation and the return curve."""
    changes = {name: value for name, value in task.items() if name not in ("preset", "seeds")}
    config = headrace.config(
        task["preset"], **{**changes, "seed": seed, "run": str(directory), "log.panel": False}
    )
    summary = headrace.train(config)
    del summary["run"]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    curve = [[line["steps"], line["return_mean"]] for line in lines if line.get("return_mean") is not None]
    # A line's mean is over the 100 episodes before it: where lines are close together, as in Pong, nearly the first 100.
    first_100 = next((line["return_mean"] for line in lines if line.get("episodes", 0) >= 100), None)
    evaluation = headrace.evaluate(directory, episodes=episodes)
    return {
        "seed": seed,
        "train": {**summary, "return_mean_first_100": first_100},
        "eval": evaluation,
        "curve": curve[:: max(len(curve) // 50, 1)],
    }


def command(arguments: argparse.Namespace) -> str:
    """The command line that gives this result again."""
    seeds = f" --seeds {' '.join(map(str, arguments.seeds))}" if arguments.seeds else ""
    return f"python bench/scores.py {arguments.task} --episodes {arguments.episodes}{seeds}"


def main() -> None:
    """Run a task and write ``docs/results/TASK.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    runs = []
    for seed in arguments.seeds or task["seeds"]:
        with tempfile.TemporaryDirectory() as directory:
            runs.append(run_seed(task, seed, Path(directory) / "run", arguments.episodes))
        done = runs[-1]
        print(
            f"{arguments.task} seed {seed}: {done['train']['steps']} steps in {done['train']['wall_s']} s, "
            f"eval mean {done['eval']['return_mean']}, worst {done['eval']['return_min']}",
            file=sys.stderr,
        )
    means = [r["eval"]["return_mean"] for r in runs]
    result = {
        "command": command(arguments),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "settings": {k: v for k, v in task.items() if k != "seeds"},
        "eval_mean": statistics.fmean(means),
        "eval_worst_seed": min(means),
        "runs": runs,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{arguments.task}.json").write_text(json.dumps(result, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
