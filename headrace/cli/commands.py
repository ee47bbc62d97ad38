"""The options of the small commands, and the catalogue that ``list`` prints."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_type_hints

import tyro

from headrace.cli.arguments import normalise
from headrace.errors import ConfigError

A = TypeVar("A")


@dataclass(frozen=True)
class Eval:
    """Play greedy episodes with a run's newest policy, on environments that never fed its learner."""

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    episodes: int = 20
    """Episodes, shared evenly among the run's eval.num_envs environments."""
    seed: int | None = None
    """Seed of the environments; None: the run's."""
    json: bool = False
    """Print one JSON object as the last line of standard output."""


@dataclass(frozen=True)
class Play:
    """Play episodes of a run's policy and show them: as videos, or as they happen."""

    run: tyro.conf.Positional[str]
    """Directory of the run."""
    video: str | None = None
    """An .mp4 or .gif; with several episodes NAME-0.mp4, NAME-1.mp4, … None without --live: RUN/videos/play-STEP.mp4."""
    episodes: int = 1
    """Episodes, one after the other on one environment."""
    seed: int | None = None
    """Seed of the environment and of exploration; None: the run's."""
    step: int | None = None
    """One of the run's checkpoints; None: the newest."""
    explore: bool = False
    """Act as in training; --no-explore or --greedy: take the most probable action."""
    live: bool = False
    """Show the frames as they come: in a window where there is a display, else in the terminal."""
    fps: float | None = None
    """Frames a second; None: as the environment asks, else 30."""
    json: bool = False
    """Print one JSON object as the last line of standard output."""


@dataclass(frozen=True)
class List:
    """List agents, presets and environment prefixes."""

    json: bool = False
    """Print one JSON object as the last line of standard output."""


@dataclass(frozen=True)
class BenchEnvs:
    """Measure environments in worker processes, beside the thread and Gymnasium's AsyncVectorEnv."""

    seconds: float = 20.0
    """How long all is measured."""
    workers: int | None = None
    """Worker processes; None: one a core."""
    json: bool = False
    """Print one JSON object as the last line of standard output."""


@dataclass(frozen=True)
class BenchPath:
    """Measure the path end to end and each room alone, at the preset's sizes, in one run."""

    preset: str = "cartpole"
    """The preset."""
    seconds: float = 20.0
    """How long the path is measured after it has warmed up; each room alone takes about half of it."""
    json: bool = False
    """Print one JSON object as the last line of standard output."""


def parse(kind: type[A], program: str, words: list[str]) -> A:
    """Options of a command; words before the first option are positional.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type.
        SystemExit: help was asked for, or a positional argument is missing.
    """
    hints = get_type_hints(kind)
    kinds: dict[str, Any] = {f.name: hints[f.name] for f in fields(kind)}  # type: ignore[arg-type]
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    most = 1 if "run" in kinds else 0
    count = min(count, most)
    if count < most and not {"-h", "--help"} & set(words):
        raise ConfigError(f"{program} needs the directory of a run, such as: {program} runs/first")
    return tyro.cli(kind, prog=program, args=[*words[:count], *normalise(words[count:], kinds).words])


def catalogue() -> dict[str, dict[str, str]]:
    """Agents, presets and environment prefixes with a line about each."""
    from headrace.agents.registry import AGENTS
    from headrace.envs.registry import prefixes
    from headrace.settings.presets import PRESETS

    return {
        "agents": {name: about for name, (_, _, about) in AGENTS.items()},
        "presets": {name: p.about for name, p in PRESETS.items()},
        "environments": prefixes(),
    }
