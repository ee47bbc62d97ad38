"""Calls into a user's code: each is announced before it is made, timed, and whatever it raises is a finding."""

import mmap
import struct
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.envs.check.report import Finding, breach
from headrace.errors import HeadraceError, UnsupportedSpaceError, WaitTimeoutError

_HEAD = struct.Struct("<QI")
SIZE = 512
_HEADRACE = Path(__file__).parents[2]
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


class Beat:
    """What is under way, in memory that another process sees and that outlives this one.

    A counter, odd while a user's code runs, and a text that names the call.
    """

    def __init__(self, file_descriptor: int = -1) -> None:
        """Map a file of ``SIZE`` bytes; -1: memory of this process alone."""
        self._memory, self._count = mmap.mmap(file_descriptor, SIZE), 0

    def begin(self, what: str) -> None:
        """A call begins."""
        text = what.encode()[: SIZE - _HEAD.size]
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        self._count += 1
        _HEAD.pack_into(self._memory, 0, self._count, len(text))

    def end(self) -> None:
        """It returned."""
        self._count += 1
        self._memory[:8] = self._count.to_bytes(8, "little")

    def read(self) -> tuple[int, str]:
        """The counter and the newest text."""
        count, length = _HEAD.unpack_from(self._memory, 0)
        text = self._memory[_HEAD.size : min(_HEAD.size + length, SIZE)]
        return count, text.decode(errors="replace")


class Stop(Exception):
    """The check cannot go on; carries the finding that says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.got)
        self.finding = finding


class Calls:
    """Makes calls into a user's code.

    Attributes:
        last_s: how long the newest took, in seconds.
    """

    def __init__(self, beat: Beat) -> None:
        self._beat, self.last_s = beat, 0.0

    def __call__(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)``; ``what`` says which call it is.

        Raises:
            Stop: it raised, be it SystemExit; its error is the cause.
        """
        self._beat.begin(what)
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        except BaseException as exc:  # a user's code may raise anything, and this process serves it alone
            raise Stop(breach("raises", f"{what} raised {described(exc)}")) from exc
        finally:
            self.last_s = time.perf_counter() - start
            self._beat.end()


def made(call: Callable[[], Any]) -> Any:
    """``call()``, which makes an environment or a group, with its errors under the rules on that."""
    try:
        return call()
    except Stop as stop:
        cause = stop.__cause__
        if isinstance(cause, UnsupportedSpaceError):
            raise Stop(breach("spaces", str(cause).partition("; expected ")[0])) from cause
        raise Stop(breach("made", _in_words(stop))) from cause


def called(call: Callable[[], Any]) -> Any:
    """``call()`` of a group."""
    try:
        return call()
    except Stop as stop:
        rule = "returns" if isinstance(stop.__cause__, WaitTimeoutError) else "raises"
        raise Stop(breach(rule, _in_words(stop))) from stop.__cause__


def _in_words(stop: Stop) -> str:
    """What headrace says of an environment is one line already."""
    return str(stop.__cause__ if isinstance(stop.__cause__, HeadraceError) else stop)


def described(error: BaseException) -> str:
    """An error in one line, with the place in the user's code that raised it."""
    try:
        said = " ".join(str(error).split())
    except Exception:  # of the user's own class, it may do anything
        said = "(its text cannot be had)"
    frames = [(f.filename, str(f.lineno)) for f in traceback.extract_tb(error.__traceback__)]
    place = _place(frames[::-1])
    where = f" ({place})" if place else ""
    return f"{type(error).__name__}{': ' if said else ''}{said}{where}"


def place_in(trace: str) -> str:
    """The place in the user's code in a trace of ``faulthandler``, innermost first; "" where there is none."""
    frames = []
    for line in trace.splitlines():
        _, quote, rest = line.partition('File "')
        file, _, tail = rest.partition('", line ')
        if quote and tail:
            frames.append((file, tail.partition(" in ")[0]))
    return _place(frames)


def _place(frames: list[tuple[str, str]]) -> str:
    """The innermost of (file, line) outside headrace, if possible outside Python's own and installed files."""
    others = [(file, line) for file, line in frames if _HEADRACE not in Path(file).parents]
    theirs = [frame for frame in others if not any(root in Path(frame[0]).parents for root in _INSTALLED)]
    return "".join(f"{Path(file).name}:{line}" for file, line in (theirs or others)[:1])
