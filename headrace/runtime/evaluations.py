"""Evaluations during training: at once in the one-thread runner, beside it otherwise."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeAlias

from headrace.errors import WaitTimeoutError
from headrace.runtime.book import Book
from headrace.runtime.evaluate import Evaluator
from headrace.runtime.parts import Parts
from headrace.settings.config import Config

Timed: TypeAlias = tuple[dict[str, float], float]
LOOK_S = 0.2
"""How long a wait lasts before it looks whether an environment hangs."""


class Evaluations:
    """Starts evaluations of the newest params and writes their figures into the book, in order."""

    def __init__(self, config: Config, parts: Parts, book: Book) -> None:
        """``config.eval.every_steps`` 0: there will be none."""
        self._parts, self._book, self._config = parts, book, config
        self._evaluator = Evaluator(config, parts.agent, parts.surveys) if config.eval.every_steps else None
        self._running: list[tuple[int, Future[Timed]]] = []
        self._jobs: SimpleQueue[tuple[Future[Timed], Callable[[], Timed]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Evaluate the newest params."""
        assert self._evaluator is not None
        evaluator, published, episodes = self._evaluator, self._parts.newest(), self._config.eval.episodes
        number = self._parts.learner.learned_steps // self._config.eval.every_steps

        def work() -> Timed:
            before = time.perf_counter()
            figures = evaluator.figures(published, episodes, number)
            return figures, time.perf_counter() - before

        future: Future[Timed] = Future()
        self._running.append((self._parts.steps, future))
        if self._config.runtime == "sync":
            future.set_result(work())
            return
        self._jobs.put((future, work))
        if self._thread is None:
            # A daemon: an environment that hangs must not keep the process.
            self._thread = threading.Thread(target=self._work, name="eval", daemon=True)
            self._thread.start()

    def collect(self, wait: bool = False) -> None:
        """Write down the evaluations that are done.

        Raises:
            WaitTimeoutError: an environment hangs.
        """
        self._check()
        while self._running and (wait or self._running[0][1].done()):
            steps, future = self._running[0]
            try:
                figures, seconds = future.result(LOOK_S)
            except TimeoutError:
                if future.done():
                    raise
                self._check()
                continue
            del self._running[0]
            self._book.write_evaluation(steps, figures, seconds)

    def close(self) -> None:
        """Cut the evaluation under way short and drop those not begun."""
        if self._thread is None or self._evaluator is None:
            return
        try:
            while True:
                self._jobs.get_nowait()
        except Empty:
            pass
        self._evaluator.cancel()
        self._jobs.put(None)
        while self._thread.is_alive() and self._evaluator.overdue() is None:
            self._thread.join(LOOK_S)

    def _check(self) -> None:
        message = self._evaluator.overdue() if self._evaluator is not None else None
        if message is not None:
            raise WaitTimeoutError(message)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except BaseException as error:  # whatever it is, whoever collects must hear of it
                future.set_exception(error)
