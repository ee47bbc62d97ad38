"""Checks an environment in a process of its own, which may hang, crash or be killed."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from headrace.envs.check.calls import SIZE, Beat, place_in
from headrace.envs.check.report import Finding, Report, breach
from headrace.errors import ConfigError

POLL_S = 0.02
OURS_S = 300.0
"""How long headrace's own code may take between two calls, its imports included."""
_CODE = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from headrace.envs.check.child import main; main(request)"
)


def check(
    env_id: str,
    *,
    kwargs: Mapping[str, Any] = {},
    steps: int | None = None,
    seed: int = 0,
    timeout_s: float = 60.0,
    max_episode_steps: int | None = None,
) -> Report:
    """Check an environment in a process of its own.

    Args:
        env_id: as ``env.id``.
        kwargs: as ``env.kwargs``.
        steps: of the first run, in which most rules are looked at; None: 2,000, or as many as take 30 s. Of a
            group: messages of each run, None: 200.
        seed: of the check.
        timeout_s: how long one call may take, in seconds.
        max_episode_steps: as ``env.max_episode_steps``.

    Raises:
        ConfigError: a number that cannot be meant.
        RuntimeError: the check itself failed; carries its traceback.
    """
    if (steps is not None and steps < 1) or seed < 0 or not timeout_s > 0:
        raise ConfigError(
            f"steps {steps}, seed {seed}, timeout_s {timeout_s}; expected at least 1, at least 0, > 0"
        )
    if max_episode_steps is not None and max_episode_steps < 1:
        raise ConfigError(f"max_episode_steps {max_episode_steps}; expected at least 1, or None")
    request = {
        "id": env_id,
        "kwargs": dict(kwargs),
        "steps": steps,
        "seed": seed,
        "max_episode_steps": max_episode_steps,
        "path": sys.path,
        "parent": os.getpid(),
    }
    with contextlib.ExitStack() as stack:
        # Files without a name: nothing of them stays, however this process ends.
        names = ("beat", "results", "trace")
        files: dict[str, IO[bytes]] = {name: stack.enter_context(tempfile.TemporaryFile()) for name in names}
        files["beat"].truncate(SIZE)
        request |= {name: file.fileno() for name, file in files.items()}
        fate = _run(request, files, timeout_s)
        return _report(env_id, _lines(files["results"]), fate)


def _run(request: dict[str, Any], files: Mapping[str, IO[bytes]], timeout_s: float) -> Finding | None:
    """Run the process to its end; a finding where it did not come there by itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, json.dumps(request)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[file.fileno() for file in files.values()],
        start_new_session=True,  # a group of its own, with all that the environment starts
    )
    assert process.stdout is not None
    output = Tail(process.stdout)
    beat = Beat(files["beat"].fileno())
    try:
        if not _wait(process, beat, timeout_s):
            os.kill(process.pid, signal.SIGUSR1)  # faulthandler writes where it stands
            time.sleep(0.2)
            place = _place(files["trace"])
            return breach("returns", f"{beat.read()[1]} did not return within {timeout_s:g} s{place}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what the environment has started
        process.wait()
        output.close()
    return _death(process.returncode, beat, files, output.last_line())


def _wait(process: subprocess.Popen[bytes], beat: Beat, timeout_s: float) -> bool:
    """Wait for the process to end; False where one call takes too long."""
    seen, since = 0, time.monotonic()
    while process.poll() is None:
        count, now = beat.read()[0], time.monotonic()
        if count != seen:
            seen, since = count, now
        if now - since > (timeout_s if seen % 2 else OURS_S):
            return False
        time.sleep(POLL_S)
    return True


def _death(status: int, beat: Beat, files: Mapping[str, IO[bytes]], printed: str) -> Finding | None:
    """A finding where the process ended before the check did."""
    lines = _lines(files["results"])
    if any("done" in line or "crash" in line for line in lines):
        return None
    how = (
        f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    )
    said = f"; it last printed: {printed}" if printed else ""
    return breach(
        "alive", f"the process {how} in {beat.read()[1] or 'its start'}{_place(files['trace'])}{said}"
    )


def _place(trace: IO[bytes]) -> str:
    place = place_in(os.pread(trace.fileno(), 1 << 16, 0).decode(errors="replace"))
    return f", at {place}" if place else ""


def _lines(results: IO[bytes]) -> list[dict[str, Any]]:
    """The lines that were written whole."""
    results.seek(0)
    return [json.loads(line) for line in results.read().splitlines(keepends=True) if line.endswith(b"\n")]


def _report(env_id: str, lines: list[dict[str, Any]], fate: Finding | None) -> Report:
    for line in lines:
        if "crash" in line:
            raise RuntimeError(f"the check of {env_id} failed:\n{line['crash']}")
    findings = [Finding(**line["finding"]) for line in lines if "finding" in line]
    findings = sorted([*findings, *([fate] if fate else [])], key=lambda f: f.severity)  # errors first
    facts = {key: value for line in lines for key, value in line.get("facts", {}).items()}
    return Report(env_id, tuple(findings), facts, tuple(line["note"] for line in lines if "note" in line))


class Tail:
    """Reads what a process prints, and keeps the end of it."""

    KEPT = 4096

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._end, self._stop = stream, b"", threading.Event()
        self._thread = threading.Thread(target=self._read, name="headrace-check-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        file = self._stream.fileno()
        while True:
            # A process that left the group may hold the other end open for ever.
            if select.select([file], [], [], 0.05)[0]:
                chunk = os.read(file, 65536)
                if not chunk:
                    return
                self._end = (self._end + chunk)[-self.KEPT :]
            elif self._stop.is_set():
                return

    def close(self) -> None:
        """Take what is there, and stop."""
        self._stop.set()
        self._thread.join(timeout=5.0)
        self._stream.close()

    def last_line(self) -> str:
        """The last line that is not empty, shortened."""
        lines = [" ".join(line.split()) for line in self._end.decode(errors="replace").splitlines()]
        return next((line[:200] for line in reversed(lines) if line), "")
