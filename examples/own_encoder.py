r"""Bring an encoder of your own for a part of the observation: places as tiles of a board.

    python examples/own_encoder.py                # about half a minute on two cores

The task is the lamp room of ``own_environment.py``, whose places are pairs of numbers. The built-in network
puts all numbers into one perceptron. Here each place goes through a module of ours first, which makes of it
what a Discrete would have been: one unit for each row and column of the room.

The setting ``agent.network.encoders`` names for each part of the observation what makes its encoder; parts that it does not
name keep the built-in one. A part inside a Tuple or Dict is named with dots (``arm.0``), an observation without parts
``observation``. On the command line, in this folder, the same run is

    headrace train cartpole --env.id own_environment:make --total-steps 60000 \
        --agent.network.encoders '{"me": "own_encoder:Tiles", "lamp": "own_encoder:Tiles"}'

From Python a function may be given in place of its name, and a predicate over specs in place of a part's:
``impala(config, spec, encoders={"me": Tiles})`` in a ``build_agent`` as in ``own_network.py``.
"""

import argparse
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import headrace
from headrace.spaces import BoxSpec

SIZE = 9
ENCODERS = {"me": "own_encoder:Tiles", "lamp": "own_encoder:Tiles"}


class Tiles(nnx.Module):
    """Places ``[rows, 2]`` in 0 … 1 to features of the tiles they are on."""

    def __init__(self, leaf: BoxSpec, context: int, rngs: nnx.Rngs) -> None:
        """``leaf`` says what is seen; with stacked frames there would be ``context`` more before each."""
        assert leaf.shape == (2,) and context == 0
        self.layer = nnx.Linear(2 * SIZE, 32, rngs=rngs)
        self.out_features = 32  # what the network after it is made for; checked before the run starts

    def __call__(self, place: jax.Array) -> jax.Array:
        """One leading axis of rows."""
        tile = jnp.round(place * (SIZE - 1)).astype(jnp.int32)
        return jnp.tanh(self.layer(jax.nn.one_hot(tile, SIZE).reshape(place.shape[0], -1)))


def train(total_steps: int, encoders: dict[str, str]) -> float:
    """The greedy return after ``total_steps``."""
    settings: dict[str, Any] = {
        "env.id": "own_environment:make",
        "env.kwargs": {"size": SIZE},
        "total_steps": total_steps,
        "agent.network.encoders": encoders,
        "run": tempfile.mkdtemp(prefix="headrace-own-encoder-"),
        "log.panel": False,
    }
    summary = headrace.train(headrace.config("cartpole", **settings))
    return headrace.evaluate(summary["run"], episodes=100)["return_mean"]


def main(total_steps: int) -> None:
    """Train without and with them."""
    for name, encoders in (("built-in encoder", {}), ("own encoder", ENCODERS)):
        print(f"{name}, {total_steps:,} steps: greedy return {train(total_steps, encoders):.1f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--total-steps", type=int, default=60_000)
    main(parser.parse_args().total_steps)
