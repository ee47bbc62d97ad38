"""From the rows of an env group to the frames of whole episodes."""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeAlias

import numpy as np

from headrace.envs.contract import EnvGroup
from headrace.envs.render import Draw, drawer, fps_of
from headrace.runtime.video import Sink
from headrace.types import TimeStep

See: TypeAlias = Callable[[TimeStep, np.ndarray], None]
"""``see(timestep, slot_ids)``: to be called with each message of a group, before the group is sent an answer."""
Begin: TypeAlias = Callable[[int, float], Sink | None]
"""``begin(slot, fps)``: where the episode that begins in a slot goes; None: it is not drawn."""


class Recorder:
    """Draws a frame for each row of an episode, from its ``first`` row to its last, and hands it to a sink.

    A message's rows are drawn when it is seen, so the frame of a last row is the episode's own and never that of the
    reset after it. An episode that is cut without a last row is discarded.
    """

    def __init__(self, begin: Begin, slots: Collection[int] = (0,), fps: float | None = None) -> None:
        """Watch ``slots`` of one group; ``fps`` None: as its environment asks."""
        self._begin, self._slots, self._fps = begin, frozenset(slots), fps
        self._open: dict[int, Sink] = {}
        self._draw: Draw | None = None

    def attach(self, group: EnvGroup) -> See:
        """Watch ``group``.

        Raises:
            ConfigError: it cannot be drawn.
        """
        self._draw = drawer(group)
        self._fps = self._fps or fps_of(group)
        return self.see

    def see(self, timestep: TimeStep, slot_ids: np.ndarray) -> None:
        """Draw the rows of a message that are part of a recording."""
        for k, slot in enumerate(slot_ids.tolist()):
            if slot in self._slots:
                self._row(timestep, k, slot)

    def _row(self, timestep: TimeStep, k: int, slot: int) -> None:
        assert self._draw is not None and self._fps is not None
        if timestep.first[k]:
            self._drop(slot)
            sink = self._begin(slot, self._fps)
            if sink is not None:
                self._open[slot] = sink
        if slot not in self._open:
            return
        self._open[slot].add(self._draw(timestep, k, slot))
        if timestep.terminated[k] or timestep.truncated[k]:
            self._open[slot].finish()
            del self._open[slot]

    def _drop(self, slot: int) -> None:
        if slot in self._open:
            self._open.pop(slot).discard()

    def close(self) -> None:
        """Discard what is not complete."""
        for slot in list(self._open):
            with suppress(OSError):
                self._drop(slot)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
