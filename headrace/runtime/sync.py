"""One thread, a fixed order: the specification. The same seed gives the same run, bit for bit."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager

from headrace.errors import HeadraceError
from headrace.runtime.driver import Driver
from headrace.runtime.parts import Parts
from headrace.runtime.runner import Finished
from headrace.runtime.watchdog import step_limit


class SyncRunner:
    """Collect a turn, then learn from every batch that is there."""

    def __init__(self, parts: Parts, next_lanes: list[int] | None = None) -> None:
        """``next_lanes`` continues a run where it was."""
        self._parts = parts
        self._driver = Driver(parts.lanes, next_lanes[0] if next_lanes and len(next_lanes) == 1 else 0)

    def updates(self) -> Generator[Finished, None, None]:
        """Run to the end, yielding each update in order."""
        lanes = [(lane.group, lane.first_slot) for lane in self._parts.lanes]
        with step_limit(lanes, self._parts.config.env.step_timeout_s):
            yield from self._updates()

    @contextmanager
    def paused(self) -> Iterator[Iterator[Finished]]:
        """Between two updates nothing is on its way but questions to the policy, which are answered."""
        self._driver.settle()
        yield iter(())

    def next_lanes(self) -> list[int]:
        """Whose turn is next."""
        return [self._driver.next]

    def _updates(self) -> Iterator[Finished]:
        parts, idle = self._parts, 0
        if parts.server is not None:
            parts.server.warm_up()
        # A checkpoint lies between two updates: others of the same turn may be due before the next turn.
        yield from self._learn()
        while not parts.collected:
            idle = 0 if self._driver.turn() else idle + 1
            # A turn without leave may still have brought the last rows of a batch.
            for finished in self._learn():
                idle = 0
                yield finished
            if idle > 1:  # twice, as stragglers dropped in place of learning give leave too
                raise HeadraceError(
                    f"collecting and learning wait for each other: {len(parts.experience.queue)} trajectories are queued, "
                    f"{parts.experience.queue.in_flight} in flight; raise experience.max_lag"
                )
        self._driver.settle()
        if not parts.stop.asked:
            yield from self._learn()

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
