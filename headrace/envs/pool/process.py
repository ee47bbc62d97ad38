"""One worker process, as its pool sees it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

import numpy as np

from headrace.envs.pool import memory
from headrace.envs.pool.memory import Field
from headrace.envs.pool.wire import Job, Kind, receive, send_ids, send_object

_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from headrace.envs.pool.worker import main; main()"
START_S = 60.0
"""How long a process may take until it runs, seconds."""
MAKING_S = 20.0
"""How long making an environment, or its first reset, may take at least, seconds."""
SLACK_S = 5.0
"""How long a worker may be at nothing and not answer, beyond a step's time, seconds."""
BEAT = [Field("beat", (2,), np.dtype(np.float64))]
_WORDS = [Field("words", (1 << 16,), np.dtype(np.uint8))]
_WORDS_S = 0.5
_QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
"""So that workers share the cores and leave an accelerator alone, unless the user's environment says otherwise."""


class Process:
    """A worker process and the connection to it.

    A new interpreter, not a fork: threads and an accelerator's state do not survive one. It leads a process group of its
    own, so that Ctrl-C does not reach it and what it started is killed with it.

    Attributes:
        connection: to be waited for; readable too when the process is gone.
        asked: messages that it has not answered yet.
        since: ``time.monotonic()`` of the last message from it or to it.
        serving: it has given its first rows.
    """

    def __init__(self, job: Job) -> None:
        """Start it."""
        self.connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        self._files = [memory.allocate(fields, "a worker") for fields in (_WORDS, BEAT)]
        self._beat = memory.arrays(self._files[1], BEAT)["beat"]
        handed = [theirs.fileno(), lifeline, *self._files]
        block = [job.block] if job.block >= 0 else []
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, handed), json.dumps(sys.path)],
            pass_fds=[*handed, *block],
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard output is for results
            start_new_session=True,
            env=_QUIET | os.environ,
        )
        theirs.close()
        os.close(lifeline)
        self.asked, self.serving, self.since = 1, False, time.monotonic()
        self._send(Kind.CALL, job)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def step(self, slot_ids: np.ndarray) -> None:
        """Have its slots ``slot_ids`` stepped."""
        self._told()
        with suppress(OSError):  # gone; whoever waits for it sees that
            send_ids(self.connection, Kind.STEP, slot_ids)

    def call(self, name: str, *arguments: Any) -> None:
        """Have something else done."""
        self._told()
        self._send(Kind.CALL, (name, arguments))

    def _told(self) -> None:
        self.asked += 1
        self.since = time.monotonic()

    def _send(self, kind: Kind, value: Any) -> None:
        with suppress(OSError):
            send_object(self.connection, kind, value)

    def receive(self) -> tuple[Kind, Any] | None:
        """Its next message; None where it is gone."""
        try:
            kind, value = receive(self.connection)
        except (EOFError, OSError):
            return None
        self.since = time.monotonic()
        if kind in (Kind.READY, Kind.REPLY):
            self.asked -= 1
        return kind, value

    @property
    def slot(self) -> int | None:
        """Which of its slots it is making, resetting or stepping."""
        slot, since = self._beat.tolist()
        return int(slot) if since else None

    def overdue(self, step_timeout_s: float) -> bool:
        """Whether it has been at one thing for too long."""
        _, since = self._beat.tolist()
        now = time.monotonic()
        if since:
            return now - since > (step_timeout_s if self.serving else max(step_timeout_s, MAKING_S))
        limit_s = step_timeout_s + SLACK_S if self.serving else START_S
        return self.asked > 0 and now - self.since > limit_s

    def status(self) -> str:
        """How it ended."""
        code = self._process.wait(timeout=5.0)
        if code >= 0:
            return f"its process ended with exit status {code}"
        with suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process was killed by signal {-code}"

    def last_words(self) -> str:
        """Where it is in its code, or where it crashed; empty where nobody can tell."""
        if self._process.poll() is None:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGUSR1)
            until = time.monotonic() + _WORDS_S
            while not self._said() and time.monotonic() < until:
                time.sleep(0.02)
        return self._said()

    def _said(self) -> str:
        return os.pread(self._files[0], memory.size_of(_WORDS), 0).rstrip(b"\0").decode(errors="replace")

    def exited(self, timeout_s: float) -> bool:
        """Whether it ends within ``timeout_s`` seconds."""
        try:
            self._process.wait(timeout=max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and all it started, and give up what belongs to it."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        for fd in (self._lifeline, *self._files):
            os.close(fd)
