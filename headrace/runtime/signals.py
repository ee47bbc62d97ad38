"""Ctrl-C and SIGTERM ask a run to checkpoint and leave."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def leave_on_signal(leave: Callable[[], None]) -> Iterator[Callable[[], int | None]]:
    """Call ``leave`` on the first SIGINT or SIGTERM; a second one interrupts at once.

    Gives a function that tells which signal came. Off the main thread, where Python delivers none, nothing is installed.
    """
    got: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if got:
            raise KeyboardInterrupt
        got.append(number)
        leave()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: got[0] if got else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
