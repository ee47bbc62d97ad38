"""The four figures of a room: rate in, rate out, time waiting for input, time waiting for output.

A ``Meter`` is written by one thread and costs under a microsecond a call. Any thread may read it; a reading
between two writes may be off by one message, which the next report evens out.
"""

import time
from collections.abc import Iterable
from typing import NamedTuple

ROOMS = ("envs", "inference", "experience", "learner")


class _Wait:
    """Adds up the time spent inside ``with``; not reentrant."""

    __slots__ = ("_seconds", "_since")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        assert self._since is not None
        self._seconds += time.perf_counter() - self._since
        self._since = None

    def seconds(self, now: float) -> float:
        """Seconds so far, those of a wait that still lasts included: a room that hangs must show it."""
        since = self._since
        return self._seconds + (max(now - since, 0.0) if since is not None else 0.0)


class Reading(NamedTuple):
    """Totals at one moment: ``time_s`` (perf_counter), rows, seconds of waiting, number of meters summed."""

    time_s: float
    rows_in: int
    rows_out: int
    wait_in_s: float
    wait_out_s: float
    meters: int


class Rates(NamedTuple):
    """Figures between two readings: rows/s in and out, waits as fractions (0–1) of the threads' wall time."""

    rate_in: float
    rate_out: float
    wait_in: float
    wait_out: float

    def metrics(self, room: str) -> dict[str, float]:
        """By name, ``time/<room>/rate_in`` and so on."""
        return {f"time/{room}/{name}": value for name, value in self._asdict().items()}


class Meter:
    """Counts what one thread of a room takes and gives, and how long it waits at either end."""

    __slots__ = ("_rows_in", "_rows_out", "_wait_in", "_wait_out")

    def __init__(self) -> None:
        self._rows_in = self._rows_out = 0
        self._wait_in, self._wait_out = _Wait(), _Wait()

    def count_in(self, rows: int) -> None:
        """``rows`` were taken in."""
        self._rows_in += rows

    def count_out(self, rows: int) -> None:
        """``rows`` were given out."""
        self._rows_out += rows

    def wait_in(self) -> _Wait:
        """``with meter.wait_in():`` around a wait for input."""
        return self._wait_in

    def wait_out(self) -> _Wait:
        """``with meter.wait_out():`` around a wait for someone to take the output."""
        return self._wait_out

    def read(self, now: float | None = None) -> Reading:
        """Totals now (``time.perf_counter`` where not given)."""
        now = time.perf_counter() if now is None else now
        waits = self._wait_in.seconds(now), self._wait_out.seconds(now)
        return Reading(now, self._rows_in, self._rows_out, *waits, 1)


def merge(meters: Iterable[Meter], now: float | None = None) -> Reading:
    """The sum over a room's threads at one moment."""
    now = time.perf_counter() if now is None else now
    parts = [meter.read(now) for meter in meters]
    return Reading(
        now,
        sum(part.rows_in for part in parts),
        sum(part.rows_out for part in parts),
        sum(part.wait_in_s for part in parts),
        sum(part.wait_out_s for part in parts),
        len(parts),
    )


def rates(before: Reading, after: Reading) -> Rates:
    """What happened between two readings of the same meters; all zero where no time has passed.

    rate = (rows' − rows) / (t' − t)        wait = (seconds' − seconds) / ((t' − t) · meters)
    """
    elapsed = after.time_s - before.time_s
    if elapsed <= 0.0 or after.meters == 0:
        return Rates(0.0, 0.0, 0.0, 0.0)
    wait_in = (after.wait_in_s - before.wait_in_s) / (elapsed * after.meters)
    wait_out = (after.wait_out_s - before.wait_out_s) / (elapsed * after.meters)
    return Rates(
        (after.rows_in - before.rows_in) / elapsed,
        (after.rows_out - before.rows_out) / elapsed,
        min(max(wait_in, 0.0), 1.0),
        min(max(wait_out, 0.0), 1.0),
    )
