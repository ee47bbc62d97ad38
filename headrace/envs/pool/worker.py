"""What runs in a worker process: its share of a group's environments, stepped one after the other.

    python -c "…; from headrace.envs.pool.worker import main; main()" CONNECTION LIFELINE WORDS BEAT

The arguments are file descriptors: of the connection to the pool, of a pipe that closes when the pool's process dies, of a
file for the last words of a process that crashes or hangs, and of shared memory that says what it is at.
"""

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from headrace.envs import checks, rows
from headrace.envs.failures import Budget, raised_by_user
from headrace.envs.gym import GymGroup
from headrace.envs.pool import memory
from headrace.envs.pool.process import BEAT
from headrace.envs.pool.wire import Job, Kind, Resumed, Shared, layout, receive, send_ids, send_object
from headrace.envs.registry import single_maker
from headrace.errors import EnvironmentFailure, HeadraceError

MEASURED_S = 0.3
MEASURED_STEPS = 200


def main() -> None:
    """Serve until the pool says that it is enough, or is gone."""
    connection, lifeline, words, beat_fd = (int(word) for word in sys.argv[1:5])
    _die_with_the_pool(lifeline)
    _keep_last_words(words)
    beat = memory.arrays(beat_fd, BEAT)["beat"].data
    with Connection(connection) as pool, contextlib.suppress(EOFError, BrokenPipeError, ConnectionError):
        try:
            _, job = receive(pool)
            if job.spec is None:
                probe(pool, job, beat)
            else:
                _Server(pool, job, beat).serve()
        except BaseException as error:  # whatever it is, the pool must hear of it
            send_object(pool, Kind.FAILED, _told(error))
    # Not by the interpreter's end: threads of an environment, or its cleaning up, may never come to one.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _die_with_the_pool(lifeline: int) -> None:
    """Have this process and all it started killed when the other end of the pipe closes, whatever it is doing."""
    if hasattr(fcntl, "F_SETSIG"):  # the kernel does it, also where the interpreter is held in a loop of C
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
        return

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _keep_last_words(words: int) -> None:
    faulthandler.enable(words)
    faulthandler.register(signal.SIGUSR1, words, all_threads=False)


def _told(error: BaseException) -> tuple[str, str, str]:
    """Kind of error, message and traceback of the environment's own error, where there is one."""
    if not isinstance(error, HeadraceError):
        text = "".join(traceback.format_exception(error))
        return EnvironmentFailure.__name__, f"a worker raised {type(error).__name__}: {error}", text
    cause = error.__cause__
    text = "".join(traceback.format_exception(cause)) if cause and raised_by_user(cause) else ""
    return type(error).__name__, str(error), text


def probe(pool: Connection, job: Job, beat: Any) -> None:
    """Tell ``(spec, seconds a step, CPU seconds a step)`` with random actions; zeros where nothing is to be measured."""
    request = job.request
    group = GymGroup(
        single_maker(request),
        1,
        request.seed_of,
        name=request.env_id,
        first_slot=request.first_slot,
        budget=Budget(1, request.max_restarts),
        bounds="ignore",
        beat=beat,
        action_mask=request.action_mask,
    )
    try:
        measured = _measure(group) if job.measure else (0.0, 0.0)
        send_object(pool, Kind.REPLY, (group.spec, *measured))
    finally:
        group.close()


def _measure(group: GymGroup) -> tuple[float, float]:
    from headrace.envs.conformance import sample

    rng, ids = np.random.default_rng(0), np.zeros(1, np.int32)
    group.recv(0.0)
    wall, cpu, steps = time.perf_counter(), time.process_time(), 0
    # What it does wrong is told when it is trained on.
    with contextlib.suppress(HeadraceError):
        while steps < MEASURED_STEPS and time.perf_counter() - wall < MEASURED_S:
            group.send(rows.stack(group.spec.action, [sample(group.spec.action, rng)]), ids)
            group.recv(0.0)
            steps += 1
    count = max(steps, 1)
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


class _Server:
    def __init__(self, pool: Connection, job: Job, beat: Any) -> None:
        assert job.spec is not None and job.left is not None
        self._pool, self._low = pool, job.low
        fields = layout(job.spec, job.total)
        self._shared = Shared(job.spec, memory.arrays(job.block, fields))
        request = job.request
        budget = Budget(request.num_slots, request.max_restarts)
        budget.left[:] = job.left
        self._group = GymGroup(
            single_maker(request),
            request.num_slots,
            request.seed_of,
            name=request.env_id,
            first_slot=request.first_slot,
            budget=budget,
            on_bad_value=request.on_bad_value,
            bounds=request.bounds,
            first_lives=job.lives,
            beat=beat,
            action_mask=request.action_mask,
        )
        if self._group.spec != job.spec:
            raise EnvironmentFailure(
                f"env {request.env_id}: its spaces differ from one making to the next; {checks.MEND}"
            )

    def serve(self) -> None:
        """Answer messages in their order."""
        self._publish()
        while True:
            kind, value = receive(self._pool)
            if kind is Kind.STEP:
                mine = rows.pick(self._group.spec.action, self._shared.action, value + self._low)
                self._group.send(mine, value)
                self._publish()
                continue
            name, arguments = value
            if name == "close":
                self._group.close()
                return
            send_object(self._pool, Kind.REPLY, getattr(self, name)(*arguments))
            if name == "set_state" and self._group.due.any():
                self._publish()

    def get_state(self) -> dict[str, Any] | None:
        """See ``GymGroup.get_state``."""
        return self._group.get_state()

    def set_state(self, state: dict[str, Any]) -> Resumed:
        """See ``GymGroup.set_state``."""
        exact = self._group.set_state(state)
        self._shared.lives[self._low : self._low + self._group.num_slots] = self._group.run_ids()
        return Resumed(exact, self._group.due)

    def drawing(self) -> tuple[bool, float | None]:
        """See ``GymGroup.renders`` and ``render_fps``."""
        return self._group.renders, self._group.render_fps

    def render(self, slot: int) -> Any:
        """See ``GymGroup.render``."""
        return self._group.render(slot)

    def _publish(self) -> None:
        timestep, slot_ids = self._group.recv(0.0)
        everyone = len(slot_ids) == self._group.num_slots
        mine = slice(self._low, self._low + len(slot_ids)) if everyone else slot_ids + self._low
        self._shared.write(mine, timestep)
        self._shared.lives[mine] = self._group.run_ids()[slot_ids]
        failures, infos = self._group.take_failures(), self._group.take_infos()
        if failures or infos:
            send_object(self._pool, Kind.NOTES, (failures, infos))
        send_ids(self._pool, Kind.READY, slot_ids)
