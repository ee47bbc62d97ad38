"""Environments in worker processes behind the ``EnvGroup`` contract."""

import itertools
import os
import selectors
import time
import warnings
from collections import deque
from functools import cached_property
from typing import Any

import numpy as np

from headrace.envs import checks, rows
from headrace.envs import gym_state as kept
from headrace.envs.failures import Budget, Failure, Reason, WorkerTraceback
from headrace.envs.gym import MAX_INFOS
from headrace.envs.pool import memory
from headrace.envs.pool.probe import failure, probe
from headrace.envs.pool.process import Process
from headrace.envs.pool.wire import Job, Kind, Resumed, Shared, layout, share
from headrace.envs.request import Request
from headrace.errors import ConfigError, EnvironmentFailure, WaitTimeoutError
from headrace.types import PyTree, TimeStep

LOOK_S = 0.2
"""How long a wait lasts before it looks whether a worker hangs."""
CLOSE_S = 5.0
"""How long workers may take to close their environments, seconds."""


class PoolGroup:
    """``num_slots`` environments in ``workers`` processes, each of which steps its share one after the other.

    ``recv`` gives the rows of the slots that are ready first, at least ``batch_size`` of them. Rows and actions lie in
    shared memory, messages tell whose; what is handed out is copied.

    An environment that raises is made anew in its process (see ``GymGroup``). A process that dies, or in which a step takes
    longer than ``step_timeout_s``, is killed and started anew, and every slot of it begins a new life; the one it was at
    pays for it (``Budget``). Meanwhile the slots of other workers go on.

    Attributes:
        spec: see ``EnvSpec``.
        num_slots: the number of environments.
        num_workers: the number of processes.
    """

    def __init__(self, request: Request) -> None:
        """Start the workers and wait for the first rows.

        Raises:
            EnvironmentFailure: an environment could not be made or reset.
            UnsupportedSpaceError: a space the system cannot carry.
            ConfigError: the rows do not fit into memory.
        """
        n = self.num_slots = request.num_slots
        self.num_workers = min(request.workers, n)
        self._request, self._need = request, request.batch_size or n
        self.spec = request.spec or probe(request).spec
        fields = layout(self.spec, n)
        self._block = memory.allocate(fields, f"env {request.env_id}: {n} slots")
        self._shared = Shared(self.spec, memory.arrays(self._block, fields))
        bounds = np.linspace(0, n, self.num_workers + 1).astype(int).tolist()
        self._shares = [range(*pair) for pair in itertools.pairwise(bounds)]
        self._budget, self._failures = Budget(n, request.max_restarts), list[Failure]()
        self._infos: deque[tuple[int, dict[str, float]]] = deque(maxlen=max(MAX_INFOS, n))
        self._early: dict[int, dict[str, float]] = {}  # infos by slot whose rows were not received yet
        # A slot is ready (its row waits), owed (its row was received, its answer was not), or its worker is at it.
        self._ready, self._owed = np.zeros(n, bool), np.zeros(n, bool)
        self._reborn = np.zeros(n, bool)  # owed, but its life has ended: the answer goes nowhere
        self._lives, self._steps = np.zeros(n, np.int64), np.zeros(n, np.int64)  # of the rows received
        self._next_lives = np.zeros(n, np.int64)
        self._replies: dict[int, Any] = {}
        self._looked = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._workers: list[Process] = []
        try:
            for index in range(self.num_workers):
                self._workers.append(self._start(index))
            while not self._ready.all():
                self._wait()
        except BaseException:
            self.close()
            raise

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """See ``EnvGroup.recv``. The wait is bounded by a step's limit, which ends in a new life, not by ``timeout_s``."""
        need = min(self._need, self.num_slots - int(self._owed.sum()))
        if not need:
            raise WaitTimeoutError(
                f"env {self._request.env_id}: recv waits for an answer to slots 0 … {self.num_slots - 1}, but none was "
                "sent; send actions first"
            )
        while np.count_nonzero(given := self._ready & ~self._owed) < need:
            self._wait()
        slot_ids = np.flatnonzero(given).astype(np.int32)
        timestep = self._shared.read(slot_ids)
        self._lives[slot_ids] = self._shared.lives[slot_ids]
        self._steps[slot_ids] += ~timestep.first
        self._ready[slot_ids], self._owed[slot_ids] = False, True
        if self._early:
            self._infos.extend((s, self._early.pop(s)) for s in slot_ids.tolist() if s in self._early)
        return timestep, slot_ids

    def send(self, action: PyTree, slot_ids: np.ndarray) -> None:
        """Answer slots; see ``EnvGroup.send``. Their workers begin at once."""
        slot_ids = np.asarray(slot_ids)
        batch = rows.env_batch(self.spec.action, action, len(slot_ids))
        checks.check_ids(slot_ids, ~self._owed, self._request.env_id)
        rows.put(self.spec.action, self._shared.action, slot_ids, batch)
        self._owed[slot_ids] = False
        asked = np.zeros(self.num_slots, bool)
        asked[slot_ids] = ~self._reborn[slot_ids]
        self._reborn[slot_ids] = False
        for process, mine in zip(self._workers, self._shares, strict=True):
            local = np.flatnonzero(asked[mine.start : mine.stop])
            if len(local):
                process.step(local)

    def run_ids(self) -> np.ndarray:
        """Int64 ``[num_slots]``: the life of each slot, 0 at first."""
        return self._lives.copy()

    def take_infos(self) -> list[tuple[int, dict[str, float]]]:
        """See ``GymGroup.take_infos``."""
        taken = list(self._infos)
        self._infos.clear()
        return taken

    def take_failures(self) -> list[Failure]:
        """What failed and was begun anew since the last call."""
        taken, self._failures = self._failures, []
        return taken

    @cached_property
    def _drawing(self) -> tuple[bool, float | None]:
        return self._ask("drawing", {0: ()})[0]

    @property
    def renders(self) -> bool:
        """Whether its environments were made to draw."""
        return self._drawing[0]

    @property
    def render_fps(self) -> float | None:
        """Frames a second, as the environment's metadata say."""
        return self._drawing[1]

    def render(self, slot: int) -> Any:
        """The picture of the slot's last received row, when its worker has come to it; see ``GymGroup.render``."""
        index = next(k for k, mine in enumerate(self._shares) if slot in mine)
        return self._ask("render", {index: (slot - self._shares[index].start,)})[0]

    def get_state(self) -> dict[str, Any] | None:
        """As of a ``GymGroup`` of all slots, whatever the number of workers. Waits until no slot is in a step."""
        states = self._ask("get_state", dict.fromkeys(range(self.num_workers), ()))
        if any(state is None for state in states):
            return None
        state = kept.join(states)
        state["flags"] = np.concatenate([state["flags"][:3], self._ready[None]])
        return state

    def set_state(self, state: dict[str, Any]) -> bool:
        """See ``GymGroup.set_state``; each worker replays its slots' episodes."""
        if (state["env"], state["num_slots"]) != (self.spec.name, self.num_slots):
            raise ConfigError(
                f"got the state of {state['num_slots']} slots of env {state['env']}; expected {self.num_slots} "
                f"of {self.spec.name}"
            )
        parts = kept.split(state, [len(mine) for mine in self._shares])
        replies = self._ask("set_state", {index: (part,) for index, part in enumerate(parts)})
        self._lives[:], self._steps[:] = self._shared.lives, state["counts"][1]
        return all(reply.exact for reply in replies)

    def close(self) -> None:
        """Close the environments and end the workers; one that does not come to an end is named in a warning and killed."""
        workers, self._workers = self._workers, []
        for process in workers:
            process.call("close")
        until = time.monotonic() + CLOSE_S
        for index, process in enumerate(workers):
            if process.serving and not process.exited(until - time.monotonic()):
                at = "" if process.slot is None else f", at slot {self._name_of(index, process.slot)},"
                warnings.warn(
                    f"env {self._request.env_id}: worker {index}{at} did not close within {CLOSE_S:g} s and was killed",
                    RuntimeWarning,
                    stacklevel=2,
                )
        for process in workers:
            process.kill()
        self._selector.close()
        if self._block >= 0:
            os.close(self._block)
            self._block = -1

    # Workers.

    def _start(self, index: int) -> Process:
        mine = self._shares[index]
        job = Job(
            share(self._request, mine.start, mine.stop),
            low=mine.start,
            total=self.num_slots,
            spec=self.spec,
            block=self._block,
            lives=self._next_lives[mine.start : mine.stop],
            left=self._budget.left[mine.start : mine.stop],
        )
        process = Process(job)
        self._selector.register(process.connection, selectors.EVENT_READ, index)
        return process

    def _wait(self) -> None:
        """Wait for messages and take them; look whether a worker hangs."""
        for key, _ in self._selector.select(LOOK_S):
            self._take(key.data)
        if (now := time.monotonic()) - self._looked > LOOK_S:
            self._looked = now
            for index, process in enumerate(self._workers):
                if process.overdue(self._request.step_timeout_s):
                    self._anew(index, "hung")

    def _take(self, index: int) -> None:
        process, mine = self._workers[index], self._shares[index]
        said = process.receive()
        if said is None:
            return self._anew(index, "died")
        kind, value = said
        if kind is Kind.READY:
            process.serving = True
            self._ready[value + mine.start] = True
        elif kind is Kind.REPLY:
            self._replies[index] = value
            if isinstance(value, Resumed):  # here, as its slots may speak before other workers reply
                slots = slice(mine.start, mine.stop)
                self._ready[slots], self._owed[slots], self._reborn[slots] = False, ~value.due, False
                process.asked += bool(value.due.any())
        elif kind is Kind.NOTES:
            failures, infos = value
            self._early |= {slot + mine.start: numbers for slot, numbers in infos}
            for failed in failures:
                self._budget.take(failed.slot + mine.start, failed.steps)  # as the worker did
                self._failures.append(failed._replace(slot=failed.slot + mine.start))
        else:
            raise failure(value)

    def _anew(self, index: int, reason: Reason) -> None:
        """Start a worker anew, its slots with new lives; raise where the slot that it was at has no restart left."""
        process, mine = self._workers[index], self._shares[index]
        at, words = process.slot, process.last_words()
        what = f"hung: one step took more than env.step_timeout_s = {self._request.step_timeout_s:g} s"
        if reason == "died":
            what = process.status()
        self._selector.unregister(process.connection)
        process.kill()
        slot = mine.start + (at or 0)
        steps = int(self._steps[slot])
        where = f"worker {index}" if at is None else f"slot {self._name_of(index, at)} step {steps + 1}"
        message = f"env {self._request.env_id} {where}: {what}"
        if not self._budget.take(slot, steps):
            del self._workers[index]
            raise EnvironmentFailure(self._used_up(message)) from WorkerTraceback.of(words)
        self._failures.append(Failure(slot, reason, steps, message))
        slots = slice(mine.start, mine.stop)
        self._next_lives[slots] = np.maximum(self._shared.lives[slots], self._next_lives[slots]) + 1
        self._ready[slots], self._reborn[slots], self._steps[slots] = False, self._owed[slots], 0
        self._workers[index] = self._start(index)

    def _name_of(self, index: int, slot: int) -> int:
        """The global id of a worker's slot."""
        return self._request.first_slot + self._shares[index].start + slot

    def _used_up(self, message: str) -> str:
        most = self._request.max_restarts
        return (
            f"{message}; started anew {most} times in a row (env.max_restarts), it fails still"
            if most
            else message
        )

    def _ask(self, name: str, arguments: dict[int, tuple[Any, ...]]) -> list[Any]:
        """What a call gives in the workers named. One that is started anew meanwhile is asked again."""
        self._replies, asked = {}, dict[int, int]()
        while len(self._replies) < len(arguments):
            for index, given in arguments.items():
                process = self._workers[index]
                if asked.get(index) != process.pid:
                    process.call(name, *given)
                    asked[index] = process.pid
            self._wait()
        return [self._replies[index] for index in arguments]
