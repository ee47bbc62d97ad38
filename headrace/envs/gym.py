"""Single Gymnasium environments, stepped one after the other in the caller's thread."""

import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.envs import gym_state as kept
from headrace.envs import rows
from headrace.envs.contract import EnvSpec
from headrace.errors import ConfigError, EnvironmentFailure, WaitTimeoutError
from headrace.spaces import from_gymnasium
from headrace.types import PyTree, TimeStep

MAX_INFOS = 4096


class GymGroup:
    """``num_slots`` Gymnasium environments behind the ``EnvGroup`` contract.

    Environments are reset when the group is made; only that reset, the first of a life, is seeded. An ended
    environment is reset by the group in the step after its last row. Where an environment says ``terminated`` and
    ``truncated`` together, both are kept.

    A step cannot be interrupted in a thread: ``recv`` returns when the environments have stepped, whatever its timeout.
    ``stepping`` tells a watcher in another thread which slot is being stepped and since when; it should end the run
    when that is longer ago than ``step_timeout_s``.

    Attributes:
        spec: see ``EnvSpec``.
        num_slots: the number of environments.
        stepping: ``(slot, time.monotonic() at its start)`` while an environment is stepped or reset, else None.
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
    ) -> None:
        """Make and reset the environments.

        Args:
            make_env: called once a slot.
            num_slots: how many.
            seed_of: ``(slot in group, life) -> seed`` of the first reset of a life.
            name: the id, for messages.
            step_timeout_s: see the class.

        Raises:
            EnvironmentFailure: an environment could not be made or reset, or differs from the first.
            UnsupportedSpaceError: a space the system cannot carry.
        """
        if num_slots < 1:
            raise ConfigError(f"got num_slots={num_slots}; a group needs at least 1 slot")
        self.num_slots, self.step_timeout_s = num_slots, step_timeout_s
        self.stepping: tuple[int, float] | None = None
        self._name, self._seed_of = name, seed_of
        self._envs: list[gym.Env] = []
        try:
            for _ in range(num_slots):
                self._envs.append(make_env())
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        n, envs = self.num_slots, self._envs
        self.spec = _spec_of(envs[0], self._name)
        for slot, env in enumerate(envs):
            if _spec_of(env, self._name) != self.spec:
                raise EnvironmentFailure(
                    f"env {self._name} slot {slot}: its spaces differ from slot 0's; expected one space a group"
                )
        self._bare, self._steps_of = [env.unwrapped for env in envs], [env.step for env in envs]
        self._checked = rows.writer(self.spec.observation, check_kind=True)
        self._fast = rows.writer(self.spec.observation, check_kind=False)
        self._write = self._checked
        self._all, self._num_sent = np.arange(n, dtype=np.int32), 0
        self._life, self._steps = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._ended, self._held, self._sent = np.zeros((3, n), bool)
        self._pending: PyTree = None
        self._origin = [kept.Origin(-1, None)] * n
        self._log = kept.ActionLog(self.spec.action, n)
        self._infos: deque[tuple[int, dict[str, float]]] = deque(maxlen=MAX_INFOS)
        self._first_obs = rows.empty(self.spec.observation, n)
        self._last: TimeStep | None = None
        for slot in range(n):
            self._new_life(slot, life=0)

    def _new_life(self, slot: int, life: int) -> None:
        """Reset with the seed of a life; the row is held until it is received."""
        self._life[slot], self._steps[slot], self._ended[slot] = life, 0, False
        try:
            observation = self._reset(slot, self._seed_of(slot, life))
            self._checked(self._first_obs, slot, observation)
        except Exception as exc:  # whatever a user's environment raises
            raise self._failure(slot, "reset", exc) from exc
        finally:
            self.stepping = None
        self._num_sent -= int(self._sent[slot])
        self._held[slot], self._sent[slot] = True, False

    def _reset(self, slot: int, seed: int | None = None) -> Any:
        self.stepping = (slot, time.monotonic())
        generator = None if seed is not None else kept.raw_state(kept.generator_of(self._bare[slot]))
        self._origin[slot] = kept.Origin(-1 if seed is None else seed, generator)
        self._log.restart(slot)
        return self._envs[slot].reset(seed=seed)[0]

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """Step the slots that were sent an action; see ``EnvGroup.recv``. ``timeout_s`` cannot interrupt a step."""
        everyone = self._num_sent == self.num_slots
        slot_ids = self._all.copy() if everyone else np.flatnonzero(self._held | self._sent).astype(np.int32)
        if not len(slot_ids):
            raise WaitTimeoutError(
                f"env {self._name}: recv waits for an answer to slots 0 … {self.num_slots - 1}, but none was sent; "
                "send actions first"
            )
        actions: list[Any] = []
        if self._num_sent:
            actions = rows.unstack(self.spec.action, self._pending, self.num_slots)
            self._log.append(self._pending, None if everyone else self._sent.copy())
        timestep = self._step(slot_ids, actions)
        if actions:
            self._write = self._fast
        self._held[:] = self._sent[:] = False
        self._pending, self._num_sent = None, 0
        self._last = rows.merge(self.spec.observation, self._last, timestep, slot_ids)
        return timestep, slot_ids

    def _step(self, slot_ids: np.ndarray, actions: list[Any]) -> TimeStep:
        # A fast environment's speed hangs on this loop: locals, one test a slot, three writes.
        n, spec, write, clock = len(slot_ids), self.spec.observation, self._write, time.monotonic
        steps_of, ended, asleep = self._steps_of, self._ended, (self._held | self._ended).tolist()
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
        self._steps[slot_ids] += ~first
        value = rows.agent_batch(spec, observation, self._name)
        rows.check_values(self._name, spec, value, reward, slot_ids, self._steps)
        return TimeStep(value, reward.astype(np.float32), first, terminated, truncated)

    def _wake(self, slot: int, observation: PyTree, k: int) -> None:
        """Write the first row of an episode into row k: the held one, or that of a reset now."""
        if self._held[slot]:
            spec = self.spec.observation
            rows.put(spec, observation, k, rows.pick(spec, self._first_obs, slot))
        else:
            self._write(observation, k, self._reset(slot))
            self._ended[slot] = False

    def _failure(self, slot: int, doing: str, exc: Exception) -> EnvironmentFailure:
        step = int(self._steps[slot]) + (doing == "step")
        return EnvironmentFailure(
            f"env {self._name} slot {slot} step {step}: {doing}() raised {type(exc).__name__}: {exc}"
        )

    def send(self, action: PyTree, slot_ids: np.ndarray) -> None:
        """Store the answers; see ``EnvGroup.send``. The environments step in ``recv``.

        Raises:
            ValueError: an id out of range, twice, or already answered; an action of a wrong shape.
        """
        spec, n = self.spec.action, self.num_slots
        batch = rows.env_batch(spec, action, len(slot_ids))
        if not rows.in_order(slot_ids, self._all) or self._num_sent or self._held.any():
            rows.check_ids(slot_ids, self._sent | self._held, self._name)
            pending = rows.zeros_env(spec, n) if self._pending is None else self._pending
            rows.put(spec, pending, slot_ids, batch)
            batch = pending
        self._pending = batch
        self._sent[slot_ids] = True
        self._num_sent += len(slot_ids)

    def run_ids(self) -> np.ndarray:
        """Int64 ``[num_slots]``: the life of each slot, 0 at first."""
        return self._life.copy()

    def take_infos(self) -> list[tuple[int, dict[str, float]]]:
        """``(slot, numbers in the info of a last row)`` since the last call, oldest first, at most ``MAX_INFOS``."""
        taken = list(self._infos)
        self._infos.clear()
        return taken

    def get_state(self) -> dict[str, Any] | None:
        """Generators, actions of the present episodes and last rows; see ``gym_state``. None before the first ``recv``."""
        if self._last is None:
            return None
        spec, n = self.spec.action, self.num_slots
        logs = [self._log.actions(slot) for slot in range(n)]
        unsent = rows.zeros_env(spec, n)
        if self._pending is not None:
            rows.put(spec, unsent, self._sent, rows.pick(spec, self._pending, self._sent))
        return {
            "env": self._name,
            "num_slots": n,
            "life": self._life.copy(),
            "steps": self._steps.copy(),
            "ended": self._ended.copy(),
            "sent": self._sent.copy(),
            "held": self._held.copy(),
            "pending": rows.tree_arrays(spec, unsent),
            "lengths": np.array([-1 if log is None else len(log) for log in logs], np.int64),
            "actions": kept.stack_actions(spec, [a for log in logs if log is not None for a in log], unsent),
            "seed": np.array([origin.seed for origin in self._origin], np.int64),
            "generator": [None if o.generator is None else kept.encode(o.generator) for o in self._origin],
            "generator_now": [kept.encoded(env) for env in self._bare],
            "last": rows.tree_arrays(self.spec.observation, self._last.observation),
            "flags": np.stack([self._last.first, self._last.terminated, self._last.truncated]),
            "reward": np.array(self._last.reward),
        }

    def set_state(self, state: dict[str, Any]) -> bool:
        """Replay each slot's episode and compare its last row and generator; a slot that differs begins a new life.

        Raises:
            ConfigError: the state is of another environment or number of slots.
        """
        n, spec = self.num_slots, self.spec.action
        if (state["env"], state["num_slots"]) != (self._name, n):
            raise ConfigError(
                f"got the state of {state['num_slots']} slots of env {state['env']}; expected {n} of {self._name}"
            )
        self._pending = rows.tree_from_arrays(spec, {k: np.array(v) for k, v in state["pending"].items()})
        self._last = TimeStep(
            rows.tree_from_arrays(self.spec.observation, {k: np.array(v) for k, v in state["last"].items()}),
            np.array(state["reward"], np.float32),
            *np.array(state["flags"], bool),
        )
        self._infos.clear()
        logs = kept.split_actions(spec, state)
        self._log.replace([log or [] for log in logs], rows.zeros_env(spec, n))
        exact = [log is not None and self._replay(slot, state, log) for slot, log in enumerate(logs)]
        for slot in np.flatnonzero(~np.array(exact)).tolist():
            self._new_life(slot, int(state["life"][slot]) + 1)
        self._num_sent = int(self._sent.sum())
        if not self._num_sent:
            self._pending = None
        return all(exact)

    def _replay(self, slot: int, state: dict[str, Any], actions: list[PyTree]) -> bool:
        """Bring one slot to its state; False where it does not come out the same."""
        env, bare, seed = self._envs[slot], self._bare[slot], int(state["seed"][slot])
        before, now = state["generator"][slot], state["generator_now"][slot]
        if now is None or (seed < 0 and before is None):
            return False
        self._life[slot], self._steps[slot] = state["life"][slot], state["steps"][slot]
        self._ended[slot], self._sent[slot] = bool(state["ended"][slot]), bool(state["sent"][slot])
        self._held[slot] = bool(state["held"][slot])
        self._origin[slot] = kept.Origin(seed, None if before is None else kept.decode(before))
        try:
            self.stepping = (slot, time.monotonic())
            if seed < 0 and not kept.set_generator(bare, before):
                return False
            row = (env.reset(seed=None if seed < 0 else seed)[0], 0.0, False, False)
            for action in actions:
                self.stepping = (slot, time.monotonic())
                row = env.step(kept.one(self.spec.action, action))[:4]
            return self._is_last(slot, row) and kept.same(kept.encoded(bare), now)
        except (
            Exception
        ) as exc:  # an environment that is not replayable may raise anything: a new life, as for a difference
            warnings.warn(
                f"env {self._name} slot {slot}: replaying raised {type(exc).__name__}: {exc}", stacklevel=2
            )
            return False
        finally:
            self.stepping = None

    def _is_last(self, slot: int, row: tuple[Any, ...]) -> bool:
        spec, last = self.spec.observation, self._last
        assert last is not None
        buffer = rows.empty(spec, 1)
        self._checked(buffer, 0, row[0])
        pairs = rows.tree_leaves(spec, rows.agent_batch(spec, buffer, self._name))
        expected = [value[slot] for _, value in rows.tree_leaves(spec, last.observation)]
        if self._held[slot]:
            rows.put(spec, self._first_obs, slot, rows.pick(spec, buffer, 0))
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
                    f"env {self._name} slot {slot}: close() raised {exc!r}", RuntimeWarning, stacklevel=2
                )


def _spec_of(env: gym.Env, name: str) -> EnvSpec:
    return EnvSpec(
        from_gymnasium(env.observation_space, "observation space"),
        from_gymnasium(env.action_space, "action space"),
        frame_skip(env),
        name,
    )


def frame_skip(env: gym.Env) -> int:
    """Emulator frames a step of an Atari environment: the emulator's own times the preprocessing wrapper's; else 1."""
    skip = getattr(env.unwrapped, "_frameskip", 1)
    frames = skip if isinstance(skip, int) else 1
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.AtariPreprocessing):
            frames *= env.frame_skip
        env = env.env
    return frames
