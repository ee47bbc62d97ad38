"""Which environments a run has: those of each group, and those of each evaluation."""

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.envs.agree import check_agreement
from headrace.envs.contract import EnvSpec
from headrace.runtime.survey import Survey, env_spec, survey_envs, unmeasured
from headrace.settings.config import Config, EnvConfig

_BY_NAME = 2**31
"""Branches of the seeds from here on belong to names; those below to the run's own ids, in their order."""


class Target(NamedTuple):
    """What is evaluated.

    Attributes:
        name: its figures are ``eval/<name>/…``; "" where there is nothing to tell it from.
        config: the run's settings with ``env`` as evaluated, of one id.
        branch: of its environments' seeds; by name or id, so that another evaluation changes none.
        trained: whether it is one of the ids that are trained on.
    """

    name: str
    config: Config
    branch: int
    trained: bool


def of_group(config: Config, index: int) -> Config:
    """``config`` with the one id of group ``index``."""
    return replace(config, env=config.env.only(config.env.id_of_group(index)))


def first_id(config: Config) -> Config:
    """``config`` with its first id alone, and no further evaluations."""
    return replace(of_group(config, 0), eval=replace(config.eval, envs={}))


def targets(config: Config) -> list[Target]:
    """What each evaluation plays: the ids trained on, in order, then ``eval.envs``."""
    ids = config.env.ids
    own = [
        Target(env_id if len(ids) > 1 else "", of_group(config, i), i, True) for i, env_id in enumerate(ids)
    ]
    return own + [_named(config, name) for name in config.eval.envs]


def elsewhere(env: EnvConfig, env_id: str, kwargs: Mapping[str, Any], limit: int | None = None) -> EnvConfig:
    """``env`` with another environment of one id; what belongs to its own environments is left to that one."""
    return replace(
        env.only(env.ids[0]),
        id=env_id,
        kwargs=dict(kwargs),
        max_episode_steps=limit,
        num_threads=0,
        workers=0 if env.workers == 0 else None,
    )


def _named(config: Config, name: str) -> Target:
    given = config.eval.envs[name]
    env = elsewhere(config.env, given["id"], given.get("kwargs", {}), given.get("max_episode_steps"))
    return Target(name, replace(config, env=env), _BY_NAME + zlib.crc32(name.encode()) % _BY_NAME, False)


def survey_targets(config: Config, spec: EnvSpec | None = None) -> list[Survey]:
    """What the environments of each of ``targets(config)`` look like and where they are stepped.

    Args:
        config: the settings.
        spec: of the first id, where it is known; then nothing is measured.

    Raises:
        ConfigError: their spaces differ; see ``check_agreement``.
        HeadraceError: one cannot be made.
    """
    first, *others = targets(config)
    surveys = [survey_envs(first.config) if spec is None else unmeasured(first.config, spec)]
    for target in others:
        measured = target.trained and spec is None
        one, env = target.config, target.config.env
        surveys.append(survey_envs(one) if measured else unmeasured(one, env_spec(one)))
        who = env.id if target.trained else f"{env.id} (eval.envs {target.name!r})"
        check_agreement(surveys[0].spec, surveys[-1].spec, first.config.env.id, who)
    return surveys
