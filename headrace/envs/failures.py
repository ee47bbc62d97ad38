"""Environments that fail: what is told of it, and how often they may be started anew."""

import traceback
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

Reason: TypeAlias = Literal["raised", "bad_value", "hung", "died"]
OnBadValue: TypeAlias = Literal["error", "restart"]
Bounds: TypeAlias = Literal["warn", "error", "ignore"]
REASONS: tuple[str, ...] = get_args(Reason)
STEPS_PER_RESTART = 100
"""Steps of a life that give an environment one of its restarts back."""


class Failure(NamedTuple):
    """An environment began a new life without an end of the episode before.

    Attributes:
        slot: within the group.
        reason: it ``raised``, gave a ``bad_value``, or its process ``hung`` or ``died``.
        steps: of the life that ended.
        message: names env, slot and step, and says what happened.
    """

    slot: int
    reason: Reason
    steps: int
    message: str


class BadValueError(ValueError):
    """An observation or reward that must not reach the learner; the message names the leaf, got and expected."""


class Budget:
    """How often environments may be started anew: ``most`` times in a row, each ``STEPS_PER_RESTART`` steps give one back.

    Attributes:
        most: see above.
        left: int64 ``[num_slots]``, restarts that each slot has left.
    """

    def __init__(self, num_slots: int, most: int) -> None:
        self.most, self.left = most, np.full(num_slots, most, np.int64)

    def take(self, slot: int, steps: int) -> bool:
        """Take one restart of a slot whose life lasted ``steps``; False where it has none left."""
        left = min(int(self.left[slot]) + steps // STEPS_PER_RESTART, self.most)
        self.left[slot] = max(left - 1, 0)
        return left >= 1


class WorkerTraceback(Exception):
    """Where a worker process was, as text."""

    @classmethod
    def of(cls, text: str) -> "WorkerTraceback | None":
        """None where there is nothing to tell."""
        return cls(text) if text else None


def raised_by_user(error: BaseException | None) -> bool:
    """Whether it was raised elsewhere than in headrace, whose own frames tell a user nothing."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    return bool(frames) and Path(__file__).parents[1] not in Path(frames[-1].filename).parents
