"""Agents by name, and how an agent is built from its settings."""

from collections.abc import Callable
from typing import Any

from headrace.agents.agent import Agent
from headrace.agents.impala import ImpalaConfig, impala
from headrace.envs.contract import EnvSpec
from headrace.errors import ConfigError
from headrace.references import load_function

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
