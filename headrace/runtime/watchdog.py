"""An end to an environment that hangs in the main thread.

A step cannot be given a timeout from outside of it. So a thread watches since when each group has been in one
step, and interrupts the main thread by a signal whose handler raises there.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from headrace.errors import WaitTimeoutError

LOOKS_PER_LIMIT = 20
LONGEST_LOOK_S = 0.5


class _Overdue(BaseException):
    """Raised inside the step; not an ``Exception``, which the environment might catch."""


def overdue(groups: Sequence[tuple[Any, int]], limit_s: float) -> str | None:
    """What to say of the first slot that has been in one step for longer than ``limit_s`` seconds, or None.

    Args:
        groups: env groups, each with the global id of its slot 0; those that do not tell ``stepping`` bound their own waits.
        limit_s: the limit.
    """
    for group, first_slot in groups:
        stepping = getattr(group, "stepping", None)
        if stepping is not None and time.monotonic() - stepping[1] > limit_s:
            return (
                f"env {group.spec.name} slot {first_slot + stepping[0]} has been in one step for more than "
                f"env.step_timeout_s = {limit_s:g} s; mend the environment or raise the limit"
            )
    return None


class Patience:
    """Runs out when nothing has moved for ``limit_s`` seconds."""

    def __init__(self, position: Callable[[], Any], limit_s: float) -> None:
        """``position`` gives something that differs from before where there was movement."""
        self._position, self._limit_s = position, limit_s
        self._last, self._since = position(), time.monotonic()

    def over(self) -> bool:
        """Look; whether it has run out."""
        position = self._position()
        if position != self._last:
            self._last, self._since = position, time.monotonic()
        return time.monotonic() - self._since > self._limit_s


@contextmanager
def step_limit(groups: Sequence[tuple[Any, int]], limit_s: float) -> Iterator[None]:
    """Interrupt a step of ``groups`` (see ``overdue``) that takes longer than ``limit_s`` seconds.

    Off the main thread, where Python runs no signal handlers, and where there is no SIGALRM, nothing is watched. What never
    comes back to the interpreter (a loop in C) is not interrupted either.

    Raises:
        WaitTimeoutError: names the env and the slot; its cause has the traceback of the step.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return
    found: list[str] = []
    over = threading.Event()
    before = signal.getsignal(signal.SIGALRM)

    def handle(number: int, frame: FrameType | None) -> None:
        if found:
            message = found.pop()
            # The step may have come to its end meanwhile; an error is raised inside a step or not at all.
            if not over.is_set() and overdue(groups, limit_s) is not None:
                raise _Overdue(message)
        elif callable(before):  # somebody else's alarm
            before(number, frame)

    def look() -> None:
        told: str | None = None
        while not over.wait(min(limit_s / LOOKS_PER_LIMIT, LONGEST_LOOK_S)):
            message = overdue(groups, limit_s)
            if message is not None and message != told:
                found.append(message)
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            told = message

    watcher = threading.Thread(target=look, name="step-limit", daemon=True)
    signal.signal(signal.SIGALRM, handle)
    watcher.start()
    try:
        yield
    except _Overdue as error:
        raise WaitTimeoutError(str(error)) from error
    finally:
        over.set()
        watcher.join()  # first, so that no alarm meets the handler from before
        signal.signal(signal.SIGALRM, before)
