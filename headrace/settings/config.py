"""The settings of a run: one frozen dataclass a part, nested. Help text stands below each field."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import tyro

from headrace.agents.impala import ImpalaConfig
from headrace.envs import masks
from headrace.envs.failures import Bounds, OnBadValue
from headrace.errors import ConfigError
from headrace.experience.queue import OnFull
from headrace.learner.learner import LearnerConfig
from headrace.settings.primitives import JSON_OBJECT


@dataclass(frozen=True)
class EnvConfig:
    """The environments."""

    id: str = "CartPole-v1"
    """Which one: a Gymnasium id, envpool:ID, vector:ID, or my.module:make_env (see `headrace list`)."""
    kwargs: Annotated[dict[str, Any], JSON_OBJECT] = field(default_factory=dict)
    """Arguments of the environment, as a JSON object: '{"gravity": 9.8}'."""
    num_envs: int = 32
    """Training environments (slots), over all groups."""
    groups: int = 2
    """Groups the environments are driven in; while one steps, the policy answers another."""
    actor_threads: int = 1
    """Threads that drive the groups (threads runner); each drives groups/actor_threads in turn."""
    workers: int | None = None
    """Processes that step the environments, over all groups: at least one a group, at most one an environment. 0: the
    actor's thread. None: the thread for Gymnasium's own small tasks and for environments that come many at once, else as
    many processes as keep the cores busy."""
    batch_size: int | None = None
    """Slots of a group that are received together: as soon as that many are ready. None: all; with several workers a group,
    half of them (threads runner)."""
    max_restarts: int = 5
    """How often in a row an environment that raises, hangs or dies is started anew; 100 steps of life give one back. Beyond
    that the run ends with its traceback; 0: at the first failure."""
    on_bad_value: OnBadValue = "error"
    """NaN, an infinite value, a wrong shape, kind or range ends the run with an error, or (restart) the slot's life: the row
    is left out and counted, the environment is reset."""
    bounds: Bounds = "warn"
    """What a float outside its Box is: said once (warn), a bad value (error), or nothing (ignore)."""
    num_threads: int = 0
    """Threads inside a group of EnvPool; 0 lets EnvPool choose."""
    vectorization: Literal["single", "vector"] = "single"
    """Gymnasium: step single environments in the actor's thread, or use the environment's vector version."""
    max_episode_steps: int | None = None
    """Time limit in steps, in place of the environment's own."""
    action_mask: str | None = None
    """Where masks of forbidden actions come from: info.action_mask, or observation.KEY; None: nothing is forbidden."""
    step_timeout_s: float = 60.0
    """A worker in which a step takes longer than this is killed and started anew, seconds; in a thread the run ends."""

    def __post_init__(self) -> None:
        """Refuse groups that do not divide the environments."""
        if (self.workers is not None and self.workers < 0) or self.max_restarts < 0:
            raise ConfigError(
                f"env.workers {self.workers}, env.max_restarts {self.max_restarts}; expected at least 0 "
                "(or None for workers)"
            )
        if self.batch_size is not None and not 1 <= self.batch_size <= self.num_envs // self.groups:
            raise ConfigError(
                f"env.batch_size {self.batch_size}; expected 1 … {self.num_envs // self.groups}, the slots of a group"
            )
        for name, kind in (("on_bad_value", OnBadValue), ("bounds", Bounds)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"env.{name} {getattr(self, name)!r}; expected one of {', '.join(get_args(kind))}"
                )
        if min(self.num_envs, self.groups, self.actor_threads) < 1 or self.num_threads < 0:
            raise ConfigError(
                f"env.num_envs {self.num_envs}, env.groups {self.groups}, env.actor_threads {self.actor_threads}, "
                f"env.num_threads {self.num_threads}; expected at least 1, 1, 1 and 0"
            )
        if self.num_envs % self.groups:
            raise ConfigError(
                f"env.num_envs {self.num_envs} is not a multiple of env.groups {self.groups}; change one of them"
            )
        if self.groups % self.actor_threads:
            raise ConfigError(
                f"env.groups {self.groups} is not a multiple of env.actor_threads {self.actor_threads}; change one of them"
            )
        if self.step_timeout_s <= 0:
            raise ConfigError(f"env.step_timeout_s {self.step_timeout_s}; expected seconds > 0")
        if self.action_mask is not None:
            masks.parse(self.action_mask)
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise ConfigError(f"env.max_episode_steps {self.max_episode_steps}; expected at least 1, or None")


@dataclass(frozen=True)
class InferenceConfig:
    """Where the policy runs."""

    placement: Literal["actor", "central"] = "actor"
    """actor: where the environments are. (central, one server for many groups, is not there yet.)"""

    def __post_init__(self) -> None:
        """Refuse what is not built."""
        if self.placement == "central":
            raise ConfigError("inference.placement central is not there yet; use inference.placement actor")


@dataclass(frozen=True)
class ExperienceConfig:
    """The queue between collecting and learning."""

    max_lag: int = 4
    """Most updates between the params that acted and the params that learn; 0: collecting and learning alternate."""
    capacity: int | None = None
    """Trajectories that may wait in the queue; None: as many as max_lag lets be in flight."""
    max_reuse: int = 1
    """How often a trajectory is trained on."""
    on_full: OnFull = "wait"
    """A full queue makes collecting wait, or drops its oldest trajectory (counted)."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation during training: greedy episodes on environments that never feed the learner."""

    every_steps: int = 0
    """Evaluate each time this many steps were learned from; 0: never."""
    episodes: int = 20
    """Episodes of an evaluation, shared evenly among its environments."""
    num_envs: int = 10
    """Environments of an evaluation."""

    def __post_init__(self) -> None:
        """Refuse what cannot be shared evenly."""
        if self.every_steps < 0 or self.num_envs < 1 or self.episodes < 1:
            raise ConfigError(
                f"eval.every_steps {self.every_steps}, eval.episodes {self.episodes}, eval.num_envs {self.num_envs}; "
                f"expected at least 0, 1 and 1"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of a run."""

    every_steps: int = 50_000
    """Write one each time this many steps were learned from, and at the end."""
    keep_latest: int = 2
    """How many of the newest are kept."""
    keep_best: bool = True
    """Keep the one with the highest return as well (of evaluation where there is one, else of training)."""
    milestone_every_steps: int | None = None
    """Keep one for good each time this many steps were learned from; None: none."""

    def __post_init__(self) -> None:
        """Refuse intervals that never come."""
        if self.every_steps < 1 or self.keep_latest < 1:
            raise ConfigError(
                f"checkpoint.every_steps {self.every_steps}, checkpoint.keep_latest {self.keep_latest}; expected at least 1"
            )


@dataclass(frozen=True)
class LogConfig:
    """What a run tells."""

    every_steps: int = 10_000
    """Write a line of metrics each time this many steps were learned from."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    panel: bool = True
    """Show progress on standard error: a live panel on a terminal, plain lines elsewhere."""

    def __post_init__(self) -> None:
        """Refuse an interval that never comes."""
        if self.every_steps < 1:
            raise ConfigError(f"log.every_steps {self.every_steps}; expected at least 1")


@dataclass(frozen=True)
class Config:
    """A run."""

    preset: tyro.conf.Suppress[str] = "impala"
    """The preset or agent it was made from."""
    total_steps: int = 500_000
    """Agent steps to collect in training environments."""
    seed: int = 0
    """Seed of everything random; 0 is a seed like any other."""
    run: str | None = None
    """Directory of the run; the same command with the same directory resumes it. None: a fresh one under runs/."""
    resume: bool = True
    """Resume the run where the directory holds one; --no-resume refuses such a directory instead."""
    init_from: str | None = None
    """Start from the params of another run: RUN, or RUN@STEP for one of its checkpoints."""
    runtime: Literal["threads", "sync"] = "threads"
    """threads: collecting and learning overlap. sync: one thread, a fixed order, repeatable bit for bit."""
    agent: ImpalaConfig = field(default_factory=ImpalaConfig)
    """The agent."""
    build_agent: str | None = None
    """A function `my.module:function(config.agent, env_spec) -> Agent` that makes the agent in place of the built-in one."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The environments."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    """Where the policy runs."""
    experience: ExperienceConfig = field(default_factory=ExperienceConfig)
    """The queue."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """The learner."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant."""
        if self.total_steps < 1 or self.seed < 0:
            raise ConfigError(f"total_steps {self.total_steps}, seed {self.seed}; expected at least 1 and 0")
