"""Checkpoints of a run: written in the background, each whole or not there, damaged ones passed over.

One worker thread owns Orbax's ``CheckpointManager``; the caller pays only for the copy to host memory.
A step:

    <directory>/<step>/arrays             leaves, by number (Orbax, OCDBT)
    <directory>/<step>/meta               JSON: the leaves' paths, and what the caller put beside them
    <directory>/<step>/headrace_mark.json see ``marks``: written last, so a step without it does not count

Order matters: the new step is marked before an old one is deleted, so that a kill at any moment leaves one to
restore.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp

from headrace.checkpoint.marks import (
    complete_steps,
    damage,
    kept,
    metrics_of,
    present_steps,
    read_mark,
    remove,
    tidy,
)
from headrace.checkpoint.storage import open_manager, read_step, write_step
from headrace.checkpoint.tree import check_json, flatten, nest, paths, unflatten
from headrace.errors import ConfigError, RunDirectoryError, WaitTimeoutError
from headrace.types import PyTree


class Restored(NamedTuple):
    """A checkpoint's ``step``, its ``arrays`` (NumPy leaves) and the JSON dict ``meta`` saved beside them."""

    step: int
    arrays: PyTree
    meta: Any


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class Checkpointer:
    """Saves and restores the checkpoints in one directory.

    One process owns the directory for writing; others open it with ``read_only``, which creates and deletes
    nothing. Calls come from one thread at a time.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_latest: int = 2,
        keep_best: bool = True,
        milestone_every: int | None = None,
        read_only: bool = False,
        warn: Callable[[str], None] = _warn,
        timeout_s: float = 600.0,
    ) -> None:
        """Open ``directory`` (made where it is not there) and clear away what a killed save left.

        Args:
            directory: where the steps lie.
            keep_latest: how many of the latest steps stay, >= 1.
            keep_best: whether the step of the highest ``metric`` stays too.
            milestone_every: in steps; see ``kept``.
            read_only: another run's directory: restore only.
            warn: told, in one line, of each damaged step.
            timeout_s: seconds any one save or restore may take.

        Raises:
            ConfigError: a setting out of range.
        """
        if keep_latest < 1 or (milestone_every is not None and milestone_every < 1):
            raise ConfigError(
                f"keep_latest is {keep_latest} and milestone_every {milestone_every}; expected at least 1 "
                "(milestone_every None keeps no milestones)"
            )
        self._directory = Path(directory).absolute()
        self._kept = partial(
            kept, keep_latest=keep_latest, keep_best=keep_best, milestone_every=milestone_every
        )
        self._read_only, self._tell, self._timeout_s = read_only, warn, timeout_s
        self._pending: Future[None] | None = None
        self._manager: ocp.CheckpointManager | None = None
        self._swept = self._closed = False
        if not read_only:
            self._directory.mkdir(parents=True, exist_ok=True)
            tidy(self._directory)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def steps(self) -> list[int]:
        """Complete steps, ascending. Files are looked for and sized, their contents not read."""
        return complete_steps(self._directory)

    def best_step(self) -> int | None:
        """The complete step of the highest metric, the later of equals; None where none has a metric."""
        metrics = metrics_of(self._directory, self.steps())
        return max((value, step) for step, value in metrics.items())[1] if metrics else None

    def save(
        self, step: int, arrays: PyTree, meta: Mapping[str, Any] | None = None, metric: float | None = None
    ) -> None:
        """Copy to host memory and write in the background; first waits for a save still being written.

        A step already there is replaced; the old one stays until the new one is complete.

        Args:
            step: >= the newest step there is.
            arrays: see ``tree`` for what it may hold. Free to be donated or written once this returns.
            meta: a dict of JSON values with string keys.
            metric: figure of merit, higher is better; None or NaN where there is none.

        Raises:
            RunDirectoryError: the *previous* save failed (disk full …); or a newer step is there.
            ConfigError: a leaf or a value that cannot be kept; names it.
            WaitTimeoutError: the save before this one is not done within ``timeout_s``.
        """
        if self._closed or self._read_only:
            state = "closed" if self._closed else "opened read-only"
            raise RunDirectoryError(
                f"cannot save step {step}: the checkpoints in {self._directory} are {state}"
            )
        self.wait()
        check_json(dict(meta or {}))
        meta = json.loads(json.dumps(dict(meta or {})))  # a copy: the caller may change theirs at once
        self._sweep()
        newer = [s for s in self.steps() if s > step]
        if newer:
            raise RunDirectoryError(
                f"cannot save step {step}: {self._directory} holds the newer step {newer[-1]}, which a "
                "resume would take. Restore that one, start a new run, or delete the newer steps."
            )
        flat = flatten(arrays)
        document = {"meta": meta, "leaves": _table(arrays, flat)}
        score = None if metric is None or np.isnan(metric) else float(metric)
        self._pending = self._worker.submit(self._write, step, list(flat.values()), document, score)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the save in the background is complete.

        Raises:
            WaitTimeoutError: not within ``timeout_s`` seconds; the save goes on.
            RunDirectoryError: it failed. Raised once; earlier steps are intact.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            self._await(pending, "the checkpoint being written", timeout_s)
        finally:
            if pending.done():
                self._pending = None

    def restore(self, step: int | None = None, like: PyTree | None = None) -> Restored:
        """The newest step that is whole, or the one named.

        Damaged steps newer than it are warned about and deleted (not under ``read_only``).

        Args:
            step: exactly this step; None walks downwards from the newest.
            like: structure to follow, see ``tree.unflatten``; None gives dicts and lists, see ``tree.nest``.

        Raises:
            RunDirectoryError: no step is left; or the one named is missing or damaged (it is not deleted).
            ConfigError: the arrays do not fit ``like``.
        """
        self.wait()
        if step is not None:
            reason = (
                damage(self._path(step), contents=True)
                if step in present_steps(self._directory)
                else "it is not there"
            )
            if reason:
                raise RunDirectoryError(
                    f"step {step} of {self._directory} cannot be restored: {reason}. "
                    f"Complete steps: {self.steps() or 'none'}."
                )
            return self._read(step, like)
        found = present_steps(self._directory)
        damaged: list[tuple[int, str]] = []
        for candidate in reversed(found):
            if reason := damage(self._path(candidate), contents=True):
                damaged.append((candidate, reason))
                continue
            # Only now, when there is a whole one: the last that is left of a run is not deleted.
            for step, why in damaged:
                self._discard(step, why)
            return self._read(candidate, like)
        reasons = "; ".join(f"{step}: {why}" for step, why in damaged)
        what = f"all {len(found)} are damaged ({reasons})" if found else "there is none"
        raise RunDirectoryError(
            f"no checkpoint to restore in {self._directory}: {what}. Nothing was changed. "
            "Check the path, bring back a copy, or start a new run in a fresh directory."
        )

    def ever_completed(self) -> bool:
        """Whether a save was ever completed here, damaged since or not."""
        return any(read_mark(self._path(step)) is not None for step in present_steps(self._directory))

    def close(self) -> None:
        """Finish the save in the background and end the worker thread; safe to call twice.

        Raises:
            RunDirectoryError: that save failed. Everything is released all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            if manager is not None:
                self._worker.submit(manager.close)
            self._worker.shutdown(wait=self._pending is None)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _discard(self, step: int, reason: str) -> None:
        done = "passed over" if self._read_only else "deleted"
        self._tell(f"checkpoint {step} in {self._directory} is damaged ({reason}); {done}")
        if not self._read_only:
            remove(self._path(step))

    def _sweep(self) -> None:
        # Steps damaged before this process opened the directory must not count as the latest ones kept.
        if not self._swept:
            for step in present_steps(self._directory):
                if reason := damage(self._path(step), contents=False):
                    self._discard(step, reason)
        self._swept = True

    def _await(self, future: "Future[Any]", what: str, timeout_s: float | None = None) -> Any:
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            return future.result(limit)
        except TimeoutError as error:
            if future.done():
                raise
            raise WaitTimeoutError(
                f"waited {limit:g} s for {what} in {self._directory}; the disk may be slow or hang"
            ) from error

    def _read(self, step: int, like: PyTree | None) -> Restored:
        future = self._worker.submit(self._load, step)
        leaves, document = self._await(future, f"checkpoint {step} to be read")
        table = document["leaves"]
        if like is None:
            arrays = nest([entry["path"] for entry in table], leaves)
        else:
            arrays = unflatten(like, {entry["name"]: leaf for entry, leaf in zip(table, leaves, strict=True)})
        return Restored(step, arrays, document["meta"])

    # On the worker thread only:

    def _orbax(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._manager = open_manager(self._directory, read_only=self._read_only)
        return self._manager

    def _write(
        self, step: int, leaves: list[np.ndarray], document: dict[str, Any], metric: float | None
    ) -> None:
        write_step(self._orbax(), self._directory, step, leaves, document, metric, self._kept)

    def _load(self, step: int) -> tuple[list[np.ndarray], dict[str, Any]]:
        return read_step(self._orbax(), self._directory, step)


def _table(tree: PyTree, flat: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    return [
        {"name": name, "path": path, "shape": list(leaf.shape), "dtype": leaf.dtype.name}
        for path, (name, leaf) in zip(paths(tree), flat.items(), strict=True)
    ]
