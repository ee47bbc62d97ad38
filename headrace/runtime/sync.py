"""One thread, a fixed order: the specification. The same seed gives the same run, bit for bit."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from headrace.errors import HeadraceError
from headrace.runtime.driver import Driver
from headrace.runtime.parts import Parts
from headrace.runtime.runner import Finished


class SyncRunner:
    """Collect a turn, then learn from every batch that is there."""

    def __init__(self, parts: Parts, next_lanes: list[int] | None = None) -> None:
        """``next_lanes`` continues a run where it was."""
        self._parts = parts
        self._driver = Driver(parts.lanes, next_lanes[0] if next_lanes and len(next_lanes) == 1 else 0)

    def updates(self) -> Generator[Finished, None, None]:
        """Run to the end, yielding each update in order."""
        parts, learned = self._parts, True
        while not parts.collected:
            turned = self._driver.turn()
            if not turned and not learned:
                raise HeadraceError(
                    f"collecting and learning wait for each other: {len(parts.experience.queue)} trajectories are queued, "
                    f"{parts.experience.queue.in_flight} in flight; raise experience.max_lag"
                )
            learned = False
            for finished in self._learn():
                learned = True
                yield finished
        self._driver.settle()
        if not parts.stop:
            yield from self._learn()

    @contextmanager
    def paused(self) -> Iterator[Iterator[Finished]]:
        """Between two updates nothing is on its way but questions to the policy, which are answered."""
        self._driver.settle()
        yield iter(())

    def next_lanes(self) -> list[int]:
        """Whose turn is next."""
        return [self._driver.next]

    def _learn(self) -> Iterator[Finished]:
        parts = self._parts
        learner, experience = parts.learner, parts.experience
        while items := experience.take(learner.updates):
            batch = experience.collate(items, learner.updates)
            learned = learner.dispatch(batch)
            # Published before the ranges are given back: whoever begins a range in their place acts with these params.
            parts.newest.value = learned.published
            experience.finished(items)
            yield Finished(learned, learner.read(learned))
