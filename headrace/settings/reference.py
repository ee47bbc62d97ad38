"""The pages of settings in the documentation, made from the dataclasses and the text below their fields."""

import ast
import dataclasses
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from headrace.agents.impala import ImpalaConfig
from headrace.metrics import schema
from headrace.settings.fields import fields_of
from headrace.settings.presets import PRESETS


class Setting(NamedTuple):
    """One setting: its dotted name, its type in words, its default as written, and its help text."""

    name: str
    kind: str
    default: str
    about: str


def settings_of(config: Any, prefix: str = "") -> Iterator[Setting]:
    """The settings of a dataclass, nested ones by dotted name, in order.

    Args:
        config: an instance; its values are the defaults.
        prefix: put before the names.

    Raises:
        ValueError: a field without help text below it; names it.
    """
    kinds, about = get_type_hints(type(config)), help_of(type(config))
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{name}.")
            continue
        if field.name not in about:
            raise ValueError(
                f"{type(config).__name__}.{field.name} has no help text; write one below the field"
            )
        yield Setting(name, spell_kind(kinds[field.name]), spell_value(value), about[field.name])


def help_of(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass, by the field's name."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(about))):
                texts[name] = " ".join(about.split())
    return texts


def spell_kind(kind: Any) -> str:
    """A type in words: ``int``, ``a | b`` of the values of a Literal, ``int or None``, ``int …`` for many."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return spell_kind(args[0])
    if origin is Literal:
        return " | ".join(str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join("None" if a is type(None) else spell_kind(a) for a in args)
    if origin is tuple:
        return f"{spell_kind(args[0])} …"
    if origin is dict:
        return "JSON object"
    return str(kind.__name__)


def spell_value(value: Any) -> str:
    """A default as it would be written on the command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "(none)"
    return "{}" if value == {} else str(value)


def table(config: Any, prefix: str = "") -> str:
    """A Markdown table of ``settings_of``."""
    rows = [
        f"| `{s.name}` | {_cell(s.kind)} | {_cell(s.default)} | {_cell(s.about)} |"
        for s in settings_of(config, prefix)
    ]
    return "\n".join(["| setting | type | default | |", "|---|---|---|---|", *rows])


def markdown() -> str:
    """The page docs/settings.md."""
    config = PRESETS["impala"].make()
    return f"""# Settings

Written by `headrace.settings.reference.markdown()`; change the help text below the field, in
`headrace/settings/config.py` or in the dataclass of the part.

On the command line a setting is `--env.num-envs 64` (dashes or underscores), in Python
`headrace.config("cartpole", **{{"env.num_envs": 64}})`, and in a file given by `--config-file` a JSON key,
nested or dotted. A preset is taken first, then the file, then the options. Booleans are `--x`, `--no-x` or
`--x true|false|1|0`; whole numbers may be written `1e6`; `None` is written `None`; a JSON object is quoted:
`--env.kwargs '{{"gravity": 9.8}}'`. An unknown setting is refused and the nearest named.

Defaults below are those of the preset `impala`.

{_without_preset(table(config))}

## Presets

Complete settings by name; an agent's name is its default preset. What each changes of the defaults above:

{_presets()}"""


def _presets() -> str:
    default = fields_of(PRESETS["impala"].make())
    parts = []
    for name, preset in PRESETS.items():
        changed = {k: v for k, v in fields_of(preset.make()).items() if v != default[k] and k != "preset"}
        lines = [f"- `{key}` {spell_value(value)}" for key, value in changed.items()] or ["- nothing"]
        parts.append("\n".join([f"### {name}", "", f"{preset.about}.", "", *lines, ""]))
    return "\n".join(parts)


def _without_preset(text: str) -> str:
    """The preset is given as the first word, not as a setting."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("| `preset` "))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


BEGIN, END = "<!-- settings: written by headrace.settings.reference -->", "<!-- end of settings -->"


def with_table(page: str, config: Any, prefix: str) -> str:
    """``page`` with what stands between its two marks replaced by ``table``.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} … {END}; put both lines where the table belongs")
    return f"{before}{begin}\n\n{table(config, prefix)}\n\n{end}{after}"


def write_pages(docs: Path) -> None:
    """Write the generated pages in the folder ``docs``: settings.md, metrics.md, and the table of impala.md."""
    (docs / "settings.md").write_text(markdown())
    (docs / "metrics.md").write_text(schema.markdown())
    agent = docs / "impala.md"
    agent.write_text(with_table(agent.read_text(), ImpalaConfig(), "agent."))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m headrace.settings.reference DOCS_FOLDER")
    write_pages(Path(sys.argv[1]))
