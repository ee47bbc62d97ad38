"""What a factory of environments is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from headrace.envs.contract import EnvSpec
from headrace.envs.failures import Bounds, OnBadValue
from headrace.errors import ConfigError

Vectorization: TypeAlias = Literal["single", "vector"]


@dataclass(frozen=True)
class Request:
    """What a factory is asked for.

    Attributes:
        env_id: the id as the user wrote it.
        target: the id without its prefix.
        num_slots: environments of the group.
        seed_of: ``(slot in group, life) -> seed``.
        kwargs: the environment's own settings.
        vectorization: ``single`` environments, or one ``vector`` environment of ``num_slots``.
        step_timeout_s: how long one step may take, in seconds.
        max_episode_steps: a time limit in agent steps in place of the environment's; None leaves it.
        workers: processes that step the environments; 0: they are stepped in the caller's thread.
        batch_size: slots that are received together at least; None: all.
        max_restarts: how often in a row an environment that fails is started anew; 0: the first failure is an error.
        on_bad_value: see ``GymGroup``.
        bounds: see ``GymGroup``.
        spec: what ``describe`` said of the environments; None: to be found out.
        num_threads: threads of an environment that has its own; 0 lets it choose.
        first_slot: global id of the group's slot 0, for messages.
        drive_single: what is called in place of ``GymGroup`` to drive single environments in the caller's thread.
        render: the group should be able to draw, see ``render``; one that cannot ignores it.
        action_mask: ``info.KEY`` or ``observation.KEY``, where action masks come from; None: there are none.
    """

    env_id: str
    target: str
    num_slots: int
    seed_of: Callable[[int, int], int]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    vectorization: Vectorization = "single"
    step_timeout_s: float = 60.0
    max_episode_steps: int | None = None
    workers: int = 0
    batch_size: int | None = None
    max_restarts: int = 0
    on_bad_value: OnBadValue = "error"
    bounds: Bounds = "warn"
    spec: EnvSpec | None = None
    num_threads: int = 0
    first_slot: int = 0
    drive_single: Callable[..., Any] | None = None
    render: bool = False
    action_mask: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no factory could do."""
        at_least = {"num_slots": 1, "workers": 0, "max_restarts": 0, "num_threads": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"got {name}={getattr(self, name)} for env {self.env_id}; expected at least {least}"
                )
        kinds = {"vectorization": Vectorization, "on_bad_value": OnBadValue, "bounds": Bounds}
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                allowed = " or ".join(map(repr, get_args(kind)))
                raise ConfigError(f"got {name}={getattr(self, name)!r}; expected {allowed}")
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise ConfigError(
                f"got max_episode_steps={self.max_episode_steps}; expected at least 1, or None for the env's own"
            )
        for key in ("max_episode_steps", "num_envs"):
            if key in self.kwargs:
                raise ConfigError(
                    f"env {self.env_id}: got {key!r} among its kwargs; it has a setting of its own, use that"
                )
        if self.batch_size is not None and not 1 <= self.batch_size <= self.num_slots:
            raise ConfigError(
                f"got batch_size={self.batch_size} for env {self.env_id}; expected 1 … {self.num_slots}, the slots "
                "of a group"
            )
