"""From the command line's words to settings."""

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import tyro

from headrace.errors import ConfigError
from headrace.settings.config import Config
from headrace.settings.fields import flatten, nearest, read, replace_fields, types_of
from headrace.settings.presets import PRESETS, preset
from headrace.settings.primitives import read_json_object


@dataclass(frozen=True)
class Train:
    """Train an agent, or continue a run.

    Any setting below can be given; booleans take --x, --no-x or --x true|false|1|0, integers also 1e6.
    """

    config: Annotated[Config, tyro.conf.arg(name="")]
    json: bool = False
    """Print one JSON object as the last line of standard output."""
    config_file: str | None = None
    """A JSON file of settings, nested or by dotted name, applied before the other options."""


def parse_train(words: Sequence[str]) -> Train:
    """``PRESET [--setting value …]`` as settings.

    Raises:
        ConfigError: no such preset or setting (the nearest is named), or a value of the wrong type.
        SystemExit: help was asked for.
    """
    if not words or words[0] in ("-h", "--help"):
        known = "\n".join(f"  {name:<18}{p.about}" for name, p in PRESETS.items())
        print(f"usage: headrace train PRESET|AGENT [options]\n\n{known}\n")
        print("`headrace train PRESET --help` lists its settings.")
        raise SystemExit(0 if words else 2)
    if words[0].startswith("-"):
        raise ConfigError(f"got {words[0]!r}, expected a preset or agent first: {', '.join(PRESETS)}")
    config = preset(words[0])
    rest = list(words[1:])
    file = _option(rest, "config_file")
    if file is not None:
        config = replace_fields(config, read_settings(Path(file), config))
    kinds = {**types_of(config), "json": bool, "config_file": str}
    options = normalise(rest, {name: kind for name, kind in kinds.items() if name != "preset"})
    # Contradictions are found here, where they are one line; tyro would draw a box.
    replace_fields(
        config, {name: value for name, value in options.values.items() if name in types_of(config)}
    )
    return tyro.cli(Train, prog=f"headrace train {words[0]}", default=Train(config), args=options.words)


def read_settings(path: Path, config: Config) -> dict[str, Any]:
    """A JSON file of settings by dotted name.

    Raises:
        ConfigError: it is not there, or not a JSON object.
    """
    try:
        nested = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as JSON settings: {error}") from error
    if not isinstance(nested, dict):
        raise ConfigError(f"{path}: got {type(nested).__name__}, expected a JSON object of settings")
    return {name: value for name, value in flatten(nested, types_of(config)).items() if name != "preset"}


class Options(NamedTuple):
    """Options as words for tyro, and by dotted name."""

    words: list[str]
    values: dict[str, Any]


def normalise(words: Sequence[str], kinds: Mapping[str, Any]) -> Options:
    """``words`` as tyro reads them: ``--x true`` as ``--x``, ``--x false`` as ``--no-x``, 1e6 as 1000000.

    Args:
        words: of the command line, after the preset.
        kinds: types of the settings by dotted name.

    Raises:
        ConfigError: an unknown option (the nearest is named), a value of the wrong type, or a word without an option.
    """
    out = Options([], {})
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            out.words.append(word)
            continue
        if not word.startswith("--"):
            raise ConfigError(f"got {word!r} where an option was expected; options begin with --")
        option, equals, value = word.partition("=")
        name, negated = _name_of(option, kinds)
        values = [value] if equals else []
        kind = kinds[name]
        if kind is bool:
            if not values and rest and not rest[0].startswith("-") and not negated:
                values = [rest.pop(0)]
            on = read(values[0], bool, name) if values else True
            out.words.append(_spell(name, negated == on))
            out.values[name] = negated != on
            continue
        many = get_origin(kind) is tuple
        while not equals and rest and not _is_option(rest[0]) and (many or not values):
            values.append(rest.pop(0))
        if not values and not many:
            raise ConfigError(f"--{_dashed(name)} needs a value")
        out.values[name] = (
            [_checked(v, kind, name) for v in values] if many else _checked(values[0], kind, name)
        )
        out.words.extend([_spell(name, False), *(out.values[name] if many else [out.values[name]])])
    return out


def _is_option(word: str) -> bool:
    return word.startswith("--") or (word.startswith("-") and not word[1:2].isdigit() and word[1:2] != ".")


def _checked(value: str, kind: Any, name: str) -> str:
    """``value`` as tyro reads it, after it was read here, where errors are one line."""
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    plain = kind
    if get_origin(kind) in (Union, types.UnionType):
        plain = next(a for a in get_args(kind) if a is not type(None))
    if get_origin(plain) is dict:
        read_json_object(value, name)
        return value
    result = read(value, kind, name)
    return str(result) if plain is int else value


def _name_of(option: str, kinds: Mapping[str, Any]) -> tuple[str, bool]:
    name = option.removeprefix("--").replace("-", "_")
    if name in kinds:
        return name, False
    head, _, tail = name.rpartition(".")
    # --no-log.panel and --log.no-panel
    for positive in (name.removeprefix("no_"), f"{head}.{tail.removeprefix('no_')}".lstrip(".")):
        if positive != name and kinds.get(positive) is bool:
            return positive, True
    close = nearest(name, kinds).replace("_", "-").replace("'", "")
    raise ConfigError(f"unknown option {option}{close.replace('did you mean ', 'did you mean --')}")


def _spell(name: str, off: bool) -> str:
    head, _, tail = _dashed(name).rpartition(".")
    return f"--{head}{'.' if head else ''}{'no-' if off else ''}{tail}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _option(words: list[str], name: str) -> str | None:
    """Take ``--name VALUE`` or ``--name=VALUE`` out of ``words``."""
    spelled = "--" + _dashed(name)
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == spelled:
            if not equals and i + 1 >= len(words):
                raise ConfigError(f"{spelled} needs a value")
            taken = value if equals else words[i + 1]
            del words[i : i + (1 if equals else 2)]
            return taken
    return None
