"""EnvPool's C++ environments behind the ``EnvGroup`` contract, all slots in lock-step."""

import difflib
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.envs import checks, rows
from headrace.envs.contract import EnvSpec
from headrace.envs.gym import MAX_INFOS
from headrace.envs.masks import Masks
from headrace.errors import (
    ConfigError,
    EnvironmentFailure,
    EnvironmentIdError,
    UnsupportedSpaceError,
    WaitTimeoutError,
)
from headrace.spaces import from_gymnasium
from headrace.types import PyTree, TimeStep

_OURS = (
    "num_envs",
    "batch_size",
    "num_threads",
    "seed",
    "env_seed",
    "gym_reset_return_info",
    "max_num_players",
)

_SILENT = ("env_id", "elapsed_step", "terminated", "reward", "lives")
"""Infos of no use at an episode's end: ids, what the row says already, and lives, of which none are left then."""


class EnvPoolGroup:
    """``num_slots`` environments of one EnvPool; they step in its threads from ``send`` until ``recv``.

    A row is ``first`` where the slot's previous row was last; the step count EnvPool reports is not trusted
    for it.

    EnvPool reports an MDP end that falls on the limit step as truncated only, so that its value is
    bootstrapped although it is 0. Such a row cannot be told from another row of the limit;
    ``limit_truncations`` counts all rows that ended by the limit, an upper bound on these.

    Image environments with EnvPool's ``stack_num`` give single frames here (frames are stacked later, from
    single ones): ``stack_num`` is 1 unless given, and its axis is dropped: ``[84, 84]`` uint8 for Atari.

    EnvPool's wait cannot be given a timeout; it runs no Python and no user's code. Its state cannot be had.

    Its infos are given but for those that tell nothing at an episode's end (``_SILENT``). Under EnvPool's ``reward_clip``
    they hold ``raw_return``, the episode's unclipped rewards added up.

    Attributes:
        spec: see ``EnvSpec``; ``frame_skip`` is that of image environments, 1 for others.
        num_slots: the number of environments.
        limit_truncations: rows that ended truncated so far.
        renders: whether it was made to draw (some tasks cannot all the same).
    """

    def __init__(
        self,
        task: str,
        num_slots: int,
        seed_of: Callable[[int, int], int],
        *,
        kwargs: Mapping[str, Any] | None = None,
        max_episode_steps: int | None = None,
        num_threads: int = 0,
        first_slot: int = 0,
        render: bool = False,
        action_mask: str | None = None,
    ) -> None:
        """Make the pool and start its resets.

        Args:
            task: EnvPool's id, such as ``Pong-v5``.
            num_slots: how many environments.
            seed_of: ``(slot, life) -> seed``, taken modulo 2^31.
            kwargs: EnvPool's own settings for the task.
            max_episode_steps: the time limit in agent steps; None leaves EnvPool's.
            num_threads: EnvPool's threads; 0 lets it choose.
            first_slot: global id of slot 0, for messages.
            render: be ready to draw.
            action_mask: ``observation.KEY`` of action masks (see ``masks``); None: there are none.

        Raises:
            EnvironmentIdError: EnvPool is not installed or has no such task.
            ConfigError: a setting the task does not take, or one that is set elsewhere.
        """
        self.num_slots, self.limit_truncations = num_slots, 0
        self._first_slot = first_slot
        self._name, self._seed_of, self._life = f"envpool:{task}", seed_of, 0
        settings = dict(kwargs or {})
        self.renders = render
        if render:
            settings["render_mode"] = "rgb_array"
        if max_episode_steps is not None:
            settings["max_episode_steps"] = max_episode_steps
        known = _known_settings(task)
        _check_settings(self._name, settings, known)
        if "stack_num" in known:
            settings.setdefault("stack_num", 1)
        self._task, self._settings = task, settings | {"num_threads": num_threads}
        self._all = np.arange(num_slots, dtype=np.int32)
        self._pool: Any = None
        self._infos: deque[tuple[int, dict[str, float]]] = deque(maxlen=max(MAX_INFOS, num_slots))
        self._open()
        pool: Any = self._pool
        skip = pool.config.get("frame_skip", 1) if "stack_num" in known else 1
        self._squeeze = False
        space = self._space(pool.observation_space)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action = pool.action_space
        if isinstance(action, dict | gym.spaces.Dict):
            raise UnsupportedSpaceError(
                f"{self._name} takes several actions ({action}); expected one Box or Discrete."
            )
        observation, action = (
            from_gymnasium(space, "observation space"),
            from_gymnasium(action, "action space"),
        )
        self._masks = Masks(action_mask, observation, action, name=self._name, first_slot=first_slot)
        if self._masks.in_info:
            raise ConfigError(
                f"{self._name}: got env.action_mask={action_mask!r}; EnvPool's infos hold no masks. Expected "
                "observation.KEY, a part of its observation, or None"
            )
        self.spec = EnvSpec(observation, action, int(skip), self._name, self._masks.spec)

    def _space(self, space: Any) -> gym.Space:
        """The observation space, without the axis of a stack of one frame."""
        if self._settings.get("stack_num") == 1 and isinstance(space, gym.spaces.Box):
            self._squeeze = len(space.shape) == 3 and space.shape[0] == 1
        if not self._squeeze:
            return space
        return gym.spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)

    def _open(self) -> None:
        import envpool

        n = self.num_slots
        seeds = [self._seed_of(slot, self._life) % 2**31 for slot in range(n)]
        try:
            with (
                warnings.catch_warnings()
            ):  # Gymnasium's remarks on EnvPool's float64 bounds: nothing to be done
                warnings.simplefilter("ignore")
                pool = envpool.make_gymnasium(
                    self._task, num_envs=n, batch_size=n, seed=seeds, **self._settings
                )
                _ = pool.observation_space, pool.action_space
        except Exception as exc:  # whatever EnvPool raises for settings it cannot use
            raise EnvironmentFailure(
                f"env {self._name}: EnvPool could not make it with {self._settings}: {type(exc).__name__}: "
                f"{exc}"
            ) from exc
        self._pool = pool
        self._steps, self._last = np.zeros(n, np.int64), np.ones(n, bool)
        self._sent, self._pending = np.zeros(n, bool), None
        self._raw_return = np.zeros(n)
        pool.async_reset()
        self._running = True

    def recv(self, timeout_s: float) -> tuple[TimeStep, np.ndarray]:
        """See ``EnvGroup.recv``; EnvPool's wait has no timeout."""
        if not self._running:
            raise WaitTimeoutError(
                f"env {self._name}: recv waits for an answer to slot {int(np.argmin(self._sent))}; EnvPool "
                "steps when "
                "every slot was sent an action"
            )
        observation, reward, terminated, truncated, info = self._pool.recv()
        self._running = False
        order = info["env_id"]
        if not np.array_equal(order, self._all):
            index = np.argsort(order)
            observation = _take(observation, index)
            reward, terminated, truncated = reward[index], terminated[index], truncated[index]
        first = self._last
        reward = np.where(first, np.float32(0), reward).astype(np.float32, copy=False)
        terminated, truncated = terminated.astype(bool) & ~first, truncated.astype(bool) & ~first
        self._last = terminated | truncated
        self._steps += ~first
        self.limit_truncations += int(truncated.sum())
        self._keep_infos(info, order, first)
        spec = self.spec.observation
        value = rows.agent_batch(spec, observation[:, 0] if self._squeeze else observation, self._name)
        checks.check_values(self._name, spec, value, reward, self._all, self._steps, self._first_slot)
        extra = self._masks.blank(self.num_slots)
        extra = self._masks.complete(extra, value, terminated | truncated, self._all, self._steps)
        return TimeStep(value, reward, first, terminated, truncated, extra), self._all.copy()

    def _keep_infos(self, info: Mapping[str, Any], order: np.ndarray, first: np.ndarray) -> None:
        """Numbers in the infos of last rows; ``order`` has the slot of each row of ``info``."""
        clipped = bool(self._settings.get("reward_clip")) and "reward" in info
        if clipped:
            self._raw_return[first] = 0.0
            self._raw_return[order] += np.where(first[order], 0.0, info["reward"])
        for row in np.flatnonzero(self._last[order]).tolist():
            given = {k: v[row] for k, v in info.items() if k not in _SILENT and getattr(v, "ndim", 0) == 1}
            if clipped:
                given["raw_return"] = self._raw_return[order[row]]
            self._infos.append((int(order[row]), rows.numbers(given)))

    def take_infos(self) -> list[tuple[int, dict[str, float]]]:
        """``(slot, numbers in the info of a last row)`` since the last call; of those, at least the newest ``MAX_INFOS``."""
        taken = list(self._infos)
        self._infos.clear()
        return taken

    def send(self, action: PyTree, slot_ids: np.ndarray) -> None:
        """Answer slots; see ``EnvGroup.send``. With the last slot's answer the environments start."""
        slot_ids = np.asarray(slot_ids)
        batch = rows.env_batch(self.spec.action, action, len(slot_ids))
        checks.check_ids(slot_ids, self._sent | self._running, self._name)
        if not checks.in_order(slot_ids, self._all):
            pending = (
                rows.zeros_env(self.spec.action, self.num_slots) if self._pending is None else self._pending
            )
            rows.put(self.spec.action, pending, slot_ids, batch)
            batch = pending
        self._pending = batch
        self._sent[slot_ids] = True
        if self._sent.all():
            self._pool.send(np.ascontiguousarray(batch), self._all)
            self._sent, self._pending, self._running = np.zeros(self.num_slots, bool), None, True

    def render(self, slot: int) -> Any:
        """The picture of the slot's last received row; see ``envs.render``.

        Raises:
            EnvironmentFailure: EnvPool cannot draw the task.
        """
        try:
            return self._pool.render(env_ids=[slot])[0]
        except Exception as exc:  # whatever EnvPool raises where a task has no picture
            raise EnvironmentFailure(
                f"env {self._name}: EnvPool cannot draw this task ({exc}); take a Gymnasium environment of the same game"
            ) from exc

    def run_ids(self) -> np.ndarray:
        """Int64 ``[num_slots]``: the life of each slot, 0 at first."""
        return np.full(self.num_slots, self._life, np.int64)

    def get_state(self) -> None:
        """None: EnvPool does not give its environments' state."""
        return None

    def set_state(self, state: dict[str, Any]) -> bool:
        """False: every slot begins a new life, in a new pool."""
        self._drain()
        self._life += 1
        self._open()
        return False

    def _drain(self) -> None:
        """Wait for steps under way, so that the pool is not freed under them."""
        if self._running and self._pool is not None:
            self._pool.recv()
            self._running = False

    def close(self) -> None:
        """Free the pool and its threads."""
        self._drain()
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def _take(tree: Any, index: np.ndarray) -> Any:
    if isinstance(tree, dict):
        return {key: _take(value, index) for key, value in tree.items()}
    return tree[index]


def _known_settings(task: str) -> set[str]:
    """The names of the settings a task takes."""
    try:
        import envpool
    except ImportError as exc:
        raise EnvironmentIdError(
            f'envpool:{task} needs EnvPool, which is not installed; run: pip install "headrace[envpool]"'
        ) from exc
    tasks = envpool.list_all_envs()
    if task not in tasks:
        near = difflib.get_close_matches(task, tasks, n=3, cutoff=0.5)
        raise EnvironmentIdError(
            f"EnvPool has no environment {task!r}; "
            + (f"nearest: {', '.join(near)}" if near else "see envpool.list_all_envs()")
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return set(envpool.make_spec(task)._config_keys)


_RENDER = {"render_mode", "render_env_id", "render_width", "render_height", "render_camera_id", "from_pixels"}


def _check_settings(name: str, settings: Mapping[str, Any], known: set[str]) -> None:
    for key in settings:
        if key in _OURS:
            raise ConfigError(f"{name}: got the setting {key!r}, which the group sets itself; leave it out")
        if key not in known | _RENDER:
            near = difflib.get_close_matches(key, sorted(known - set(_OURS)), n=3, cutoff=0.5)
            raise ConfigError(f"{name} takes no setting {key!r}; nearest: {', '.join(near) or 'none'}")
    if settings.get("episodic_life"):
        raise ConfigError(
            f"{name}: episodic_life=True is not supported: it hides where the real game ends, and with it "
            "the game's "
            "return. Leave it out."
        )
