"""What lies on the disk: the mark that makes a step complete, what is kept, and what a killed save left.

The mark lists a step's files with sizes and checksums and is written last. The library that writes the arrays
cannot tell a damaged step from a whole one: it names a step with a missing file as the newest, and reads past
a flipped bit. A step counts here only while its mark is there and agrees.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "headrace_mark.json"
ASIDE = ".replaced"
"""Suffix of a step set aside while its replacement is written."""
_DELETED = ".deleted"
_TEMPORARY = ".orbax-checkpoint-tmp"
_CHUNK = 1 << 20


def write_mark(step_dir: Path, metric: float | None) -> None:
    """List every file of ``step_dir`` as ``[bytes, crc32]``, and the ``metric``; all or nothing."""
    files = {str(p.relative_to(step_dir)): [p.stat().st_size, _crc(p)] for p in _files(step_dir)}
    temporary = step_dir / (MARK + ".tmp")
    temporary.write_text(json.dumps({"metric": metric, "files": files}))
    os.replace(temporary, step_dir / MARK)


def read_mark(step_dir: Path) -> dict[str, Any] | None:
    """The mark of a step, or None where there is none or it cannot be parsed."""
    try:
        mark = json.loads((step_dir / MARK).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return mark if isinstance(mark, dict) and isinstance(mark.get("files"), dict) and mark["files"] else None


def damage(step_dir: Path, *, contents: bool) -> str:
    """Why the step cannot be trusted, or "" where it can.

    Args:
        step_dir: the step's directory.
        contents: also read every file and compare checksums; without, only presence and sizes.

    Raises:
        OSError: a file is there but cannot be read (permissions, a failing disk); that is not damage.
    """
    mark = read_mark(step_dir)
    if mark is None:
        return "it was never completed, or its commit mark is gone"
    for name, entry in mark["files"].items():
        path = step_dir / name
        try:
            size, crc = entry
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes, expected {size}"
            if contents and _crc(path) != crc:
                return f"the contents of {name} have changed since they were written"
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        except (TypeError, ValueError):
            return f"its commit mark is garbled at {name}"
    return ""


def kept(
    steps: Sequence[int],
    metrics: Mapping[int, float],
    *,
    keep_latest: int,
    keep_best: bool,
    milestone_every: int | None,
) -> set[int]:
    """The steps worth their disk: the latest ones, the best one, and the first at or after each milestone.

    Args:
        steps: complete steps.
        metrics: figure of merit by step, higher is better; of equals the later step wins.
        keep_latest: how many of the latest.
        keep_best: whether the best counts.
        milestone_every: the first step within each ``[k·n, (k+1)·n)``, k ≥ 1, is kept for good.
    """
    ordered = sorted(steps)
    keep = set(ordered[-keep_latest:])
    scored = [(metrics[step], step) for step in ordered if step in metrics]
    if keep_best and scored:
        keep.add(max(scored)[1])
    if milestone_every is not None:
        first = {step // milestone_every: step for step in reversed(ordered)}
        keep |= {step for k, step in first.items() if k >= 1}
    return keep


def tidy(directory: Path, failed: int | None = None) -> None:
    """Remove half-written steps, and put back a step whose replacement was not completed."""
    if failed is not None and damage(directory / str(failed), contents=False):
        shutil.rmtree(directory / str(failed), ignore_errors=True)
    for path in directory.iterdir():
        if _TEMPORARY in path.name or path.name.endswith(_DELETED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(ASIDE):
            target = path.with_name(path.name.removesuffix(ASIDE))
            if damage(target, contents=False):
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)


def present_steps(directory: Path) -> list[int]:
    """Every step with a directory, whole or not, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal() and p.is_dir())


def complete_steps(directory: Path) -> list[int]:
    """Steps without damage that shows in presence and size, ascending."""
    return [step for step in present_steps(directory) if not damage(directory / str(step), contents=False)]


def metrics_of(directory: Path, steps: Sequence[int]) -> dict[int, float]:
    """The figure of merit of those steps that have one."""
    marks = {step: read_mark(directory / str(step)) or {} for step in steps}
    return {s: float(m["metric"]) for s, m in marks.items() if isinstance(m.get("metric"), int | float)}


def remove(step_dir: Path) -> None:
    """Delete a step, renamed first: one half deleted by a killed process must not look damaged."""
    doomed = step_dir.with_name(step_dir.name + _DELETED)
    step_dir.rename(doomed)
    shutil.rmtree(doomed)


def _files(step_dir: Path) -> Iterator[Path]:
    return (p for p in sorted(step_dir.rglob("*")) if p.is_file() and not p.name.startswith(MARK))


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
