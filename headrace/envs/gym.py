"""Single Gymnasium environments, stepped one after the other in the caller's thread."""

import time
import warnings
from collections import deque
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

from headrace.envs import checks, rows
from headrace.envs import gym_state as kept
from headrace.envs.contract import EnvSpec
from headrace.envs.failures import BadValueError, Bounds, Budget, Failure, OnBadValue
from headrace.envs.masks import MaskError, Masks
from headrace.errors import ConfigError, EnvironmentFailure, EnvironmentIdError, WaitTimeoutError
from headrace.spaces import from_gymnasium, to_agent
from headrace.types import PyTree, TimeStep

MAX_INFOS = 256
FAILURES = (Exception, SystemExit)
"""What a user's environment may raise."""


class _Message(NamedTuple):
    """A message being written, ``[b, ...]``: observations in environment types, rewards float64, flags, extra."""

    observation: PyTree
    reward: np.ndarray
    first: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    extra: PyTree


class GymGroup:
    """``num_slots`` Gymnasium environments behind the ``EnvGroup`` contract.

    Environments are reset when the group is made; only that reset, the first of a life, is seeded. An ended
    environment is reset by the group in the step after its last row. Where an environment says ``terminated``
    and ``truncated`` together, both are kept.

    An environment that raises is made anew, as often as ``budget`` allows, and begins a new life in the same message.
    What it says is checked; see ``on_bad_value``.

    A step cannot be interrupted in a thread: ``recv`` returns when the environments have stepped, whatever
    its timeout. ``stepping`` tells a watcher in another thread which slot is being stepped and since when.

    Attributes:
        spec: see ``EnvSpec``.
        num_slots: the number of environments.
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env],
        num_slots: int,
        seed_of: Callable[[int, int], int],
        *,
        name: str,
        first_slot: int = 0,
        budget: Budget | None = None,
        on_bad_value: OnBadValue = "error",
        bounds: Bounds = "warn",
        first_lives: np.ndarray | None = None,
        beat: MutableSequence[float] | None = None,
        action_mask: str | None = None,
    ) -> None:
        """Make and reset the environments.

        Args:
            make_env: called once a slot and life.
            num_slots: how many.
            seed_of: ``(slot in group, life) -> seed`` of the first reset of a life.
            name: the id, for messages.
            first_slot: global id of slot 0, for messages.
            budget: of restarts; None allows none.
            on_bad_value: what NaN, or a value of a wrong shape, kind or range, does: end the run with an ``error``, or end
                the slot's life, the row left out (``restart``).
            bounds: what a float outside the bounds of its Box is: a bad value (``error``), said once (``warn``), or nothing.
            first_lives: int64 ``[num_slots]``; None: zeros.
            beat: two floats where the group says what it is at: slot, and time (see ``stepping``; 0: at nothing).
            action_mask: where action masks come from (see ``masks``); None: there are none.

        Raises:
            EnvironmentFailure: an environment could not be made or reset, or differs from the first.
            UnsupportedSpaceError: a space the system cannot carry.
        """
        if num_slots < 1:
            raise ConfigError(f"got num_slots={num_slots}; a group needs at least 1 slot")
        self.num_slots = num_slots
        self._beat: MutableSequence[float] = [0.0, 0.0] if beat is None else beat
        self._name, self._seed_of, self._first_slot, self._make = name, seed_of, first_slot, make_env
        self._budget = Budget(num_slots, 0) if budget is None else budget
        self._on_bad_value, self._bounds = on_bad_value, bounds
        self._failures: list[Failure] = []
        self._action_mask = action_mask
        self._envs: list[gym.Env] = []
        lives = np.zeros(num_slots, np.int64) if first_lives is None else first_lives
        try:
            for slot in range(num_slots):
                self._envs.append(self._made(slot))
            self._begin(lives)
        except BaseException:
            self.close()
            raise

    @property
    def stepping(self) -> tuple[int, float] | None:
        """``(slot, time.monotonic() at its start)`` while an environment is made, reset or stepped, else None."""
        slot, since = self._beat
        return (int(slot), since) if since else None

    def _made(self, slot: int) -> gym.Env:
        """A fresh environment; tried again where making it raises."""
        while True:
            self._beat[0], self._beat[1] = slot, time.monotonic()
            try:
                return self._make()
            except EnvironmentFailure as failure:
                if not self._budget.take(slot, 0):
                    raise _used_up(failure, self._budget) from failure.__cause__
                self._failures.append(Failure(slot, "raised", 0, str(failure)))
            finally:
                self._beat[1] = 0.0

    def _begin(self, lives: np.ndarray) -> None:
        envs, name = self._envs, self._name
        spec = _spec_of(envs[0], name)
        self._masks = Masks(
            self._action_mask, spec.observation, spec.action, name=name, first_slot=self._first_slot
        )
        self.spec = replace(spec, extra=self._masks.spec)
        for slot in range(1, len(envs)):
            self._check_spec(slot)
        self._bare, self._steps_of = [env.unwrapped for env in envs], [env.step for env in envs]
        self._write = rows.writer(self.spec.observation)
        self._all, self._num_sent, self._num_held = np.arange(self.num_slots, dtype=np.int32), 0, 0
        self._infos: deque[tuple[int, dict[str, float]]] = deque(maxlen=max(MAX_INFOS, self.num_slots))
        self._first_obs = rows.empty(self.spec.observation, self.num_slots)
        self._first_extra = self._masks.blank(self.num_slots)
        self._slots = kept.Slots(self.num_slots, self.spec.action)
        for slot in range(self.num_slots):
            try:
                self._new_life(slot, int(lives[slot]))
            except EnvironmentFailure as failure:
                self._restart(slot, failure)
        self._num_held = self.num_slots

    def _check_spec(self, slot: int) -> None:
        if replace(_spec_of(self._envs[slot], self._name), extra=self.spec.extra) != self.spec:
            raise EnvironmentFailure(
                f"env {self._name} slot {self._first_slot + slot}: its spaces differ from slot 0's; "
                "expected one space a group"
            )

    def _new_life(self, slot: int, life: int) -> None:
        """Reset with the seed of a life; the row is held until it is received."""
        slots = self._slots
        slots.life[slot], slots.steps[slot], slots.ended[slot] = life, 0, False
        slots.held[slot], slots.sent[slot], slots.again[slot] = True, False, False
        try:
            self._write(self._first_obs, slot, self._reset(slot, self._seed_of(slot, life)))
            self._check_first(slot)
        except FAILURES as exc:
            raise self._failure(slot, "reset", exc) from _cause(exc)
        finally:
            self._beat[1] = 0.0

    def _check_first(self, slot: int) -> None:
        spec = self.spec.observation
        one = to_agent(spec, rows.pick(spec, self._first_obs, slice(slot, slot + 1)))
        for what in checks.bad_values(spec, one, np.zeros(1)).values():
            raise BadValueError(what)
        self._masks.of_observation((), one, np.zeros(1, bool))

    def _restart(self, slot: int, failure: EnvironmentFailure) -> None:
        """Make the environment anew and begin its next life, as often as it takes and the budget allows.

        Raises:
            EnvironmentFailure: the last one, when the budget is used up.
        """
        slots = self._slots
        while True:
            steps = int(slots.steps[slot])
            if not self._budget.take(slot, steps):
                raise _used_up(failure, self._budget)
            self._failures.append(Failure(slot, "raised", steps, str(failure)))
            try:
                with suppress(*FAILURES):  # it is broken already
                    self._beat[0], self._beat[1] = slot, time.monotonic()
                    self._envs[slot].close()
                env = self._envs[slot] = self._made(slot)
                self._bare[slot], self._steps_of[slot] = env.unwrapped, env.step
                self._check_spec(slot)
                self._new_life(slot, int(slots.life[slot]) + 1)
                return
            except EnvironmentFailure as again:
                failure = again
            finally:
                self._beat[1] = 0.0

    def _leave_out(self, slot: int, step: int, what: str) -> None:
        """A bad value ends the slot's life; its environment is reset, not made anew.

        Raises:
            EnvironmentFailure: it must not be left out.
        """
        message = f"env {self._name} slot {self._first_slot + slot} step {step}: {what}"
        if self._on_bad_value == "error":
            raise EnvironmentFailure(f"{message}. {checks.MEND}")
        self._failures.append(Failure(slot, "bad_value", step, message))
        self._begin_life(slot)

    def _begin_life(self, slot: int) -> None:
        """The next life of a slot whose environment is in order."""
        try:
            self._new_life(slot, int(self._slots.life[slot]) + 1)
        except EnvironmentFailure as failure:
            self._restart(slot, failure)

    def _reset(self, slot: int, seed: int | None = None) -> Any:
        self._beat[0], self._beat[1] = slot, time.monotonic()
        generator = None if seed is not None else kept.raw_state(kept.generator_of(self._bare[slot]))
        self._slots.origin[slot] = kept.Origin(-1 if seed is None else seed, generator)
        self._slots.log.restart(slot)
        result = self._envs[slot].reset(seed=seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"got a {type(result).__name__}, expected (observation, info) as in Gymnasium")
        self._masks.write(self._first_extra, slot, result[1])
        return result[0]

    @property
    def due(self) -> np.ndarray:
        """Bool ``[num_slots]``: the slots that the next ``recv`` brings."""
        return self._slots.held | self._slots.sent | self._slots.again

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """Step the slots that were sent an action; see ``EnvGroup.recv``.

        ``timeout_s`` cannot interrupt a step.
        """
        slots, everyone = self._slots, self._num_sent == self.num_slots
        slot_ids = self._all.copy() if everyone else np.flatnonzero(self.due).astype(np.int32)
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
        slots.held[:] = slots.sent[:] = slots.again[:] = False
        slots.pending, self._num_sent, self._num_held = None, 0, 0
        slots.last = rows.merge(self.spec.observation, slots.last, timestep, slot_ids)
        return timestep, slot_ids

    def _step(self, slot_ids: np.ndarray, actions: list[Any]) -> TimeStep:
        spec, n, slots = self.spec.observation, len(slot_ids), self._slots
        first, terminated, truncated = (np.zeros(n, bool) for _ in range(3))
        extra = self._masks.blank(n)
        message = _Message(rows.empty(spec, n), np.zeros(n), first, terminated, truncated, extra)
        self._advance(slot_ids.tolist(), actions, message)
        slots.steps[slot_ids] += ~message.first & ~slots.again[slot_ids]
        value = to_agent(spec, message.observation)
        if bad := self._bad_rows(message, value):
            for k, what in bad.items():
                slot = int(slot_ids[k])
                self._leave_out(slot, int(slots.steps[slot]), what)
                self._begin_again(message, k, slot)
            value = to_agent(spec, message.observation)
        value, extra = self._with_masks(message, slot_ids, value)
        return TimeStep(value, message.reward.astype(np.float32), first, terminated, truncated, extra)

    def _with_masks(self, message: _Message, slot_ids: np.ndarray, value: PyTree) -> tuple[PyTree, PyTree]:
        """Observations in agent types and ``extra``, with the masks that are part of the observation."""
        while True:
            try:
                last = message.terminated | message.truncated
                return value, self._masks.of_observation(message.extra, value, last)
            except MaskError as exc:
                slot = int(slot_ids[exc.row])
                self._leave_out(slot, int(self._slots.steps[slot]), str(exc))
                self._begin_again(message, exc.row, slot)
                value = to_agent(self.spec.observation, message.observation)

    def _advance(self, slot_ids: list[int], actions: list[Any], message: _Message) -> None:
        # A fast environment's speed hangs on this loop: locals, one test a slot, three writes.
        observation, reward, _, terminated, truncated, extra = message
        mask = self._masks.write if self._masks.in_info else None
        write, clock, beat = self._write, time.monotonic, self._beat
        steps_of, slots = self._steps_of, self._slots
        ended, asleep = slots.ended, (slots.held | slots.ended | slots.again).tolist()
        try:
            for k, slot in enumerate(slot_ids):
                try:
                    if asleep[slot]:
                        self._wake(slot, message, k)
                        continue
                    beat[0], beat[1] = slot, clock()
                    value, reward[k], end, limit, info = steps_of[slot](actions[slot])
                    write(observation, k, value)
                    if end or limit:
                        terminated[k], truncated[k], ended[slot] = end, limit, True
                        self._infos.append((slot, rows.numbers(info)))
                    elif mask is not None:
                        mask(extra, k, info)
                except FAILURES as exc:
                    self._failed(slot, asleep[slot], exc)
                    self._begin_again(message, k, slot)
        finally:
            beat[1] = 0.0

    def _failed(self, slot: int, asleep: bool, exc: BaseException) -> None:
        if isinstance(exc, BadValueError):
            self._leave_out(slot, int(self._slots.steps[slot]) + (not asleep), str(exc))
        else:
            self._restart(slot, self._failure(slot, "reset" if asleep else "step", exc))

    def _bad_rows(self, message: _Message, value: PyTree) -> dict[int, str]:
        spec = self.spec.observation
        bad = checks.bad_values(spec, value, message.reward)
        if self._bounds == "ignore" or not (out := checks.out_of_bounds(spec, message.observation)):
            return bad
        if self._bounds == "error":
            return out | bad
        self._bounds = "ignore"  # said once
        warnings.warn(f"env {self._name}: {next(iter(out.values()))}", RuntimeWarning, stacklevel=2)
        return bad

    def _wake(self, slot: int, message: _Message, k: int) -> None:
        """Write a row that needs no step into row k: one that waits to be received, or the first of an episode."""
        if self._slots.again[slot]:
            self._repeat(slot, message, k)
        elif self._slots.held[slot]:
            self._begin_again(message, k, slot)
        else:
            message.first[k] = True
            self._write(message.observation, k, self._reset(slot))
            self._slots.ended[slot] = False
            self._put_extra(message, k, slot)

    def _begin_again(self, message: _Message, k: int, slot: int) -> None:
        """Row k is the first of a life, which is held."""
        spec = self.spec.observation
        rows.put(spec, message.observation, k, rows.pick(spec, self._first_obs, slot))
        message.reward[k], message.first[k] = 0.0, True
        message.terminated[k] = message.truncated[k] = False
        self._put_extra(message, k, slot)

    def _put_extra(self, message: _Message, k: int, slot: int) -> None:
        extra = self.spec.extra
        rows.put(extra, message.extra, k, rows.pick(extra, self._first_extra, slot))

    def _repeat(self, slot: int, message: _Message, k: int) -> None:
        """Row k is the slot's last, which nobody received."""
        last, spec = self._slots.last, self.spec.observation
        assert last is not None
        rows.put(spec, message.observation, k, rows.pick(spec, self._first_obs, slot))
        for target, value in zip(message[1:5], last[1:5], strict=True):
            target[k] = value[slot]
        self._put_extra(message, k, slot)

    def _failure(self, slot: int, doing: str, exc: BaseException) -> EnvironmentFailure:
        step = int(self._slots.steps[slot]) + (doing == "step")
        where = f"env {self._name} slot {self._first_slot + slot} step {step}"
        if isinstance(exc, BadValueError):
            return EnvironmentFailure(f"{where}: {exc}. {checks.MEND}")
        if isinstance(exc, ValueError) and "unpack" in str(exc) and doing == "step":
            exc = TypeError(
                f"{exc}; step must return (observation, reward, terminated, truncated, info) as in Gymnasium"
            )
        failure = EnvironmentFailure(f"{where}: {doing}() raised {type(exc).__name__}: {exc}")
        failure.__cause__ = exc
        return failure

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
        """``(slot, numbers in the info of a last row)`` since the last call; of those, at least the newest ``MAX_INFOS``."""
        taken = list(self._infos)
        self._infos.clear()
        return taken

    def take_failures(self) -> list[Failure]:
        """What failed and was begun anew since the last call."""
        taken, self._failures = self._failures, []
        return taken

    @property
    def renders(self) -> bool:
        """Whether every environment was made to draw."""
        return all(env.render_mode == "rgb_array" for env in self._envs)

    @property
    def render_fps(self) -> float | None:
        """Frames a second, as the environment's metadata say."""
        return self._envs[0].metadata.get("render_fps")

    def render(self, slot: int) -> Any:
        """The picture of the slot's last received row; see ``envs.render``.

        Raises:
            EnvironmentIdError: a package that draws is missing.
            EnvironmentFailure: the environment raised.
        """
        self._beat[0], self._beat[1] = slot, time.monotonic()
        try:
            return self._envs[slot].render()
        except gym.error.DependencyNotInstalled as exc:
            raise EnvironmentIdError(
                f'env {self._name} cannot draw: {exc}; or run: pip install "headrace[video]"'
            ) from exc
        except FAILURES as exc:
            raise self._failure(slot, "render", exc) from exc
        finally:
            self._beat[1] = 0.0

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
            self._begin_life(slot)
        slots = self._slots
        self._num_sent, self._num_held = int(slots.sent.sum()), int((slots.held | slots.again).sum())
        return all(exact)

    def _replay(self, slot: int, actions: list[PyTree] | None, now: dict[str, Any] | None) -> bool:
        """Bring one slot to its state; False where it does not come out the same."""
        env, bare, (seed, before) = self._envs[slot], self._bare[slot], self._slots.origin[slot]
        if actions is None or now is None or (seed < 0 and before is None):
            return False
        row: tuple[Any, ...]
        try:
            self._beat[0], self._beat[1] = slot, time.monotonic()
            if before is not None and not kept.set_generator(bare, before):
                return False
            observation, info = env.reset(seed=None if seed < 0 else seed)
            row = (observation, 0.0, False, False, info)
            for action in actions:
                self._beat[1] = time.monotonic()
                row = env.step(kept.one(self.spec.action, action))
            self._keep_extra(slot, row)
            exact = self._is_last(slot, row) and kept.same(kept.encoded(bare), now)
            if exact and self._slots.again[slot] and (row[2] or row[3]):
                self._infos.append((slot, rows.numbers(row[4])))  # nobody received the row, nor this with it
            return exact
        except (
            Exception
        ) as exc:  # what cannot be replayed may raise anything; it is no worse than a difference
            said = f"env {self._name} slot {self._first_slot + slot}: replaying raised {type(exc).__name__}: {exc}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
            return False
        finally:
            self._beat[1] = 0.0

    def _keep_extra(self, slot: int, row: tuple[Any, ...]) -> None:
        """The mask of a row that may have to be given (again)."""
        if row[2] or row[3]:
            spec = self.spec.extra
            rows.put(spec, self._first_extra, slot, rows.pick(spec, self._masks.blank(1), 0))
        else:
            self._masks.write(self._first_extra, slot, row[4])

    def _is_last(self, slot: int, row: tuple[Any, ...]) -> bool:
        """Whether ``row`` is the slot's last received one."""
        spec, last = self.spec.observation, self._slots.last
        assert last is not None
        buffer = rows.empty(spec, 1)
        self._write(buffer, 0, row[0])
        if self._slots.held[slot] or self._slots.again[slot]:
            rows.put(spec, self._first_obs, slot, rows.pick(spec, buffer, 0))
        pairs = rows.tree_leaves(spec, to_agent(spec, buffer))
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
            self._beat[0], self._beat[1] = slot, time.monotonic()
            try:
                env.close()
            except Exception as exc:  # closing goes on with the others
                warnings.warn(
                    f"env {self._name} slot {self._first_slot + slot}: close() raised {exc!r}",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _cause(exc: BaseException) -> BaseException | None:
    """What tells a user where his environment raised; bad values tell all in their message."""
    return None if isinstance(exc, BadValueError) else exc


def _used_up(failure: EnvironmentFailure, budget: Budget) -> EnvironmentFailure:
    if not budget.most:
        return failure
    said = f"{failure}; started anew {budget.most} times in a row (env.max_restarts), it fails still"
    used_up = EnvironmentFailure(said)
    used_up.__cause__ = failure.__cause__
    return used_up


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
