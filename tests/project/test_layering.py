"""The import rules: each part imports only parts below it.

``MAY`` says which: a stage knows some others; all know ``_core``, and the statistics and traces of ``observe``, which
knows no stage. ``engine`` wires the stages, and knows nothing above it; only ``loader``, ``patching``, the package
itself and the command line may import everything. Imports stand at the top of a module, but for the few parts that load
others of minato when they are first used, and for the packages of extras.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "minato"
STAGES: dict[str, set[str]] = {
    "sampling": set(),
    "transforms": set(),
    "batching": set(),
    "scheduling": {"sampling", "batching"},
    "workers": {"sampling", "transforms", "batching", "scheduling"},
    "delivery": {"sampling", "batching"},
}
"""The stages, and which others each may import."""
COMMON = {
    "checks",
    "errors",
    "options",
    "_support",
    *(path.stem for path in PACKAGE.glob("_*.py") if path.stem != "__init__"),
}
"""Top-level modules, and the helpers of several packages, below everything; they import only each other."""

TOP = {"__init__", "__main__", "cli", "loader", "patching"}
ON_DEMAND = {"engine", "integrations", "loader"}
"""The only parts that import others of minato inside functions, so that ``import minato`` is quick."""
OPTIONAL = {
    *("cassandra", "fsspec", "lmdb", "matplotlib", "nilearn", "obstore", "pandas"),
    *("prometheus_client", "psutil", "pyarrow", "pynvml", "rich", "sklearn"),
}
"""Packages of extras, and two that workers do not need: no others may be imported inside a function."""


class Import(NamedTuple):
    """One imported module, as its dotted name, and where it stands."""

    module: str
    line: int
    in_function: bool


def imports_of(source: str, module: str, *, is_package: bool) -> list[Import]:
    """All imports of a module's source, relative ones made absolute; ``from package import name`` as one of both."""
    found = []

    def visit(node: ast.AST, in_function: bool) -> None:
        in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                base = []
                if level := getattr(child, "level", 0):
                    base = module.split(".")[: module.count(".") + 1 + is_package - level]
                base += filter(None, [getattr(child, "module", None)])
                names = [".".join([*base, alias.name]) for alias in child.names]
                found.extend(Import(name, child.lineno, in_function) for name in names)
            visit(child, in_function)

    visit(ast.parse(source), False)
    return found


MAY = {
    **dict.fromkeys(TOP),
    "_core": {"_core", "_compat"},
    "engine": {"engine", *STAGES, "caching", "ray", "sharing", "observe", "_core", *COMMON},
    "observe": {"observe", "_core", *COMMON},
    **{stage: {stage, *below, "observe", "_core", *COMMON} for stage, below in STAGES.items()},
    "ray": {"ray", "workers", "transforms", "batching", "observe", "_core", *COMMON},
    "shared_pool": {"shared_pool", *STAGES, "engine", "observe", "_core", *COMMON},
    "_support": {"_core", *COMMON},
    "sharing": {"_core", *COMMON},
    "consumers": {"delivery", *COMMON},
    "integrations": {"integrations", "observe", *COMMON},
    "caching": {"caching", "sharing", *COMMON},
    "streams": {"streams", "sampling", "transforms", "_core", *COMMON},
    "sources": {"sources", "streams", *COMMON},
}
"""Second name parts that a part of minato may import; None: all of them. Other parts: the common modules."""
RECORDED = {"lateness", "meters", "tracer"}
"""Modules of ``observe`` that the stages write to; of ``observe``, they import only each other."""


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Broken rules of one module, each with its line."""
    part = module.split(".")[1] if "." in module else "__init__"
    may = MAY.get(part, COMMON)
    name = module.split(".")[2] if module.count(".") > 1 else ""
    broken = []
    for imported in imports_of(source, module, is_package=is_package):
        top, _, rest = imported.module.partition(".")
        if top == "minato":
            parts = rest.split(".")
            records = parts[0] == "observe" and (part in STAGES or name in RECORDED)
            is_above = may is not None and parts[0] not in may
            if is_above or (records and parts[1] not in RECORDED):
                broken.append(f"line {imported.line}: {part} must not import {imported.module}")
        late = part in ON_DEMAND if top == "minato" else top in OPTIONAL
        if imported.in_function and not late:
            broken.append(f"line {imported.line}: {imported.module} imported in a function")
    return broken


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_each_part_imports_only_parts_below_it() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        is_package = path.name == "__init__.py"
        assert violations(path.read_text("utf-8"), dotted(path), is_package=is_package) == [], path


def test_cython_imports_only_the_core() -> None:
    imports = re.compile(r"^\s*(?:from|c?import)\s+(minato[\w.]*)", re.MULTILINE)
    for path in (*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd")):
        names = imports.findall(path.read_text("utf-8"))
        assert [name for name in names if not name.startswith("minato._core")] == [], path


def test_every_folder_is_a_known_part() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    leaves = {"cli", "integrations", "shared_pool", "sources", "streams"}
    assert folders == {*STAGES, *leaves, "_core", "_support", "engine", "observe"}
    assert {path.stem for path in PACKAGE.glob("observe/*.py")} > RECORDED


FORBIDDEN = [
    ("minato._core._wait_py", "from minato import errors"),
    ("minato.observe.meters", "from minato.transforms import compose"),
    ("minato.observe.meters", "from minato.observe import figures"),
    ("minato.sampling.keys", "import minato.transforms"),
    ("minato.batching.writer", "from ..workers import runner"),
    ("minato.workers.worker", "from minato import loader"),
    ("minato.workers.worker", "from minato.observe.report import Report"),
    ("minato.workers.worker", "import minato"),
    ("minato.scheduling.order", "if TYPE_CHECKING:\n    from minato.workers import worker"),
    ("minato.engine.factory", "from minato.shared_pool import session"),
    ("minato.errors", "from minato.transforms import chain"),
    ("minato._support.files", "from minato.loader import DataLoader"),
    ("minato.transforms.compose", "def f():\n    from minato.sampling import keys"),
    ("minato.transforms.compose", "def f():\n    import torch"),
]
ALLOWED = [
    ("minato._core._wait_py", "from minato._core import USE_EXTENSIONS"),
    ("minato.workers.worker", "from minato.transforms.compose import Transforms\nimport torch"),
    ("minato.workers.worker", "from . import pool\nfrom .._core import Ledger"),
    ("minato.workers.worker", "from minato.observe.tracer import Tracer"),
    ("minato.delivery.lease", "from minato import errors\nfrom minato.observe import meters"),
    ("minato.observe.text", "def show():\n    import rich.table"),
    ("minato.observe.report", "from minato.observe import epoch_log"),
    ("minato.engine.plan", "from minato.delivery import lease\nfrom minato.sampling import keys"),
]


@pytest.mark.parametrize(("module", "line"), FORBIDDEN)
def test_the_checker_sees_what_is_forbidden(module: str, line: str) -> None:
    assert violations(line, module) != []


@pytest.mark.parametrize(("module", "line"), ALLOWED)
def test_the_checker_lets_pass_what_is_allowed(module: str, line: str) -> None:
    assert violations(line, module) == []
