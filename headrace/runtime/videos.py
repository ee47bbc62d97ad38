"""Videos during training: episodes beside it, and those of training environments as they act."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

from headrace.agents.agent import Agent
from headrace.envs.render import as_rgb, drawer
from headrace.errors import WaitTimeoutError
from headrace.inference.actor import Published
from headrace.runtime.beside import LOOK_S, Beside
from headrace.runtime.driver import Lane
from headrace.runtime.evaluate import Evaluator
from headrace.runtime.parts import Parts, make_envs
from headrace.runtime.recorder import Recorder
from headrace.runtime.survey import Survey
from headrace.runtime.targets import first_id
from headrace.runtime.video import Sink, VideoFile, ffmpeg
from headrace.seeds import Role
from headrace.settings.config import Config
from headrace.settings.fields import replace_fields


def check(config: Config, survey: Survey) -> None:
    """Draw one frame of the run's environments, so that what is missing is missed at the start.

    Raises:
        ConfigError: there is no FFmpeg, or the environment cannot be drawn.
        EnvironmentIdError: a package that draws is missing.
    """
    if not config.video.every:
        return
    ffmpeg()
    group = make_envs(first_id(config), survey, 1, Role.EVAL_ENV, config.eval.num_envs, render=True)
    try:
        timestep, ids = group.recv(config.env.step_timeout_s)
        as_rgb(drawer(group)(timestep, 0, int(ids[0])), group.spec.name)
    finally:
        group.close()


class EpisodeVideos:
    """Greedy episodes on an environment of their own, ``step-STEPS-EPISODE.mp4`` each."""

    def __init__(self, config: Config, agent: Agent, survey: Survey, directory: Path) -> None:
        self._directory, self._episodes, self._steps = directory, config.video.episodes, 0
        self._files: list[VideoFile] = []
        self._recorder = Recorder(self._begin)
        # Slots beyond those of evaluation: what is filmed is not what was measured.
        self.evaluator = Evaluator(
            replace_fields(first_id(config), {"eval.num_envs": 1}),
            agent,
            [survey],
            watch=self._recorder.attach,
            first_slot=config.eval.num_envs,
        )

    def record(self, published: Published, steps: int, number: int) -> list[Path]:
        """Play and record; the paths. Nothing is left of what was cut short."""
        self._steps, self._files = steps, []
        try:
            self.evaluator.run(published, self._episodes, number)
        finally:
            self._recorder.close()
        return [file.path for file in self._files]

    def _begin(self, slot: int, fps: float) -> Sink:
        self._files = [file for file in self._files if file.done]
        name = f"step-{self._steps}-{len(self._files)}.mp4"
        self._files.append(VideoFile(self._directory / name, fps))
        return self._files[-1]


class ActorVideos:
    """Training episodes of some slots of a lane, drawn while the lane is driven; they change nothing it does.

    ``want`` may be called from another thread than the one that drives the lane.
    """

    def __init__(self, lane: Lane, slots: int, directory: Path) -> None:
        """Watch the first ``slots`` slots of ``lane``, whose group was made to draw."""
        self._first_slot, self._directory = lane.first_slot, directory
        self._wanted: dict[int, Path] = {}  # by slot of the group
        self._done: SimpleQueue[Path] = SimpleQueue()
        self._slots = range(min(slots, lane.group.num_slots))
        self._recorder = Recorder(self._begin, self._slots)
        lane.see = self._recorder.attach(lane.group)

    def want(self, steps: int) -> None:
        """Record the next episode of each slot, ``step-STEPS-actor-SLOT.mp4``."""
        for slot in self._slots:
            self._wanted[slot] = self._directory / f"step-{steps}-actor-{self._first_slot + slot}.mp4"

    def take(self) -> list[Path]:
        """The videos finished since the last call."""
        return [self._done.get() for _ in range(self._done.qsize())]

    def close(self) -> None:
        """Discard what is not complete."""
        self._recorder.close()

    def _begin(self, slot: int, fps: float) -> Sink | None:
        path = self._wanted.get(slot)
        return None if path is None else _Wanted(path, fps, lambda: self._fulfil(slot, path))

    def _fulfil(self, slot: int, path: Path) -> None:
        self._done.put(path)
        if self._wanted.get(slot) == path:  # else another is wanted already
            del self._wanted[slot]


class _Wanted(VideoFile):
    """A video that says when it is there; until then the next episode is recorded in its place."""

    def __init__(self, path: Path, fps: float, done: Callable[[], None]) -> None:
        super().__init__(path, fps)
        self._tell = done

    def finish(self) -> None:
        super().finish()
        self._tell()


class Videos:
    """The videos of a run."""

    def __init__(self, config: Config, parts: Parts, path: Path, log: Callable[[str], None]) -> None:
        """Write below ``path``/videos and ``log`` what was written; nothing with ``config.video.every`` 0."""
        self._parts, self._path, self._log = parts, path, log
        self._video, directory = config.video, path / "videos"
        self._beside = Beside("video", at_once=config.runtime == "sync")
        self._running: tuple[int, Future[list[Path]]] | None = None
        self._episodes: EpisodeVideos | None = None
        self._actors: list[ActorVideos] = []
        if not config.video.every:
            return
        for left in directory.glob(".partial-*"):  # of a process that was killed
            left.unlink()
        if config.video.episodes:
            self._episodes = EpisodeVideos(config, parts.agent, parts.surveys[0], directory)
        for lane in parts.lanes:
            if lane.first_slot < config.video.actors:
                self._actors.append(ActorVideos(lane, config.video.actors - lane.first_slot, directory))

    def start(self) -> None:
        """Record: of the newest params, and the next episodes of the actors."""
        steps, published = self._parts.learner.learned_steps, self._parts.newest()
        for actors in self._actors:
            actors.want(steps)
        if self._episodes is None:
            return
        self.collect()
        if self._running is not None:
            self._log(f"no video at {steps} steps: that of {self._running[0]} steps is not done yet")
            return
        episodes, number = self._episodes, steps // self._video.every
        self._running = steps, self._beside.submit(lambda: episodes.record(published, steps, number))
        self.collect()

    def collect(self, wait: bool = False) -> None:
        """Tell of the videos that are there.

        Raises:
            WaitTimeoutError: an environment hangs.
        """
        self._tell([path for actors in self._actors for path in actors.take()])
        while self._running is not None:
            message = self._hangs()
            if message is not None:
                raise WaitTimeoutError(message)
            _, future = self._running
            if not future.done() and not wait:
                return
            try:
                paths = future.result(LOOK_S)
            except TimeoutError:
                if future.done():
                    raise
                continue
            self._running = None
            self._tell(paths)

    def close(self) -> None:
        """Cut short what is being recorded, and leave nothing of it."""
        if self._episodes is not None:
            self._beside.close(self._episodes.evaluator.cancel, lambda: self._hangs() is not None)
        for actors in self._actors:
            actors.close()

    def _tell(self, paths: list[Path]) -> None:
        if paths:
            self._log(f"recorded {', '.join(str(path.relative_to(self._path)) for path in paths)}")

    def _hangs(self) -> str | None:
        return self._episodes.evaluator.overdue() if self._episodes is not None else None
