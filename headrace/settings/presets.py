"""Presets: complete settings by name. An agent's name is its default preset."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.agents.impala import ImpalaConfig
from headrace.agents.optim import OptimizerConfig
from headrace.errors import ConfigError
from headrace.networks.actor_critic import NetworkConfig
from headrace.settings.config import Config, EnvConfig, ExperienceConfig, LogConfig
from headrace.settings.fields import nearest, replace_fields


class Preset(NamedTuple):
    """A preset: what it is in a line, and the function that makes it."""

    about: str
    make: Callable[[], Config]


def _small_tasks(network: NetworkConfig) -> ImpalaConfig:
    """IMPALA for small tasks with vector observations; the agent's own defaults are those of large ones.

    A large eps and a tight clip keep one bad batch from throwing the policy off a plateau it has reached.
    """
    return ImpalaConfig(
        batch_size=16,
        vtrace_lambda=0.95,
        entropy_cost=0.03,
        optimizer=OptimizerConfig(learning_rate=3e-3, eps=1e-2, max_grad_norm=2.0),
        network=network,
    )


def _impala() -> Config:
    return Config(preset="impala", agent=_small_tasks(NetworkConfig(separate_value=True, init="lecun")))


def _cartpole() -> Config:
    # One group: where stepping holds the interpreter, two halves would pay a turn's fixed cost twice.
    return replace(_impala(), preset="cartpole", total_steps=490_000, env=EnvConfig(groups=1))


def _cartpole_memory() -> Config:
    agent = _small_tasks(NetworkConfig(core="lstm", core_size=64, separate_value=True, init="lecun"))
    env = EnvConfig(id="headrace.envs.memory:make_cartpole_without_velocities", groups=1)
    return Config(preset="cartpole-memory", total_steps=1_000_000, agent=agent, env=env)


def _pong() -> Config:
    agent = ImpalaConfig(
        unroll_length=40,
        batch_size=4,
        micro_batches=2,
        vtrace_lambda=0.95,
        entropy_cost=0.002,
        reward_clip="abs_one",
        optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-5, max_grad_norm=0.5),
        network=NetworkConfig(frame_stack=4, init="lecun", pixels="standard"),
    )
    return Config(
        preset="pong",
        total_steps=1_000_000,
        agent=agent,
        env=EnvConfig(id="envpool:Pong-v5", num_envs=32),
        experience=ExperienceConfig(max_lag=9),
        log=LogConfig(every_steps=5_000),
    )


def _catch() -> Config:
    agent = ImpalaConfig(
        batch_size=16,
        vtrace_lambda=0.95,
        entropy_cost=0.01,
        optimizer=OptimizerConfig(learning_rate=2e-3, eps=1e-5, max_grad_norm=40.0),
        network=NetworkConfig(separate_value=True, init="lecun"),
    )
    # One group: policy and environments are one program, so there is no stepping to overlap with.
    env = EnvConfig(id="gymnax:Catch-bsuite", groups=1)
    return Config(preset="catch", total_steps=300_000, agent=agent, env=env)


def _breakout_minatar() -> Config:
    # Ten by ten planes of zeros and ones are too small for the Nature CNN; a layer over all of them does.
    agent = ImpalaConfig(
        unroll_length=16,
        batch_size=16,
        vtrace_lambda=0.95,
        entropy_cost=0.01,
        optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-5, max_grad_norm=40.0),
        network=NetworkConfig(hidden=(128,), activation="relu", separate_value=True, init="lecun"),
    )
    env = EnvConfig(id="gymnax:Breakout-MinAtar", num_envs=64, groups=1)
    return Config(preset="breakout-minatar", total_steps=1_000_000, agent=agent, env=env)


PRESETS: dict[str, Preset] = {
    "impala": Preset("IMPALA with its default settings on CartPole-v1; set --env.id", _impala),
    "cartpole": Preset("IMPALA on CartPole-v1, one pass over the data", _cartpole),
    "cartpole-memory": Preset("IMPALA with an LSTM on CartPole-v1 without velocities", _cartpole_memory),
    "pong": Preset("IMPALA with the Nature CNN on EnvPool's Pong-v5 (needs the envpool extra)", _pong),
    "catch": Preset("IMPALA on bsuite's Catch in gymnax (needs the gymnax extra)", _catch),
    "breakout-minatar": Preset(
        "IMPALA on MinAtar's Breakout in gymnax (needs the gymnax extra)", _breakout_minatar
    ),
}


def preset(name: str) -> Config:
    """The settings of a preset or agent.

    Raises:
        ConfigError: no preset of that name; names the nearest.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"unknown preset or agent {name!r}{nearest(name, PRESETS)} Known: {', '.join(PRESETS)}"
        )
    return PRESETS[name].make()


def config(name: str, **changes: Any) -> Config:
    """The settings of a preset or agent, changed by dotted name.

    Example:
        >>> config("cartpole", **{"env.num_envs": 64}).env.num_envs
        64

    Raises:
        ConfigError: an unknown preset or setting (the nearest is named), or a value of the wrong type.
    """
    return replace_fields(preset(name), changes)
