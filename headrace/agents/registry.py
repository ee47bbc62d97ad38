"""Agents by name, and how an agent is built from its settings."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from headrace.agents.agent import Agent
from headrace.agents.impala import ImpalaConfig, impala
from headrace.envs.contract import EnvSpec
from headrace.errors import ConfigError

BuildAgent = Callable[[Any, EnvSpec], Agent]
"""``(settings of the agent, spec of the environment) -> Agent``."""

AGENTS: dict[str, tuple[type, BuildAgent, str]] = {
    "impala": (ImpalaConfig, impala, "IMPALA: actor-critic with V-trace (Espeholt et al. 2018)"),
}
"""By name: the class of its settings, its builder, and what it is in a line."""


def build_agent(config: Any, spec: EnvSpec, reference: str | None = None) -> Agent:
    """The agent of ``config``, or the one that the function ``reference`` (``my.module:function``) builds from it.

    Raises:
        ConfigError: no such function, or no agent has settings of that class.
    """
    if reference is not None:
        agent = load_function(reference)(config, spec)
        if not isinstance(agent, Agent):
            raise ConfigError(
                f"{reference} returned a {type(agent).__name__}; expected a headrace.agents.Agent"
            )
        return agent
    for kind, build, _ in AGENTS.values():
        if isinstance(config, kind):
            return build(config, spec)
    raise ConfigError(
        f"no agent has settings of the class {type(config).__name__}; known: {', '.join(AGENTS)}"
    )


def load_function(reference: str) -> Callable[..., Any]:
    """The function ``my.module:function``, looked for in the working directory too.

    Raises:
        ConfigError: the text is not of that form, or there is no such module or function.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise ConfigError(f"got {reference!r}, expected my.module:function")
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{reference}: there is no module {error.name!r} in the working directory or installed"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{reference}: module {module_name} has no {name!r}") from error
    finally:
        if added:
            sys.path.remove(here)
