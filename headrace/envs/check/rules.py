"""The rules on what one call returned, and the comparison of two answers."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headrace.envs.check.player import Row
from headrace.envs.check.report import Finding, breach
from headrace.envs.rows import env_shape
from headrace.spaces import BoxSpec, DiscreteSpec, Leaf, MultiDiscreteSpec, Spec

_F32_MAX = float(np.finfo(np.float32).max)


def row(spec: Spec, said: Row, when: str) -> Iterator[Finding]:
    """Breaches of one row; ``spec`` is that of observations."""
    yield from observation(spec, said.observation, when)
    if said.first:
        return
    yield from _reward(said.reward, when)
    for name in ("terminated", "truncated"):
        flag = getattr(said, name)
        if not isinstance(flag, bool | np.bool_):
            yield breach("end-flags", f"{name} is {_short(flag)}, of type {type(flag).__name__}, at {when}")


def _reward(reward: Any, when: str) -> Iterator[Finding]:
    value = _array(reward)
    if value is None or value.shape != () or value.dtype.kind not in "biuf":
        yield breach("reward", f"reward is {_short(reward)}, of type {type(reward).__name__}, at {when}")
    elif not abs(float(value)) <= _F32_MAX:  # NaN too
        yield breach("reward", f"reward is {'NaN' if np.isnan(value) else value} at {when}")


def observation(spec: Spec, value: Any, when: str, path: str = "observation") -> Iterator[Finding]:
    """Breaches of an observation, leaf by leaf."""
    if isinstance(spec, dict):
        yield from _dict(spec, value, when, path)
    elif isinstance(spec, tuple):
        if not isinstance(value, tuple | list) or len(value) != len(spec):
            size = f" of {len(value)} parts" if isinstance(value, tuple | list) else ""
            got = f"{path} is a {type(value).__name__}{size} at {when}"
            yield breach("observation-form", got, f"a tuple of {len(spec)} parts, as its space says")
            return
        for i, (part, item) in enumerate(zip(spec, value, strict=True)):
            yield from observation(part, item, when, f"{path}[{i}]")
    else:
        yield from _leaf(spec, value, when, path)


def _dict(spec: Mapping[str, Spec], value: Any, when: str, path: str) -> Iterator[Finding]:
    if not isinstance(value, Mapping):
        got = f"{path} is a {type(value).__name__} at {when}"
        yield breach("observation-form", got, f"a dict with {sorted(spec)}, as its space says")
        return
    for key in value.keys() - spec.keys():
        yield breach("observation-extra", f"{path}[{key!r}] is not in the space, at {when}")
    for key, part in spec.items():
        if key in value:
            yield from observation(part, value[key], when, f"{path}[{key!r}]")
        else:
            yield breach("observation-form", f"{path}[{key!r}] is missing at {when}")


def _leaf(leaf: Leaf, value: Any, when: str, path: str) -> Iterator[Finding]:
    array, says = _array(value), f"{leaf.env_dtype} of shape {env_shape(leaf)}, as its space says"
    if array is None or array.shape != env_shape(leaf):
        shape = "of unequal rows" if array is None else f"of shape {array.shape}"
        yield breach("observation-form", f"{path} is {shape} at {when}", says)
        return
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and leaf.env_dtype.kind != "f"):
        yield breach("observation-kind", f"{path} is of {array.dtype} at {when}", says)
        return
    if isinstance(leaf, BoxSpec):
        yield from _box(leaf, value, array, when, path)
        return
    low, high = _categories(leaf)
    outside = (array < low) | (array > high)
    if outside.any():
        got, at = _element(path, array, outside)
        expected = f"{_at(low, at)} … {_at(high, at)}, as its space says"
        yield breach("observation-range", f"{got} at {when}", expected)


def _box(leaf: BoxSpec, value: Any, array: np.ndarray, when: str, path: str) -> Iterator[Finding]:
    if array.dtype != leaf.env_dtype or not isinstance(value, np.ndarray | np.generic):
        kind = "an array" if isinstance(value, np.ndarray | np.generic) else f"a {type(value).__name__}"
        got = f"{path} is {kind} of {array.dtype} at {when}"
        yield breach("observation-precision", got, f"an array of {leaf.env_dtype}")
    if array.dtype.kind == "f":
        bad = ~(np.abs(array.astype(np.float64)) <= _F32_MAX)
        if bad.any():
            yield breach("observation-finite", f"{_element(path, array, bad)[0]} at {when}")
            return
    elif leaf.env_dtype.kind in "iu":
        kept = [np.iinfo(d) for d in (leaf.env_dtype, leaf.dtype)]
        low, high = max(int(i.min) for i in kept), min(int(i.max) for i in kept)
        outside = np.array([not low <= int(x) <= high for x in array.ravel()], bool).reshape(array.shape)
        if outside.any():
            got = f"{_element(path, array, outside)[0]} at {when}"
            yield breach("observation-range", got, f"{low} … {high}")
            return
    with np.errstate(over="ignore"):
        cast = array.astype(leaf.env_dtype)
    outside = (cast < leaf.low) | (cast > leaf.high)
    if outside.any():
        got, at = _element(path, array, outside)
        bounds = f"{_at(leaf.low, at)} … {_at(leaf.high, at)}, the bounds of its Box"
        yield breach("observation-bounds", f"{got} at {when}", bounds)


def _categories(leaf: Leaf) -> tuple[Any, Any]:
    """The lowest and highest category."""
    if isinstance(leaf, DiscreteSpec):
        return leaf.start, leaf.start + leaf.n - 1
    if isinstance(leaf, MultiDiscreteSpec):
        start = np.array(leaf.start).reshape(leaf.env_shape)
        return start, start + np.array(leaf.nvec).reshape(leaf.env_shape) - 1
    return 0, 1


def _element(path: str, array: np.ndarray, bad: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """The first bad element in words, and its index."""
    at = tuple(int(i) for i in np.argwhere(bad)[0]) if array.ndim else ()
    index = f"[{', '.join(map(str, at))}]" if at else ""
    return f"{path}{index} is {'NaN' if np.isnan(array[at]) else array[at]}", at


def _at(bound: Any, index: tuple[int, ...]) -> Any:
    return bound[index] if isinstance(bound, np.ndarray) else bound


def _array(value: Any) -> np.ndarray | None:
    try:
        return np.asarray(value)
    except Exception:  # ragged lists, or what a user's __array__ raises
        return None


def copied(said: Row) -> Row:
    """``said`` with the observation's leaves as arrays that nobody writes again."""
    return said._replace(observation=_copied(said.observation))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_copied(part) for part in value)
    array = _array(value)
    return value if array is None else array.copy()


def difference(one: Any, other: Any, path: str = "observation") -> str | None:
    """The first part in which two observations differ, in words; None where they are equal (NaN equals NaN)."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        pairs = [(f"{path}[{key!r}]", one[key], other[key]) for key in one]
    elif isinstance(one, tuple | list) and isinstance(other, tuple | list) and len(one) == len(other):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return _leaf_difference(one, other, path)
    found = (difference(a, b, where) for where, a, b in pairs)
    return next((text for text in found if text), None)


def _leaf_difference(one: Any, other: Any, path: str) -> str | None:
    a, b = _array(one), _array(other)
    if a is None or b is None or a.shape != b.shape:
        return f"{path} is {_short(one)} and {_short(other)}"
    unequal = np.atleast_1d(a != b)
    if a.dtype.kind == "f" and b.dtype.kind == "f":
        unequal &= ~(np.atleast_1d(np.isnan(a)) & np.atleast_1d(np.isnan(b)))
    if not unequal.any():
        return None
    at = tuple(int(i) for i in np.argwhere(unequal)[0]) if a.ndim else ()
    index = f"[{', '.join(map(str, at))}]" if at else ""
    return f"{path}{index} is {a[at]} and {b[at]}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}…"
