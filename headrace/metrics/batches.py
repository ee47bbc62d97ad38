"""What the batches of central inference add up to: sizes, padding, waits, and why they went out."""

from collections.abc import Sequence
from dataclasses import dataclass

_MAXIMA = {"rows_max", "wait_max_s"}


@dataclass
class Tally:
    """Sums over batches.

    Attributes:
        batches: how many.
        rows: of requests.
        rows_max: of the largest batch.
        padding: rows computed only to fill a bucket.
        requests: whose last row went out.
        wait_s: their waits from being asked to being sent to the device, seconds.
        wait_max_s: the longest of them.
        by_minimum: batches that went out as soon as ``min_batch`` rows waited.
        by_maximum: batches of ``max_batch`` rows.
        by_deadline: batches that went out because their oldest request had waited long enough.
    """

    batches: int = 0
    rows: int = 0
    rows_max: int = 0
    padding: int = 0
    requests: int = 0
    wait_s: float = 0.0
    wait_max_s: float = 0.0
    by_minimum: int = 0
    by_maximum: int = 0
    by_deadline: int = 0

    def count(self, rows: int, padded: int, reason: str, waits: Sequence[float]) -> None:
        """Count a batch of ``rows`` rows, ``padded`` with those that fill its bucket."""
        one = Tally(1, rows, rows, padded - rows, len(waits), sum(waits), max(waits, default=0.0))
        setattr(one, f"by_{reason}", 1)
        self.add(one)

    def add(self, other: "Tally") -> None:
        """Add the batches of ``other``."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name in _MAXIMA else mine + value)

    def figures(self) -> dict[str, float]:
        """What a person wants to know of the sizes; nothing here depends on wall time in a one-thread run."""
        return {
            "batches": self.batches,
            "rows_mean": self.rows / max(self.batches, 1),
            "rows_max": self.rows_max,
            "padding": self.padding / max(self.rows + self.padding, 1),
            "by_minimum": self.by_minimum,
            "by_maximum": self.by_maximum,
            "by_deadline": self.by_deadline,
        }

    def waits(self) -> dict[str, float]:
        """Mean and longest wait of a request, milliseconds."""
        return {
            "request_wait_ms_mean": 1e3 * self.wait_s / max(self.requests, 1),
            "request_wait_ms_max": 1e3 * self.wait_max_s,
        }
