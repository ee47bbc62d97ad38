"""Which of the rows that wait go out together, and when. Pure: the clock is handed in, and nothing waits here.

A batch goes out as soon as ``min_batch`` rows wait, or when the oldest request has waited ``deadline_s`` seconds, with
whatever is there: at most ``max_batch`` rows, oldest first. A request that does not fit is split.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

Reason = Literal["minimum", "maximum", "deadline"]
REASONS: tuple[Reason, ...] = get_args(Reason)
"""Why a batch went out: enough rows waited, as many as fit, or the oldest had waited long enough."""
T = TypeVar("T")


class Limits(NamedTuple):
    """When a batch goes out, and how large it may be: rows, rows, seconds."""

    min_batch: int
    max_batch: int
    deadline_s: float


class Part(NamedTuple, Generic[T]):
    """Rows ``start … stop-1`` of a request."""

    ticket: T
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.stop - self.start


class Batch(NamedTuple, Generic[T]):
    """Rows that go out together.

    Attributes:
        parts: whose, oldest first.
        reason: why now.
        waits: seconds waited by each request whose last rows these are.
    """

    parts: list[Part[T]]
    reason: Reason
    waits: list[float]

    @property
    def size(self) -> int:
        """Number of rows."""
        return sum(part.size for part in self.parts)


@dataclass
class _Waiting(Generic[T]):
    ticket: T
    rows: int
    since: float
    sent: int = 0


class Batcher(Generic[T]):
    """The requests that wait, in order; see the module docstring."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rows = 0
        self._waiting: deque[_Waiting[T]] = deque()

    def add(self, ticket: T, rows: int, now: float) -> None:
        """A request of ``rows`` rows came in at ``now``."""
        if rows < 1:
            raise ValueError(f"a request of {rows} rows; expected at least 1")
        self._waiting.append(_Waiting(ticket, rows, now))
        self.rows += rows

    def due(self) -> float | None:
        """When the oldest request will have waited long enough; None where nothing waits."""
        return self._waiting[0].since + self.limits.deadline_s if self._waiting else None

    def take(self, now: float, hurry: bool = False) -> Batch[T] | None:
        """The batch that is to go out at ``now``; None where none is. ``hurry``: as if the deadline had come."""
        reason = self._reason(now, hurry)
        if reason is None:
            return None
        parts: list[Part[T]] = []
        waits: list[float] = []
        room = self.limits.max_batch
        while self._waiting and room:
            oldest = self._waiting[0]
            start, stop = oldest.sent, min(oldest.rows, oldest.sent + room)
            parts.append(Part(oldest.ticket, start, stop))
            oldest.sent, room = stop, room - (stop - start)
            if stop == oldest.rows:
                waits.append(now - oldest.since)
                self._waiting.popleft()
        self.rows -= self.limits.max_batch - room
        return Batch(parts, reason, waits)

    def _reason(self, now: float, hurry: bool) -> Reason | None:
        if self.rows >= self.limits.max_batch:
            return "maximum"
        if self.rows >= self.limits.min_batch:
            return "minimum"
        due = self.due()
        return "deadline" if due is not None and (hurry or now >= due) else None
