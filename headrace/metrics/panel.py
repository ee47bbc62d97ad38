"""What a person watches while a run goes on: progress, returns, lag, and which room is the bottleneck.

Written to stderr, so that stdout stays clean.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.metrics.meter import Rates

_TERMINAL_INTERVAL_S, _PLAIN_INTERVAL_S = 0.5, 5.0


@dataclass(frozen=True)
class Snapshot:
    """Where a run stands.

    Attributes:
        steps: agent steps so far.
        frames: steps times action repeat.
        steps_per_s: lately.
        return_mean: raw, last 100 episodes; None before the first has ended.
        lag_mean: updates, since the last report; None before the first batch.
        lag_max: likewise.
        restarts: environments restarted so far.
        rooms: the four figures by room.
    """

    steps: int
    frames: int
    steps_per_s: float
    return_mean: float | None = None
    lag_mean: float | None = None
    lag_max: float | None = None
    restarts: int = 0
    rooms: Mapping[str, Rates] = field(default_factory=dict)


class Panel:
    """A live panel on a terminal, a plain line every few seconds elsewhere.

    Used as a context manager; ``update`` may be called as often as one likes.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        *,
        console: Console | None = None,
        interval_s: float | None = None,
    ) -> None:
        """Nothing is shown before ``with``.

        Args:
            title: preset or environment id.
            total_steps: agent steps at which the run ends.
            console: where to; stderr by default.
            interval_s: seconds between two refreshes; by default 0.5 on a terminal, 5 elsewhere.
        """
        self._title, self._total_steps = title, total_steps
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        default = _TERMINAL_INTERVAL_S if self._console.is_terminal else _PLAIN_INTERVAL_S
        self._interval_s = default if interval_s is None else interval_s
        self._next = 0.0
        self._waiting: Snapshot | None = None

    @property
    def due(self) -> bool:
        """Whether ``update`` would show something; asking first saves making a snapshot."""
        return time.monotonic() >= self._next

    def update(self, snapshot: Snapshot) -> None:
        """Show ``snapshot``, or return at once while the last one is younger than the interval."""
        self._waiting = snapshot
        if self.due:
            self._show(snapshot)

    def print(self, text: str) -> None:
        """A line above the panel."""
        self._console.print(Text(text), soft_wrap=True)

    def __enter__(self) -> "Panel":
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting is not None:
            self._show(self._waiting)  # the end is shown whatever the interval
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, snapshot: Snapshot) -> None:
        self._next = time.monotonic() + self._interval_s
        self._waiting = None
        if self._live is not None:
            self._live.update(_panel(self._title, self._total_steps, snapshot), refresh=True)
        else:
            self.print(_line(self._title, self._total_steps, snapshot))


def _figures(total_steps: int, s: Snapshot) -> dict[str, str]:
    share = min(s.steps / total_steps, 1.0) if total_steps > 0 else 1.0
    return {
        "steps": f"{s.steps:,}/{total_steps:,} ({100 * share:.0f}%)",
        "frames": f"{s.frames:,}",
        "steps/s": f"{s.steps_per_s:,.0f}",
        "left": _duration((total_steps - s.steps) / s.steps_per_s if s.steps_per_s > 0 else math.inf),
        "return": _number(s.return_mean),
        "lag": f"{_number(s.lag_mean)} (max {_number(s.lag_max)})",
        "restarts": str(s.restarts),
    }


def _line(title: str, total_steps: int, s: Snapshot) -> str:
    parts = [f"{name} {value}" for name, value in _figures(total_steps, s).items()]
    busiest = min(s.rooms, key=lambda room: s.rooms[room].wait_in + s.rooms[room].wait_out, default="")
    return " | ".join([title, *parts, *([f"busiest {busiest}"] if busiest else [])])


def _panel(title: str, total_steps: int, s: Snapshot) -> Group:
    figures = Table.grid(padding=(0, 2))
    figures.add_row(Text(title, style="bold"))
    for name, value in _figures(total_steps, s).items():
        figures.add_row(name, value)
    rooms = Table(box=None, padding=(0, 2))
    rooms.add_column("room")
    for heading in ("rows/s in", "rows/s out", "wait in", "wait out"):
        rooms.add_column(heading, justify="right")
    for room, r in s.rooms.items():
        rates = f"{r.rate_in:,.0f}", f"{r.rate_out:,.0f}"
        rooms.add_row(room, *rates, f"{100 * r.wait_in:.0f}%", f"{100 * r.wait_out:.0f}%")
    return Group(figures, rooms)


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    minutes, second = divmod(max(int(seconds), 0), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"
