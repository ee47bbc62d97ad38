"""Checks on what environments say and on what they are answered."""

import numpy as np

from headrace.envs.rows import paths
from headrace.errors import EnvironmentFailure
from headrace.spaces import BoxSpec, Spec
from headrace.types import PyTree

_F32_MAX = float(np.finfo(np.float32).max)


def in_order(slot_ids: np.ndarray, everyone: np.ndarray) -> bool:
    """Whether ``slot_ids`` are 0 … N-1, given as ``everyone``; the usual case, found quickly."""
    return slot_ids.dtype == everyone.dtype and slot_ids.tobytes() == everyone.tobytes()


def check_ids(slot_ids: np.ndarray, answered: np.ndarray, name: str) -> None:
    """Refuse answers to slots that do not wait for one.

    Args:
        slot_ids: ``[b]``.
        answered: bool ``[N]``, slots that have an action already or were not received.
        name: the environment's id.

    Raises:
        ValueError: an id out of range, twice, or of a slot that does not wait.
    """
    n = len(answered)
    if slot_ids.ndim != 1 or slot_ids.dtype.kind not in "iu" or len(slot_ids) > n:
        raise ValueError(f"env {name}: got slot ids {slot_ids!r}; expected at most {n} integers")
    if len(slot_ids) and (slot_ids.min() < 0 or slot_ids.max() >= n):
        raise ValueError(f"env {name}: got slot ids {slot_ids.tolist()}; expected 0 … {n - 1}")
    if answered[slot_ids].any() or np.bincount(slot_ids, minlength=n).max(initial=0) > 1:
        raise ValueError(
            f"env {name}: got actions for slots {slot_ids.tolist()}, of which one came twice or was not "
            "received "
            "since its last action; answer each received slot once"
        )


def bad_values(spec: Spec, observation: PyTree, reward: np.ndarray) -> dict[int, str]:
    """What would poison the learner: rows of a message, and what is wrong with each.

    Args:
        spec: spec of the observation.
        observation: ``[b, ...]`` in agent types.
        reward: ``[b]``, as the environment gave it.
    """
    found: dict[int, str] = {}
    # A sum of squares tells the usual case in one call; what it cannot tell is looked at closely.
    if not float(np.vdot(reward, reward)) <= _F32_MAX**2:
        fine = np.abs(reward) <= _F32_MAX  # False for NaN too
        found |= {int(k): _not_finite("reward", reward[k]) for k in np.flatnonzero(~fine)}
    for path, leaf, value in paths(spec, observation):
        if leaf.dtype.kind == "f" and not np.isfinite(np.vdot(value, value)):
            flat = value.reshape(len(value), -1)
            fine = np.isfinite(flat)
            for k in np.flatnonzero(~fine.all(axis=1)):
                found.setdefault(int(k), _not_finite(f"observation{path}", flat[k][np.argmin(fine[k])]))
    return found


def check_values(
    name: str,
    spec: Spec,
    observation: PyTree,
    reward: np.ndarray,
    slot_ids: np.ndarray,
    steps: np.ndarray,
    first_slot: int = 0,
) -> None:
    """Refuse ``bad_values``.

    Args:
        name: the environment's id.
        spec: spec of the observation.
        observation: ``[b, ...]`` in agent types.
        reward: ``[b]``, as the environment gave it.
        slot_ids: ``[b]``.
        steps: ``[N]``, how many steps each slot has made in this life, this one included.
        first_slot: global id of the group's slot 0, for messages.

    Raises:
        EnvironmentFailure: names reward or the observation's leaf, the value, the slot and the step.
    """
    for k, what in bad_values(spec, observation, reward).items():
        slot = int(slot_ids[k])
        raise EnvironmentFailure(
            f"env {name} slot {first_slot + slot} step {int(steps[slot])}: {what}. {MEND}"
        )


MEND = "Mend it in the environment or replace it in a wrapper."


def _not_finite(what: str, value: np.floating) -> str:
    shown = "NaN" if np.isnan(value) else str(value)
    return f"the {what} is {shown}; expected a finite number of float32's range"


def out_of_bounds(spec: Spec, observation: PyTree) -> dict[int, str]:
    """Rows ``k`` of ``observation [b, ...]`` in environment types with a float outside its Box, and where."""
    found: dict[int, str] = {}
    for path, leaf, value in paths(spec, observation):
        if not isinstance(leaf, BoxSpec) or leaf.env_dtype.kind != "f":
            continue
        out = (value < leaf.low) | (value > leaf.high)
        if out.any():
            for k in np.flatnonzero(out.reshape(len(out), -1).any(axis=1)):
                index = np.unravel_index(int(np.argmax(out[k])), leaf.shape)
                where = f"[{', '.join(map(str, index))}]" if index else ""
                found.setdefault(
                    int(k),
                    f"the observation{path}{where} is {value[k][index]}; "
                    f"expected {leaf.low[index]} … {leaf.high[index]} as its space says",
                )
    return found
