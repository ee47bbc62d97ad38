"""What drives env groups: receive, remember, ask, answer, in turn.

While one group's step of inference is on its way the next group's environments step, so neither waits for the
other. The one-thread runner has one driver for all groups, the threaded runner one a thread; the code is the same.
"""

from collections import Counter, deque
from typing import Any

import jax
import numpy as np

from headrace import spaces
from headrace.agents.agent import Agent
from headrace.envs.contract import EnvGroup, infos_of
from headrace.experience.room import Experience
from headrace.inference.messages import Inference, Question, Request
from headrace.metrics.episodes import EpisodeTracker
from headrace.metrics.meter import Meter
from headrace.runtime.recorder import See
from headrace.types import TimeStep


class Lane:
    """One env group with its inference and its episode statistics.

    ``received`` is a message that was written to the store but not asked about yet: the ranges that begin with it
    have no leave. ``pending`` is a question on its way.
    """

    def __init__(
        self,
        group: EnvGroup,
        inference: Inference[Any],
        experience: Experience,
        agent: Agent,
        episodes: EpisodeTracker,
        *,
        first_slot: int,
        timeout_s: float,
        life_offset: int = 0,
    ) -> None:
        """Join the parts.

        Args:
            group: driven by this lane alone.
            inference: of the group's slots.
            experience: where rows go.
            agent: for its ``to_env``, and whether it has a carry.
            episodes: statistics of the group's slots.
            first_slot: global id of the group's slot 0.
            timeout_s: bound of each wait for the group, seconds.
            life_offset: added to the group's run ids, so that lives before a resume are not met again.
        """
        self.group, self.inference, self.episodes = group, inference, episodes
        self.env_meter, self.inference_meter = Meter(), Meter()
        self._experience, self._to_env, self._timeout_s = experience, agent.to_env, timeout_s
        self.first_slot, self._life_offset = first_slot, life_offset
        self._has_carry = bool(jax.tree.leaves(agent.initial_carry(1)))
        self._run_ids = np.full(group.num_slots, life_offset, np.int64)
        self.received: tuple[Request, np.ndarray] | None = None
        self.pending: tuple[Question, np.ndarray] | None = None
        self.see: See | None = None  # watches every message, before its answer is sent
        self.steps = 0
        self.restarts = 0
        self.failures = Counter[str]()  # by reason
        self._told: deque[str] = deque()
        self._count_failures()

    def _count_failures(self) -> None:
        take = getattr(self.group, "take_failures", None)
        for failure in take() if take is not None else ():
            self.failures[failure.reason] += 1
            self._told.append(failure.message)

    def take_messages(self) -> list[str]:
        """What failed since the last call; may be called from another thread."""
        return [self._told.popleft() for _ in range(len(self._told))]

    def receive(self) -> None:
        """Wait for the group and write what it says to the store."""
        with self.env_meter.wait_out():
            timestep, ids = self.group.recv(self._timeout_s)
        if self.see is not None:
            self.see(timestep, ids)
        run_ids = self.group.run_ids() + self._life_offset
        if not np.array_equal(run_ids, self._run_ids):
            changed = np.flatnonzero(run_ids != self._run_ids).astype(np.int32)
            self.restarts += len(changed)
            self.episodes.drop(changed)
            self._run_ids = run_ids.copy()
            self._count_failures()
        begins = self._experience.observe(timestep, ids + self.first_slot, run_ids[ids])
        self.episodes.update(timestep, ids, infos_of(self.group))
        self.env_meter.count_out(len(ids))
        self.steps += len(ids) - int(np.count_nonzero(timestep.first))
        self.received = Request(timestep, ids, run_ids[ids]), begins

    def submit(self) -> bool:
        """Ask for actions; False where the ranges that begin here have no leave yet."""
        assert self.received is not None
        request, begins = self.received
        if not self._experience.begin(request.slot_ids[begins] + self.first_slot):
            return False
        self.inference_meter.count_in(len(request.slot_ids))
        self.pending = self.inference.submit(request), begins
        self.received = None
        return True

    def answer(self) -> None:
        """Wait for the actions, send them to the group, write them to the store."""
        assert self.pending is not None
        (pending, begins), self.pending = self.pending, None
        keep = self._has_carry and bool(begins.any())
        with self.inference_meter.wait_out():
            answer = self.inference.answer(pending, keep)
        self.group.send(self._to_env(answer.action), pending.slot_ids)
        slots = pending.slot_ids + self.first_slot
        if keep:
            carry = jax.tree.map(lambda x: x[begins], answer.carry)
            self._experience.store.keep_carry(carry, slots[begins])
        self._experience.store.act(slots, answer.action, answer.extras, pending.version)
        self.inference_meter.count_out(pending.size)
        self.env_meter.count_in(pending.size)

    def get_state(self) -> dict[str, Any]:
        """State with no question on its way; ``env`` is None where the environments' state cannot be had."""
        assert self.pending is None
        received = None
        if self.received is not None:
            request, begins = self.received
            received = {"leaves": jax.tree.leaves(request), "begins": begins}
        return {
            "env": self.group.get_state(),
            "inference": self.inference.get_state(),
            "episodes": self.episodes.get_state(),
            "received": received,
            "run_ids": self._run_ids.copy(),
            "counts": {"steps": self.steps, "restarts": self.restarts, "life_offset": self._life_offset},
            "failures": dict(self.failures),
        }

    def set_state(self, state: dict[str, Any]) -> bool:
        """Continue from ``get_state``; False where environments had to be reset instead."""
        self.inference.set_state(state["inference"])
        self.episodes.set_state(state["episodes"])
        self.steps, self.restarts = (int(state["counts"][k]) for k in ("steps", "restarts"))
        self.failures.update(state["failures"])
        exact = state["env"] is not None and self.group.set_state(state["env"])
        self._run_ids = self.group.run_ids() + self._life_offset
        changed = self._run_ids != state["run_ids"]
        self.episodes.drop(np.flatnonzero(changed).astype(np.int32))
        if state["received"] is not None:
            self.received = self._restore_received(state["received"], changed)
        return exact

    def _restore_received(
        self, saved: dict[str, Any], changed: np.ndarray
    ) -> tuple[Request, np.ndarray] | None:
        """The message of the slots that are still in the life they spoke in."""
        flag, spec = np.zeros(0), self.group.spec
        observation, extra = (spaces.zeros(part, (0,)) for part in (spec.observation, spec.extra))
        blank = TimeStep(observation, flag, flag, flag, flag, extra)
        treedef = jax.tree.structure(Request(blank, flag, flag))
        request: Request = jax.tree.unflatten(treedef, [np.asarray(x) for x in saved["leaves"]])
        keep = ~changed[request.slot_ids]
        if not keep.any():
            return None
        return jax.tree.map(lambda x: x[keep], (request, np.asarray(saved["begins"])))


class Driver:
    """Drives lanes in turn, keeping all but one of them on their way."""

    def __init__(self, lanes: list[Lane], next_lane: int = 0) -> None:
        """``lanes`` are driven by one thread only; ``next_lane`` is the first to have its turn."""
        self.lanes, self.next = lanes, next_lane
        self._pending: deque[Lane] = deque()

    def turn(self) -> bool:
        """One lane receives and asks; the longest waiting one is answered.

        Returns:
            False where no lane may ask before the learner has learned; then nothing was done that a second call
            would do again.
        """
        for offset in range(len(self.lanes)):
            lane = self.lanes[(self.next + offset) % len(self.lanes)]
            if lane.pending is not None:
                continue
            if lane.received is None:
                lane.receive()
            if lane.submit():
                self._pending.append(lane)
                self.next = (self.next + offset + 1) % len(self.lanes)
                if len(self._pending) == len(self.lanes):
                    self._pending.popleft().answer()
                return True
        if self._pending:
            self._pending.popleft().answer()
            return True
        return False

    def settle(self) -> None:
        """Answer every question on its way."""
        while self._pending:
            self._pending.popleft().answer()
