"""The options of the small commands, and the catalogue that ``list`` prints."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from headrace.cli.arguments import normalise
from headrace.errors import ConfigError
from headrace.settings.primitives import JSON_OBJECT

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
    id: str | None = None
    """Another environment to play on, with the spaces of the run's; None: those of the run."""
    kwargs: Annotated[dict[str, Any], JSON_OBJECT] = field(default_factory=dict)
    """Arguments of that environment, or without --id other arguments of the run's, as a JSON object; {}: none given."""
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


@dataclass(frozen=True)
class CheckEnv:
    """Check an environment of one's own before training on it; exit status 1 where there are errors."""

    id: tyro.conf.Positional[str]
    """The environment, as env.id: a Gymnasium id, my_module:make_env, or prefix:rest."""
    kwargs: Annotated[dict[str, Any], JSON_OBJECT] = field(default_factory=dict)
    """Arguments of the environment, as a JSON object."""
    max_episode_steps: int | None = None
    """Time limit in steps, in place of the environment's own."""
    steps: int | None = None
    """Steps of the first and longest run; None: 2,000, or as many as take 30 seconds."""
    seed: int = 0
    """Seed of the check's actions and resets."""
    timeout_s: float = 60.0
    """How long one call of the environment may take, seconds."""
    json: bool = False
    """Print one JSON object as the last line of standard output."""


_POSITIONAL = {
    "run": ("the directory of a run", "runs/first"),
    "id": ("an environment's id", "my_module:make_env"),
}


def parse(kind: type[A], program: str, words: list[str]) -> A:
    """Options of a command; words before the first option are positional.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type.
        SystemExit: help was asked for, or a positional argument is missing.
    """
    hints = get_type_hints(kind)
    kinds: dict[str, Any] = {f.name: hints[f.name] for f in fields(kind)}  # type: ignore[arg-type]
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    positional = next((_POSITIONAL[name] for name in kinds if name in _POSITIONAL), None)
    count = min(count, 1 if positional else 0)
    if positional and not count and not {"-h", "--help"} & set(words):
        raise ConfigError(f"{program} needs {positional[0]}, such as: {program} {positional[1]}")
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
