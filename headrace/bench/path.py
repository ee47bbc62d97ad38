"""How near the path comes to the speed of its rooms.

A machine that takes each step through one room after the other, each room at the rate it has alone on all cores, makes

    limit = 1 / Σ 1/rate_i          efficiency = steps/s end to end ÷ limit

A path that loses no time between its rooms comes near an efficiency of 1; where a room alone leaves cores idle, another
can use them, and the path can pass it. Everything is measured in one process and one call, the rooms before and
after the path, so that a drift of the machine's speed is seen. No run directory is written.
"""

import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, NamedTuple, TypeAlias

from headrace.agents.registry import build_agent
from headrace.bench.machine import cores, machine, versions
from headrace.bench.rooms import Loop, Turns, bare_loops
from headrace.bench.table import table
from headrace.errors import ConfigError
from headrace.metrics.meter import ROOMS, Reading, merge, rates
from headrace.runtime.book import Lags
from headrace.runtime.parts import Parts, build
from headrace.runtime.runner import Finished
from headrace.runtime.survey import env_spec
from headrace.runtime.threads import ThreadsRunner
from headrace.settings.config import Config
from headrace.settings.presets import config as settings_of

__all__ = ["bench_path", "fastest", "limit", "table"]

REPEATS = 5
"""Windows of a measurement; its rate is their median."""
ENDLESS = 10**15
"""Steps that no measurement reaches."""


class Bare(NamedTuple):
    """One form of a room's bare loop: rates of its windows in rows/s, and CPU-seconds of the process a row."""

    rates: list[float]
    cpu_s: list[float]


Rooms: TypeAlias = dict[str, dict[str, Bare]]
"""By room and form."""


class Path(NamedTuple):
    """The path end to end.

    Attributes:
        rates: trained steps/s of each window.
        collected_per_s: steps/s that the environments made meanwhile; near the trained ones when in balance.
        cores_busy: CPU-seconds a second, all threads.
        cpu_s_per_step: CPU-seconds of the process for a trained step.
        lags: of the trained ranges, in updates.
        waits: fractions of time that each room waited for input and for output.
        seconds: how long was measured.
    """

    rates: list[float]
    collected_per_s: float
    cores_busy: float
    cpu_s_per_step: float
    lags: Lags
    waits: dict[str, dict[str, float]]
    seconds: float


def limit(rates: Mapping[str, float]) -> float:
    """Steps/s of the rooms one after the other: ``1 / Σ 1/rate``.

    Raises:
        ValueError: no rates, or one that is not positive.
    """
    if not rates or min(rates.values()) <= 0:
        raise ValueError(f"got rates {dict(rates)}; expected a positive one for every room")
    return 1.0 / sum(1.0 / rate for rate in rates.values())


def bench_path(
    preset: str, seconds: float = 20.0, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Measure the rooms alone, the path end to end, and the rooms again.

    Args:
        preset: name of a preset or agent.
        seconds: of the path, after it has warmed up; each room alone takes half of it.
        changes: settings by dotted name.

    Returns:
        A JSON object; ``rates`` are medians over both times, ``rates_before`` and ``rates_after`` over each.

    Raises:
        ConfigError: unknown preset or setting, the one-thread runner, ``seconds`` not positive.
    """
    config = settings_of(preset, **{**(changes or {}), "total_steps": ENDLESS})
    if config.runtime != "threads" or not seconds > 0:
        raise ConfigError(
            f"got runtime {config.runtime!r}, seconds {seconds}; the bench needs runtime 'threads', seconds > 0"
        )
    spec = env_spec(config)
    loops = bare_loops(config, build_agent(config.agent, spec, config.build_agent), spec)
    before = rooms_alone(loops, seconds / 4)
    path = end_to_end(config, seconds)
    after = rooms_alone(loops, seconds / 4)
    reuse = config.experience.max_reuse
    return _result(preset, _per_step(before, reuse), path, _per_step(after, reuse))


def _per_step(rooms: Rooms, max_reuse: int) -> Rooms:
    """Rooms whose learner's figures are per new step: it trains on each ``max_reuse`` times."""
    learner = {
        form: Bare([rate / max_reuse for rate in bare.rates], [cpu_s * max_reuse for cpu_s in bare.cpu_s])
        for form, bare in rooms["learner"].items()
    }
    return {**rooms, "learner": learner}


def _result(preset: str, before: Rooms, path: Path, after: Rooms) -> dict[str, Any]:
    median = statistics.median
    forms = {room: fastest(before[room], after[room]) for room in ROOMS}
    bare = {room: (before[room][form], after[room][form]) for room, form in forms.items()}
    both = {room: median(b.rates + a.rates) for room, (b, a) in bare.items()}
    steps_per_s, most = median(path.rates), limit(both)
    return {
        "preset": preset,
        "steps_per_s": steps_per_s,
        "efficiency": steps_per_s / most,
        "limit": most,
        "rates": both,
        "rates_before": {room: median(b.rates) for room, (b, _) in bare.items()},
        "rates_after": {room: median(a.rates) for room, (_, a) in bare.items()},
        "forms": forms,
        "cpu_s_per_row": {room: median(b.cpu_s + a.cpu_s) for room, (b, a) in bare.items()},
        "cores_busy": path.cores_busy,
        "steps_per_s_windows": path.rates,
        "collected_per_s": path.collected_per_s,
        "cpu_s_per_step": path.cpu_s_per_step,
        "lag_mean": path.lags.mean,
        "lag_max": path.lags.most,
        "waits": path.waits,
        "cores": cores(),
        "machine": machine(),
        "versions": versions(),
        "seconds": path.seconds,
    }


def fastest(*times: Mapping[str, Bare]) -> str:
    """The form with the highest median over all windows of all ``times``."""
    return max(times[0], key=lambda form: statistics.median(itertools.chain(*(t[form].rates for t in times))))


def rooms_alone(loops: Mapping[str, Mapping[str, Loop]], seconds: float) -> Rooms:
    """Each room for ``seconds`` in all, one form after the other."""
    return {
        room: {form: time_loop(loop, seconds / len(forms)) for form, loop in forms.items()}
        for room, forms in loops.items()
    }


def time_loop(loop: Loop, seconds: float) -> Bare:
    """Rates of a loop in ``REPEATS`` windows, after it has compiled and warmed up for a tenth of the time."""
    with closing(loop()) as turns:
        next(turns)
        _window(turns, seconds / 10)
        windows = [_window(turns, seconds / REPEATS) for _ in range(REPEATS)]
    return Bare([rate for rate, _ in windows], [cpu_s for _, cpu_s in windows])


def _window(turns: Turns, seconds: float) -> tuple[float, float]:
    """Rows/s and CPU-seconds a row."""
    clock, rows, elapsed = time.perf_counter, 0, 0.0
    cpu, start = time.process_time(), clock()
    while elapsed < seconds or not rows:  # a turn of nothing but resets makes no rows
        rows += next(turns)
        elapsed = clock() - start
    return rows / elapsed, (time.process_time() - cpu) / rows


class _Mark(NamedTuple):
    """Where the run stood when an update was published."""

    time_s: float
    cpu_s: float
    learned_steps: int
    steps: int
    readings: dict[str, Reading]


def end_to_end(config: Config, seconds: float) -> Path:
    """The run itself on its threads, without logs and checkpoints, for ``seconds`` after it has warmed up."""
    parts = build(config, threading.Condition())
    try:
        with closing(ThreadsRunner(parts).updates()) as updates:
            marks, lags = [_mark(parts, _warm_up(updates, config, seconds / 5))], Lags()
            for finished in updates:
                lags.add(finished.learned.batch.lag)
                # A window ends with an update, and the next begins there.
                if time.perf_counter() - marks[0].time_s >= len(marks) * seconds / REPEATS:
                    marks.append(_mark(parts, finished))
                    if len(marks) > REPEATS:
                        break
            parts.stop.asked = True
    finally:
        parts.close()
    return _path(marks, lags)


def _warm_up(updates: Iterator[Finished], config: Config, seconds: float) -> Finished:
    """Until everything is compiled and the lag has settled, and for ``seconds`` more."""
    for _ in range(config.experience.max_lag + config.learner.staging + 2):
        next(updates)
    start = time.perf_counter()
    while True:
        finished = next(updates)
        if time.perf_counter() - start >= seconds:
            return finished


def _mark(parts: Parts, finished: Finished) -> _Mark:
    meters = {
        "envs": [lane.env_meter for lane in parts.lanes],
        "inference": [lane.inference_meter for lane in parts.lanes],
        "experience": [parts.experience_meter],
        "learner": [parts.learner_meter],
    }
    readings = {room: merge(meters[room]) for room in ROOMS}
    return _Mark(
        time.perf_counter(), time.process_time(), finished.learned.learned_steps, parts.steps, readings
    )


def _path(marks: list[_Mark], lags: Lags) -> Path:
    first, last = marks[0], marks[-1]
    elapsed, cpu = last.time_s - first.time_s, last.cpu_s - first.cpu_s
    waits = {}
    for room in ROOMS:
        figures = rates(first.readings[room], last.readings[room])
        waits[room] = {"wait_in": figures.wait_in, "wait_out": figures.wait_out}
    return Path(
        rates=[
            (b.learned_steps - a.learned_steps) / (b.time_s - a.time_s) for a, b in itertools.pairwise(marks)
        ],
        collected_per_s=(last.steps - first.steps) / elapsed,
        cores_busy=cpu / elapsed,
        cpu_s_per_step=cpu / (last.learned_steps - first.learned_steps),
        lags=lags,
        waits=waits,
        seconds=elapsed,
    )
