"""The pages agree with the code, the code says what it is, and the folders import only what they may."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import tiny

from headrace.agents.impala import ImpalaConfig
from headrace.metrics import schema
from headrace.runtime.run import train
from headrace.settings import reference
from headrace.settings.config import Config
from headrace.settings.fields import fields_of

ROOT = Path(__file__).resolve().parents[1]
DOCS, SOURCE = ROOT / "docs", ROOT / "headrace"
MODULES = sorted(SOURCE.rglob("*.py"))
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
REWRITE = "run `python -m headrace.settings.reference docs`"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# The pages.


def test_the_metrics_page_is_the_schema() -> None:
    assert (DOCS / "metrics.md").read_text() == schema.markdown(), REWRITE


def test_the_settings_page_is_the_settings() -> None:
    assert (DOCS / "settings.md").read_text() == reference.markdown(), REWRITE


def test_the_agent_page_has_the_agents_settings() -> None:
    page = (DOCS / "impala.md").read_text()
    assert page == reference.with_table(page, ImpalaConfig(), "agent."), REWRITE


def test_every_setting_is_on_the_page_with_its_help() -> None:
    settings = list(reference.settings_of(Config()))
    assert [s.name for s in settings] == list(fields_of(Config()))
    page = reference.markdown()
    assert all(f"| `{s.name}` |" in page and s.about for s in settings if s.name != "preset")


def test_a_setting_without_help_is_refused() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Bare:
        told: int = 1
        """Told."""
        silent: int = 2

    assert reference.help_of(Bare) == {"told": "Told."}
    with pytest.raises(ValueError, match=r"Bare\.silent has no help text"):
        list(reference.settings_of(Bare()))


def test_every_metric_of_the_agent_is_explained(tmp_path: Path) -> None:
    page = (DOCS / "impala.md").read_text()
    table = page.partition("## Metrics")[2].partition("## Scores")[0]
    explained = set(re.findall(r"^\| `([a-z_/]+)` ?\*? \|", table, re.MULTILINE))
    train(tiny(tmp_path / "run"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    written = {name for line in lines for name in json.loads(line)}
    every_run = re.compile("learned_steps|updates|lag_|time/")
    learned = {n for n in written if schema.find(n).source == "learner" and not every_run.match(n)}
    assert explained == learned


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_names_a_place_on_somebodys_machine(page: Path) -> None:
    found = re.search(r"(?<![\w.])/(home|root|tmp|work|Users|mnt|opt|var)/\S*", page.read_text())
    assert found is None, found


def test_the_index_names_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    for page in DOCS.rglob("*.md"):
        assert page.name == "index.md" or page.relative_to(DOCS).as_posix() in index, name_of(page)


def test_decisions_are_numbered_in_order() -> None:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    assert pages and [int(p.name[:4]) for p in pages] == list(range(1, len(pages) + 1))
    for number, page in enumerate(pages, 1):
        text = page.read_text()
        assert text.startswith(f"# {number}. ")
        parts = ("**Context.**", "**Decision.**", "**Why.**", "**Consequences.**")
        assert all(part in text for part in parts), name_of(page)


# The code.


def public_without_docstring(tree: ast.Module) -> Iterator[str]:
    if ast.get_docstring(tree) is None:
        yield "(module)"
    yield from _silent(tree.body, "")


def _silent(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name.startswith("_"):
                continue
            if ast.get_docstring(node) is None and not _is_overload(node):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _silent(node.body, f"{prefix}{node.name}.")


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_is_public_has_a_docstring(path: Path) -> None:
    assert list(public_without_docstring(ast.parse(path.read_text()))) == []


def test_the_docstring_check_can_fail() -> None:
    text = (
        '"""Module."""\nclass A:\n    """A."""\n    def f(self): ...\n    def _g(self): ...\ndef h(): ...\n'
    )
    assert list(public_without_docstring(ast.parse(text))) == ["A.f", "h"]
    assert list(public_without_docstring(ast.parse("x = 1"))) == ["(module)"]


def imports_of(tree: ast.AST) -> set[str]:
    """Top-level names of all modules imported anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


IMPURE = {"threading", "time", "logging", "os"}
PURE = [
    *(p for p in MODULES if p.relative_to(SOURCE).parts[0] in ("ops", "networks", "agents")),
    SOURCE / "experience" / "store.py",
    SOURCE / "experience" / "queue.py",
]


@pytest.mark.parametrize("path", PURE, ids=name_of)
def test_pure_folders_know_no_threads_clocks_or_files(path: Path) -> None:
    assert imports_of(ast.parse(path.read_text())) & IMPURE == set()


def test_the_import_check_can_fail() -> None:
    text = "import os.path\ndef f():\n    from time import sleep\n"
    assert imports_of(ast.parse(text)) == {"os", "time"}


# They never run in an environment worker; the registry imports them when such an environment is asked for.
JAX_ENVIRONMENTS = {"jax_step.py", "jax_state.py", "jax_group.py", "gymnax.py"}


def test_environments_are_importable_without_jax() -> None:
    # In a process of its own, as an environment worker would; every module of the folder, and what it imports.
    folder = [
        p for p in MODULES if p.relative_to(SOURCE).parts[0] == "envs" and p.name not in JAX_ENVIRONMENTS
    ]
    names = [name_of(p)[:-3].replace("/", ".") for p in folder]
    names = [name.removesuffix(".__init__") for name in names]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'jax' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr.splitlines()[-1]
