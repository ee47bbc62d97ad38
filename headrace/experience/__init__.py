"""Experience: rows to trajectories to batches. ``store`` holds rows, ``queue`` ranges, ``room`` joins them."""

from headrace.experience.queue import Queue, QueueLimits, check_limits
from headrace.experience.room import Batch, Experience, NoGuard
from headrace.experience.store import Range, RangeLayout, Store

__all__ = [
    "Batch",
    "Experience",
    "NoGuard",
    "Queue",
    "QueueLimits",
    "Range",
    "RangeLayout",
    "Store",
    "check_limits",
]
