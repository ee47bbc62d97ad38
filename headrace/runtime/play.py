"""Episodes of a trained policy to be looked at: as videos, or as they happen."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace.errors import ConfigError
from headrace.runtime.evaluate import Cancelled, Evaluation, Evaluator
from headrace.runtime.live import Pace, View, view
from headrace.runtime.policy import load
from headrace.runtime.recorder import Recorder
from headrace.runtime.signals import leave_on_signal
from headrace.runtime.survey import unmeasured
from headrace.runtime.targets import first_id
from headrace.runtime.video import Sink, Together, VideoFile, check_path
from headrace.settings.fields import replace_fields


def play(
    run: str | Path,
    *,
    video: str | Path | None = None,
    episodes: int = 1,
    seed: int | None = None,
    step: int | None = None,
    explore: bool = False,
    live: bool = False,
    fps: float | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Play episodes of a run's policy on one environment, one after the other, and show each.

    An episode of n steps has n + 1 frames: that of its reset, and one after each step; the last shows the state that ended
    it.

    Args:
        run: directory of the run.
        video: an .mp4 or .gif, written over; with several episodes NAME-0.mp4, NAME-1.mp4, … None without ``live``:
            RUN/videos/play-STEP.mp4.
        episodes: how many.
        seed: of the environment and of exploration; None: the run's.
        step: of one of the run's checkpoints; None: the newest.
        explore: act as in training, in place of greedily.
        live: show the frames as they come, in a window where there is a display, else in the terminal.
        fps: frames a second; None: as the environment asks, else 30.
        console: the terminal; None: standard error.

    Returns:
        run, step, episodes, return_mean … length_mean as ``evaluate``, returns and lengths by episode, videos (their paths);
        where it was left early, all are of the episodes that ended (no means without any), and signal says by what.

    Raises:
        ConfigError: video cannot be written, or there is nothing to show frames on.
        RunDirectoryError: no such run or checkpoint.
    """
    if episodes < 1 or (fps is not None and not 0 < fps <= 1000):
        raise ConfigError(
            f"episodes {episodes}, fps {fps}; expected at least 1, and more than 0 and at most 1000"
        )
    if video is not None:
        check_path(Path(video))
    policy = load(run, step)
    if video is None and not live:
        video = Path(run) / "videos" / f"play-{policy.step}.mp4"
        check_path(video)
    config = first_id(policy.config)
    config = replace_fields(config, {"eval.num_envs": 1} | ({} if seed is None else {"seed": seed}))
    shown = _Shown([] if video is None else episode_paths(Path(video), episodes))
    with ExitStack() as stack:
        recorder = stack.enter_context(Recorder(shown.begin, fps=fps))
        evaluator = Evaluator(
            config, policy.agent, [unmeasured(config, policy.spec)], explore=explore, watch=recorder.attach
        )
        if live:
            shown.view = view(evaluator.cancel, console or Console(file=sys.stderr))
            stack.callback(shown.view.close)
        signal_number = stack.enter_context(leave_on_signal(evaluator.cancel))
        try:
            evaluation = evaluator.run(policy.published(), episodes)
        except Cancelled as cancelled:
            evaluation = cancelled.so_far
        left_by = signal_number()
    summary = {"run": str(run), "step": policy.step} | _figures(evaluation) | {"videos": shown.videos()}
    return summary | ({} if left_by is None else {"signal": left_by})


@dataclass
class _Shown:
    """Where the frames go: each episode to a file of its own, all to the view."""

    paths: list[Path]
    view: View | None = None
    files: list[VideoFile] = field(default_factory=list)

    def begin(self, slot: int, fps: float) -> Sink:
        sinks: list[Sink] = []
        if self.paths:
            self.files = [file for file in self.files if file.done]
            self.files.append(VideoFile(self.paths[len(self.files)], fps))
            sinks.append(self.files[-1])
        if self.view is not None:
            self.view.pace = Pace(fps)
            sinks.append(self.view)
        return Together(sinks)

    def videos(self) -> list[str]:
        return [str(file.path) for file in self.files if file.done]


def episode_paths(path: Path, episodes: int) -> list[Path]:
    """The file of each episode: ``path`` for one, else numbered from 0 before the ending."""
    if episodes == 1:
        return [path]
    return [path.with_name(f"{path.stem}-{k}{path.suffix}") for k in range(episodes)]


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    figures = evaluation.summary() if evaluation.returns else {"episodes": 0}
    return figures | {"returns": evaluation.returns, "lengths": evaluation.lengths}
