"""The contract between environments and the rest of the path.

An ``EnvGroup`` owns ``num_slots`` environments, numbered ``0 … num_slots-1`` within the group. It is driven by

    timestep, slot_ids = group.recv(timeout_s)     # 1 <= b <= num_slots slots, each at most once
    group.send(action, slot_ids)                   # an answer to each slot that was received

- After construction every slot is reset; the first ``recv`` calls bring each slot's ``first`` row.
- A slot is received again only after it was sent an action; a lock-step group answers all slots at once.
- A subset may be answered: where an adapter holds a final *and* a reset observation (same-step autoreset, disabled
  autoreset), it gives the last row with all slots, then the ``first`` rows alone, then steps when every slot
  has an action. The action sent in answer to a last row is ignored.
- A group that can draw says so as ``render.py`` has it; none needs to.
- Arrays handed out by ``recv`` are never written again by the group, and arrays passed to ``send`` may be kept.

A group may also have ``take_infos() -> list[(slot, {name: number})]``: the numbers in the infos of the last rows that
were received since it was last called. Those of a ``first`` row are not among them.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from headrace.spaces import Spec
from headrace.types import PyTree, TimeStep


@dataclass(frozen=True)
class EnvSpec:
    """What a group's environments look like.

    Attributes:
        observation: spec of one observation.
        action: spec of one action.
        frame_skip: environment frames per agent step (action repeat), for reporting frames.
        name: the id, for messages.
        extra: spec of ``TimeStep.extra``; ``()`` where the group says nothing more.
    """

    observation: Spec
    action: Spec
    frame_skip: int = 1
    name: str = ""
    extra: Spec = ()


@runtime_checkable
class EnvGroup(Protocol):
    """See the module docstring for the rules; ``conformance.py`` checks them."""

    spec: EnvSpec
    num_slots: int

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """Wait for slots to speak.

        Returns:
            ``TimeStep`` with fields ``[b, ...]`` in the agent's types, and int32 slot ids ``[b]`` within the group.

        Raises:
            WaitTimeoutError: nothing came within ``timeout_s`` seconds; names the env and a slot.
            EnvironmentFailure: an environment raised; carries its traceback as ``__cause__``.
        """
        ...

    def send(self, action: PyTree, slot_ids: np.ndarray) -> None:
        """Answer slots with ``action`` ``[b, ...]`` in the environment's own coordinates (see ``spaces.to_env``)."""
        ...

    def run_ids(self) -> np.ndarray:
        """Int64 ``[num_slots]``: the life each slot is in; changes when an environment was restarted without a last row."""
        ...

    def get_state(self) -> dict[str, Any] | None:
        """State from which ``set_state`` continues every slot exactly, or None where it cannot be had.

        A nesting of dicts with string keys over NumPy arrays and JSON scalars, lists and strings; nothing pickled.
        Called only between ``send`` and ``recv``.
        """
        ...

    def set_state(self, state: dict[str, Any]) -> bool:
        """Continue from ``state``; False (and freshly reset slots, with new run ids) where it could not be reproduced."""
        ...

    def close(self) -> None:
        """Release everything; safe to call twice."""
        ...


def infos_of(group: EnvGroup) -> list[tuple[int, dict[str, float]]]:
    """What ``group.take_infos`` gives; nothing where the group has none."""
    take = getattr(group, "take_infos", None)
    return [] if take is None else take()
