"""The words of the system: what an environment says, what is stored, what is learned from.

Named tuples rather than dataclasses, so that an environment worker can import them without importing JAX
and yet JAX treats them as pytrees.

Axes: ``b`` slots of one message, ``N`` all slots, ``T`` time, ``B`` trajectories of a batch. A *slot* is one
environment's place in the run; its global id never changes while the run lives.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A NumPy or JAX array."""
PyTree: TypeAlias = Any
"""Any nesting of dicts and tuples over arrays."""
ACTION_MASK = "action_mask"
"""The key of masks in ``TimeStep.extra``: what may be chosen, in the form of ``envs.masks``."""


class TimeStep(NamedTuple):
    """What environment slots say, fields ``[b, ...]``.

    The last row of an episode carries the true final observation, with ``terminated`` or ``truncated`` set.
    The row after it is the ``first`` row of the next episode; the action chosen at a last row is ignored.

    Attributes:
        observation: pytree of arrays ``[b, ...]`` in the agent's types (see ``spaces``).
        reward: f32 ``[b]``, received on arriving here; 0 where ``first``.
        first: bool ``[b]``, this is the observation of a reset.
        terminated: bool ``[b]``, the MDP ended here: value beyond is 0. Also set when it ended on the limit step.
        truncated: bool ``[b]``, a limit ended the episode here: the value of *this* observation is bootstrapped.
        extra: declared pytree ``[b, ...]``, default ``()``: ``action_mask``, ``task``, goals.
    """

    observation: PyTree
    reward: Array
    first: Array
    terminated: Array
    truncated: Array
    extra: PyTree = ()

    @property
    def last(self) -> Array:
        """Bool ``[b]``: the episode ends with this row."""
        return self.terminated | self.truncated


class Row(NamedTuple):
    """One stored step: what the slot said, and what was answered.

    Attributes:
        timestep: the ``TimeStep``.
        action: the sample in the distribution's own coordinates (an index, an unclipped normal, pre-tanh).
        extras: what the agent's ``act`` asked to keep, such as the behaviour distribution's parameters.
        version: i32, the version of the params that chose ``action`` (the number of updates behind them).
    """

    timestep: TimeStep
    action: PyTree
    extras: PyTree
    version: Array


class Context(NamedTuple):
    """The rows before a trajectory's row 0 that state with finite memory is rebuilt from, ``[n, B, ...]``.

    Rows of an earlier episode or of a life before this one are recognised by the ``first`` after them and count as zero.
    """

    observation: PyTree
    first: Array


class Trajectory(NamedTuple):
    """A batch of ranges of rows, time-major.

    ``T`` is overlap + new rows; row ``T`` is the next range's row 0, whose action was not yet chosen: its
    ``action``, ``extras`` and ``version`` are zero.

    Attributes:
        rows: ``Row`` with fields ``[T+1, B, ...]``.
        context: the ``n`` rows before row 0, ``[n, B, ...]``.
        carry: recurrent state before row 0, ``[B, ...]``; ``()`` without recurrence.
        prev_action: action of the row before row 0, ``[B, ...]``.
        slot_id: i32 ``[B]``, the global slot each range came from.
        item_id: i64 ``[B]``, never repeats in a run (host only, never trained on).
        weight: f32 ``[B]``, loss weight of the range.
    """

    rows: Row
    context: Context
    carry: PyTree
    prev_action: PyTree
    slot_id: Array
    item_id: Array
    weight: Array


class Progress(NamedTuple):
    """Where the run stands; every schedule is a function of it.

    Attributes:
        fraction: f32 scalar, learned steps ÷ ``total_steps``, within [0, 1].
        updates: i32 scalar, the number of updates made.
    """

    fraction: Array
    updates: Array


def transition_masks(timestep: TimeStep, discount: float) -> tuple[Array, Array]:
    """Discount and validity of the transitions k → k+1 of rows ``[T+1, ...]``.

    The row after a last row is ``first``; the transition into it joins two episodes and is not valid:

        discount[k+1] = γ · (1 − terminated[k+1]) · (1 − first[k+1])
        valid[k]      = 1 − first[k+1]

    Args:
        timestep: rows ``[T+1, ...]``.
        discount: γ.

    Returns:
        ``discount_t`` f32 ``[T, ...]`` and ``valid`` f32 ``[T, ...]``, both belonging to transition k = 0…T−1.
    """
    first_t = timestep.first[1:]
    valid = 1.0 - first_t.astype(np.float32)
    discount_t = np.float32(discount) * (1.0 - timestep.terminated[1:].astype(np.float32)) * valid
    return discount_t, valid
