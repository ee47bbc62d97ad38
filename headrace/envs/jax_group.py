"""A ``JaxEnv`` behind the ``EnvGroup`` contract: all slots stepped by one compiled call.

Driven with ``send`` and ``recv`` like any group. Inference that is on the same device takes the step itself, in one
program with the policy's (``advance``); ``send`` then only says that its actions were the ones taken.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from headrace import xla
from headrace.envs import checks, jax_state, rows
from headrace.envs.contract import EnvSpec
from headrace.envs.jax_env import JaxEnv
from headrace.envs.jax_step import EnvSlots, EnvStep, functions
from headrace.errors import ConfigError, EnvironmentFailure, WaitTimeoutError
from headrace.types import Array, PyTree, TimeStep

T = TypeVar("T")
LOOK_S = 2e-5
"""How long a wait for the device sleeps between two looks."""


class Programs(NamedTuple):
    """What the groups of one environment share: ``begin`` and ``step`` compiled, and the step to be traced into others."""

    spec: EnvSpec
    begin: Callable[[Array], tuple[EnvSlots, TimeStep]]
    step: EnvStep
    traced_step: EnvStep


@functools.lru_cache(maxsize=16)
def programs(env: JaxEnv, name: str, limit: int | None) -> Programs:
    """The compiled functions of ``env``; see ``jax_step.functions`` for what is raised."""
    spec, begin, step = functions(env, name, limit)
    return Programs(spec, xla.jit(begin), xla.jit(step, donate_argnums=(0,)), step)


class JaxGroup:
    """``num_slots`` environments in lock-step; they step on the device from the last answer on.

    Attributes:
        spec: see ``EnvSpec``; dtypes are those the device has.
        num_slots: the number of environments.
        env_step: the step of all slots, to be traced into a program that ``advance`` runs.
        stepping: ``(0, time.monotonic() at its start)`` while a step is dispatched (which on the CPU may be all of it) or
            waited for, else None; compiling, which the first dispatch does, is not told of.
    """

    def __init__(
        self,
        env: JaxEnv,
        num_slots: int,
        seed_of: Callable[[int, int], int],
        *,
        name: str,
        max_episode_steps: int | None = None,
        first_slot: int = 0,
    ) -> None:
        """Compile and reset.

        Args:
            env: the environment's functions.
            num_slots: how many environments.
            seed_of: ``(slot, life) -> seed``, taken modulo 2^32.
            name: the id, for messages.
            max_episode_steps: a time limit in place of the environment's; None leaves it.
            first_slot: global id of slot 0, for messages.

        Raises:
            EnvironmentFailure: ``reset`` or ``step`` gives something else than was declared.
            UnsupportedSpaceError: a space that cannot be carried.
        """
        limit = env.max_episode_steps if max_episode_steps is None else max_episode_steps
        self._programs = programs(env, name, limit)
        self.spec, self.env_step = self._programs.spec, self._programs.traced_step
        self.num_slots, self._name, self._seed_of, self._first_slot = num_slots, name, seed_of, first_slot
        self.stepping: tuple[int, float] | None = None
        self._compiled = False
        self._all = np.arange(num_slots, dtype=np.int32)
        self._begin(0)

    def _begin(self, life: int) -> None:
        """Reset every slot in a new life."""
        n = self.num_slots
        seeds = np.array([self._seed_of(slot, life) % 2**32 for slot in range(n)], np.uint32)
        self._slots, self._timestep = self._programs.begin(seeds)
        self._life, self._steps, self._unread = life, np.zeros(n, np.int64), True
        self._sent, self._pending, self._advanced = (
            np.zeros(n, bool),
            rows.zeros_env(self.spec.action, n),
            False,
        )

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """See ``EnvGroup.recv``."""
        if not self._unread:
            raise WaitTimeoutError(
                f"env {self._name}: recv waits for an answer to slot {int(np.argmin(self._sent))}; a JAX environment "
                "steps when every slot was sent an action"
            )
        self.wait(timeout_s)
        # Copies: a program of ``advance`` may donate the rows, and what is handed out is never written again.
        timestep: TimeStep = jax.tree.map(np.array, jax.device_get(self._timestep))
        self._unread = False
        self._steps += ~timestep.first
        checks.check_values(
            self._name, self.spec.observation, timestep.observation, timestep.reward, self._all, self._steps,
            self._first_slot,
        )  # fmt: skip
        return timestep, self._all.copy()

    def wait(self, timeout_s: float) -> None:
        """Wait until the rows under way are there.

        Raises:
            WaitTimeoutError: they are not within ``timeout_s`` seconds.
            EnvironmentFailure: the device reports an error.
        """
        leaves, since = jax.tree.leaves(self._timestep), time.monotonic()
        with self._watched():
            while not all(x.is_ready() for x in leaves):
                if time.monotonic() - since > timeout_s:
                    raise WaitTimeoutError(
                        f"env {self._name}: slots {self._first_slot} … {self._first_slot + self.num_slots - 1} did not "
                        f"step within {timeout_s:g} s"
                    )
                time.sleep(LOOK_S)
            jax.block_until_ready(leaves)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self.stepping = (0, time.monotonic())
        try:
            yield
        except jax.errors.JaxRuntimeError as exc:
            raise EnvironmentFailure(f"env {self._name}: its step failed on the device: {exc}") from exc
        finally:
            self.stepping = None

    def _dispatch(self, program: Callable[..., Any], *args: Any) -> Any:
        with self._watched():
            if not self._compiled:
                self.stepping = None
            result = program(*args)
        self._compiled = True
        return result

    def send(self, action: PyTree, slot_ids: np.ndarray) -> None:
        """Answer slots; see ``EnvGroup.send``. With the last slot's answer the environments step."""
        slot_ids = np.asarray(slot_ids)
        batch = rows.env_batch(self.spec.action, action, len(slot_ids))
        checks.check_ids(slot_ids, self._sent | self._unread, self._name)
        if self._advanced:
            self._advanced, self._unread = False, True
            return
        if not checks.in_order(slot_ids, self._all):
            rows.put(self.spec.action, self._pending, slot_ids, batch)
            batch = self._pending
        self._sent[slot_ids] = True
        if self._sent.all():
            self._slots, self._timestep = self._dispatch(self._programs.step, self._slots, batch)
            self._answered()
            self._unread = True

    def _answered(self) -> None:
        self._sent = np.zeros(self.num_slots, bool)
        self._pending = rows.zeros_env(self.spec.action, self.num_slots)

    def advance(self, program: Callable[[EnvSlots, TimeStep], tuple[EnvSlots, TimeStep, T]]) -> T:
        """Let ``program`` choose actions for the rows received last and take the step with them.

        Args:
            program: ``(slots, rows) -> (slots, rows, answer)``, by ``env_step``; may donate both. Dispatches and returns
                at once.

        Returns:
            The answer, whose actions are to be given to ``send``.

        Raises:
            ValueError: the rows were not received yet, or were answered already.
        """
        if self._unread or self._advanced or self._sent.any():
            raise ValueError(
                f"env {self._name}: advance is called once after each recv, in place of a step by send"
            )
        self._slots, self._timestep, answer = self._dispatch(program, self._slots, self._timestep)
        self._advanced = True
        return cast(T, answer)

    def run_ids(self) -> np.ndarray:
        """Int64 ``[num_slots]``: the life of each slot, 0 at first."""
        return np.full(self.num_slots, self._life, np.int64)

    def get_state(self) -> dict[str, Any]:
        """Everything, as arrays; also between ``recv`` and ``send``."""
        assert not self._advanced, "the actions that were taken have not been sent yet"
        return {
            "env": self._name,
            "num_slots": self.num_slots,
            "life": self._life,
            "steps": self._steps.copy(),
            "unread": self._unread,
            "sent": self._sent.copy(),
            "pending": rows.tree_arrays(self.spec.action, rows.copied(self.spec.action, self._pending)),
            "device": jax_state.to_arrays((self._slots, self._timestep)),
        }

    def set_state(self, state: dict[str, Any]) -> bool:
        """Continue exactly; False, in a new life, where the environment's state has another form now.

        Raises:
            ConfigError: the state is of another environment or number of slots.
        """
        if (state["env"], state["num_slots"]) != (self._name, self.num_slots):
            raise ConfigError(
                f"got the state of {state['num_slots']} slots of env {state['env']}; expected {self.num_slots} of "
                f"{self._name}"
            )
        restored = jax_state.from_arrays((self._slots, self._timestep), state["device"])
        if restored is None:
            self._begin(int(state["life"]) + 1)
            return False
        self._slots, self._timestep = restored
        self._life, self._unread, self._advanced = int(state["life"]), bool(state["unread"]), False
        self._steps, self._sent = np.array(state["steps"], np.int64), np.array(state["sent"], bool)
        pending = {key: np.array(value) for key, value in state["pending"].items()}
        self._pending = rows.tree_from_arrays(self.spec.action, pending)
        return True

    def close(self) -> None:
        """Wait for nothing and keep nothing: the device's arrays go with the group."""
