"""A run from its settings to its summary: resume, train, checkpoint, leave."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.checkpoint.checkpointer import Checkpointer, Restored
from headrace.errors import HeadraceError, RunDirectoryError
from headrace.experience.room import NoGuard
from headrace.metrics.panel import Panel
from headrace.metrics.sinks import MetricsWriter
from headrace.runtime import snapshot, videos
from headrace.runtime.book import Book
from headrace.runtime.directory import as_json, checkpoints, claim, find, write_json
from headrace.runtime.evaluations import Evaluations
from headrace.runtime.parts import Parts, Stop, build
from headrace.runtime.runner import Finished, Runner
from headrace.runtime.signals import leave_on_signal
from headrace.runtime.sync import SyncRunner
from headrace.runtime.threads import ThreadsRunner
from headrace.settings.config import Config


class Stopped(Exception):
    """The run was asked to leave before its end; it was checkpointed and can be resumed."""

    def __init__(self, signal_number: int | None, summary: dict[str, Any]) -> None:
        self.signal_number, self.summary = signal_number, summary
        super().__init__(
            f"stopped at {summary['steps']} steps; the same command with --run {summary['run']} continues"
        )


@dataclass
class _Run:
    """A run under way."""

    config: Config
    parts: Parts
    runner: Runner
    book: Book
    checkpointer: Checkpointer
    writer: MetricsWriter
    evaluations: Evaluations
    videos: videos.Videos

    def loop(self) -> None:
        """Train to the end, checkpointing and evaluating on the way."""
        every = self.config.checkpoint.every_steps
        with closing(self.runner.updates()) as updates:
            for finished in updates:
                self._record(finished)
                self.evaluations.collect()
                self.videos.collect()
                if self.book.due(every):
                    self.checkpoint()

    def checkpoint(self) -> None:
        """Hold the run still and save everything that influences it."""
        with self.runner.paused() as remaining:
            for finished in remaining:
                self._record(finished)
            self.save()

    def _record(self, finished: Finished) -> None:
        self.book.record(finished)
        if self.book.due(self.config.eval.every_steps):
            self.evaluations.start()
        if self.book.due(self.config.video.every):
            self.videos.start()

    def save(self) -> None:
        """Save; the run must be still."""
        arrays, meta = snapshot.take(self.parts, self.runner.next_lanes(), self.book.get_state())
        self.checkpointer.save(self.parts.learner.learned_steps, arrays, meta, self.book.figure_of_merit())


def train(config: Config) -> dict[str, Any]:
    """Train, or continue a run, to ``config.total_steps``.

    Args:
        config: settings, such as ``headrace.config("cartpole")`` gives.

    Returns:
        The summary: run, steps, frames, updates, wall_s, steps_per_s, episodes, return_mean (last 100 episodes),
        lag_mean, lag_max, restarts, params_sha256.

    Raises:
        Stopped: by Ctrl-C or SIGTERM, after a checkpoint.
        HeadraceError: what went wrong, in a line.
    """
    started = time.perf_counter()
    asked, (config, path, resuming) = config, find(config)
    finished = _finished_summary(path, config) if resuming else None
    if finished is not None:
        print(
            f"headrace: {path} is finished at {finished['steps']} steps; a larger --total-steps continues it",
            file=sys.stderr,
            flush=True,
        )
        return finished
    with ExitStack() as stack:
        if asked.run is None:
            stack.callback(_discard_if_empty, path)
        stop = Stop()
        got_signal = stack.enter_context(leave_on_signal(partial(_ask_to_stop, stop)))
        run = _open(stack, config, path, resuming, stop)
        try:
            run.loop()
            return _leave(run, path, time.perf_counter() - started, got_signal())
        except HeadraceError as error:
            run.writer.log(f"ended by an error at {run.parts.steps} steps: {error}")
            raise


def _discard_if_empty(path: Path) -> None:
    """Leave no directory where the parts of a run could not be made."""
    with suppress(OSError):
        path.rmdir()


def _ask_to_stop(stop: Stop) -> None:
    stop.asked = True
    # Not print: a signal may come while another print holds the stream.
    os.write(2, b"headrace: stopping after a checkpoint; once more stops at once\n")


def _finished_summary(path: Path, config: Config) -> dict[str, Any] | None:
    """The summary of a run that is finished and not asked for more steps."""
    file = path / "summary.json"
    if not file.is_file():
        return None
    try:
        summary = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise RunDirectoryError(
            f"{file} cannot be read ({error}); delete it to go on from the last checkpoint"
        ) from error
    return summary if summary["steps"] >= config.total_steps else None


def _open(stack: ExitStack, config: Config, path: Path, resuming: bool, stop: Stop) -> _Run:
    """Make the parts of a run and put them where the newest checkpoint has them."""
    notes: list[str] = []
    if resuming:
        claim(stack, path)
        find(config)  # once more: until now another process may have been at it
    restored = _newest_checkpoint(path, config, notes) if resuming else None
    state = snapshot.state_of(restored) if restored is not None else None
    threads = config.runtime == "threads"
    parts = build(
        config, threading.Condition() if threads else NoGuard(), state["lanes"] if state else None, stop
    )
    stack.callback(parts.close)
    videos.check(config, parts.surveys[0])
    if restored is None and config.init_from is not None:
        snapshot.init_params_from(parts, config.init_from)
        notes.append(f"started from the params of {config.init_from}")
    if not resuming:
        claim(stack, path, fresh=True)
    write_json(path / "config.json", as_json(config))
    checkpointer = stack.enter_context(checkpoints(path, config, warn=notes.append))
    writer = _writer(config, path, restored, state)
    stack.callback(writer.close)
    if restored is not None and state is not None:
        notes += _continue(parts, restored, state)
    elif not resuming:
        notes.append(f"started {config.preset} on {config.env.id}, seed {config.seed}")
    panel = stack.enter_context(_panel(config)) if config.log.panel else None
    for note in notes:
        writer.log(note)
        if panel is not None:
            panel.print(note)
    book = Book(parts, writer, panel)
    if state is not None:
        book.set_state(state["book"])
        book.begin()
    evaluations = Evaluations(config, parts, book)
    stack.callback(evaluations.close)
    recorded = videos.Videos(config, parts, path, writer.log)
    stack.callback(recorded.close)
    next_lanes = state["next_lanes"] if state else None
    runner: Runner = ThreadsRunner(parts, next_lanes) if threads else SyncRunner(parts, next_lanes)
    return _Run(config, parts, runner, book, checkpointer, writer, evaluations, recorded)


def _newest_checkpoint(path: Path, config: Config, notes: list[str]) -> Restored | None:
    """None where the run was ended before its first checkpoint: it begins again."""
    with checkpoints(path, config, warn=notes.append) as checkpointer:
        if checkpointer.ever_completed():
            return checkpointer.restore()
    if (path / "summary.json").exists():
        raise RunDirectoryError(
            f"{path} holds a finished run without its checkpoints; bring them back, or give another directory"
        )
    notes.append("no checkpoint was written yet; the run begins again")
    return None


def _writer(
    config: Config, path: Path, restored: Restored | None, state: dict[str, Any] | None
) -> MetricsWriter:
    offset, steps = (state["book"]["offset"], restored.meta["steps"]) if restored and state else (0, 0)
    return MetricsWriter.resume(path, offset, steps, tensorboard=config.log.tensorboard)


def _continue(parts: Parts, restored: Restored, state: dict[str, Any]) -> list[str]:
    exact = snapshot.continue_parts(parts, restored, state)
    notes = [f"resumed at {parts.steps} steps"]
    if not exact:
        notes.append(
            "environments were reset on resume, because their state could not be had or reproduced; their unfinished "
            "episodes and trajectories were dropped"
        )
    return notes


@contextmanager
def _panel(config: Config) -> Iterator[Panel]:
    with Panel(f"{config.preset} · {config.env.id}", config.total_steps) as panel:
        yield panel


def _leave(run: _Run, path: Path, wall_s: float, signal_number: int | None) -> dict[str, Any]:
    """Save the end of the run, or where it was stopped, and sum up."""
    if not run.parts.stop.asked:
        run.evaluations.collect(wait=True)
        run.videos.collect(wait=True)
        if run.book.behind:
            run.book.write_line()
    run.save()
    run.checkpointer.wait()
    summary = run.book.summary(wall_s)
    summary["params_sha256"] = snapshot.digest(run.parts.agent.policy_params(run.parts.learner.state))
    if run.parts.stop.asked:
        run.writer.log(f"stopped at {run.parts.steps} steps")
        raise Stopped(signal_number, summary)
    write_json(path / "summary.json", summary)
    run.writer.log(f"finished at {run.parts.steps} steps")
    return summary
