"""Evaluations during training: at once in the one-thread runner, beside it otherwise."""

import time
from concurrent.futures import Future
from typing import TypeAlias

from headrace.errors import WaitTimeoutError
from headrace.runtime.beside import LOOK_S, Beside
from headrace.runtime.book import Book
from headrace.runtime.evaluate import Evaluator
from headrace.runtime.parts import Parts
from headrace.settings.config import Config

Timed: TypeAlias = tuple[dict[str, float], float]


class Evaluations:
    """Starts evaluations of the newest params and writes their figures into the book, in order."""

    def __init__(self, config: Config, parts: Parts, book: Book) -> None:
        """``config.eval.every_steps`` 0: there will be none."""
        self._parts, self._book, self._config = parts, book, config
        self._evaluator = Evaluator(config, parts.agent, parts.surveys) if config.eval.every_steps else None
        self._running: list[tuple[int, Future[Timed]]] = []
        self._beside = Beside("eval", at_once=config.runtime == "sync")

    def start(self) -> None:
        """Evaluate the newest params."""
        assert self._evaluator is not None
        evaluator, published, episodes = self._evaluator, self._parts.newest(), self._config.eval.episodes
        number = self._parts.learner.learned_steps // self._config.eval.every_steps

        def work() -> Timed:
            before = time.perf_counter()
            figures = evaluator.figures(published, episodes, number)
            return figures, time.perf_counter() - before

        self._running.append((self._parts.steps, self._beside.submit(work)))

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
        if self._evaluator is not None:
            evaluator = self._evaluator
            self._beside.close(evaluator.cancel, lambda: evaluator.overdue() is not None)

    def _check(self) -> None:
        message = self._evaluator.overdue() if self._evaluator is not None else None
        if message is not None:
            raise WaitTimeoutError(message)
