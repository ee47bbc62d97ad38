"""Bring a loss of your own: PPO's clipped objective in place of IMPALA's policy gradient.

    python examples/own_loss.py                   # about half a minute on two cores

A policy moves away from the one that acted, the further the higher the learning rate; then it can forget what it
knew. PPO's objective (Schulman et al. 2017, equation 7) stops pushing an action whose probability has changed by
more than ε. We write it as a loss, and train CartPole with either at a learning rate that is far too high. What to
look at: how far the policy moved on average (the clip keeps it nearer), and what became of the
worst run. Returns after so few steps differ much from run to run.

The network of ``own_network.py`` and this loss are given in the same way: ``build_agent`` names a function
that makes the agent.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import headrace
from headrace.agents.agent import Agent
from headrace.agents.impala import ImpalaConfig, Terms, impala
from headrace.envs.contract import EnvSpec
from headrace.ops import Distribution
from headrace.types import Array

EPSILON = 0.2


def clipped_loss(config: ImpalaConfig, dist: Distribution, terms: Terms) -> tuple[Array, dict[str, Array]]:
    """The loss to be minimised as a sum over transitions, and sums to report by the names of the metrics.

    Every array of ``terms`` begins with ``[T, B]``. Sums, not means: the agent divides by the number of
    valid transitions, over micro-batches and devices too.
    """
    # π is the policy being trained, μ the one that acted; its parameters were stored with each row.
    log_prob = dist.log_prob(terms.policy, terms.action)
    ratio = jnp.exp(log_prob - dist.log_prob(terms.behaviour, terms.action))

    # V-trace's targets minus values: the λ-advantage, corrected for the age of the data. It is a constant
    # here.
    advantage = jax.lax.stop_gradient(terms.vtrace.errors)
    objective = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - EPSILON, 1 + EPSILON) * advantage)

    entropy = dist.entropy(terms.policy)
    value_loss = 0.5 * jnp.square(terms.vtrace.vs_tm1 - terms.value)
    total = -objective + config.baseline_cost * value_loss - terms.entropy_cost * entropy
    report = {
        "loss/total": total,
        "loss/policy": -objective,
        "loss/value": value_loss,
        "kl": dist.kl(terms.behaviour, terms.policy),
        "entropy": entropy,  # must be reported: ``target_entropy`` steers by it
        # A figure of one's own is called agent/…, and appears in metrics.jsonl and TensorBoard as a mean
        # over transitions.
        "agent/clip_fraction": (jnp.abs(ratio - 1) > EPSILON).astype(jnp.float32),
    }
    # Transitions that join two episodes have weight 0 and must not count.
    sums = {name: jnp.sum(terms.weight * x) for name, x in report.items()}
    return sums["loss/total"], sums


def build(config: ImpalaConfig, spec: EnvSpec) -> Agent:
    """What ``build_agent`` names: IMPALA as it is, with our loss."""
    return impala(config, spec, loss=clipped_loss)


def train(total_steps: int, seed: int, build_agent: str | None) -> Path:
    """The directory of the finished run; None trains with the built-in loss."""
    settings: dict[str, Any] = {
        "total_steps": total_steps,
        "seed": seed,
        "build_agent": build_agent,
        "agent.optimizer.learning_rate": 0.03,
        "run": tempfile.mkdtemp(prefix="headrace-own-loss-"),
        "log.every_steps": max(total_steps // 10, 1),
        "log.panel": False,
    }
    return Path(headrace.train(headrace.config("cartpole", **settings))["run"])


def figures(run: Path, name: str) -> list[float]:
    """A metric along the run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if line.get(name) is not None]


def main(total_steps: int, seeds: int) -> None:
    """Train with both, and compare."""
    print(f"{total_steps:,} steps of CartPole, {seeds} seeds")
    for name, build_agent in (("built-in loss", None), ("clipped loss", "own_loss:build")):
        runs = [train(total_steps, seed, build_agent) for seed in range(seeds)]
        moved = statistics.mean(x for run in runs for x in figures(run, "kl"))
        returns = [headrace.evaluate(run, episodes=20)["return_mean"] for run in runs]
        told = f"mean KL(μ‖π) {moved:.3f}, greedy return {statistics.mean(returns):.0f}, worst {min(returns):.0f}"
        print(f"{name:<14} {told}", flush=True)
    clipped = " ".join(f"{x:.3f}" for x in figures(runs[0], "agent/clip_fraction"))
    print(f"clipped share of the transitions along a run: {clipped}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total-steps", type=int, default=40_000)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    main(arguments.total_steps, arguments.seeds)
