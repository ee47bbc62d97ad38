"""How single values are read from text: integers, booleans, JSON objects."""

import json
import math
from typing import Any

from tyro.constructors import PrimitiveConstructorSpec

from headrace.errors import ConfigError

TRUE, FALSE = ("true", "1"), ("false", "0")


def read_bool(text: str, name: str) -> bool:
    """true, false, 1 or 0 in any case.

    Raises:
        ConfigError: anything else.
    """
    if text.lower() in TRUE + FALSE:
        return text.lower() in TRUE
    raise ConfigError(f"{name}: got {text!r}, expected true, false, 1 or 0")


def read_int(value: str | float, name: str) -> int:
    """An integer; 1e6 is one, 1.5 is not.

    Raises:
        ConfigError: not a whole number.
    """
    try:
        return int(value) if isinstance(value, str) else _whole(value)
    except ValueError:
        pass
    try:
        return _whole(float(value))
    except (ValueError, OverflowError):
        raise ConfigError(f"{name}: got {value!r}, expected a whole number such as 1000000 or 1e6") from None


def _whole(value: float) -> int:
    if not math.isfinite(value) or value != int(value):
        raise ValueError(value)
    return int(value)


def read_json_object(text: str, name: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: not JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: got {text!r}, expected a JSON object such as '{{\"gravity\": 9.8}}'")
    return value


JSON_OBJECT = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda args: read_json_object(args[0], "JSON"),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)
"""tyro's view of a field that is written as a JSON object."""
