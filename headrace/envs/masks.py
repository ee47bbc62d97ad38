"""Action masks: where they come from, and how they come into ``TimeStep.extra["action_mask"]``.

A mask says which categories may be chosen, as Gymnasium's ``Space.sample(mask)`` takes it: bools, or integers 0 and 1
(allowed). It is ``[n]`` for a Discrete and a tuple of such arrays for a MultiDiscrete. For a Dict or Tuple of actions masks
have the same nesting; a part that is missing or None allows everything, as everything is allowed of Box and MultiBinary.

On the agent's side a mask has the nesting of the action: bool ``[.., n]`` for a Discrete, bool ``[.., Σ nvec]`` for a
MultiDiscrete, ``()`` for what cannot be masked. At last rows, whose action is ignored, everything is allowed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.envs.checks import MEND
from headrace.envs.failures import BadValueError
from headrace.errors import ConfigError, EnvironmentFailure
from headrace.spaces import (
    DiscreteSpec,
    Leaf,
    MultiBinarySpec,
    MultiDiscreteSpec,
    Spec,
    leaves,
    map_leaves,
    zeros,
)
from headrace.types import ACTION_MASK, PyTree


class MaskError(BadValueError):
    """A mask that cannot be used; ``row`` is that of the batch it was found in."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row


def parse(source: str) -> tuple[str, list[str]]:
    """``info.KEY`` or ``observation.KEY`` as ``info`` or ``observation`` and the keys, dots lead into nested dicts.

    Raises:
        ConfigError: it is neither.
    """
    where, *path = source.split(".")
    if where not in ("info", "observation") or not path or "" in path:
        raise ConfigError(f"env.action_mask {source!r}; expected info.action_mask, or observation.KEY")
    return where, path


def mask_spec(action: Spec) -> Spec:
    """The spec of masks of ``action`` on the agent's side."""

    def of(leaf: Leaf) -> Spec:
        size = sum(_sizes(leaf))
        return MultiBinarySpec((size,), dtype=np.dtype(np.bool_)) if size else ()

    return map_leaves(of, action)


class Masks:
    """Reads the masks of one group. Without a source ``spec`` and all it gives are ``()``.

    Attributes:
        spec: of ``TimeStep.extra``.
        in_info: whether masks come in an environment's ``info``.
    """

    def __init__(
        self, source: str | None, observation: Spec, action: Spec, *, name: str, first_slot: int = 0
    ) -> None:
        """Read from ``source`` (see ``parse``), or nothing where it is None; ``name`` and ``first_slot`` are for messages.

        Raises:
            ConfigError: the observation has no such part, or one of another form; or no action can be masked.
        """
        self._name, self._first_slot, self._action = name, first_slot, action
        self.spec: Spec = ()
        self.in_info = self._in_observation = False
        if source is None:
            return
        where, self._path = parse(source)
        self.in_info, self._in_observation = where == "info", where == "observation"
        self.spec = {ACTION_MASK: mask_spec(action)}
        if not leaves(self.spec):
            raise ConfigError(
                f"env {name}: env.action_mask is {source!r}, but no part of its action space can be masked; "
                "expected a Discrete or MultiDiscrete in it"
            )
        if self._in_observation:
            try:
                part = _follow(observation, self._path)
                convert(action, zeros(part, (1,)), (1,), np.ones(1, bool))
            except (KeyError, ValueError) as exc:
                raise ConfigError(f"env {name}: env.action_mask is {source!r}: {exc.args[0]}") from exc

    def blank(self, n: int) -> PyTree:
        """``TimeStep.extra`` of ``n`` rows that allow everything."""
        return map_leaves(lambda leaf: np.ones((n, *leaf.shape), leaf.dtype), self.spec)

    def write(self, extra: PyTree, k: int, info: Any) -> None:
        """Put the mask of one environment's ``info`` into row ``k``, where masks come in infos.

        Raises:
            MaskError: it is missing or cannot be used.
        """
        if not self.in_info:
            return
        try:
            value = _follow(info, self._path)
        except KeyError as exc:
            raise MaskError(f"info: {exc.args[0]} (env.action_mask)") from None
        self.put(extra, k, value)

    def put(self, extra: PyTree, k: int, value: Any) -> None:
        """Put one mask into row ``k``.

        Raises:
            MaskError: it cannot be used.
        """
        if value is None:
            raise MaskError("the action mask is None; expected one at every step but the last of an episode")
        mask = convert(self._action, value, (), np.bool_(False))
        _assign(self._action, extra[ACTION_MASK], k, mask)

    def complete(
        self, extra: PyTree, observation: PyTree, free: np.ndarray, slot_ids: np.ndarray, steps: np.ndarray
    ) -> PyTree:
        """``extra`` with the masks that are part of the observation, where they are.

        Args:
            extra: of ``b`` rows.
            observation: ``[b, ...]`` in agent types.
            free: bool ``[b]``, rows that allow everything whatever their mask says: last ones.
            slot_ids: ``[b]``.
            steps: ``[N]``, steps each slot has made.

        Raises:
            EnvironmentFailure: a mask cannot be used; names env, slot and step.
        """
        try:
            return self.of_observation(extra, observation, free)
        except MaskError as exc:
            raise self._failure(int(slot_ids[exc.row]), steps, exc) from exc

    def of_observation(self, extra: PyTree, observation: PyTree, free: np.ndarray) -> PyTree:
        """As ``complete``.

        Raises:
            MaskError: a mask cannot be used.
        """
        if not self._in_observation:
            return extra
        return {ACTION_MASK: convert(self._action, _follow(observation, self._path), free.shape, free)}

    def of_batch(self, infos: Any, observation: PyTree, free: np.ndarray, steps: np.ndarray) -> PyTree:
        """``TimeStep.extra`` of all slots of a vector environment; arguments as of ``complete``.

        ``infos`` hold arrays by key, and under ``_key`` for which slots they are meant.
        """
        extra, everyone = self.blank(len(free)), np.arange(len(free))
        for slot in np.flatnonzero(~free).tolist() if self.in_info else ():
            try:
                self.write(extra, slot, _of_slot(infos, slot, self._path[0]))
            except MaskError as exc:
                raise self._failure(slot, steps, exc) from exc
        return self.complete(extra, observation, free, everyone, steps)

    def _failure(self, slot: int, steps: np.ndarray, exc: MaskError) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"env {self._name} slot {self._first_slot + slot} step {int(steps[slot])}: {exc}. {MEND}"
        )


def convert(
    action: Spec, value: Any, lead: tuple[int, ...], free: Any, path: str = "the action mask"
) -> PyTree:
    """A mask of the environment as one of the agent's, in fresh memory.

    Args:
        action: spec of the action.
        value: the mask, its arrays ``[*lead, n]``.
        lead: leading axes, ``()`` or ``(b,)``.
        free: bool ``[*lead]``, rows that allow everything whatever their mask says.
        path: for messages.

    Raises:
        MaskError: another nesting, shape or dtype, numbers besides 0 and 1, or a row that allows nothing.
    """
    if isinstance(action, dict):
        if value is not None and (not isinstance(value, Mapping) or not set(value) <= set(action)):
            got = sorted(map(repr, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise MaskError(f"{path} is {got}; expected a dict with keys among {sorted(map(repr, action))}")
        named = value or {}
        return {k: convert(a, named.get(k), lead, free, f"{path}[{k!r}]") for k, a in action.items()}
    if isinstance(action, tuple):
        if value is not None and (not isinstance(value, tuple | list) or len(value) != len(action)):
            raise MaskError(f"{path} is a {type(value).__name__}; expected a tuple of {len(action)} masks")
        parts = [None] * len(action) if value is None else value
        pairs = enumerate(zip(action, parts, strict=True))
        return tuple(convert(a, v, lead, free, f"{path}[{i}]") for i, (a, v) in pairs)
    return _leaf(action, value, lead, free, path)


def _leaf(leaf: Leaf, value: Any, lead: tuple[int, ...], free: Any, path: str) -> PyTree:
    sizes = _sizes(leaf)
    if not sizes:
        if value is not None and not (isinstance(value, tuple) and not value):
            raise MaskError(f"{path} masks a {type(leaf).__name__.removesuffix('Spec')}; expected None there")
        return ()
    out = np.ones((*lead, sum(sizes)), np.bool_)
    if value is None:
        return out
    at = 0
    for size, piece in zip(sizes, _pieces(leaf, value, lead, path), strict=True):
        if piece.shape != (*lead, size) or piece.dtype.kind not in "biu":
            raise MaskError(
                f"{path} is {piece.dtype} {list(piece.shape[len(lead) :])}; expected int8 or bool [{size}]"
            )
        allowed = out[..., at : at + size]
        allowed[...] = piece
        _refuse((piece != allowed).any(-1) & ~free, f"{path} has numbers besides 0 and 1")
        _refuse(~allowed.any(-1) & ~free, f"{path} allows nothing; expected a 1 for at least one of {size}")
        at += size
    out[free] = True
    return out


def _refuse(bad: Any, message: str) -> None:
    if np.any(bad):
        raise MaskError(message, int(np.argmax(bad)))


def _pieces(leaf: Leaf, value: Any, lead: tuple[int, ...], path: str) -> list[np.ndarray]:
    """The array of each category of a leaf."""
    depth = len(leaf.env_shape) if isinstance(leaf, MultiDiscreteSpec) else 0
    if lead and depth and isinstance(value, np.ndarray) and value.ndim > depth:
        value = np.moveaxis(value, 0, depth)

    def walk(part: Any, depth: int) -> list[np.ndarray]:
        return [np.asarray(part)] if not depth else [x for p in part for x in walk(p, depth - 1)]

    expected = f"expected a tuple of {len(_sizes(leaf))} arrays of the sizes {_sizes(leaf)}"
    try:
        pieces = walk(value, depth)
    except TypeError as exc:
        raise MaskError(f"{path} is a {type(value).__name__}; {expected}") from exc
    if len(pieces) != len(_sizes(leaf)):
        raise MaskError(f"{path} has {len(pieces)} parts; {expected}")
    return pieces


def _sizes(leaf: Leaf) -> tuple[int, ...]:
    """The number of each category of a leaf; () where nothing can be masked."""
    if isinstance(leaf, DiscreteSpec):
        return (leaf.n,)
    return leaf.nvec if isinstance(leaf, MultiDiscreteSpec) else ()


def _assign(action: Spec, extra: PyTree, k: int, mask: PyTree) -> None:
    def put(leaf: Leaf, target: Any, value: Any) -> None:
        if _sizes(leaf):
            target[k] = value

    map_leaves(put, action, extra, mask)


def _follow(tree: Any, path: list[str]) -> Any:
    """The part of a nesting of dicts and tuples that ``path`` leads to.

    Raises:
        KeyError: there is none.
    """
    for depth, key in enumerate(path):
        parts = dict(enumerate(tree)) if isinstance(tree, tuple) else tree
        named = {str(k): v for k, v in parts.items()} if isinstance(parts, Mapping) else {}
        if key not in named:
            there = f"there is {', '.join(map(repr, named))}" if named else "nothing is there"
            raise KeyError(f"no {'.'.join(path[: depth + 1])!r}; {there}")
        tree = named[key]
    return tree


def _of_slot(infos: Any, slot: int, only: str | None = None) -> Any:
    """The part of a vector environment's infos that is meant for one slot, below the key ``only``."""
    if isinstance(infos, Mapping):
        keys = [key for key in infos if (not str(key).startswith("_") if only is None else key == only)]
        meant = [key for key in keys if f"_{key}" not in infos or infos[f"_{key}"][slot]]
        return {key: _of_slot(infos[key], slot) for key in meant}
    return tuple(_of_slot(part, slot) for part in infos) if isinstance(infos, tuple) else infos[slot]
