"""Where metrics and log lines go: ``metrics.jsonl``, TensorBoard events, ``log.txt`` of a run directory."""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from headrace.errors import ConfigError, HeadraceError, RunDirectoryError
from headrace.metrics.schema import find

_COUNTER = itertools.count()


class MetricsWriter:
    """Appends to a run's metrics and log. One thread at a time.

    TensorBoard's events are written in the caller's thread too: a writer thread would neither tell of a full
    disk nor end with the run, and a report is a few dozen numbers every few seconds.
    """

    def __init__(self, run_dir: str | Path, *, tensorboard: bool = True) -> None:
        """Begin the metrics of a fresh run.

        Raises:
            RunDirectoryError: there are metrics already; ``resume`` continues them.
        """
        directory = Path(run_dir)
        existing = directory / "metrics.jsonl"
        if existing.exists() and existing.stat().st_size:
            raise RunDirectoryError(
                f"{existing} has metrics already; resume that run, or choose a fresh directory"
            )
        self._open(directory, 0, None, tensorboard)

    @classmethod
    def resume(
        cls, run_dir: str | Path, offset: int, step: int, *, tensorboard: bool = True
    ) -> "MetricsWriter":
        """Continue a run: what came after ``offset`` is cut off, TensorBoard hides what came after ``step``.

        Where the file is shorter than ``offset`` (it was edited, or the machine lost power), it is continued
        after its last whole line and ``log.txt`` says so.

        Args:
            run_dir: the run's directory.
            offset: bytes of metrics.jsonl at the checkpoint, from ``offset()``.
            step: agent steps at the checkpoint.
            tensorboard: whether to write TensorBoard events.
        """
        writer = cls.__new__(cls)
        writer._open(Path(run_dir), offset, step, tensorboard)
        return writer

    def _open(self, directory: Path, offset: int, step: int | None, tensorboard: bool) -> None:
        self._directory, self._closed = directory, False
        with _one_line(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._metrics = _Appender(directory / "metrics.jsonl")
            self._log = _Appender(directory / "log.txt")
            self._events = _events(directory / "tensorboard", step) if tensorboard else None
        kept = self._metrics.truncate(offset)
        if kept != offset:
            self.log(f"metrics.jsonl had {kept} bytes of whole lines, expected {offset}: some lines are lost")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics: keys sorted, numbers as ``repr`` writes them, NaN and infinities as null.

        Args:
            step: agent steps.
            metrics: numbers by the names of ``schema``.

        Raises:
            ConfigError: a name that is not in the schema, or a value that is not a number.
            HeadraceError: the disk is full, or cannot be written. Earlier lines are intact.
        """
        self._check_open()
        if int(metrics.get("steps", step)) != step:
            raise ConfigError(
                f"metrics at step {step} say steps={metrics['steps']}; expected the same number"
            )
        values = {name: _number(name, value) for name, value in metrics.items()} | {"steps": int(step)}
        line = json.dumps({name: _finite(values[name]) for name in sorted(values)}) + "\n"
        with _one_line(self._directory):
            self._metrics.append(line)
            if self._events is not None:
                for name, value in values.items():
                    if name != "steps" and math.isfinite(value):
                        event = Event(wall_time=time.time(), step=step, summary=scalar(name, value))
                        self._events.write_event(event)
                self._events.flush()

    def offset(self) -> int:
        """Bytes of metrics.jsonl so far, every one of them handed to the operating system."""
        return self._metrics.size

    def log(self, text: str) -> None:
        """Append ``text`` to log.txt after the local time; further lines of it are indented."""
        self._check_open()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with _one_line(self._directory):
            self._log.append(f"{stamp} " + text.rstrip("\n").replace("\n", "\n    ") + "\n")

    def close(self) -> None:
        """Close all files; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._metrics.close()
        self._log.close()
        if self._events is not None:
            with _one_line(self._directory):
                self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RunDirectoryError(f"the metrics of {self._directory} are closed; nothing can be written")


class _Appender:
    """A file of whole lines: each is written at once, unbuffered, and taken back where it does not fit."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        self.size = self._file.tell()

    def append(self, line: str) -> None:
        data = line.encode()
        try:
            written = 0
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError:
            os.ftruncate(self._file.fileno(), self.size)
            raise
        self.size += len(data)

    def truncate(self, size: int) -> int:
        """Cut to at most ``size`` bytes of whole lines; returns how many are left."""
        data = Path(self._file.name).read_bytes()[:size]
        self.size = data.rfind(b"\n") + 1
        os.ftruncate(self._file.fileno(), self.size)
        return self.size

    def close(self) -> None:
        self._file.close()


def _events(directory: Path, purge_step: int | None) -> Any:
    directory.mkdir(exist_ok=True)
    # The library names files by the second; a run resumed within one must not overwrite the events before it.
    suffix = f".{os.getpid()}.{time.time_ns()}.{next(_COUNTER)}"
    writer = EventsWriter(str(directory / "events"), suffix)
    if purge_step is not None:
        # A reader forgets what has this step or a later one; the step of the checkpoint itself stays.
        start = Event(
            wall_time=time.time(), step=purge_step + 1, session_log=SessionLog(status=SessionLog.START)
        )
        writer.write_event(start)
        writer.flush()
    return writer


def _number(name: str, value: Any) -> float:
    find(name)
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"metric {name!r} is {value!r} ({type(value).__name__}); expected a number"
        ) from error


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextmanager
def _one_line(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HeadraceError(
            f"cannot write the metrics of {directory}: {error.strerror or error}. Make room or fix the "
            "permissions, and resume the run; earlier lines are intact."
        ) from error


Log = Callable[[str], None]
"""What takes a line of log, such as ``MetricsWriter.log``."""
