"""A run is a directory: its settings, its metrics, its checkpoints.

config.json   settings as resolved          metrics.jsonl, tensorboard/   metrics
summary.json  of a finished run             log.txt                       what happened when
checkpoints/  latest, best, milestones    videos/      where any were recorded
"""

import errno
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.checkpoint.checkpointer import Checkpointer
from headrace.errors import ConfigError, RunDirectoryError
from headrace.settings.config import Config
from headrace.settings.fields import fields_of, replace_fields

try:
    import fcntl
except ImportError:  # not on this system: two processes in one directory at the same time are not noticed
    fcntl = None  # type: ignore[assignment]

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems say that have no locks; there it is as where the system has none."""
MAY_CHANGE = (
    "preset",
    "total_steps",
    "run",
    "resume",
    "runtime",
    "init_from",
    "inference.",
    "env.actor_threads",
    "env.num_threads",
    "env.step_timeout_s",
    "env.workers",
    "env.batch_size",
    "env.max_restarts",
    "env.on_bad_value",
    "env.bounds",
    "learner.staging",
    "eval.",
    "video.",
    "checkpoint.",
    "log.",
)
"""Settings that may differ when a run is resumed; those that end with a dot stand for all below them."""


def find(config: Config) -> tuple[Config, Path, bool]:
    """Find the directory of a run. A fresh name is taken by making it; else nothing is made or changed yet (see ``claim``).

    Returns:
        The settings with ``run`` filled in, the directory, and whether it holds a run to be resumed.

    Raises:
        RunDirectoryError: the directory is not a run, or holds one though ``resume`` is off.
        ConfigError: the run there was made with other settings; names them.
    """
    path = Path(config.run) if config.run is not None else _fresh(config.preset)
    config = replace(config, run=str(path))
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"{path} is a file; expected a directory for the run")
    if not path.is_dir() or not _contents(path):
        return config, path, False
    if not (path / "config.json").is_file():
        raise RunDirectoryError(f"{path} is not empty and not a run; give a new or empty directory")
    if not config.resume:
        raise RunDirectoryError(
            f"{path} holds a run; leave out --no-resume to continue it, or give another directory"
        )
    if not (any((path / "checkpoints").glob("[0-9]*")) or (path / "summary.json").exists()):
        # It ended before its first checkpoint: there is nothing to protect, whatever the settings were.
        return config, path, True
    differences = compare(read_config(path), config)
    if differences:
        raise ConfigError(
            f"{path} was made with other settings: {'; '.join(differences)}. Give it the same settings, or another directory"
        )
    return config, path, True


def claim(stack: ExitStack, path: Path, *, fresh: bool = False) -> None:
    """Make the directory and take it for this process, until ``stack`` is closed or the process ends.

    Args:
        stack: holds the lock.
        path: the directory.
        fresh: there must still be nothing in it: since ``find`` looked, another process may have begun and ended.

    Raises:
        RunDirectoryError: it cannot be made, or another process has it, or had it meanwhile.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context((path / "lock").open("w"))
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be made or written ({error.strerror}); give another directory"
        ) from error
    if fcntl is not None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"another process is training in {path}; wait for it, or give another directory"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise RunDirectoryError(
                    f"{path / 'lock'} cannot be locked ({error.strerror}); give another directory"
                ) from error
    if fresh and _contents(path):
        raise RunDirectoryError(
            f"another process has begun a run in {path} meanwhile; give another directory, or run again to continue it"
        )


def _contents(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()} - {"lock"}


def _fresh(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        path = Path("runs") / f"{name}-{stamp}{f'-{number}' if number else ''}"
        try:
            path.mkdir(parents=True)  # at once, as another run may be started in the same second
        except FileExistsError:
            continue
        except OSError as error:
            raise RunDirectoryError(
                f"{path} cannot be made ({error.strerror}); give another with --run"
            ) from error
        return path
    raise RunDirectoryError("could not find a free name under runs/; give one with --run")


def read_config(path: Path) -> Config:
    """The settings of the run in ``path``.

    A setting that is not in the file is younger than the run, and its default is what the run did without it.

    Raises:
        RunDirectoryError: it is not a run, or its config.json cannot be read.
    """
    file = path / "config.json"
    if not file.is_file():
        raise RunDirectoryError(
            f"{path} is not a run: it has no config.json. Give a directory that `headrace train` made"
        )
    try:
        saved = json.loads(file.read_text())
        return replace_fields(Config(preset=saved["preset"]), saved)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise RunDirectoryError(f"{file} cannot be read as the settings of a run: {error}") from error


def compare(saved: Config, given: Config) -> list[str]:
    """Settings that differ and may not, as ``name: saved → given``."""
    before, now = as_json(saved), as_json(given)
    return [
        f"{name}: {before[name]!r} there, {now[name]!r} here"
        for name in before
        if before[name] != now[name]
        and not any(name == m or (m[-1] == "." and name.startswith(m)) for m in MAY_CHANGE)
    ]


def as_json(config: Config) -> dict[str, Any]:
    """All settings by dotted name, as JSON values."""
    return json.loads(json.dumps(fields_of(config)))


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that the file is the old one or the new one, never a half.

    Raises:
        RunDirectoryError: it cannot be written, such as on a full disk.
    """
    partial = path.with_suffix(".json.partial")
    try:
        partial.write_text(json.dumps(value, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        why = f"{path} cannot be written ({error.strerror}); make room, or give another directory"
        raise RunDirectoryError(why) from error


def checkpoints(path: Path, config: Config, **options: Any) -> Checkpointer:
    """The checkpoints of the run in ``path``."""
    c = config.checkpoint
    return Checkpointer(
        path / "checkpoints",
        keep_latest=c.keep_latest,
        keep_best=c.keep_best,
        milestone_every=c.milestone_every_steps,
        **options,
    )
