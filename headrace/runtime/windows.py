"""Statistics of training episodes: over all environments and, where a run has several ids, by id."""

from collections.abc import Sequence
from typing import Any

from headrace.metrics.episodes import EpisodeWindow
from headrace.metrics.infos import MOST_NAMES
from headrace.runtime.driver import Lane
from headrace.settings.config import EnvConfig

_BY_ID = ("episodes", "return_mean", "return_min", "return_max", "length_mean")


class Windows:
    """The last episodes of the lanes of a run; lane i drives group i."""

    def __init__(self, env: EnvConfig, lanes: Sequence[Lane]) -> None:
        """``env`` says which id each lane's environments have."""
        self.total = EpisodeWindow()
        self._env, self._lanes = env, lanes
        self._by_id = {env_id: EpisodeWindow() for env_id in env.ids} if len(env.ids) > 1 else {}
        self._told = False

    def take(self) -> None:
        """Count the episodes that the lanes have finished since the last call."""
        for index, lane in enumerate(self._lanes):
            episodes = lane.episodes.take()
            self.total.add(episodes)
            if self._by_id:
                self._by_id[self._env.id_of_group(index)].add(episodes)

    def metrics(self) -> dict[str, float]:
        """Over all, and as ``env/<id>/…`` by id where there are several."""
        figures = self.total.metrics()
        for env_id, window in self._by_id.items():
            own = {
                name: value
                for name, value in window.metrics().items()
                if name in _BY_ID or name.startswith("episode/")
            }
            own["steps"] = self._steps(env_id)
            figures |= {f"env/{env_id}/{name}": value for name, value in own.items()}
        return figures

    def summary(self) -> dict[str, float | None]:
        """``episodes`` and ``return_mean``, over all and by id."""
        windows = {"": self.total, **{f"env/{env_id}/": w for env_id, w in self._by_id.items()}}
        return {
            prefix + name: window.metrics().get(name)
            for prefix, window in windows.items()
            for name in ("episodes", "return_mean")
        }

    def warning(self) -> str | None:
        """What to say, once, where numbers of infos are not written."""
        name = self.total.left_out
        if name is None or self._told:
            return None
        self._told = True
        return (
            f"the environments' infos hold {name!r} and perhaps more that is not written: there are more than "
            f"{MOST_NAMES} names, or another is spelled like it"
        )

    def get_state(self) -> dict[str, Any]:
        """Everything needed to continue."""
        return {**self.total.get_state(), "by_id": {k: w.get_state() for k, w in self._by_id.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from ``get_state``."""
        self.total.set_state(state)
        for env_id, window in self._by_id.items():
            window.set_state(state["by_id"][env_id])

    def _steps(self, env_id: str) -> int:
        return sum(lane.steps for i, lane in enumerate(self._lanes) if self._env.id_of_group(i) == env_id)
