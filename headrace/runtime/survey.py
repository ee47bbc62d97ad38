"""What a run's environments look like, and how many processes step them."""

import math
import os
from dataclasses import dataclass
from typing import Any

from headrace.envs.contract import EnvSpec
from headrace.envs.pool.probe import Probe
from headrace.envs.registry import describe, measure, steps_in_thread
from headrace.settings.config import Config

MOST_A_CORE = 8
"""Most workers a core, where environments wait for something else than the core."""


@dataclass(frozen=True)
class Survey:
    """What is known of a run's environments.

    Attributes:
        spec: of one.
        workers: processes over all groups; 0: they are stepped in the actor's thread.
    """

    spec: EnvSpec
    workers: int


def env_options(config: Config) -> dict[str, Any]:
    """The options of ``make_group`` that say which environment it is."""
    env = config.env
    return {
        "kwargs": env.kwargs,
        "vectorization": env.vectorization,
        "max_episode_steps": env.max_episode_steps,
        "step_timeout_s": env.step_timeout_s,
        "max_restarts": env.max_restarts,
        "action_mask": env.action_mask,
    }


def env_spec(config: Config) -> EnvSpec:
    """The spec of the run's environments; made in a process of its own where the run's are."""
    workers = config.env.workers
    if workers is None:
        workers = 0 if steps_in_thread(config.env.id, config.env.vectorization) else 1
    return describe(config.env.id, **env_options(config), workers=min(workers, 1))


def unmeasured(config: Config, spec: EnvSpec) -> Survey:
    """Where environments are stepped whose spec is known: in one worker a core unless it is set, or in the thread."""
    env = config.env
    if env.workers is None and not steps_in_thread(env.id, env.vectorization):
        return Survey(spec, available_cores())
    return Survey(spec, env.workers or 0)


def survey_envs(config: Config) -> Survey:
    """The spec and the number of workers: the one that is set, or one found by a short measurement."""
    env = config.env
    if env.workers is not None or steps_in_thread(env.id, env.vectorization):
        return Survey(env_spec(config), env.workers or 0)
    probe = measure(env.id, **env_options(config))
    return Survey(probe.spec, min(workers_for(probe, available_cores()), env.num_envs))


def workers_for(probe: Probe, cores: int) -> int:
    """One worker a core; more where a step waits rather than computes, so that the cores are busy all the same."""
    waits = probe.step_s / probe.cpu_s if probe.cpu_s > 0 else 1.0
    return math.ceil(cores * min(max(waits, 1.0), MOST_A_CORE) - 0.5)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of(workers: int, groups: int, index: int, num_slots: int) -> int:
    """Workers of a group: an even share, at least one and at most one a slot."""
    if not workers:
        return 0
    return min(max(workers // groups + (index < workers % groups), 1), num_slots)
