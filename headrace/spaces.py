"""Specs of observations and actions, made from Gymnasium spaces, and the conversions at the adapter's seam.

A ``Spec`` is a pytree (nested dicts and tuples) of leaf records. Arrays are carried in the *agent's* types:

| space | agent side | environment side |
|---|---|---|
| ``Box`` float | float32 | its own dtype, clipped to its bounds |
| ``Box`` uint8, int8, int16, uint16, int32 | its own dtype | its own dtype |
| ``Box`` int64, uint32, uint64 | int32, range checked | its own dtype |
| ``Discrete(n, start)`` | int32 index ``0 … n-1`` | ``index + start`` in its own dtype |
| ``MultiDiscrete(nvec, start)`` | int32 indices ``[len(nvec)]`` | ``indices + start`` in its own dtype |
| ``MultiBinary(shape)`` | int8 zeros and ones | int8 |
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np

from headrace.errors import UnsupportedSpaceError
from headrace.types import Array, PyTree


@dataclass(frozen=True)
class BoxSpec:
    """An array within bounds. ``low`` and ``high`` have the array's shape and the environment's dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype
    env_dtype: np.dtype
    low: np.ndarray = field(repr=False, compare=False)
    high: np.ndarray = field(repr=False, compare=False)

    @property
    def bounded(self) -> bool:
        """Whether every dimension has finite bounds on both sides."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())


@dataclass(frozen=True)
class DiscreteSpec:
    """One of ``n`` categories; the environment calls them ``start … start+n-1``."""

    n: int
    start: int
    env_dtype: np.dtype
    shape: tuple[int, ...] = ()
    dtype: np.dtype = np.dtype(np.int32)


@dataclass(frozen=True)
class MultiDiscreteSpec:
    """A vector of categories of sizes ``nvec``, counted by the environment from ``start``."""

    nvec: tuple[int, ...]
    start: tuple[int, ...]
    env_shape: tuple[int, ...]
    env_dtype: np.dtype
    dtype: np.dtype = np.dtype(np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape on the agent's side: always a vector."""
        return (len(self.nvec),)


@dataclass(frozen=True)
class MultiBinarySpec:
    """An array of zeros and ones."""

    shape: tuple[int, ...]
    env_dtype: np.dtype = np.dtype(np.int8)
    dtype: np.dtype = np.dtype(np.int8)


Leaf: TypeAlias = BoxSpec | DiscreteSpec | MultiDiscreteSpec | MultiBinarySpec
Spec: TypeAlias = Any
"""A ``Leaf``, or a dict or tuple of ``Spec``."""


def from_gymnasium(space: gym.Space, path: str = "space") -> Spec:
    """The spec of a Gymnasium space.

    Args:
        space: any nesting of Dict and Tuple over Box, Discrete, MultiDiscrete and MultiBinary.
        path: name of the space, used in messages.

    Raises:
        UnsupportedSpaceError: a space of another kind, one that holds nothing (an empty Dict, a Box of shape
            ``(0,)``), or a Dict whose keys have no order; names the path to it.
    """
    match space:
        case gym.spaces.Dict():
            _refuse_unordered(space, path)
            return {
                k: from_gymnasium(v, f"{path}[{k!r}]") for k, v in _filled(space.spaces, space, path).items()
            }
        case gym.spaces.Tuple():
            parts = enumerate(_filled(space.spaces, space, path))
            return tuple(from_gymnasium(v, f"{path}[{i}]") for i, v in parts)
        case gym.spaces.Box():
            return _box(_filled(space, space, path), path)
        case gym.spaces.Discrete():
            return DiscreteSpec(_counted(space.n, path), int(space.start), np.dtype(space.dtype))
        case gym.spaces.MultiDiscrete():
            nvec = tuple(_counted(n, path) for n in _filled(np.ravel(space.nvec), space, path))
            start = tuple(int(n) for n in np.ravel(space.start))
            return MultiDiscreteSpec(nvec, start, tuple(space.nvec.shape), np.dtype(space.dtype))
        case gym.spaces.MultiBinary():
            return MultiBinarySpec(tuple(space.shape), np.dtype(space.dtype))
    raise UnsupportedSpaceError(
        f"{path} is a {type(space).__name__}; expected Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple "
        f"of them. Convert it in a wrapper (gymnasium.ObservationWrapper or ActionWrapper)."
    )


def _filled(parts: Any, space: gym.Space, path: str) -> Any:
    """``parts``, unless there are none."""
    if 0 in np.shape(parts) if isinstance(parts, gym.spaces.Box | np.ndarray) else not len(parts):
        raise UnsupportedSpaceError(f"{path} is {space}, which holds nothing; leave it out of the space.")
    return parts


def _counted(n: Any, path: str) -> int:
    if int(n) > np.iinfo(np.int32).max:
        raise UnsupportedSpaceError(
            f"{path} has {n} categories; expected at most 2**31 - 1 (they are int32)."
        )
    return int(n)


def _refuse_unordered(space: gym.spaces.Dict, path: str) -> None:
    try:
        sorted(space.spaces)
    except TypeError as exc:
        raise UnsupportedSpaceError(
            f"{path} is a Dict with the keys {', '.join(map(repr, space.spaces))}, which cannot be sorted; "
            "expected keys of one kind, such as strings."
        ) from exc


_AGENT_DTYPE = {"f": np.float32, "b": np.bool_}


def _box(space: gym.spaces.Box, path: str) -> BoxSpec:
    env_dtype = np.dtype(space.dtype)
    if env_dtype.kind in "iu":
        dtype = np.dtype(np.int32) if env_dtype.itemsize > 4 or env_dtype == np.uint32 else env_dtype
    elif env_dtype.kind in _AGENT_DTYPE:
        dtype = np.dtype(_AGENT_DTYPE[env_dtype.kind])
    else:
        raise UnsupportedSpaceError(
            f"{path} is a Box of {env_dtype}; expected a float, integer or bool dtype."
        )
    return BoxSpec(tuple(space.shape), dtype, env_dtype, np.asarray(space.low), np.asarray(space.high))


def map_leaves(function: Callable[..., Any], spec: Spec, *values: PyTree) -> PyTree:
    """Apply ``function(leaf, *values)`` to each leaf of ``spec`` and the matching parts of ``values``."""
    if isinstance(spec, dict):
        return {k: map_leaves(function, v, *(value[k] for value in values)) for k, v in spec.items()}
    if isinstance(spec, tuple):
        return tuple(map_leaves(function, v, *(value[i] for value in values)) for i, v in enumerate(spec))
    return function(spec, *values)


def leaves(spec: Spec, path: str = "") -> list[tuple[str, Leaf]]:
    """The leaves of ``spec`` with their paths, dict keys sorted as JAX sorts them."""
    if isinstance(spec, dict):
        return [x for k in sorted(spec) for x in leaves(spec[k], f"{path}[{k!r}]")]
    if isinstance(spec, tuple):
        return [x for i, v in enumerate(spec) for x in leaves(v, f"{path}[{i}]")]
    return [(path, spec)]


def names(spec: Spec) -> list[tuple[str, Leaf]]:
    """The leaves of ``spec`` under the names they have in settings: ``arm.0`` for ``["arm"][0]``.

    A bare leaf is called ``observation``.
    """

    def walk(part: Spec, path: tuple[str, ...]) -> list[tuple[str, Leaf]]:
        if isinstance(part, dict):
            return [x for k in sorted(part) for x in walk(part[k], (*path, str(k)))]
        if isinstance(part, tuple):
            return [x for i, v in enumerate(part) for x in walk(v, (*path, str(i)))]
        return [(".".join(path) or "observation", part)]

    return walk(spec, ())


def zeros(spec: Spec, batch: tuple[int, ...] = ()) -> PyTree:
    """Zero arrays in the agent's types with leading axes ``batch``."""
    return map_leaves(lambda leaf: np.zeros(batch + leaf.shape, leaf.dtype), spec)


def namespace(value: Array) -> Any:
    """NumPy, or ``jax.numpy`` where JAX traces ``value``: a conversion then becomes part of its program."""
    jax = sys.modules.get("jax")  # not imported for this: environment workers do without
    return jax.numpy if jax is not None and isinstance(value, jax.core.Tracer) else np


def _wide(value: Array) -> Array:
    """Integers in which a start can be added: it may lie outside the space's own dtype, as −1 does of uint8."""
    return value.astype(np.int64 if namespace(value) is np else np.int32)


def to_agent(spec: Spec, value: PyTree) -> PyTree:
    """Values ``[b, ...]`` of the environment in the agent's types. Never aliases a float64 or int64 input; may alias others.

    Raises:
        ValueError: an int64 value outside int32.
    """
    return map_leaves(_leaf_to_agent, spec, value)


def _leaf_to_agent(leaf: Leaf, value: Array) -> Array:
    value = namespace(value).asarray(value)
    if isinstance(leaf, DiscreteSpec):
        return (_wide(value) - leaf.start if leaf.start else value).astype(leaf.dtype, copy=False)
    if isinstance(leaf, MultiDiscreteSpec):
        flat = value.reshape(*value.shape[: value.ndim - len(leaf.env_shape)], len(leaf.nvec))
        return (_wide(flat) - np.asarray(leaf.start)).astype(leaf.dtype, copy=False)
    if leaf.dtype == np.int32 and leaf.env_dtype != np.int32:
        info = np.iinfo(np.int32)
        if value.size and (value.min() < info.min or value.max() > info.max):
            raise ValueError(
                f"an observation of {leaf.env_dtype} holds {value.min()} … {value.max()}, outside int32 "
                f"({info.min} … {info.max}); rescale it in a wrapper or declare a float Box"
            )
    return value.astype(leaf.dtype, copy=False)


def to_env(spec: Spec, value: PyTree) -> PyTree:
    """Values ``[b, ...]`` on the agent's side as the environment expects them: its dtype, its start, within its bounds.

    Indices, bits and already scaled boxes only; the squashing or clipping of a raw sample belongs to its distribution.
    """
    return map_leaves(_leaf_to_env, spec, value)


def _leaf_to_env(leaf: Leaf, value: Array) -> Array:
    value = namespace(value).asarray(value)
    if isinstance(leaf, DiscreteSpec):
        return (_wide(value) + leaf.start if leaf.start else value).astype(leaf.env_dtype, copy=False)
    if isinstance(leaf, MultiDiscreteSpec):
        shifted = (_wide(value) + np.asarray(leaf.start)).astype(leaf.env_dtype, copy=False)
        return shifted.reshape(*value.shape[:-1], *leaf.env_shape)
    if isinstance(leaf, BoxSpec):
        return namespace(value).clip(value, leaf.low, leaf.high).astype(leaf.env_dtype, copy=False)
    return value.astype(leaf.env_dtype, copy=False)
