"""From a trajectory to what the network sees, and the re-unroll of an update."""

from typing import Any

import jax
import jax.numpy as jnp

from headrace.networks.context import stack_sequence
from headrace.networks.network import Input, Network
from headrace.types import PyTree, Trajectory


def input_of_trajectory(batch: Trajectory) -> Input:
    """The network's input for rows ``[T+1, B]``: observations stacked over the context, actions one row late."""
    timestep = batch.rows.timestep
    observation = timestep.observation
    if batch.context.first.shape[0]:
        observation = stack_sequence(batch.context, observation, timestep.first)
    prev_action = jax.tree.map(
        lambda before, action: jnp.concatenate([before[None], action[:-1]]),
        batch.prev_action,
        batch.rows.action,
    )
    return Input(observation, prev_action, timestep.reward, timestep.first)


def unroll_after_burn_in(network: Network, params: PyTree, inputs: Input, carry: PyTree, burn_in: int) -> Any:
    """Outputs of rows ``burn_in … T``; the rows before only warm the carry, without gradient."""
    if burn_in:
        warm = jax.tree.map(lambda x: x[:burn_in], inputs)
        _, carry = network.unroll(jax.lax.stop_gradient(params), warm, carry)
        carry = jax.lax.stop_gradient(carry)
        inputs = jax.tree.map(lambda x: x[burn_in:], inputs)
    return network.unroll(params, inputs, carry)[0]
