"""What a runner is: an iterator of finished updates, and a way to hold everything still."""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from headrace.learner.learner import Learned


class Finished(NamedTuple):
    """An update whose params are published: what the learner dispatched, and its metrics."""

    learned: Learned
    metrics: dict[str, float]


class Runner(Protocol):
    """Drives the parts of a run; logging and checkpoints are its consumer's."""

    def updates(self) -> Generator[Finished, None, None]:
        """Run to the end, yielding each update in order."""
        ...

    def paused(self) -> AbstractContextManager[Iterator[Finished]]:
        """Hold everything still; gives the updates that were already on their way."""
        ...

    def next_lanes(self) -> list[int]:
        """Whose turn is next, for each driver."""
        ...
