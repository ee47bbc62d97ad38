"""Claim: a run's memory does not grow. Trains CartPole for a million steps in a process of its own and watches it.

python bench/memory.py
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace.bench.machine import machine, versions

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has ended")


def main() -> None:
    """Sample steps and resident memory until the run ends; write ``docs/results/memory.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--from-step", type=int, default=200_000)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    arguments = parser.parse_args()
    samples: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [
            sys.executable, "-m", "headrace.cli.main", "train", "cartpole", "--run", str(run),
            "--total-steps", str(arguments.steps), "--no-log.panel",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            lines = (
                (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
            )
            try:
                if lines:
                    samples.append((json.loads(lines[-1])["steps"], resident_bytes(process.pid)))
            except (RuntimeError, FileNotFoundError):
                break
            time.sleep(0.5)
        if process.wait(60):
            raise SystemExit(f"the run failed with status {process.returncode}")
    before = next(memory for steps, memory in samples if steps >= arguments.from_step)
    after = samples[-1][1]
    most = max(memory for steps, memory in samples if steps >= arguments.from_step)
    result = {
        "command": f"python bench/memory.py --steps {arguments.steps}",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "resident_mb_at_from_step": round(before / 1e6, 1),
        "resident_mb_at_end": round(after / 1e6, 1),
        "growth": round(after / before - 1, 5),
        "growth_most": round(most / before - 1, 5),
        "samples": [
            [steps, round(memory / 1e6, 1)] for steps, memory in samples[:: max(len(samples) // 50, 1)]
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    text = f"{before / 1e6:.1f} MB → {after / 1e6:.1f} MB ({result['growth']:+.2%})"
    print(json.dumps(result) if arguments.json else text)


if __name__ == "__main__":
    main()
