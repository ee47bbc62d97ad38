"""The book-keeping of a run: what updates and episodes add up to, when to write a line, and the summary."""

import time
from collections import Counter
from typing import Any

from headrace.envs.failures import REASONS
from headrace.metrics.batches import Tally
from headrace.metrics.meter import ROOMS, Rates, Reading, merge, rates
from headrace.metrics.panel import Panel, Snapshot
from headrace.metrics.sinks import MetricsWriter
from headrace.runtime.parts import Parts
from headrace.runtime.runner import Finished
from headrace.runtime.windows import Windows

TOLD = 10
"""Failures of environments that are shown; log.txt has them all."""


class Sums:
    """Sums of metrics over updates."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.count = 0

    def add(self, metrics: dict[str, float]) -> None:
        """Count an update."""
        self.count += 1
        for name, value in metrics.items():
            self.values[name] = self.values.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Means over the updates counted."""
        return {name: value / self.count for name, value in self.values.items()}


class Lags:
    """Mean and maximum of the lags of trajectories, in updates."""

    def __init__(self) -> None:
        self.total = self.count = self.most = 0

    def add(self, lag: Any) -> None:
        """Count the lags of a batch."""
        self.total += int(lag.sum())
        self.count += len(lag)
        self.most = max(self.most, int(lag.max()))

    @property
    def mean(self) -> float:
        """Mean lag; 0 before the first batch."""
        return self.total / max(self.count, 1)


def crossed(before: int, now: int, every: int) -> bool:
    """Whether a multiple of ``every`` lies in (before, now]; never for ``every`` 0."""
    return every > 0 and now // every > before // every


class Book:
    """Adds up what a runner yields. In the one-thread runner all but ``time/`` figures are the same each time."""

    def __init__(self, parts: Parts, writer: MetricsWriter, panel: Panel | None) -> None:
        """``writer`` and ``panel`` are told; neither is closed here."""
        self._parts, self._writer, self._panel = parts, writer, panel
        self._sums, self._lags = Sums(), Lags()
        self.windows, self.run_lags = Windows(parts.config.env, parts.lanes), Lags()
        self._batches, self.run_batches = Tally(), Tally()
        self.skipped = self._told = 0
        self.before = self.now = parts.learner.learned_steps
        self.eval_return: float | None = None
        self._line_steps = -1  # steps at the last line
        self._started = self._reported = time.perf_counter()
        self._steps_at_start = self._steps_at_report = parts.steps
        self._updates_at_report = parts.learner.updates
        self._readings = self._read()

    def begin(self) -> None:
        """Count time and rates from now; to be called when a resumed run was put in its place."""
        self.before = self.now = self._parts.learner.learned_steps
        self._started = self._reported = time.perf_counter()
        self._steps_at_start = self._steps_at_report = self._parts.steps
        self._updates_at_report = self._parts.learner.updates

    def record(self, finished: Finished) -> None:
        """Count an update; write a line of metrics and refresh the panel where they are due."""
        learned, metrics = finished
        self.before, self.now = self.now, learned.learned_steps
        self.skipped += int(metrics.pop("skipped_updates", 0.0) > 0)
        self._sums.add(metrics)
        self._lags.add(learned.batch.lag)
        self.run_lags.add(learned.batch.lag)
        self._take_episodes()
        self._tell_failures()
        if crossed(self.before, self.now, self._parts.config.log.every_steps):
            self.write_line()
        if self._panel is not None and self._panel.due:
            self._panel.update(self._snapshot())

    def due(self, every: int) -> bool:
        """Whether the last update crossed a multiple of ``every`` learned steps."""
        return crossed(self.before, self.now, every)

    @property
    def behind(self) -> bool:
        """Whether there is anything that the last line does not tell."""
        return self._sums.count > 0 or self._parts.steps != self._line_steps

    def write_line(self) -> None:
        """Write what came since the last line."""
        self._take_episodes()
        parts = self._parts
        self._line_steps = parts.steps
        metrics: dict[str, Any] = {
            "frames": parts.frames,
            "learned_steps": self.now,
            "updates": parts.learner.updates,
            "restarts": sum(lane.restarts for lane in parts.lanes),
            **{f"failures/{reason}": n for reason, n in self._failures().items()},
            "skipped_updates": self.skipped,
            **self._sums.means(),
            **self.windows.metrics(),
            **{f"dropped_ranges/{reason}": n for reason, n in parts.experience.dropped().items()},
        }
        if self._lags.count:
            metrics |= {"lag_mean": self._lags.mean, "lag_max": self._lags.most}
        if parts.server is not None:
            self._take_batches()
            metrics |= {f"inference/{name}": value for name, value in self._batches.figures().items()}
            metrics |= {f"time/inference/{name}": value for name, value in self._batches.waits().items()}
            metrics["inference/compilations"] = parts.server.compilations
        self._writer.write(parts.steps, metrics | self._times())
        self._sums, self._lags, self._batches = Sums(), Lags(), Tally()

    def write_evaluation(self, steps: int, figures: dict[str, float], seconds: float) -> None:
        """Write the figures of an evaluation; see ``Evaluator.figures``."""
        self.eval_return = figures["return_mean"]
        named = {f"eval/{name}": value for name, value in figures.items()}
        self._writer.write(steps, named | {"time/eval_s": seconds})

    def figure_of_merit(self) -> float | None:
        """What the best checkpoint is chosen by: the last evaluation's return, else the training return."""
        return self.eval_return if self.eval_return is not None else self._return_mean()

    def summary(self, wall_s: float) -> dict[str, Any]:
        """The figures of the run so far."""
        parts = self._parts
        self._take_episodes()
        self._tell_failures()
        figures = {
            "run": parts.config.run,
            "steps": parts.steps,
            "frames": parts.frames,
            "updates": parts.learner.updates,
            "wall_s": round(wall_s, 3),
            "steps_per_s": round((parts.steps - self._steps_at_start) / max(wall_s, 1e-9), 1),
            **self.windows.summary(),
            "lag_mean": self.run_lags.mean,
            "lag_max": self.run_lags.most,
            "restarts": sum(lane.restarts for lane in parts.lanes),
            "failures": self._failures(),
        }
        if parts.server is not None:
            self._take_batches()
            central = {**self.run_batches.figures(), **self.run_batches.waits()}
            central["compilations"] = parts.server.compilations
            figures |= {f"inference_{name}": value for name, value in central.items()}
        return figures

    def get_state(self) -> dict[str, Any]:
        """Everything needed to continue."""
        self._take_episodes()
        self._take_batches()
        return {
            "sums": {"values": dict(self._sums.values), "count": self._sums.count},
            "lags": [vars(self._lags).copy(), vars(self.run_lags).copy()],
            "batches": [vars(self._batches).copy(), vars(self.run_batches).copy()],
            "window": self.windows.get_state(),
            "skipped": self.skipped,
            "eval_return": self.eval_return,
            "line_steps": self._line_steps,
            "offset": self._writer.offset(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``."""
        self._sums.values, self._sums.count = dict(state["sums"]["values"]), state["sums"]["count"]
        for lags, saved in zip((self._lags, self.run_lags), state["lags"], strict=True):
            vars(lags).update(saved)
        for batches, saved in zip((self._batches, self.run_batches), state["batches"], strict=True):
            vars(batches).update(saved)
        self.windows.set_state(state["window"])
        self.skipped, self.eval_return = state["skipped"], state["eval_return"]
        self._line_steps = state["line_steps"]

    def _failures(self) -> dict[str, int]:
        """Environments that failed so far, by reason; those that did."""
        counts = sum((lane.failures for lane in self._parts.lanes), Counter[str]())
        return {reason: counts[reason] for reason in REASONS if counts[reason]}

    def _tell_failures(self) -> None:
        for message in (m for lane in self._parts.lanes for m in lane.take_messages()):
            self._writer.log(message)
            self._told += 1
            if self._panel is not None and self._told <= TOLD:
                self._panel.print(message + (" (further ones: log.txt)" if self._told == TOLD else ""))

    def _take_episodes(self) -> None:
        self.windows.take()
        warning = self.windows.warning()
        if warning is not None:
            self._writer.log(warning)
            if self._panel is not None:
                self._panel.print(warning)

    def _return_mean(self) -> float | None:
        return self.windows.total.metrics().get("return_mean")

    def _take_batches(self) -> None:
        if self._parts.server is not None:
            tally = self._parts.server.take_tally()
            self._batches.add(tally)
            self.run_batches.add(tally)

    def _read(self) -> dict[str, Reading]:
        parts = self._parts
        meters = {
            "envs": [lane.env_meter for lane in parts.lanes],
            "inference": [lane.inference_meter for lane in parts.lanes],
            "experience": [parts.experience_meter],
            "learner": [parts.learner_meter],
        }
        return {room: merge(meters[room]) for room in ROOMS}

    def _rooms(self, readings: dict[str, Reading]) -> dict[str, Rates]:
        return {room: rates(self._readings[room], readings[room]) for room in ROOMS}

    def _times(self) -> dict[str, float]:
        now, readings = time.perf_counter(), self._read()
        elapsed = max(now - self._reported, 1e-9)
        steps, updates = self._parts.steps, self._parts.learner.updates
        figures = {
            "time/wall_s": now - self._started,
            "time/steps_per_s": (steps - self._steps_at_report) / elapsed,
            "time/updates_per_s": (updates - self._updates_at_report) / elapsed,
        }
        for room, figure in self._rooms(readings).items():
            figures |= figure.metrics(room)
        self._reported, self._readings = now, readings
        self._steps_at_report, self._updates_at_report = steps, updates
        return figures

    def _snapshot(self) -> Snapshot:
        parts, elapsed = self._parts, max(time.perf_counter() - self._started, 1e-9)
        return Snapshot(
            steps=parts.steps,
            frames=parts.frames,
            steps_per_s=(parts.steps - self._steps_at_start) / elapsed,
            return_mean=self._return_mean(),
            lag_mean=self.run_lags.mean,
            lag_max=self.run_lags.most,
            restarts=sum(lane.restarts for lane in parts.lanes),
            rooms=self._rooms(self._read()),
        )
