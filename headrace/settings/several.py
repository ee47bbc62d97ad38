"""Several environments in one run: what their ids, their arguments and their evaluations may be."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ConfigError

EVALUATION_KEYS = ("id", "kwargs", "max_episode_steps")


def check_ids(ids: Sequence[str], kwargs: Mapping[str, Any]) -> None:
    """Refuse ids that are empty or there twice, and arguments by id that are not complete sentences.

    Raises:
        ConfigError: names the id or the argument.
    """
    whole = ",".join(ids)
    for env_id in ids:
        if not env_id:
            raise ConfigError(
                f"env.id {whole!r} has an empty id; expected ids with a comma between two of them"
            )
        if len(ids) > 1 and re.search(r"[\s<>]", env_id):
            raise ConfigError(f"env.id {env_id!r} has a blank, < or >; metrics by id cannot be named so")
        if ids.count(env_id) > 1:
            raise ConfigError(f"env.id {whole!r} names {env_id!r} twice; leave one of them out")
    if len(ids) > 1 and any(key in ids for key in kwargs):
        for key, value in kwargs.items():
            if key not in ids:
                raise ConfigError(
                    f"env.kwargs has ids and the argument {key!r}; expected arguments of all ids, or an object for each id"
                )
            if not isinstance(value, dict):
                raise ConfigError(
                    f"env.kwargs[{key!r}] is {value!r}; expected a JSON object, the arguments of that id"
                )


def by_id(ids: Sequence[str], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``kwargs``, which were checked, hold an object for each id rather than arguments of all."""
    return len(ids) > 1 and any(key in ids for key in kwargs)


def groups_needed(ids: Sequence[str], groups: int, num_envs: int, actor_threads: int) -> str:
    """What to say where ``groups`` is no multiple of the number of ids: the least numbers that would do."""
    step = math.lcm(len(ids), actor_threads)
    fitting = [n for n in range(step, num_envs + 1, step) if num_envs % n == 0]
    what = f"env.groups {groups} is not a multiple of the {len(ids)} ids of env.id"
    if fitting:
        return f"{what}; set --env.groups {min(fitting, key=lambda n: (n < groups, n))}"
    enough = -(-num_envs // step) * step
    return f"{what}; set --env.groups {step} --env.num-envs {enough}"


def check_evaluations(envs: Mapping[str, Any]) -> None:
    """Refuse further evaluations whose names or descriptions cannot be used.

    Raises:
        ConfigError: names the evaluation.
    """
    for name, given in envs.items():
        where = f"eval.envs[{name!r}]"
        if not re.fullmatch(r"[^\s,<>]+", name) or name == "episode":
            raise ConfigError(
                f"eval.envs has the name {name!r}; expected one without blanks, commas, < and >, other than 'episode'"
            )
        if not isinstance(given, dict) or not isinstance(given.get("id"), str) or not given["id"].strip():
            raise ConfigError(f'{where} is {given!r}; expected an object such as {{"id": "CartPole-v1"}}')
        for key in given:
            if key not in EVALUATION_KEYS:
                raise ConfigError(f"{where} has {key!r}; expected only {', '.join(EVALUATION_KEYS)}")
        if "," in given["id"]:
            raise ConfigError(
                f"{where} has the id {given['id']!r}; expected one id, give the others names of their own"
            )
        if not isinstance(given.get("kwargs", {}), dict):
            raise ConfigError(f"{where}: its kwargs are {given['kwargs']!r}; expected a JSON object")
        limit = given.get("max_episode_steps")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ConfigError(f"{where}: its max_episode_steps is {limit!r}; expected at least 1")
