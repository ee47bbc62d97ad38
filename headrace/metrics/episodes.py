"""Returns and lengths of episodes, followed by slot, and their statistics over the last hundred."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from headrace.errors import ConfigError
from headrace.metrics.infos import InfoNames, means, usable
from headrace.types import TimeStep

_FIELDS = 3  # raw return, transformed return, length
Infos: TypeAlias = Iterable[tuple[int, Mapping[str, float]]]
"""``(slot, numbers in the info of its last row)``."""


class Episode(NamedTuple):
    """A finished episode.

    Attributes:
        raw_return: the sum of its rewards.
        train_return: the sum of its transformed rewards.
        length: its steps.
        slot_id: its slot.
        infos: numbers in the info of its last step.
    """

    raw_return: float
    train_return: float
    length: int
    slot_id: int
    infos: Mapping[str, float] = MappingProxyType({})


class EpisodeTracker:
    """Adds up rewards by slot from the messages of one env group.

    ``update`` and ``drop`` belong to one thread; ``take`` may be called from another.
    """

    def __init__(
        self, num_slots: int, reward_transform: Callable[[np.ndarray], np.ndarray] | None = None
    ) -> None:
        """Follow slots ``0 … num_slots-1``.

        Args:
            num_slots: slots of the group.
            reward_transform: what the learner makes of a reward ``[b]``; None leaves it as it is.
        """
        self._totals = np.zeros((_FIELDS, num_slots))
        self._transform = reward_transform
        self._finished: deque[Episode] = deque()

    def update(self, timestep: TimeStep, slot_ids: np.ndarray, infos: Infos = ()) -> None:
        """Count a message: rows that are not ``first`` add reward and length, last rows finish their episode.

        Args:
            timestep: fields ``[b]`` (observations are not looked at).
            slot_ids: ``[b]``, each slot at most once.
            infos: ``(slot, numbers in its info)`` of the message's last rows.
        """
        raw, train, length = self._totals
        reward = timestep.reward
        transformed = reward if self._transform is None else self._transform(reward)
        if np.count_nonzero(timestep.first):
            first = np.asarray(timestep.first)
            self._totals[:, slot_ids[first]] = 0.0
            reward, transformed = reward[~first], transformed[~first]
            counted = slot_ids[~first]
        else:
            counted = slot_ids
        raw[counted] += reward
        train[counted] += transformed
        length[counted] += 1.0
        last = timestep.terminated | timestep.truncated
        if np.count_nonzero(last):
            self._finish(slot_ids[last], {slot: usable(info) for slot, info in infos})

    def _finish(self, slots: np.ndarray, infos: Mapping[int, Mapping[str, float]]) -> None:
        for slot, (raw, train, length) in zip(slots.tolist(), self._totals[:, slots].T.tolist(), strict=True):
            self._finished.append(Episode(raw, train, int(length), slot, infos.get(slot, {})))
        self._totals[:, slots] = 0.0

    def drop(self, slot_ids: np.ndarray) -> None:
        """Forget the unfinished episodes of slots whose life was cut."""
        self._totals[:, slot_ids] = 0.0

    def take(self) -> list[Episode]:
        """The episodes finished since the last call, in the order they ended."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def get_state(self) -> dict[str, Any]:
        """Unfinished sums ``[3, num_slots]`` and finished episodes nobody took ``[n, 4]``, float64, with their infos."""
        return {
            "totals": self._totals.copy(),
            "finished": _to_array(self._finished),
            **_infos_of(self._finished),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``.

        Raises:
            ConfigError: it was taken with another number of slots.
        """
        totals = np.array(state["totals"], np.float64)
        if totals.shape != self._totals.shape:
            raise ConfigError(
                f"episode statistics of {totals.shape[-1]} slots, expected {self._totals.shape[1]}; "
                "resume with the same number of environments"
            )
        self._totals[...] = totals
        self._finished = deque(_from_arrays(state["finished"], state))


class EpisodeWindow:
    """Statistics over the last ``size`` episodes. Fed in a fixed order, it gives the same figures again."""

    def __init__(self, size: int = 100) -> None:
        self._recent: deque[Episode] = deque(maxlen=size)
        self._names = InfoNames()
        self.episodes = 0

    @property
    def left_out(self) -> str | None:
        """A name of infos that is not written, as there are too many or one too like it; None where all are."""
        return self._names.left_out

    def add(self, episodes: Iterable[Episode]) -> None:
        """Count finished episodes."""
        for episode in episodes:
            self._recent.append(episode._replace(infos=self._names.pick(episode.infos)))
            self.episodes += 1

    def metrics(self) -> dict[str, float]:
        """By the names of ``schema``; only ``episodes`` while none has finished."""
        if not self._recent:
            return {"episodes": self.episodes}
        raw, train, length, _ = _to_array(self._recent).T
        return {
            "episodes": self.episodes,
            "return_mean": float(raw.mean()),
            "return_min": float(raw.min()),
            "return_max": float(raw.max()),
            "return_train_mean": float(train.mean()),
            "length_mean": float(length.mean()),
            **means(episode.infos for episode in self._recent),
        }

    def get_state(self) -> dict[str, Any]:
        """The window ``[n, 4]`` float64 with its infos, the count, and the names of infos that are written."""
        return {
            "recent": _to_array(self._recent),
            "episodes": self.episodes,
            "written": self._names.names,
            **_infos_of(self._recent),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``."""
        self._recent.clear()
        self._recent.extend(_from_arrays(state["recent"], state))
        self.episodes = int(state["episodes"])
        self._names = InfoNames(state.get("written", ()))


def _to_array(episodes: Iterable[Episode]) -> np.ndarray:
    return np.array([episode[: _FIELDS + 1] for episode in episodes], np.float64).reshape(-1, _FIELDS + 1)


def _infos_of(episodes: Iterable[Episode]) -> dict[str, Any]:
    """The names of infos, and their values ``[n, names]`` float64, NaN where an episode has none."""
    episodes = list(episodes)
    names = list(dict.fromkeys(name for episode in episodes for name in episode.infos))
    values = [[episode.infos.get(name, np.nan) for name in names] for episode in episodes]
    return {"names": names, "infos": np.array(values, np.float64).reshape(len(episodes), len(names))}


def _from_arrays(figures: np.ndarray, state: dict[str, Any]) -> list[Episode]:
    """Episodes of figures ``[n, 4]`` and of what ``_infos_of`` gave; a state from before there were infos has none."""
    rows = np.asarray(figures).tolist()
    infos = np.asarray(state["infos"]).tolist() if "infos" in state else [[]] * len(rows)
    given = [{k: v for k, v in zip(state.get("names", ()), row, strict=True) if v == v} for row in infos]
    return [
        Episode(raw, train, int(n), int(s), info)
        for (raw, train, n, s), info in zip(rows, given, strict=True)
    ]
