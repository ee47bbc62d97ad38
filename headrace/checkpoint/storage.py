"""One step on the disk, through Orbax's ``CheckpointManager``: all of it or none, and back exactly."""

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from headrace.checkpoint.marks import ASIDE, complete_steps, metrics_of, remove, tidy, write_mark
from headrace.errors import HeadraceError, RunDirectoryError


def open_manager(directory: Path, *, read_only: bool) -> ocp.CheckpointManager:
    """A manager that writes in the caller's thread; ``marks`` decides what is kept."""
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False,
        lightweight_initialize=True,
        read_only=read_only,
        create=False,
        save_interval_steps=0 if read_only else 1,
    )
    remarks = logging.getLogger("absl")
    level = remarks.level
    remarks.setLevel(logging.ERROR)  # Orbax warns of every reader that it is one
    try:
        return ocp.CheckpointManager(directory, options=options)
    finally:
        remarks.setLevel(level)


def write_step(
    manager: ocp.CheckpointManager,
    directory: Path,
    step: int,
    leaves: Sequence[np.ndarray],
    document: dict[str, Any],
    metric: float | None,
    keep: Callable[[list[int], dict[int, float]], set[int]],
) -> None:
    """Write a step, mark it, and only then delete those that need not be kept.

    Args:
        manager: from ``open_manager``.
        directory: where the steps lie.
        step: a step that is there already is set aside until this one is marked.
        leaves: host arrays that nobody writes.
        document: JSON written beside them.
        metric: figure of merit for the mark.
        keep: ``(complete steps, metric by step) -> steps to keep``.

    Raises:
        RunDirectoryError: it could not be written; what was there before is there still.
    """
    path = directory / str(step)
    try:
        if path.exists():
            path.rename(path.with_name(path.name + ASIDE))
        manager.reload()
        items = {"meta": ocp.args.JsonSave(document)}
        arrays = {str(i): leaf for i, leaf in enumerate(leaves) if leaf.size}  # Orbax refuses empty arrays
        if arrays:
            items["arrays"] = ocp.args.StandardSave(arrays)
        if not manager.save(step, args=ocp.args.Composite(**items), force=True):
            raise RunDirectoryError(f"Orbax declined to save step {step} in {directory}")
        write_mark(path, metric)
        shutil.rmtree(path.with_name(path.name + ASIDE), ignore_errors=True)
        complete = complete_steps(directory)
        for old in set(complete) - keep(complete, metrics_of(directory, complete)):
            remove(directory / str(old))
    except Exception as error:  # whatever a storage library raises, the run must hear one named line
        tidy(directory, failed=step)
        if isinstance(error, HeadraceError):
            raise
        free = shutil.disk_usage(directory).free / 1e6
        raise RunDirectoryError(
            f"checkpoint {step} could not be written to {directory} ({_first_line(error)}; {free:.1f} MB "
            "free). Earlier checkpoints are intact; make room or keep fewer, and resume."
        ) from error


def read_step(
    manager: ocp.CheckpointManager, directory: Path, step: int
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The leaves and the document of a step whose checksums agree.

    Raises:
        RunDirectoryError: the library cannot read it. The files are not at fault and must not be deleted.
    """
    items: dict[str, Any] = {"meta": ocp.args.JsonRestore()}
    if (directory / str(step) / "arrays").is_dir():
        items["arrays"] = ocp.args.StandardRestore()
    try:
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:  # as above
        raise RunDirectoryError(
            f"checkpoint {step} in {directory} is whole, but Orbax {ocp.__version__} fails: "
            f"{_first_line(error)}. Use the versions it was written with."
        ) from error
    arrays, document = restored["arrays"] if "arrays" in items else {}, restored["meta"]
    leaves = []
    for i, entry in enumerate(document["leaves"]):
        # Empty leaves were never written; the table knows their shape.
        leaf = (
            arrays[str(i)] if str(i) in arrays else np.zeros(entry["shape"], jax.numpy.dtype(entry["dtype"]))
        )
        leaves.append(np.asarray(leaf))
    return leaves, document


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"
