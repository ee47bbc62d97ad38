"""Single Gymnasium environments, stepped one after the other in the caller's thread."""

import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.envs import checks, rows
from headrace.envs import gym_state as kept
from headrace.envs.contract import EnvSpec
from headrace.errors import ConfigError, EnvironmentFailure, WaitTimeoutError
from headrace.spaces import from_gymnasium
from headrace.types import PyTree, TimeStep

MAX_INFOS = 256


class GymGroup:
    """``num_slots`` Gymnasium environments behind the ``EnvGroup`` contract.

    Environments are reset when the group is made; only that reset, the first of a life, is seeded. An ended
    environment is reset by the group in the step after its last row. Where an environment says ``terminated``
    and ``truncated`` together, both are kept.

    A step cannot be interrupted in a thread: ``recv`` returns when the environments have stepped, whatever
    its timeout. ``stepping`` tells a watcher in another thread which slot is being stepped and since when; it
    should end the run when that is longer ago than ``step_timeout_s``.

    Attributes:
        spec: see ``EnvSpec``.
        num_slots: the number of environments.
        stepping: ``(slot, time.monotonic() at its start)`` while an environment is stepped or reset, else
            None.
        step_timeout_s: how long one step may take, in seconds; for the watcher.
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env],
        num_slots: int,
        seed_of: Callable[[int, int], int],
        *,
        name: str,
        step_timeout_s: float = 60.0,
        first_slot: int = 0,
    ) -> None:
        """Make and reset the environments.

        Args:
            make_env: called once a slot.
            num_slots: how many.
            seed_of: ``(slot in group, life) -> seed`` of the first reset of a life.
            name: the id, for messages.
            step_timeout_s: see the class.
            first_slot: global id of slot 0, for messages.

        Raises:
            EnvironmentFailure: an environment could not be made or reset, or differs from the first.
            UnsupportedSpaceError: a space the system cannot carry.
        """
        if num_slots < 1:
            raise ConfigError(f"got num_slots={num_slots}; a group needs at least 1 slot")
        self.num_slots, self.step_timeout_s = num_slots, step_timeout_s
        self.stepping: tuple[int, float] | None = None
        self._name, self._seed_of, self._first_slot = name, seed_of, first_slot
        self._envs: list[gym.Env] = []
        try:
            for _ in range(num_slots):
                self._envs.append(make_env())
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        envs, name = self._envs, self._name
        self.spec = _spec_of(envs[0], name)
        for slot, env in enumerate(envs):
            if _spec_of(env, name) != self.spec:
                raise EnvironmentFailure(
                    f"env {name} slot {self._first_slot + slot}: its spaces differ from slot 0's; expected one space a group"
                )
        self._bare, self._steps_of = [env.unwrapped for env in envs], [env.step for env in envs]
        self._checked = rows.writer(self.spec.observation, check_kind=True)
        self._fast = rows.writer(self.spec.observation, check_kind=False)
        self._write = self._checked  # until every slot has stepped once
        self._all, self._num_sent, self._num_held = np.arange(self.num_slots, dtype=np.int32), 0, 0
        self._infos: deque[tuple[int, dict[str, float]]] = deque(maxlen=MAX_INFOS)
        self._first_obs = rows.empty(self.spec.observation, self.num_slots)
        self._slots = kept.Slots(self.num_slots, self.spec.action)
        for slot in range(self.num_slots):
            self._new_life(slot, life=0)
        self._num_held = self.num_slots

    def _new_life(self, slot: int, life: int) -> None:
        """Reset with the seed of a life; the row is held until it is received."""
        slots = self._slots
        slots.life[slot], slots.steps[slot], slots.ended[slot] = life, 0, False
        slots.held[slot], slots.sent[slot] = True, False
        try:
            observation = self._reset(slot, self._seed_of(slot, life))
            self._checked(self._first_obs, slot, observation)
        except Exception as exc:  # whatever a user's environment raises
            raise self._failure(slot, "reset", exc) from exc
        finally:
            self.stepping = None

    def _reset(self, slot: int, seed: int | None = None) -> Any:
        self.stepping = (slot, time.monotonic())
        generator = None if seed is not None else kept.raw_state(kept.generator_of(self._bare[slot]))
        self._slots.origin[slot] = kept.Origin(-1 if seed is None else seed, generator)
        self._slots.log.restart(slot)
        result = self._envs[slot].reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"got a {type(result).__name__}, expected (observation, info) as in Gymnasium")
        return result[0]

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """Step the slots that were sent an action; see ``EnvGroup.recv``.

        ``timeout_s`` cannot interrupt a step.
        """
        slots, everyone = self._slots, self._num_sent == self.num_slots
        slot_ids = self._all.copy() if everyone else np.flatnonzero(slots.held | slots.sent).astype(np.int32)
        if not len(slot_ids):
            raise WaitTimeoutError(
                f"env {self._name}: recv waits for an answer to slots 0 … {self.num_slots - 1}, but none was "
                "sent; send actions first"
            )
        actions: list[Any] = []
        if self._num_sent:
            actions = rows.unstack(self.spec.action, slots.pending, self.num_slots)
            slots.log.append(slots.pending, None if everyone else slots.sent.copy())
        timestep = self._step(slot_ids, actions)
        if everyone:
            self._write = self._fast
        slots.held[:] = slots.sent[:] = False
        slots.pending, self._num_sent, self._num_held = None, 0, 0
        slots.last = rows.merge(self.spec.observation, slots.last, timestep, slot_ids)
        return timestep, slot_ids

    def _step(self, slot_ids: np.ndarray, actions: list[Any]) -> TimeStep:
        # A fast environment's speed hangs on this loop: locals, one test a slot, three writes.
        n, spec, write, clock = len(slot_ids), self.spec.observation, self._write, time.monotonic
        steps_of, ended = self._steps_of, self._slots.ended
        asleep = (self._slots.held | ended).tolist()
        observation, reward = rows.empty(spec, n), np.zeros(n)
        first, terminated, truncated = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        slot = 0
        try:
            for k, slot in enumerate(slot_ids.tolist()):
                if asleep[slot]:
                    first[k] = True
                    self._wake(slot, observation, k)
                    continue
                self.stepping = (slot, clock())
                value, reward[k], end, limit, info = steps_of[slot](actions[slot])
                write(observation, k, value)
                if end or limit:
                    terminated[k], truncated[k], ended[slot] = end, limit, True
                    self._infos.append((slot, rows.numbers(info)))
        except Exception as exc:  # whatever a user's environment raises
            raise self._failure(slot, "reset" if asleep[slot] else "step", exc) from exc
        finally:
            self.stepping = None
        self._slots.steps[slot_ids] += ~first
        value = rows.agent_batch(spec, observation, self._name)
        checks.check_values(self._name, spec, value, reward, slot_ids, self._slots.steps, self._first_slot)
        return TimeStep(value, reward.astype(np.float32), first, terminated, truncated)

    def _wake(self, slot: int, observation: PyTree, k: int) -> None:
        """Write the first row of an episode into row k: the held one, or that of a reset now."""
        if self._slots.held[slot]:
            spec = self.spec.observation
            rows.put(spec, observation, k, rows.pick(spec, self._first_obs, slot))
        else:
            self._write(observation, k, self._reset(slot))
            self._slots.ended[slot] = False

    def _failure(self, slot: int, doing: str, exc: Exception) -> EnvironmentFailure:
        step = int(self._slots.steps[slot]) + (doing == "step")
        if isinstance(exc, ValueError) and "unpack" in str(exc) and doing == "step":
            exc = TypeError(
                f"{exc}; step must return (observation, reward, terminated, truncated, info) as in Gymnasium"
            )
        return EnvironmentFailure(
            f"env {self._name} slot {self._first_slot + slot} step {step}: {doing}() raised {type(exc).__name__}: {exc}"
        )

    def send(self, action: PyTree, slot_ids: np.ndarray) -> None:
        """Store the answers; see ``EnvGroup.send``. The environments step in ``recv``.

        Raises:
            ValueError: an id out of range, twice, or already answered; an action of a wrong shape.
        """
        spec, slots = self.spec.action, self._slots
        batch = rows.env_batch(spec, action, len(slot_ids))
        if self._num_sent or self._num_held or not checks.in_order(slot_ids, self._all):
            checks.check_ids(slot_ids, slots.sent | slots.held, self._name)
            pending = rows.zeros_env(spec, self.num_slots) if slots.pending is None else slots.pending
            rows.put(spec, pending, slot_ids, batch)
            batch = pending
        slots.pending = batch
        slots.sent[slot_ids] = True
        self._num_sent += len(slot_ids)

    def run_ids(self) -> np.ndarray:
        """Int64 ``[num_slots]``: the life of each slot, 0 at first."""
        return self._slots.life.copy()

    def take_infos(self) -> list[tuple[int, dict[str, float]]]:
        """``(slot, numbers in the info of a last row)`` since the last call, at most ``MAX_INFOS``."""
        taken = list(self._infos)
        self._infos.clear()
        return taken

    def get_state(self) -> dict[str, Any] | None:
        """The actions since each slot's reset; see ``gym_state``. None before the first ``recv``."""
        if self._slots.last is None:
            return None
        return kept.read(self.spec, self._slots, [kept.encoded(env) for env in self._bare])

    def set_state(self, state: dict[str, Any]) -> bool:
        """Replay each slot's episode; a slot whose last row or generator differs begins a new life.

        Raises:
            ConfigError: the state is of another environment or number of slots.
        """
        if (state["env"], state["num_slots"]) != (self._name, self.num_slots):
            raise ConfigError(
                f"got the state of {state['num_slots']} slots of env {state['env']}; expected "
                f"{self.num_slots} "
                f"of {self._name}"
            )
        self._infos.clear()
        self._slots, actions = kept.load(self.spec, state)
        exact = [self._replay(slot, log, state["generator_now"][slot]) for slot, log in enumerate(actions)]
        for slot in np.flatnonzero(~np.array(exact)).tolist():
            self._new_life(slot, int(self._slots.life[slot]) + 1)
        self._num_sent, self._num_held = int(self._slots.sent.sum()), int(self._slots.held.sum())
        return all(exact)

    def _replay(self, slot: int, actions: list[PyTree] | None, now: dict[str, Any] | None) -> bool:
        """Bring one slot to its state; False where it does not come out the same."""
        env, bare, (seed, before) = self._envs[slot], self._bare[slot], self._slots.origin[slot]
        if actions is None or now is None or (seed < 0 and before is None):
            return False
        row: tuple[Any, ...]
        try:
            self.stepping = (slot, time.monotonic())
            if before is not None and not kept.set_generator(bare, before):
                return False
            row = (env.reset(seed=None if seed < 0 else seed)[0], 0.0, False, False)
            for action in actions:
                self.stepping = (slot, time.monotonic())
                row = env.step(kept.one(self.spec.action, action))[:4]
            return self._is_last(slot, row) and kept.same(kept.encoded(bare), now)
        except (
            Exception
        ) as exc:  # what cannot be replayed may raise anything; it is no worse than a difference
            said = f"env {self._name} slot {self._first_slot + slot}: replaying raised {type(exc).__name__}: {exc}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
            return False
        finally:
            self.stepping = None

    def _is_last(self, slot: int, row: tuple[Any, ...]) -> bool:
        """Whether ``row`` is the slot's last received one."""
        spec, last = self.spec.observation, self._slots.last
        assert last is not None
        buffer = rows.empty(spec, 1)
        self._checked(buffer, 0, row[0])
        if self._slots.held[slot]:
            rows.put(spec, self._first_obs, slot, rows.pick(spec, buffer, 0))
        pairs = rows.tree_leaves(spec, rows.agent_batch(spec, buffer, self._name))
        expected = [value[slot] for _, value in rows.tree_leaves(spec, last.observation)]
        return (
            all(np.array_equal(value[0], other) for (_, value), other in zip(pairs, expected, strict=True))
            and np.float32(row[1]) == last.reward[slot]
            and (bool(row[2]), bool(row[3])) == (bool(last.terminated[slot]), bool(last.truncated[slot]))
        )

    def close(self) -> None:
        """Close every environment; one that raises is named in a warning."""
        envs, self._envs = self._envs, []
        for slot, env in enumerate(envs):
            try:
                env.close()
            except Exception as exc:  # closing goes on with the others
                warnings.warn(
                    f"env {self._name} slot {self._first_slot + slot}: close() raised {exc!r}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _spec_of(env: gym.Env, name: str) -> EnvSpec:
    for part in ("observation_space", "action_space"):
        if not isinstance(getattr(env, part, None), gym.Space):
            raise EnvironmentFailure(
                f"env {name}: its {part} is {getattr(env, part, 'missing')}; expected one of gymnasium.spaces"
            )
    return EnvSpec(
        from_gymnasium(env.observation_space, "observation space"),
        from_gymnasium(env.action_space, "action space"),
        frame_skip(env),
        name,
    )


def frame_skip(env: gym.Env) -> int:
    """Emulator frames a step: of Atari the emulator's own times the preprocessing wrapper's; else 1."""
    skip = getattr(env.unwrapped, "_frameskip", 1)
    frames = skip if isinstance(skip, int) else 1
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.AtariPreprocessing):
            frames *= env.frame_skip
        env = env.env
    return frames
