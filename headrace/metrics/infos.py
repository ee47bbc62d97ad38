"""The numbers that environments give in the info of an episode's last step, as metrics: success rates and the like."""

import math
import re
from collections.abc import Iterable, Mapping

MOST_NAMES = 32
"""How many names a run writes; an environment with more of them gets those that came first."""
_IGNORED = frozenset({"TimeLimit.truncated"})  # older wrappers' own, told by ``truncated`` already


def usable(info: Mapping[str, float]) -> dict[str, float]:
    """The entries worth keeping: finite, and not an old wrapper's word for truncation."""
    return {name: value for name, value in info.items() if name not in _IGNORED and math.isfinite(value)}


def metric_name(name: str) -> str:
    """``name`` with what a metric's name cannot hold as underscores: ``is success?`` is ``is_success_``."""
    return re.sub(r"[^A-Za-z0-9_.\-/]+", "_", name).strip("/")


class InfoNames:
    """Which names are written: the first ``MOST_NAMES`` that come, each under a metric's name of its own."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names`` as environments give them, from ``names`` of another."""
        self._metric = {name: metric_name(name) for name in names}
        self.left_out: str | None = None
        """The first name that was left out, or None."""

    @property
    def names(self) -> list[str]:
        """As environments give them, in the order they came."""
        return list(self._metric)

    def pick(self, info: Mapping[str, float]) -> dict[str, float]:
        """``info`` by metric names, without what is left out."""
        return {self._metric[name]: value for name, value in info.items() if self._has(name)}

    def _has(self, name: str) -> bool:
        if name in self._metric:
            return True
        metric = metric_name(name)
        if not metric or metric in self._metric.values() or len(self._metric) >= MOST_NAMES:
            self.left_out = self.left_out or name
            return False
        self._metric[name] = metric
        return True


def means(infos: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """``episode/<name>``: the mean of each name over the episodes that gave it."""
    values: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            values.setdefault(name, []).append(value)
    return {f"episode/{name}": math.fsum(given) / len(given) for name, given in values.items()}
