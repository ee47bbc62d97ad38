"""The settings of a run: one frozen dataclass a part, nested. Help text stands below each field."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

import tyro

from headrace.agents.impala import ImpalaConfig
from headrace.envs import masks
from headrace.envs.failures import Bounds, OnBadValue
from headrace.errors import ConfigError
from headrace.experience.queue import OnFull
from headrace.learner.learner import LearnerConfig
from headrace.settings import several
from headrace.settings.primitives import JSON_OBJECT


@dataclass(frozen=True)
class EnvConfig:
    """The environments."""

    id: str = "CartPole-v1"
    """Which one: a Gymnasium id, envpool:ID, gymnax:ID, vector:ID, or my.module:make_env (see `headrace list`). Several,
    separated by commas, are spread over the groups in turn."""
    kwargs: Annotated[dict[str, Any], JSON_OBJECT] = field(default_factory=dict)
    """Arguments of the environment, as a JSON object: '{"gravity": 9.8}'. With several ids: of all of them, or, where every
    key is one of the ids, an object for each: '{"A-v1": {"size": 3}}'."""
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

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids, one or several."""
        return tuple(part.strip() for part in self.id.split(","))

    def id_of_group(self, index: int) -> str:
        """The id of the environments of group ``index``."""
        return self.ids[index % len(self.ids)]

    def only(self, env_id: str) -> "EnvConfig":
        """The settings of one of several ids."""
        if len(self.ids) == 1:
            return self
        kwargs = self.kwargs.get(env_id, {}) if several.by_id(self.ids, self.kwargs) else self.kwargs
        return replace(self, id=env_id, kwargs=kwargs)

    def __post_init__(self) -> None:
        """Refuse groups that do not divide the environments, and ids that cannot be spread over them."""
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
        several.check_ids(self.ids, self.kwargs)
        if self.groups % len(self.ids):
            raise ConfigError(several.groups_needed(self.ids, self.groups, self.num_envs, self.actor_threads))
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
    """actor: beside the environments of each group. central: one server answers the groups of a run in batches."""
    min_batch: int = 1
    """Central: a batch goes out as soon as this many slots wait for an action."""
    max_batch: int | None = None
    """Central: most slots of a batch; a larger request is split. None: all slots."""
    deadline_ms: float = 10.0
    """Central: a slot that has waited this long goes out in a smaller batch, milliseconds."""

    def __post_init__(self) -> None:
        """Refuse bounds that cannot hold, and those that would be ignored."""
        if self.min_batch < 1 or (self.max_batch is not None and self.max_batch < self.min_batch):
            raise ConfigError(
                f"inference.min_batch {self.min_batch}, inference.max_batch {self.max_batch}; expected "
                f"1 <= min_batch <= max_batch"
            )
        if not 0 < self.deadline_ms < math.inf:
            raise ConfigError(f"inference.deadline_ms {self.deadline_ms}; expected milliseconds > 0")
        if self.placement == "actor" and (self.min_batch, self.max_batch, self.deadline_ms) != (
            1,
            None,
            10.0,
        ):
            raise ConfigError(
                f"inference.min_batch {self.min_batch}, inference.max_batch {self.max_batch}, inference.deadline_ms "
                f"{self.deadline_ms:g} have no effect with inference.placement actor; leave them out, or use "
                f"inference.placement central"
            )


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
    envs: Annotated[dict[str, Any], JSON_OBJECT] = field(default_factory=dict)
    """Further evaluations by name, on other environments: '{"hard": {"id": "A-v1", "kwargs": {"size": 9}}}', each with
    `id` and, if need be, `kwargs` and `max_episode_steps`. Each evaluation plays them too, as `eval/NAME/…`."""

    def __post_init__(self) -> None:
        """Refuse what cannot be shared evenly, and evaluations that are not described."""
        several.check_evaluations(self.envs)
        if self.every_steps < 0 or self.num_envs < 1 or self.episodes < 1:
            raise ConfigError(
                f"eval.every_steps {self.every_steps}, eval.episodes {self.episodes}, eval.num_envs {self.num_envs}; "
                f"expected at least 0, 1 and 1"
            )


@dataclass(frozen=True)
class VideoConfig:
    """Videos during training, under videos/ in the run (needs the video extra)."""

    every: int = 0
    """Record each time this many steps were learned from; 0: never."""
    episodes: int = 1
    """Greedy episodes of a recording, on an environment that never feeds the learner; a file each."""
    actors: int = 0
    """Record an episode of each of the first so many training environments too, as they act."""

    def __post_init__(self) -> None:
        """Refuse recordings of nothing, or at no time."""
        if min(self.every, self.episodes, self.actors) < 0:
            raise ConfigError(
                f"video.every {self.every}, video.episodes {self.episodes}, video.actors {self.actors}; expected at least 0"
            )
        if self.every and not self.episodes + self.actors:
            raise ConfigError(
                "video.every without video.episodes and video.actors records nothing; set one of them"
            )
        if self.actors and not self.every:
            raise ConfigError(
                f"video.actors {self.actors} needs video.every: how many steps lie between recordings"
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
    video: VideoConfig = field(default_factory=VideoConfig)
    """Videos during training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant."""
        if self.total_steps < 1 or self.seed < 0:
            raise ConfigError(f"total_steps {self.total_steps}, seed {self.seed}; expected at least 1 and 0")
        if self.inference.min_batch > self.env.num_envs:
            raise ConfigError(
                f"inference.min_batch {self.inference.min_batch} is more than env.num_envs {self.env.num_envs}: every batch "
                f"would wait for its deadline; expected at most all slots"
            )
        for name in sorted(set(self.eval.envs) & set(self.env.ids)):
            raise ConfigError(
                f"eval.envs {name!r} is an id of env.id, under which its own evaluation goes; rename it"
            )
        if self.video.actors > self.env.num_envs:
            raise ConfigError(
                f"video.actors {self.video.actors} is more than env.num_envs {self.env.num_envs}; lower it"
            )
