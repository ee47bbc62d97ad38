"""Bring a network of your own: one that knows that only the way to the lamp matters, not where in the room it lies.

    python examples/own_network.py                # about half a minute on two cores

The task is the lamp room of ``own_environment.py``. The built-in network is a perceptron over everything
the walker sees. Ours takes the difference of the two places first, so what it learns in one corner holds in
every other. Both train for the same steps, few enough that it shows.

The setting ``build_agent`` names a function ``module:function`` that makes the agent from its settings and
from the spec of the environment; it is found as the environment is (see there). The run's directory keeps
the name, so that ``headrace.evaluate``, ``headrace.load`` and ``headrace eval`` find the network again.
"""

import argparse
import tempfile
from typing import Any

import jax.numpy as jnp
from flax import nnx

import headrace
from headrace.agents.agent import Agent
from headrace.agents.impala import ImpalaConfig, impala
from headrace.envs.contract import EnvSpec
from headrace.networks import MLP, ActorCriticOutput, Input, feed_forward
from headrace.ops import distribution


class WayToTheLamp(nnx.Module):
    """Policy and value from ``lamp - me``."""

    def __init__(self, policy_size: int, rngs: nnx.Rngs) -> None:
        """Make the layers; ``policy_size`` is how many numbers the policy's distribution has."""
        # A body each: values here are tens, and their errors would drown what the policy learns in a shared
        # one.
        self.for_policy, self.for_value = MLP(2, (64, 64), rngs), MLP(2, (64, 64), rngs)
        # A near-zero last layer: the fresh policy tries every move alike.
        self.policy = nnx.Linear(64, policy_size, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)
        self.value = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: Input) -> ActorCriticOutput:
        """``x.observation`` is what the environment gives, with one leading axis of rows."""
        way = x.observation["lamp"] - x.observation["me"]
        policy, value = self.policy(self.for_policy(way)), self.value(self.for_value(way))
        return ActorCriticOutput(policy, jnp.squeeze(value, -1))


def build(config: ImpalaConfig, spec: EnvSpec) -> Agent:
    """What ``build_agent`` names: IMPALA as it is, with our network."""
    # The same distribution the agent will make; it says how many parameters the network has to give.
    size = distribution(spec.action, box=config.box_policy).size
    # ``feed_forward`` turns a module into pure functions. ``recurrent`` does it for encoder, core and head.
    return impala(config, spec, network=feed_forward(lambda rngs: WayToTheLamp(size, rngs)))


def train(total_steps: int, build_agent: str | None) -> float:
    """The greedy return after ``total_steps``; None trains the built-in network."""
    settings: dict[str, Any] = {
        "env.id": "own_environment:make",
        "total_steps": total_steps,
        "build_agent": build_agent,
        "run": tempfile.mkdtemp(prefix="headrace-own-network-"),
        "log.panel": False,
    }
    summary = headrace.train(headrace.config("cartpole", **settings))
    return headrace.evaluate(summary["run"], episodes=100)["return_mean"]


def main(total_steps: int) -> None:
    """Train both, and compare."""
    built_in = train(total_steps, None)
    print(f"built-in network, {total_steps:,} steps: greedy return {built_in:.1f}", flush=True)
    own = train(total_steps, "own_network:build")
    print(f"own network,      {total_steps:,} steps: greedy return {own:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total-steps", type=int, default=60_000)
    main(parser.parse_args().total_steps)
