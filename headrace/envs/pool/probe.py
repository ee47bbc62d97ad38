"""What an environment looks like and how long its steps take, found out in a process of its own."""

import time
from typing import NamedTuple

from headrace import errors
from headrace.envs.contract import EnvSpec
from headrace.envs.failures import WorkerTraceback
from headrace.envs.pool.process import Process
from headrace.envs.pool.wire import Job, Kind, share
from headrace.envs.request import Request
from headrace.errors import EnvironmentFailure, HeadraceError

LOOK_S = 0.1
CLOSE_S = 2.0
"""How long it may take to close, seconds; then it is killed without a word: those that are trained on are warned of."""
PATIENCE_S = 20.0
"""How long an environment that cannot start is tried again."""


class Probe(NamedTuple):
    """What was found.

    Attributes:
        spec: of the environments.
        step_s: wall time of a step, seconds; 0: not measured.
        cpu_s: of it, time that it computed.
    """

    spec: EnvSpec
    step_s: float
    cpu_s: float


def probe(request: Request, measure: bool = False) -> Probe:
    """Make one environment of a request in a process of its own, and close it.

    Raises:
        EnvironmentFailure: it cannot be made, or its process dies or hangs.
        HeadraceError: as of ``make_group``.
    """
    until, tries = time.monotonic() + PATIENCE_S, request.max_restarts
    while True:
        process = Process(Job(share(request, 0, 1), measure=measure))
        try:
            return _found(process, request)
        except _Died as died:
            if not tries or time.monotonic() > until:
                raise EnvironmentFailure(str(died)) from died.__cause__
            tries -= 1
        finally:
            process.kill()


class _Died(Exception):
    """The process ended without a word."""


def _found(process: Process, request: Request) -> Probe:
    while not process.connection.poll(LOOK_S):
        if process.overdue(request.step_timeout_s):
            words = process.last_words()
            raise EnvironmentFailure(
                f"env {request.env_id}: making it, or a step of it, takes too long (env.step_timeout_s "
                f"{request.step_timeout_s:g} s); mend the environment or raise the limit"
            ) from WorkerTraceback.of(words)
    said = process.receive()
    if said is None:
        words = process.last_words()
        raise _Died(f"env {request.env_id}: made in a process of its own, {process.status()}") from (
            WorkerTraceback.of(words)
        )
    kind, value = said
    if kind is Kind.FAILED:
        raise failure(value)
    process.exited(CLOSE_S)
    return Probe(*value)


def failure(told: tuple[str, str, str]) -> HeadraceError:
    """The error that ended a worker."""
    name, message, text = told
    kind = getattr(errors, name, EnvironmentFailure)
    error: HeadraceError = kind(message)
    error.__cause__ = WorkerTraceback.of(text)
    return error
