"""Seeds from one tree over (seed, role, global slot id, life): no two streams are alike.

The number of workers, threads or hosts is not in the tree, so it changes no stream.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Role(IntEnum):
    """What a stream of random numbers is for."""

    INIT = 0
    TRAIN_ENV = 1
    EVAL_ENV = 2
    TRAIN_ACTION = 3
    EVAL_ACTION = 4
    LEARNER = 5


def stream_seed(seed: int, role: Role, slot_id: int = 0, life: int = 0, branch: int = 0) -> int:
    """A 31-bit seed for one stream.

    Args:
        seed: the run's seed, >= 0; 0 is a seed like any other.
        role: what the stream is for.
        slot_id: global slot id.
        life: counts the restarts of the slot.
        branch: parts streams whose slots are counted from 0 each, such as those of several evaluations.
    """
    key = (int(role), slot_id, life, branch) if branch else (int(role), slot_id, life)
    sequence = np.random.SeedSequence(seed, spawn_key=key)
    return int(sequence.generate_state(1, np.uint32)[0] >> 1)


@dataclass(frozen=True)
class SlotSeeds:
    """Seeds of a group's environments, ``(slot in group, life) -> seed``; a record, as worker processes are handed it."""

    seed: int
    role: Role
    first_slot: int = 0
    first_life: int = 0
    branch: int = 0

    def __call__(self, slot: int, life: int) -> int:
        """The seed of a slot in a life."""
        slot, life = self.first_slot + slot, self.first_life + life
        return stream_seed(self.seed, self.role, slot, life, self.branch)
