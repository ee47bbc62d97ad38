"""Rows of single environments and batches of them: packing and unpacking.

"Environment types" below are the dtypes and shapes of the environment's own spaces; "agent types" are those
of ``headrace.spaces``.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from headrace.envs.failures import BadValueError
from headrace.errors import EnvironmentFailure
from headrace.spaces import (
    BoxSpec,
    DiscreteSpec,
    Leaf,
    MultiDiscreteSpec,
    Spec,
    map_leaves,
    namespace,
    to_agent,
)
from headrace.types import PyTree, TimeStep

Write: TypeAlias = Callable[[PyTree, int, Any], None]
"""``write(buffer [n, ...], k, observation)`` puts one observation into row k."""


def env_shape(leaf: Leaf) -> tuple[int, ...]:
    """Shape of a leaf on the environment's side."""
    return leaf.env_shape if isinstance(leaf, MultiDiscreteSpec) else leaf.shape


def empty(spec: Spec, n: int) -> PyTree:
    """Uninitialised arrays ``[n, ...]`` in environment types."""
    return map_leaves(lambda leaf: np.empty((n, *env_shape(leaf)), leaf.env_dtype), spec)


def zeros_env(spec: Spec, n: int) -> PyTree:
    """Zero arrays ``[n, ...]`` in environment types."""
    return map_leaves(lambda leaf: np.zeros((n, *env_shape(leaf)), leaf.env_dtype), spec)


def tree_leaves(spec: Spec, tree: PyTree) -> Iterator[tuple[Leaf, Any]]:
    """Pairs of spec leaf and the matching part of ``tree``, dict keys sorted."""
    if isinstance(spec, dict):
        for key in sorted(spec):
            yield from tree_leaves(spec[key], tree[key])
    elif isinstance(spec, tuple):
        for part, value in zip(spec, tree, strict=True):
            yield from tree_leaves(part, value)
    else:
        yield spec, tree


def paths(spec: Spec, tree: PyTree, path: str = "") -> Iterator[tuple[str, Leaf, Any]]:
    """As ``tree_leaves``, with the path to each leaf: ``['pose'][0]``."""
    if isinstance(spec, dict):
        for key in sorted(spec):
            yield from paths(spec[key], tree[key], f"{path}[{key!r}]")
    elif isinstance(spec, tuple):
        for i, (part, value) in enumerate(zip(spec, tree, strict=True)):
            yield from paths(part, value, f"{path}[{i}]")
    else:
        yield path, spec, tree


def tree_arrays(spec: Spec, tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves of ``tree`` under the keys "0", "1", …: a form without tuples, for checkpoints."""
    return {str(i): np.asarray(value) for i, (_, value) in enumerate(tree_leaves(spec, tree))}


def tree_from_arrays(spec: Spec, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Inverse of ``tree_arrays``."""
    values = iter([arrays[str(i)] for i in range(len(arrays))])

    def build(part: Spec) -> PyTree:
        if isinstance(part, dict):
            built = {key: build(part[key]) for key in sorted(part)}
            return {key: built[key] for key in part}
        if isinstance(part, tuple):
            return tuple(build(p) for p in part)
        return next(values)

    return build(spec)


def pick(spec: Spec, tree: PyTree, index: Any) -> PyTree:
    """``leaf[index]`` of each leaf."""
    return map_leaves(lambda _, value: value[index], spec, tree)


def put(spec: Spec, tree: PyTree, index: Any, values: PyTree) -> None:
    """``leaf[index] = value`` for each leaf, in place."""

    def assign(_: Leaf, target: np.ndarray, value: Any) -> None:
        target[index] = value

    map_leaves(assign, spec, tree, values)


def env_batch(spec: Spec, action: PyTree, n: int) -> PyTree:
    """Actions ``[n, ...]`` in the environment's dtypes and shapes; may be traced by JAX.

    Raises:
        ValueError: a leaf of another batch size or shape, or fractions for integers.
    """

    def convert(leaf: Leaf, value: Any) -> Any:
        array = namespace(value).asarray(value)
        if array.dtype.kind == "f" and leaf.env_dtype.kind != "f":
            raise ValueError(f"got an action of {array.dtype}; expected {leaf.env_dtype} as its space says")
        array = array.astype(leaf.env_dtype, copy=False)
        if array.shape != (n, *env_shape(leaf)):
            raise ValueError(
                f"got an action of shape {array.shape}; expected {(n, *env_shape(leaf))} for {n} slots: "
                "pass actions through spaces.to_env first"
            )
        return array

    return map_leaves(convert, spec, action)


def stack(spec: Spec, values: list[PyTree]) -> PyTree:
    """Inverse of ``unstack``: ``[n, ...]``."""
    return map_leaves(lambda _, *parts: np.stack(parts), spec, *values)


def unstack(spec: Spec, batch: PyTree, n: int) -> list[Any]:
    """One value per row of ``batch [n, ...]``, as ``env.step`` takes it.

    Array rows are views of a copy: an environment may write into its action.
    """
    if isinstance(spec, dict):
        columns = [unstack(spec[key], batch[key], n) for key in spec]
        return [dict(zip(spec, row, strict=True)) for row in zip(*columns, strict=True)] if spec else [{}] * n
    if isinstance(spec, tuple):
        return list(zip(*(unstack(part, b, n) for part, b in zip(spec, batch, strict=True)), strict=True))
    if isinstance(spec, DiscreteSpec):
        return batch.tolist()
    batch = batch.copy()
    return list(batch) if batch.ndim > 1 else [batch[k, ...] for k in range(n)]  # 0-d rows stay arrays


def writer(spec: Spec, path: str = "observation") -> Write:
    """A function that writes observations into a batch in environment types.

    An array of the leaf's own dtype and shape is written as it is, and indices are checked; anything else is looked at
    closely, as NumPy would broadcast a wrong shape and wrap a number that does not fit, both without a word.

    Raises:
        BadValueError: (the function returned) names the leaf, what was got and what was expected.
    """
    if isinstance(spec, dict):
        return _composite_writer([(key, writer(p, f"{path}[{key!r}]")) for key, p in spec.items()], path)
    if isinstance(spec, tuple):
        return _composite_writer([(i, writer(p, f"{path}[{i}]")) for i, p in enumerate(spec)], path)
    # Indices, and what shrinks to int32.
    counts = not isinstance(spec, BoxSpec) or (spec.dtype == np.int32 and spec.env_dtype != np.int32)
    shape, dtype = env_shape(spec), spec.env_dtype

    def write(buffer: np.ndarray, k: int, value: Any) -> None:
        if counts or getattr(value, "shape", None) != shape or value.dtype != dtype:
            value = _checked(spec, value, path)
        buffer[k] = value

    return write


def _composite_writer(parts: list[tuple[Any, Write]], path: str) -> Write:
    def write(buffer: PyTree, k: int, value: Any) -> None:
        for key, part in parts:
            try:
                item = value[key]
            except (KeyError, IndexError, TypeError) as exc:
                raise BadValueError(f"the {path} has no part {key!r}; got a {type(value).__name__}") from exc
            part(buffer[key], k, item)

    return write


def _checked(leaf: Leaf, value: Any, path: str) -> np.ndarray:
    array = np.asarray(value)
    expected = f"expected {leaf.env_dtype} of shape {env_shape(leaf)} as its space says"
    if array.shape != env_shape(leaf):
        raise BadValueError(f"the {path} has shape {array.shape}; {expected}")
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and leaf.env_dtype.kind != "f"):
        raise BadValueError(f"the {path} is of {array.dtype}; {expected}")
    low, high = _range(leaf)
    if low is not None and array.size and ((array < low) | (array > high)).any():
        k = np.unravel_index(int(np.argmax((array < low) | (array > high))), array.shape)
        span = f"{np.broadcast_to(low, array.shape)[k]} … {np.broadcast_to(high, array.shape)[k]}"
        why = (
            "as its space says"
            if leaf.dtype == leaf.env_dtype or not isinstance(leaf, BoxSpec)
            else "as int32 holds"
        )
        raise BadValueError(f"the {path} holds {array[k]}; expected {span} {why}")
    return array


def _range(leaf: Leaf) -> tuple[Any, Any]:
    """Least and greatest value of whole numbers, inclusive; None where there is none to keep."""
    if isinstance(leaf, DiscreteSpec):
        return leaf.start, leaf.start + leaf.n - 1
    if isinstance(leaf, MultiDiscreteSpec):
        low = np.reshape(leaf.start, leaf.env_shape)
        return low, low + np.reshape(leaf.nvec, leaf.env_shape) - 1
    if not isinstance(leaf, BoxSpec):
        return 0, 1
    if leaf.env_dtype.kind in "iu":
        kinds = np.iinfo(leaf.env_dtype), np.iinfo(leaf.dtype)
        return max(k.min for k in kinds), min(k.max for k in kinds)
    return None, None


def agent_batch(spec: Spec, observation: PyTree, name: str) -> PyTree:
    """Observations ``[b, ...]`` in agent types (may alias).

    Raises:
        EnvironmentFailure: an integer outside int32.
    """
    try:
        return to_agent(spec, observation)
    except ValueError as exc:
        raise EnvironmentFailure(f"env {name}: {exc}") from exc


def as_arrays(spec: Spec, observation: PyTree, n: int, name: str) -> PyTree:
    """A vector environment's batch as arrays ``[n, ...]``.

    Raises:
        EnvironmentFailure: a leaf of another shape.
    """

    def check(leaf: Leaf, value: Any) -> np.ndarray:
        array = np.asarray(value)
        if array.shape != (n, *env_shape(leaf)):
            raise EnvironmentFailure(
                f"env {name}: observations have shape {array.shape}; expected {(n, *env_shape(leaf))} as "
                "their space says"
            )
        return array

    return map_leaves(check, spec, observation)


def copied(spec: Spec, tree: PyTree) -> PyTree:
    """``tree`` with every leaf copied."""
    return map_leaves(lambda _, value: np.array(value), spec, tree)


def owned(spec: Spec, converted: PyTree, source: PyTree) -> PyTree:
    """``converted`` with the leaves that share memory with ``source`` copied."""
    return map_leaves(
        lambda _, new, old: new.copy() if np.may_share_memory(new, old) else new, spec, converted, source
    )


def merge(spec: Spec, last: TimeStep | None, timestep: TimeStep, slot_ids: np.ndarray) -> TimeStep:
    """The last row of each of N slots after the rows of ``slot_ids`` came; no copy where all did."""
    if last is None or len(slot_ids) == len(last.reward):
        return timestep
    merged = TimeStep(copied(spec, last.observation), *(np.copy(x) for x in last[1:5]))
    put(spec, merged.observation, slot_ids, timestep.observation)
    for target, value in zip(merged[1:5], timestep[1:5], strict=True):
        target[slot_ids] = value
    return merged


def numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """The entries of an ``info`` that are single numbers."""
    return {str(k): float(v) for k, v in info.items() if _is_number(v)}


def _is_number(value: Any) -> bool:
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, int | float)
