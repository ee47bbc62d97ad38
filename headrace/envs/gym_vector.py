"""A ``gymnasium.vector.VectorEnv`` behind the contract, in each of Gymnasium's three autoreset modes."""

import multiprocessing
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from headrace.envs import checks, rows
from headrace.envs.contract import EnvSpec
from headrace.envs.gym import MAX_INFOS, frame_skip
from headrace.envs.masks import Masks
from headrace.errors import ConfigError, EnvironmentFailure, EnvironmentIdError, WaitTimeoutError
from headrace.spaces import from_gymnasium
from headrace.types import PyTree, TimeStep


class VectorGroup:
    """The sub-environments of one vector environment as slots.

    - next-step autoreset is the contract's own order;
    - same-step autoreset gives the true final observation in ``infos["final_obs"]`` beside the reset one: all
      slots are received with the final one, then the ended slots alone with their ``first`` row;
    - with autoreset disabled the ended slots are reset by ``reset(options={"reset_mask": …})`` and received
      alone.

    Seeds are given as a list, one a sub-environment; a vector environment that takes one integer only (it has
    one generator for all) gets that of slot 0. ``recv``'s timeout holds where the environment steps
    asynchronously (``step_async``); a synchronous one cannot be interrupted. Its state cannot be had.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv,
        seed_of: Callable[[int, int], int],
        *,
        name: str,
        first_slot: int = 0,
        action_mask: str | None = None,
    ) -> None:
        """Take over ``env`` (closed with the group) and reset it.

        Args:
            env: the vector environment.
            seed_of: ``(slot, life) -> seed``.
            name: the id, for messages.
            first_slot: global id of slot 0, for messages.
            action_mask: where action masks come from (see ``masks``); None: there are none.

        Raises:
            ConfigError: ``env.metadata`` does not say how it resets, or the masks are not where they should be.
            EnvironmentFailure: the reset raised.
        """
        mode = env.metadata.get("autoreset_mode")
        try:
            self._mode = AutoresetMode(mode)
        except ValueError as exc:
            raise ConfigError(
                f"env {name}: got metadata['autoreset_mode']={mode!r}; expected a "
                "gymnasium.vector.AutoresetMode. "
                "Set it in the vector environment's metadata to say when it resets an ended sub-environment."
            ) from exc
        self._env, self._name, self._seed_of, self._closed = env, name, seed_of, False
        self._first_slot = first_slot
        self.num_slots = n = env.num_envs
        subs = getattr(env.unwrapped, "envs", None)
        observation = from_gymnasium(env.single_observation_space, "observation space")
        action = from_gymnasium(env.single_action_space, "action space")
        self._masks = Masks(action_mask, observation, action, name=name, first_slot=first_slot)
        self.spec = EnvSpec(observation, action, frame_skip(subs[0]) if subs else 1, name, self._masks.spec)
        self._all = np.arange(n, dtype=np.int32)
        self._infos: deque[tuple[int, dict[str, float]]] = deque(maxlen=max(MAX_INFOS, n))
        self._life = 0
        self._begin()

    def _begin(self) -> None:
        n = self.num_slots
        self._steps, self._ended, self._sent = np.zeros(n, np.int64), np.zeros(n, bool), np.zeros(n, bool)
        self._waiting = np.ones(n, bool)  # slots that hold a first row to be received
        self._running = False
        self._pending = rows.zeros_env(self.spec.action, n)
        seeds = [self._seed_of(slot, self._life) for slot in range(n)]
        try:
            try:
                observation, infos = self._env.reset(seed=seeds)  # type: ignore[arg-type]
            except (TypeError, ValueError, gym.error.Error):
                observation, infos = self._env.reset(seed=seeds[0])
        except Exception as exc:  # whatever a user's environment raises
            raise self._failure("reset", exc) from exc
        self._hold(self._convert(observation), infos)

    def _hold(self, observation: PyTree, infos: Any) -> None:
        """Keep the first rows of the slots that wait until they are received."""
        self._reset_obs = observation
        self._reset_extra = self._masks.of_batch(infos, observation, ~self._waiting, self._steps)

    def _convert(self, observation: PyTree) -> PyTree:
        """In agent types and never the environment's own memory, which it may write again."""
        spec = self.spec.observation
        arrays = rows.as_arrays(spec, observation, self.num_slots, self._name)
        return rows.owned(spec, rows.agent_batch(spec, arrays, self._name), arrays)

    def _failure(self, doing: str, exc: Exception) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"env {self._name} slots 0 … {self.num_slots - 1} step "
            f"{int(self._steps.max()) + (doing == 'step')}: "
            f"{doing}() raised {type(exc).__name__}: {exc}"
        )

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """See ``EnvGroup.recv``; for the timeout see the class."""
        if not self._waiting.any() and self._mode is AutoresetMode.DISABLED and self._ended.any():
            self._reset_ended()
        if self._waiting.any():
            return self._first_rows()
        if not self._sent.all():
            silent = int(np.argmin(self._sent))
            raise WaitTimeoutError(
                f"env {self._name}: recv waits for an answer to slot {silent}; a vector environment steps "
                "when every "
                "slot was sent an action"
            )
        return self._stepped(*self._step(timeout_s)), self._all.copy()

    def _reset_ended(self) -> None:
        try:
            observation, infos = self._env.reset(options={"reset_mask": self._ended.copy()})
        except Exception as exc:  # whatever a user's environment raises
            raise self._failure("reset", exc) from exc
        self._waiting, self._ended = self._ended, np.zeros(self.num_slots, bool)
        self._hold(self._convert(observation), infos)

    def _first_rows(self) -> tuple[TimeStep, np.ndarray]:
        """The held first rows alone."""
        slot_ids = np.flatnonzero(self._waiting).astype(np.int32)
        observation = rows.pick(self.spec.observation, self._reset_obs, slot_ids)
        n, no = len(slot_ids), np.zeros(len(slot_ids), bool)
        self._waiting = np.zeros(self.num_slots, bool)
        self._sent[slot_ids] = False  # what was sent in answer to the last row is ignored
        checks.check_values(
            self._name,
            self.spec.observation,
            observation,
            np.zeros(n),
            slot_ids,
            self._steps,
            self._first_slot,
        )
        extra = rows.pick(self.spec.extra, self._reset_extra, slot_ids)
        return TimeStep(
            observation, np.zeros(n, np.float32), np.ones(n, bool), no, no.copy(), extra
        ), slot_ids

    def _step(self, timeout_s: float) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        env: Any = self._env
        try:
            if not isinstance(env, gym.vector.AsyncVectorEnv):
                return env.step(rows.copied(self.spec.action, self._pending))
            if not self._running:  # else an earlier recv timed out and the step goes on
                env.step_async(self._pending)
                self._running = True
            outcome = env.step_wait(timeout=timeout_s)
            self._running = False
            return outcome
        except multiprocessing.TimeoutError as exc:
            self._running = False
            raise WaitTimeoutError(
                f"env {self._name}: slots 0 … {self.num_slots - 1} did not step within {timeout_s} s"
            ) from exc
        except Exception as exc:  # whatever a user's environment raises
            raise self._failure("step", exc) from exc

    def _stepped(
        self, obs: Any, reward: Any, terminated: Any, truncated: Any, infos: dict[str, Any]
    ) -> TimeStep:
        first = self._ended if self._mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_slots, bool)
        observation = self._convert(obs)
        reward = np.where(first, 0.0, np.asarray(reward, np.float64))
        terminated, truncated = (np.asarray(x, bool) & ~first for x in (terminated, truncated))
        self._ended = terminated | truncated
        self._steps += ~first
        extra = self._masks.of_batch(infos, observation, self._ended, self._steps)
        if self._mode is AutoresetMode.SAME_STEP and self._ended.any():
            self._waiting = self._ended
            self._hold(observation, infos)
            observation = self._with_final(observation, infos)
            self._ended = np.zeros(self.num_slots, bool)
        self._keep_infos(infos, terminated | truncated)
        self._sent = np.zeros(self.num_slots, bool)
        self._pending = rows.zeros_env(self.spec.action, self.num_slots)
        checks.check_values(
            self._name, self.spec.observation, observation, reward, self._all, self._steps, self._first_slot
        )
        return TimeStep(observation, reward.astype(np.float32), first, terminated, truncated, extra)

    def _with_final(self, observation: PyTree, infos: dict[str, Any]) -> PyTree:
        """The batch with the true final observation of each ended slot in place of the reset one."""
        spec, given = self.spec.observation, infos.get("_final_obs", np.zeros(self.num_slots, bool))
        missing = self._ended & ~np.asarray(given, bool)
        if missing.any():
            raise EnvironmentFailure(
                f"env {self._name} slot {self._first_slot + int(np.argmax(missing))} step "
                f"{int(self._steps[np.argmax(missing)])}: ended "
                "with same-step autoreset, but infos['final_obs'] and its mask infos['_final_obs'] do not "
                "hold it; "
                "without it truncation cannot be told right. Use next-step autoreset."
            )
        batch, final, write = (
            rows.copied(spec, observation),
            infos["final_obs"],
            rows.writer(spec),
        )
        for slot in np.flatnonzero(self._ended).tolist():
            buffer = rows.empty(spec, 1)
            value = final[slot] if isinstance(final, np.ndarray) else rows.pick(spec, final, slot)
            write(buffer, 0, value)
            rows.put(spec, batch, slot, rows.pick(spec, rows.agent_batch(spec, buffer, self._name), 0))
        return batch

    def _keep_infos(self, infos: dict[str, Any], ended: np.ndarray) -> None:
        """Numbers in the infos of last rows; same-step autoreset keeps them in ``final_info``."""
        source = infos.get("final_info", infos) if self._mode is AutoresetMode.SAME_STEP else infos
        if not isinstance(source, dict):
            return
        for slot in np.flatnonzero(ended).tolist():
            given = {
                key: value[slot]
                for key, value in source.items()
                if isinstance(value, np.ndarray) and value.ndim == 1 and not key.startswith("_")
                if source.get(f"_{key}", ended)[slot]
            }
            self._infos.append((slot, rows.numbers(given)))

    def take_infos(self) -> list[tuple[int, dict[str, float]]]:
        """``(slot, numbers in the info of a last row)`` since the last call; of those, at least the newest ``MAX_INFOS``."""
        taken = list(self._infos)
        self._infos.clear()
        return taken

    @property
    def renders(self) -> bool:
        """Whether it was made to draw; with same-step autoreset the end of an episode is gone when it is received."""
        return self._env.render_mode == "rgb_array" and self._mode is not AutoresetMode.SAME_STEP

    @property
    def render_fps(self) -> float | None:
        """Frames a second, as the environment's metadata say."""
        return self._env.metadata.get("render_fps")

    def render(self, slot: int) -> Any:
        """The picture of the slot's last received row, with all others drawn in vain; see ``envs.render``.

        Raises:
            EnvironmentIdError: a package that draws is missing.
            EnvironmentFailure: the environment raised.
        """
        try:
            return (self._env.render() or ())[slot]
        except gym.error.DependencyNotInstalled as exc:
            raise EnvironmentIdError(
                f'env {self._name} cannot draw: {exc}; or run: pip install "headrace[video]"'
            ) from exc
        except Exception as exc:  # whatever a user's environment raises
            raise self._failure("render", exc) from exc

    def send(self, action: PyTree, slot_ids: np.ndarray) -> None:
        """Store the answers; see ``EnvGroup.send``. The environment steps when every slot has one."""
        slot_ids = np.asarray(slot_ids)
        batch = rows.env_batch(self.spec.action, action, len(slot_ids))
        checks.check_ids(slot_ids, self._sent, self._name)
        rows.put(self.spec.action, self._pending, slot_ids, batch)
        self._sent[slot_ids] = True

    def run_ids(self) -> np.ndarray:
        """Int64 ``[num_slots]``: the life of each slot, 0 at first."""
        return np.full(self.num_slots, self._life, np.int64)

    def get_state(self) -> None:
        """None: a vector environment's state cannot be had."""
        return None

    def set_state(self, state: dict[str, Any]) -> bool:
        """False: every slot begins a new life."""
        self._life += 1
        self._begin()
        return False

    def close(self) -> None:
        """Close the environment; one that raises is named in a warning."""
        if self._closed:
            return
        self._closed = True
        try:
            self._env.close()
        except Exception as exc:  # the run is ending; say it and go on
            warnings.warn(f"env {self._name}: close() raised {exc!r}", RuntimeWarning, stacklevel=2)
