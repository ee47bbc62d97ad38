"""Configs as plain data: dotted names, JSON files, and the differences between two of them."""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from headrace.errors import ConfigError
from headrace.settings.primitives import read_bool, read_int, read_json_object

C = TypeVar("C")


def fields_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """All settings of ``config`` by dotted name, in order."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out.update(fields_of(value, f"{prefix}{field.name}."))
        else:
            out[prefix + field.name] = value
    return out


def types_of(config: Any, prefix: str = "") -> dict[str, Any]:
    """The types of ``fields_of``."""
    hints = get_type_hints(type(config))
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            out.update(types_of(value, f"{prefix}{field.name}."))
        else:
            out[prefix + field.name] = hints[field.name]
    return out


def replace_fields(config: C, changes: Mapping[str, Any]) -> C:
    """``config`` with settings changed by dotted name, values read as the field's type.

    Raises:
        ConfigError: a name that does not exist (the nearest is named) or a value of the wrong type.
    """
    kinds = types_of(config)
    for name in changes:
        if name not in kinds:
            raise ConfigError(f"unknown setting {name!r}{nearest(name, kinds)}")
    return _replace(config, {name: read(value, kinds[name], name) for name, value in changes.items()})


def _replace(config: Any, changes: Mapping[str, Any]) -> Any:
    direct: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            direct[head] = value
    for head, inner in nested.items():
        direct[head] = _replace(getattr(config, head), inner)
    return dataclasses.replace(config, **direct)


def nearest(name: str, known: Any) -> str:
    """``; did you mean …?`` with the closest known name, or nothing."""
    tail = name.rsplit(".", 1)[-1]

    def likeness(other: str) -> tuple[float, float]:
        # By the whole name or by its last part, whichever is closer: few remember in which part a setting lies.
        whole, last = (
            difflib.SequenceMatcher(None, a, b).ratio()
            for a, b in ((name, other), (tail, other.rsplit(".", 1)[-1]))
        )
        return max(whole, last), whole + last

    close = max(known, key=likeness, default=None)
    return f"; did you mean {close!r}?" if close is not None and likeness(close)[0] >= 0.5 else ""


def read(value: Any, kind: Any, name: str) -> Any:
    """``value``, given in Python, JSON or as text, as a value of type ``kind``.

    Raises:
        ConfigError: it cannot be read as one.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None or value == "None":
            if type(None) in args:
                return None
            raise ConfigError(f"{name}: got None, expected {_spell(kind)}")
        return read(value, next(a for a in args if a is not type(None)), name)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}: got {value!r}, expected a list")
        return tuple(read(v, args[0], name) for v in value)
    return _read_plain(value, kind, name)


def _read_plain(value: Any, kind: Any, name: str) -> Any:
    if kind is bool:
        return value if isinstance(value, bool) else read_bool(str(value), name)
    if kind is int and not isinstance(value, bool) and isinstance(value, str | int | float):
        return read_int(value, name)
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    if kind is str and isinstance(value, str):
        return value
    if get_origin(kind) is dict:
        return dict(value) if isinstance(value, Mapping) else read_json_object(str(value), name)
    raise ConfigError(f"{name}: got {value!r}, expected {_spell(kind)}")


def _spell(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)


def flatten(nested: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping (a JSON file) by dotted name; a mapping that is itself a setting stays whole."""
    out: dict[str, Any] = {}
    for key, value in nested.items():
        name = prefix + key
        if isinstance(value, Mapping) and name not in kinds:
            out.update(flatten(value, kinds, f"{name}."))
        else:
            out[name] = value
    return out
