"""The check of groups: the conformance suite, with each call announced and timed."""

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.envs.check.calls import Calls, called, made
from headrace.envs.check.report import Finding, breach
from headrace.envs.conformance import check_group
from headrace.envs.contract import EnvGroup
from headrace.types import PyTree, TimeStep

SLOTS = 3
MESSAGES = 200
WARM_UP = 3
"""Messages before which nothing is timed: what is compiled on demand is compiled then."""


class Watched:
    """A group whose every call goes through ``Calls``.

    Attributes:
        step_s: seconds of each message from ``send`` to ``recv``, divided by its slots.
    """

    def __init__(self, make: Callable[[], EnvGroup], calls: Calls, step_s: list[float]) -> None:
        self._group = group = made(lambda: calls("making a group", make))
        self.spec, self.num_slots = group.spec, group.num_slots
        self._calls, self._messages, self._sent_s, self.step_s = calls, 0, 0.0, step_s

    def _call(self, name: str, *args: Any) -> Any:
        what = f"{name}() of a group of {self.num_slots} slots, message {self._messages}"
        return called(lambda: self._calls(what, getattr(self._group, name), *args))

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """See ``EnvGroup``; so the others."""
        timestep, slot_ids = self._call("recv", timeout_s)
        self._messages += 1
        if self._messages > WARM_UP and not np.any(timestep.first):
            self.step_s.append((self._sent_s + self._calls.last_s) / len(slot_ids))
        return timestep, slot_ids

    def send(self, action: PyTree, slot_ids: np.ndarray) -> None:
        """Answer slots."""
        self._call("send", action, slot_ids)
        self._sent_s = self._calls.last_s

    def run_ids(self) -> np.ndarray:
        """The life of each slot."""
        return self._call("run_ids")

    def get_state(self) -> dict[str, Any] | None:
        """State to continue from."""
        return self._call("get_state")

    def set_state(self, state: dict[str, Any]) -> bool:
        """Continue from ``state``."""
        return self._call("set_state", state)

    def close(self) -> None:
        """Release everything."""
        self._call("close")


def check(
    make: Callable[[], EnvGroup], calls: Calls, messages: int, seed: int, spec: Callable[[Any], None]
) -> tuple[list[Finding], dict[str, Any]]:
    """Run the conformance suite.

    Args:
        make: makes a group, with the same seeds every time.
        calls: makes the calls.
        messages: to receive in each run of the suite.
        seed: of the actions.
        spec: is told the ``EnvSpec`` as soon as it is known.

    Returns:
        The findings, and ``steps`` and ``step_s`` as facts.

    Raises:
        Stop: the group could not be made, or a call raised.
    """
    step_s: list[float] = []

    def watched() -> Watched:
        group = Watched(make, calls, step_s)
        spec(group.spec)
        return group

    found = check_group(watched, messages, seed)
    facts = {"steps": len(step_s), **({"step_s": float(np.mean(step_s))} if step_s else {})}
    return [breach("group", f"{f.what}: {f.got}", f.expected, f"{f.todo}.") for f in found], facts
