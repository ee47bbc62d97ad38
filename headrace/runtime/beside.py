"""Work beside training: at once in the one-thread runner, in order on a thread of its own otherwise."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_S = 0.2
"""How long a wait lasts before it looks whether the work hangs."""


class Beside:
    """One kind of work, done in the order in which it was given."""

    def __init__(self, name: str, *, at_once: bool) -> None:
        """``name`` is the thread's; it is started by the first work, and never where work is done ``at_once``."""
        self._name, self._at_once = name, at_once
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """What ``work`` will give. What it raises is raised here where it is done at once, else by the future."""
        future: Future[T] = Future()
        if self._at_once:
            future.set_result(work())
            return future
        self._jobs.put((future, work))
        if self._thread is None:
            # A daemon: an environment that hangs must not keep the process.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def close(self, cancel: Callable[[], None], hangs: Callable[[], bool]) -> None:
        """Drop the work not begun, ``cancel`` that under way, and wait for it unless it ``hangs``."""
        if self._thread is None:
            return
        try:
            while True:
                self._jobs.get_nowait()
        except Empty:
            pass
        cancel()
        self._jobs.put(None)
        while self._thread.is_alive() and not hangs():
            self._thread.join(LOOK_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except BaseException as error:  # whatever it is, whoever asks the future must hear of it
                future.set_exception(error)
