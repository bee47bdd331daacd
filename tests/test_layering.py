"""The import rules: data moves one way through the stages, and imports follow it.

The rules, in words: ``_core`` imports nothing of minato but itself and ``_compat``; the common modules stand below
everything; ``stats`` knows ``_core``; ``monitor``, ``report`` and ``trace`` know ``stats``; a stage knows its left
neighbour, ``_core``, ``stats`` and ``trace``; ``caching``, ``integrations`` and ``sources`` know no stage;
``ingest`` uses the loader and ``sources``; only ``cached.py``, ``command.py``, ``distribution.py``, ``doctor.py``,
``engine.py``, ``experience.py``, ``factories.py``, ``gauges.py``, ``ingesting.py``, ``insight.py``, ``loader.py``,
``memory.py``, ``opening.py``, ``patching.py``, ``plan.py``, ``pools.py``, ``sharing.py``, ``slow_samples.py``,
``worker_main.py``, ``workplace.py`` and the package itself know all. Imports stand at the top of a module, but for
the few modules that load a part of minato when it is first used.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "minato"
STAGES = ["source", "chain", "scheduler", "assembler", "delivery"]
COMMON = {
    "checks",
    "errors",
    "fetching",
    *(path.stem for path in PACKAGE.glob("_*.py") if path.stem != "__init__"),
}
"""Top-level modules below everything; they import only each other."""

WIRING = {
    "__init__",
    "__main__",
    "cached",
    "command",
    "distribution",
    "doctor",
    "engine",
    "experience",
    "factories",
    "gauges",
    "ingesting",
    "insight",
    "loader",
    "memory",
    "opening",
    "patching",
    "plan",
    "pools",
    "sharing",
    "slow_samples",
    "worker_main",
    "workplace",
}
ON_DEMAND = {
    "distribution",
    "insight",
    "integrations",
    "loader",
    "opening",
    "plan",
    "pools",
    "workplace",
}
"""The only parts that import others of minato inside functions, so that ``import minato`` is quick."""
OPTIONAL = {"diskcache", "matplotlib", "nilearn", "psutil", "pynvml", "rich"}
"""Packages of extras, and two that workers do not need: no others may be imported inside a function."""


class Import(NamedTuple):
    """One imported module, as its dotted name, and where it stands."""

    module: str
    line: int
    in_function: bool


def imports_of(source: str, module: str, *, is_package: bool) -> list[Import]:
    """All imports of a module's source, relative ones made absolute.

    ``from package import name`` counts as ``package.name``: only the file system could tell
    whether it is a module, and the rules only look at the first two parts.
    """
    found = []

    def visit(node: ast.AST, in_function: bool) -> None:
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = module.split(".")
                base = base[: len(base) + is_package - child.level] if child.level else []
                base += child.module.split(".") if child.module else []
                names = [".".join([*base, alias.name]) for alias in child.names]
            found.extend(Import(name, child.lineno, in_function) for name in names)
            visit(child, in_function)

    visit(ast.parse(source), False)
    return found


def allowed(part: str) -> set[str] | None:
    """Second name parts that a part of minato may import; None for all of them."""
    if part in WIRING:
        return None
    if part == "_core":
        return {"_core", "_compat"}
    if part == "report":
        return {"report", "stats", "_core", *COMMON}
    if part == "stats":
        return {"stats", "_core", *COMMON}
    if part in ("monitor", "trace"):
        return {part, "stats", "_core", *COMMON}
    if part in STAGES:
        left = STAGES[: STAGES.index(part)][-1:]
        return {part, *left, "stats", "trace", "_core", *COMMON}
    if part == "ingest":
        return {"ingest", "sources", "loader", *COMMON}
    if part in ("caching", "integrations", "sources"):
        return {part, *COMMON}
    return {"options", *COMMON}


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Broken rules of one module, each with its line."""
    part = module.split(".")[1] if "." in module else "__init__"
    may = allowed(part)
    broken = []
    for imported in imports_of(source, module, is_package=is_package):
        top, _, rest = imported.module.partition(".")
        if top == "minato":
            if may is not None and rest.partition(".")[0] not in may:
                broken.append(f"line {imported.line}: {part} must not import {imported.module}")
            if imported.in_function and part not in ON_DEMAND:
                broken.append(f"line {imported.line}: {imported.module} imported in a function")
        elif imported.in_function and top not in OPTIONAL:
            broken.append(f"line {imported.line}: {imported.module} imported in a function")
    return broken


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=dotted)
def test_imports_follow_the_data(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert violations(source, dotted(path), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    "path", sorted([*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd")]), ids=lambda path: path.name
)
def test_cython_imports_only_the_core(path: Path) -> None:
    names = re.findall(
        r"^\s*(?:from|c?import)\s+(minato[\w.]*)", path.read_text("utf-8"), re.MULTILINE
    )
    assert [name for name in names if not name.startswith("minato._core")] == []


def test_every_folder_is_a_known_part() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    others = {"stats", "monitor", "trace", "report", "_core"}
    users = {"caching", "ingest", "integrations", "sources"}
    assert folders <= {*STAGES, *others, *users}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("minato._core.wait", "from minato import errors"),
        ("minato._core.wait", "from minato.stats import clock"),
        ("minato.stats.report", "from minato.chain import chain"),
        ("minato.stats.journal", "from minato.report import figures"),
        ("minato.stats.journal", "from minato.trace import tracer"),
        ("minato.trace.track", "from minato.scheduler import worker"),
        ("minato.report.build", "from minato.scheduler import policy"),
        ("minato.source.keys", "import minato.chain"),
        ("minato.scheduler.worker", "from minato.source.sampler import Sampler"),
        ("minato.scheduler.worker", "from ..assembler import slot"),
        ("minato.scheduler.worker", "from minato import loader"),
        ("minato.scheduler.worker", "import minato"),
        ("minato.delivery.lease", "if TYPE_CHECKING:\n    from minato.scheduler import worker"),
        ("minato.errors", "from minato.chain import chain"),
        ("minato.chain.chain", "def f():\n    from minato.source import keys"),
        ("minato.chain.chain", "def f():\n    import torch"),
    ],
)
def test_the_checker_sees_what_is_forbidden(module: str, line: str) -> None:
    assert violations(line, module) != []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("minato._core.wait", "from minato._core import USE_EXTENSIONS"),
        ("minato.scheduler.worker", "from minato.chain.chain import Chain\nimport torch"),
        ("minato.scheduler.worker", "from . import pool\nfrom .._core import ledger"),
        ("minato.delivery.lease", "from minato import errors\nfrom minato.stats import clock"),
        ("minato.report.text", "def show():\n    import rich.table"),
        ("minato.report.build", "from minato.stats import journal"),
        ("minato.scheduler.worker", "from minato.trace import tracer"),
        ("minato.loader", "from minato.delivery import lease\nfrom minato.source import keys"),
    ],
)
def test_the_checker_lets_pass_what_is_allowed(module: str, line: str) -> None:
    assert violations(line, module) == []
