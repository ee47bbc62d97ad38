"""Collecting and learning overlap: actor threads drive env groups, one thread stages batches, the caller's thread learns.

Where inference is central, one more thread serves it. Errors of any thread end the run with their traceback. No thread
outlives it, but one that an environment does not let go: it is left behind, a daemon, and its environments are not closed
under it.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

import jax

from headrace.errors import HeadraceError, WaitTimeoutError
from headrace.experience.room import Batch
from headrace.learner.learner import Learned
from headrace.runtime.driver import Driver, Lane
from headrace.runtime.parts import Parts
from headrace.runtime.runner import Finished
from headrace.runtime.serving import Serving
from headrace.runtime.watchdog import Patience, overdue

POLL_S = 0.2
"""How long a wait lasts before it looks whether anybody died."""
SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another waits for it."""
REFUSALS = 5
"""Turns in a row, ``POLL_S`` apart, that each actor is refused until it and the idle learner wait for each other."""
JOIN_S = 5.0
"""How long nothing may move, beyond the time that an environment may take to step, where threads are waited for."""


class ThreadsRunner:
    """The parts of a run on threads. ``parts.experience.guard`` must be a ``threading.Condition``."""

    def __init__(self, parts: Parts, next_lanes: list[int] | None = None) -> None:
        """``next_lanes`` continues a run where it was."""
        self._parts = parts
        assert isinstance(parts.experience.guard, threading.Condition)
        self._changed: threading.Condition = parts.experience.guard
        count = parts.config.env.actor_threads
        size = len(parts.lanes) // count
        following = next_lanes if next_lanes and len(next_lanes) == count else [0] * count
        self._drivers = [Driver(parts.lanes[i * size : (i + 1) * size], following[i]) for i in range(count)]
        self._staged: queue.Queue[Batch] = queue.Queue()
        self._free = threading.Semaphore(parts.config.learner.staging)  # batches that may still be staged
        self._taken = parts.learner.updates  # batches taken from the queue, also those not yet trained on
        self._in_flight: Learned | None = None
        self._error: BaseException | None = None
        self._quit = self._pause = False
        self._still: set[str] = set()
        self._collecting: set[str] = set()  # names of the actor threads that are not done
        self._refusals: dict[
            str, int
        ] = {}  # by name of an actor thread: turns in a row without leave to go on
        self._given_back = 0  # batches whose places in flight were given back
        self._staging = parts.config.learner.staging > 0
        self._making = False  # whether the staging thread is busy with a batch
        self._threads: dict[threading.Thread, list[Lane]] = {}  # with what each drives
        # Actors that settle need its answers: it is never held still, and leaves after them.
        server = parts.server
        self._serving = Serving(server, lambda: self._pause or self._quit, self._fail) if server else None

    def updates(self) -> Generator[Finished, None, None]:
        """Run to the end, yielding each update in order."""
        interval, at_once = _set_switch_interval(SWITCH_INTERVAL_S), False
        try:
            self._start()
            while (batch := self._next_batch()) is not None or self._in_flight is not None:
                # Dispatch the next update before waiting for the one before: the device is never idle between them.
                before, self._in_flight = (
                    self._in_flight,
                    self._parts.learner.dispatch(batch) if batch else None,
                )
                if before is not None:
                    yield self._publish(before)
            self._raise_error()
        except (GeneratorExit, KeyboardInterrupt):
            at_once = True
            raise
        finally:
            self._join(at_once)
            _set_switch_interval(interval)

    @contextmanager
    def paused(self) -> Iterator[Iterator[Finished]]:
        """Hold the other threads still and train on what was already taken from the queue."""
        try:
            with self._changed:
                self._pause = True
                self._changed.notify_all()
            yield self._drain()
        finally:
            with self._changed:
                self._pause = False
                self._changed.notify_all()

    def next_lanes(self) -> list[int]:
        """Whose turn is next, for each driver."""
        return [driver.next for driver in self._drivers]

    # On the caller's thread.

    def _start(self) -> None:
        if self._serving is not None:
            assert self._parts.server is not None
            self._parts.server.warm_up()
            self._serving.start()
        for index, driver in enumerate(self._drivers):
            self._spawn(f"actor-{index}", partial(self._act, driver), driver.lanes)
        self._collecting = {t.name for t in self._threads}
        if self._staging:
            self._spawn("stage", self._stage, [])
        for thread in self._threads:
            thread.start()

    def _spawn(self, name: str, work: Callable[[str], None], lanes: list[Lane]) -> None:
        def run() -> None:
            try:
                work(name)
            except BaseException as error:  # whatever it is, the caller's thread must hear of it
                self._fail(error)
            finally:
                with self._changed:
                    self._collecting.discard(name)
                    self._still.add(name)
                    self._changed.notify_all()

        self._threads[threading.Thread(target=run, name=name, daemon=True)] = lanes

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def _next_batch(self) -> Batch | None:
        """The next batch; None where an update is to be published meanwhile, or where none can come any more."""
        self._raise_error()
        self._watch()
        batch = self._get(0.0)
        if batch is None and self._in_flight is None:
            with self._parts.learner_meter.wait_in():
                batch = self._wait_for_batch()
        if batch is not None:
            self._parts.learner_meter.count_in(len(batch.items) * self._parts.agent.experience.length)
        return batch

    def _wait_for_batch(self) -> Batch | None:
        self._refusals.clear()
        while True:
            # Looked at before the last try: a batch staged in between is found by it.
            over = not self._staging if self._parts.config.learner.staging else not self._collecting
            if (batch := self._get(0.0 if over else POLL_S)) is not None or over:
                return batch
            self._raise_error()
            self._watch()
            self._check_progress()

    def _get(self, timeout_s: float) -> Batch | None:
        """A staged batch, or with staging 0 one made here and now."""
        batch: Batch | None
        if self._parts.config.learner.staging:
            try:
                batch = self._staged.get(timeout=timeout_s) if timeout_s else self._staged.get_nowait()
            except queue.Empty:
                return None
            self._free.release()
            return batch
        batch = self._make_batch()
        if batch is None and timeout_s:
            self._wait_for_ranges()
        return batch

    def _publish(self, learned: Learned) -> Finished:
        # Ready before it is published: an actor that is handed params still being computed would wait for the learner.
        jax.block_until_ready(learned.published.params)
        self._parts.newest.value = learned.published
        self._parts.experience.finished(learned.batch.items)
        with self._changed:
            self._given_back += 1
            self._changed.notify_all()
        self._parts.learner_meter.count_out(len(learned.batch.items) * self._parts.agent.experience.length)
        return Finished(learned, self._parts.learner.read(learned))

    def _drain(self) -> Iterator[Finished]:
        names, patience = {t.name for t in self._threads}, self._patience()
        while True:
            self._raise_error()
            self._watch()
            still = names <= self._still
            if self._in_flight is not None:
                learned, self._in_flight = self._in_flight, None
                yield self._publish(learned)
                patience = self._patience()  # the caller took its time
                continue
            if (
                self._parts.config.learner.staging
                and (batch := self._get(0.0 if still else 0.01)) is not None
            ):
                self._in_flight = self._parts.learner.dispatch(batch)
                continue
            if still:
                return
            if not self._parts.config.learner.staging:
                time.sleep(0.001)
            if patience.over():
                raise WaitTimeoutError(
                    f"waited for {sorted(names - self._still)} to hold still for a checkpoint"
                )

    def _patience(self) -> Patience:
        """Of a wait for other threads: many slow environments may step one after the other in one turn."""
        lanes, limit_s = self._parts.lanes, self._parts.config.env.step_timeout_s + JOIN_S
        return Patience(
            lambda: (self._taken, [(lane.steps, getattr(lane.group, "stepping", None)) for lane in lanes]),
            limit_s,
        )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        """End the run where an environment has been in one step for too long."""
        message = self._overdue(self._parts.lanes)
        if message is not None:
            self._error = WaitTimeoutError(message)
            raise self._error

    def _overdue(self, lanes: list[Lane]) -> str | None:
        return overdue(
            [(lane.group, lane.first_slot) for lane in lanes], self._parts.config.env.step_timeout_s
        )

    def _check_progress(self) -> None:
        """End a run in which the actors wait for the learner and the learner for the actors."""
        # In this order: a batch is queued before its maker is done.
        if self._making or not self._staged.empty():
            return
        queued, collecting = self._parts.experience.queue, set(self._collecting)
        if not collecting or any(self._refusals.get(name, 0) < REFUSALS for name in collecting):
            return
        raise HeadraceError(
            f"collecting and learning wait for each other: {len(queued)} trajectories are queued, {queued.in_flight} in "
            f"flight; raise experience.max_lag"
        )

    def _join(self, at_once: bool) -> None:
        """Wait until the threads have left: ``JOIN_S`` seconds where the caller left, else as long as anything moves."""
        patience = Patience(lambda: None, JOIN_S) if at_once else self._patience()
        try:
            with self._changed:
                self._quit = True
                self._changed.notify_all()
            for thread, lanes in self._threads.items():
                while thread.is_alive() and self._overdue(lanes) is None and not patience.over():
                    thread.join(POLL_S)
        finally:  # also where the wait is interrupted
            for thread, lanes in self._threads.items():
                if thread.is_alive():
                    self._parts.left_behind.extend(lanes)
            if self._serving is not None:
                self._serving.stop()

    # On the other threads.

    def _act(self, driver: Driver, name: str) -> None:
        while not self._quit and not self._parts.collected:
            if self._pause:
                driver.settle()
                self._hold(name)
                continue
            given_back = self._given_back
            if driver.turn():
                self._refusals.pop(name, None)
                continue
            self._refusals[name] = self._refusals.get(name, 0) + 1
            with self._changed:
                # What was given back since this turn began must not be slept over.
                if given_back == self._given_back:
                    self._changed.wait(POLL_S)
        driver.settle()

    def _stage(self, name: str) -> None:
        meter = self._parts.experience_meter
        while not self._quit:
            if self._pause:
                self._hold(name)
                continue
            over = not self._collecting
            with meter.wait_out():
                if not self._free.acquire(timeout=POLL_S):
                    continue
            self._making = True
            batch = self._make_batch()
            if batch is not None:
                self._staged.put(batch)
            self._making = False
            if batch is not None:
                continue
            self._free.release()
            if over:
                break
            self._wait_for_ranges()
        self._staging = False

    def _make_batch(self) -> Batch | None:
        parts = self._parts
        items = parts.experience.take(self._taken)
        if not items:
            return None
        batch = parts.experience.collate(items, self._taken)
        self._taken += 1
        rows = len(items) * parts.agent.experience.length
        parts.experience_meter.count_in(rows)
        parts.experience_meter.count_out(rows)
        return batch._replace(trajectory=jax.device_put(batch.trajectory))

    def _wait_for_ranges(self) -> None:
        queued = self._parts.experience.queue
        with self._parts.experience_meter.wait_in(), self._changed:
            if len(queued) < queued.limits.batch_size and not self._pause and not self._quit:
                self._changed.wait(POLL_S)

    def _hold(self, name: str) -> None:
        with self._changed:
            self._still.add(name)
            while self._pause and not self._quit:
                self._changed.wait(POLL_S)
            self._still.discard(name)


def _set_switch_interval(seconds: float) -> float:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    return before
