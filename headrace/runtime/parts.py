"""The parts of a run, made from its settings. Every runner drives the same parts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from headrace import spaces
from headrace.agents.agent import Agent
from headrace.agents.registry import build_agent
from headrace.envs.contract import EnvGroup, EnvSpec
from headrace.envs.registry import make_group
from headrace.experience.queue import QueueLimits, check_limits
from headrace.experience.room import Experience, Guard
from headrace.experience.store import RangeLayout
from headrace.inference.actor import Published
from headrace.inference.bank import SlotBank
from headrace.inference.batcher import Limits
from headrace.inference.central import InferenceServer
from headrace.inference.fused import inference_maker
from headrace.inference.messages import Inference
from headrace.learner.learner import Learner
from headrace.metrics.episodes import EpisodeTracker
from headrace.metrics.meter import Meter
from headrace.runtime.driver import Lane
from headrace.runtime.survey import Survey, env_options, share_of
from headrace.runtime.targets import of_group, survey_targets
from headrace.seeds import Role, SlotSeeds
from headrace.settings.config import Config
from headrace.types import PyTree, Row, TimeStep


class Newest:
    """Holds the newest published params; read and replaced whole, so threads need no lock."""

    def __init__(self, published: Published) -> None:
        self.value = published

    def __call__(self) -> Published:
        """The newest."""
        return self.value


@dataclass
class Stop:
    """Whether somebody asked the run to leave; a runner looks at each turn."""

    asked: bool = False


@dataclass
class Parts:
    """What a runner drives.

    Attributes:
        config: the settings.
        surveys: what the environments of each id and evaluation look like, and where they are stepped; see ``targets``.
        agent: what is learned.
        lanes: env groups with their inference.
        experience: store and queue.
        learner: state and updates.
        newest: the params that act.
        server: of central inference; None where the policy runs beside each group.
        stop: how a runner is asked to leave at its next turn.
        left_behind: lanes whose thread did not come back; their environments may still be in a step.
    """

    config: Config
    surveys: list[Survey]
    agent: Agent
    lanes: list[Lane]
    experience: Experience
    learner: Learner
    newest: Newest
    server: InferenceServer | None = None
    stop: Stop = field(default_factory=Stop)
    left_behind: list[Lane] = field(default_factory=list)
    experience_meter: Meter = field(default_factory=Meter)
    learner_meter: Meter = field(default_factory=Meter)

    @property
    def spec(self) -> EnvSpec:
        """Of the environments."""
        return self.surveys[0].spec

    @property
    def steps(self) -> int:
        """Agent steps collected."""
        return sum(lane.steps for lane in self.lanes)

    @property
    def frames(self) -> int:
        """Environment frames of these steps."""
        return sum(lane.steps * lane.group.spec.frame_skip for lane in self.lanes)

    @property
    def collected(self) -> bool:
        """Whether collecting is over: all steps are there, or somebody asked to stop."""
        return self.stop.asked or self.steps >= self.config.total_steps

    def close(self) -> None:
        """Close the environments, but those left behind."""
        for lane in self.lanes:
            if lane not in self.left_behind:
                lane.group.close()


def make_envs(
    config: Config,
    survey: Survey,
    num_slots: int,
    role: Role,
    first_slot: int = 0,
    first_life: int = 0,
    branch: int = 0,
    render: bool = False,
) -> EnvGroup:
    """A group of the environments of ``config.env``, of one id, seeded by their global slot ids from ``first_slot`` on.

    With ``render`` it is made to draw.
    """
    env = config.env
    groups = env.groups if role is Role.TRAIN_ENV else 1
    index = first_slot // num_slots
    workers = share_of(survey.workers, groups, index, num_slots)
    batch_size = None
    if role is Role.TRAIN_ENV:  # an evaluation is the same each time
        batch_size = env.batch_size or (
            -(-num_slots // 2) if workers > 1 and config.runtime == "threads" else None
        )
    return make_group(
        env.id,
        num_slots,
        SlotSeeds(config.seed, role, first_slot, first_life, branch),
        **env_options(config),
        workers=workers,
        batch_size=batch_size,
        on_bad_value=env.on_bad_value,
        bounds=env.bounds,
        spec=survey.spec,
        num_threads=env.num_threads,
        first_slot=first_slot,
        render=render,
    )


def queue_limits(config: Config, agent: Agent) -> QueueLimits:
    """The bounds of the queue, checked.

    Raises:
        ConfigError: under them collecting and learning would wait for each other for ever.
    """
    e, batch_size = config.experience, agent.experience.batch_size
    capacity = (e.max_lag + 1) * batch_size if e.capacity is None else e.capacity
    limits = QueueLimits(batch_size, e.max_lag, capacity, e.max_reuse, e.on_full)
    length, stride = agent.experience.length, agent.experience.length - agent.experience.overlap
    unfinished = (-(-length // stride) - 1) * config.env.num_envs
    check_limits(limits, config.env.num_envs // config.env.groups, unfinished)
    return limits


def blank_row(agent: Agent, spec: EnvSpec) -> Row:
    """One slot's row of zeros."""
    flag = np.zeros((), bool)
    reward, extra = np.zeros((), np.float32), spaces.zeros(spec.extra)
    timestep = TimeStep(spaces.zeros(spec.observation), reward, flag, flag, flag, extra)
    return Row(timestep, agent.action, agent.extras, np.zeros((), np.int32))


def _one(tree: PyTree) -> PyTree:
    import jax

    return jax.tree.map(lambda x: np.asarray(x)[0], tree)


def build(
    config: Config,
    guard: Guard,
    lane_states: list[dict[str, Any]] | None = None,
    stop: Stop | None = None,
) -> Parts:
    """Make the parts of a run.

    Args:
        config: the settings.
        guard: of the experience room.
        lane_states: of a checkpoint to be continued; environments whose state is not in it begin new lives.
        stop: how the run is asked to leave.
    """
    surveys = survey_targets(config)
    spec = surveys[0].spec
    agent = build_agent(config.agent, spec, config.build_agent)
    learned = agent.experience
    layout = RangeLayout(learned.length, learned.overlap, learned.context, learned.burn_in)
    limits = queue_limits(config, agent)
    experience = Experience(
        blank_row(agent, spec), _one(agent.initial_carry(1)), config.env.num_envs, layout, limits, guard
    )
    learner = Learner(agent, config.seed, config.total_steps, config.learner)
    newest = Newest(learner.publish())
    parts = Parts(config, surveys, agent, [], experience, learner, newest, stop=stop or Stop())
    timeout = config.env.step_timeout_s
    make_inference = _beside_groups(parts) if config.inference.placement == "actor" else _central(parts)
    size = config.env.num_envs // config.env.groups
    try:
        for index in range(config.env.groups):
            first_slot = index * size
            life = _first_life(lane_states[index]) if lane_states else 0
            survey, watched = surveys[index % len(config.env.ids)], config.video.actors > first_slot
            group = make_envs(
                of_group(config, index), survey, size, Role.TRAIN_ENV, first_slot, life, render=watched
            )
            inference = make_inference(group, np.arange(first_slot, first_slot + size))
            episodes = EpisodeTracker(size, learned.reward_transform)
            parts.lanes.append(
                Lane(
                    group, inference, experience, agent, episodes,
                    first_slot=first_slot, timeout_s=timeout, life_offset=life,
                )
            )  # fmt: skip
    except BaseException:
        parts.close()
        raise
    return parts


InferenceOf: TypeAlias = Callable[[EnvGroup, np.ndarray], Inference[Any]]
"""Makes the inference of a group with these global slot ids."""


def _beside_groups(parts: Parts) -> InferenceOf:
    config = parts.config
    return inference_maker(
        parts.agent, parts.spec, parts.newest, config.seed, Role.TRAIN_ACTION, config.env.step_timeout_s
    )


def _central(parts: Parts) -> InferenceOf:
    config, agent, spec = parts.config, parts.agent, parts.spec
    i, num_slots = config.inference, config.env.num_envs
    limits = Limits(i.min_batch, num_slots if i.max_batch is None else i.max_batch, i.deadline_ms / 1e3)
    bank = SlotBank(agent, spec, num_slots, parts.newest, config.seed, Role.TRAIN_ACTION)
    blank = blank_row(agent, spec).timestep
    parts.server = InferenceServer(bank, blank, limits, own_thread=config.runtime == "threads")
    server = parts.server
    return lambda group, slot_ids: server.group(int(slot_ids[0]), len(slot_ids))


def _first_life(state: dict[str, Any]) -> int:
    """The number of the first life of a resumed group: as before, where its environments continue, else beyond all."""
    if state["env"] is not None:
        return int(state["counts"]["life_offset"])
    return int(np.max(state["run_ids"])) + 1
