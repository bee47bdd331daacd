"""Rules of the source text itself: public names, docstrings, twins, and Cython's own advice."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.subprocesses import python

pytestmark = pytest.mark.large  # it keeps the trees of all modules

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "minato"
CORE = PACKAGE / "_core"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DUAL_MODULES = sorted(
    path.stem.removeprefix("_").removesuffix("_c") for path in CORE.glob("_*_c.pyx")
)


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(parse(path))]


def of(path: Path, kind: Any) -> list[Any]:
    """All parts of a module of one kind."""
    return [node for node in nodes(path) if isinstance(node, kind)]


FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITION = ast.FunctionDef | ast.ClassDef


def exported(tree: ast.Module) -> list[str] | None:
    """The literal ``__all__`` of a module, or None."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return ast.literal_eval(value)
    return None


def rank(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then the rest: the order that ``ruff check --fix`` gives."""
    constant = len(name) > 1 and name.isupper()
    return not constant, not name[:1].isupper(), name


MOST_PARAMETERS = 8
LONG = {
    "loader.py": {"__init__"},  # torch's arguments and ours, each by its own name
    "_core/_ledger_py.py": {"open"},  # fields of a record, without an object per batch
}
"""Functions that may have more parameters."""
MOST_ANY = 140
"""Parameters whose type contains ``Any``."""
MOST_UNNAMED = 3
MOST_LINES = 60
MOST_IMPORTS = 15
WIRING = {
    *("__init__.py", "loader.py", "shared_pool/session.py", "workers/worker_process.py"),
    *("_core/__init__.py", "ray.py"),
}
"""Modules outside ``engine/`` that may import more modules of the package."""
QUARANTINED = {"_compat.py", "_core/tensor_memory.py", "transforms/rng_memory.py"}
"""Modules that may use private names of other packages."""
PYTHONS = {"_asdict", "_current_frames", "_exit", "_fields", "_getframe", "_make", "_replace"}
"""Names that Python documents in spite of the underscore."""


def test_functions_take_few_parameters() -> None:
    long: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in of(path, FUNCTION):
            names = {each.arg for each in named(node.args)} - {"self", "cls"}
            if len(names) > MOST_PARAMETERS:
                long.setdefault(relative(path), set()).add(node.name)
    assert long == LONG


def named(given: ast.arguments) -> list[ast.arg]:
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def test_few_parameters_are_of_any_type() -> None:
    """``object``, a protocol or a type variable says what a function needs of a value, and mypy checks it."""
    given = [node.args for path in SOURCES for node in of(path, FUNCTION)]
    every = [each for some in given for each in (*named(some), some.vararg, some.kwarg) if each]
    kinds = [ast.walk(each.annotation) for each in every if each.annotation]
    assert sum(any(is_name(part, "Any") for part in kind) for kind in kinds) <= MOST_ANY


def is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def test_functions_are_short() -> None:
    """But constructors, which name what an object consists of."""
    assert [
        f"{relative(path)}: {node.name}"
        for path in SOURCES
        for node in of(path, FUNCTION)
        if (node.end_lineno or 0) - node.lineno >= MOST_LINES and node.name != "__init__"
    ] == []


def test_results_of_many_values_have_names() -> None:
    """A function returns a named record instead of a tuple of more than three values."""
    assert [
        f"{relative(path)}: {node.name}"
        for path in SOURCES
        for node in of(path, FUNCTION)
        for part in ast.walk(node.returns or ast.Constant(None))
        if isinstance(part, ast.Subscript)
        and is_name(part.value, "tuple")
        and len(getattr(part.slice, "elts", ())) > MOST_UNNAMED
    ] == []


def test_modules_import_few_others() -> None:
    def imported(path: Path) -> set[str]:
        found = {node.module or "" for node in of(path, ast.ImportFrom)}
        return {module for module in found if module.startswith("minato")}

    others = [path for path in SOURCES if path.parent.name != "engine"]
    crowded = {relative(path) for path in others if len(imported(path)) > MOST_IMPORTS}
    assert crowded <= WIRING


def test_private_attributes_stay_in_their_module() -> None:
    reached = {relative(path): found for path in SOURCES if (found := reached_from(path))}
    assert {name: found for name, found in reached.items() if name not in QUARANTINED} == {}


def reached_from(path: Path) -> set[str]:
    """Private attributes that a module uses and does not define."""
    own = {node.name for node in of(path, DEFINITION)} | PYTHONS
    own |= {each.target.id for each in of(path, ast.AnnAssign) if isinstance(each.target, ast.Name)}
    used = of(path, ast.Attribute)
    own |= {node.attr for node in used if is_name(node.value, "self", "cls")}
    others = [node for node in used if not is_name(node.value, "self", "cls")]
    found = [node for node in others if re.match("_[a-z]", node.attr) and node.attr not in own]
    return set(map(ast.unparse, found))


def test_private_members_of_a_base_stay_in_its_module() -> None:
    """No class overrides or uses a private member of a base class that another module defines."""
    assert [
        f"{relative(path)}: {node.name}.{name}"
        for path in SOURCES
        for node in of(path, ast.ClassDef)
        for base in bases(node)
        if base not in nodes(path)
        for name in private(base) & (private(node) | of_self(node))
    ] == []


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """All classes of the package by name."""
    found = defaultdict(list)
    for path in SOURCES:
        for node in of(path, ast.ClassDef):
            found[node.name].append(node)
    return found


def bases(node: ast.ClassDef) -> list[ast.ClassDef]:
    """The classes of the package from which one is derived."""
    found: list[ast.ClassDef] = []
    pending = [node]
    while pending:
        for base in pending.pop().bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            more = [each for each in classes().get(name, []) if each not in (*found, node)]
            found += more
            pending += more
    return found


def methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, FUNCTION)}


def private(node: ast.ClassDef) -> set[str]:
    """Private methods and attributes that a class defines."""
    return {name for name in methods(node) | of_self(node, ast.Store) if re.match("_[a-z]", name)}


def of_self(node: ast.ClassDef, context: type = ast.expr_context) -> set[str]:
    """Attributes of ``self`` and ``cls`` that a class uses, or stores."""
    parts = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    used = [part for part in parts if isinstance(part.ctx, context)]
    return {part.attr for part in used if is_name(part.value, "self", "cls")}


PUBLIC = {
    *("__init__.py", "caching.py", "errors.py"),
    *("integrations/lightning.py", "integrations/transformers.py"),
}
"""Modules of which a page of the manual names parts, beside those of ``sources``."""


def test_public_modules_list_their_names_in_order() -> None:
    """Of all other modules, others may use what has no underscore; a list would repeat it."""
    for path in SOURCES:
        names, is_public = exported(parse(path)), relative(path) in PUBLIC
        if is_public or (path.parent.name == "sources" and path.name != "__init__.py"):
            assert names is not None, relative(path)
        assert names is None or names == sorted(set(names), key=rank), relative(path)


def test_public_names_have_docstrings() -> None:
    missing = {relative(path): names for path in SOURCES if (names := undocumented(path))}
    assert missing == {}


def undocumented(path: Path) -> list[str]:
    """Public things of a module that have no docstring: without ``__all__``, all without an underscore."""
    tree, public = parse(path), exported(parse(path))
    defined = [node for node in tree.body if isinstance(node, DEFINITION)]
    if public is None:
        public = [node.name for node in defined if not node.name.startswith("_")]
    missing = [] if ast.get_docstring(tree) or not tree.body else ["the module"]
    for node in defined:
        if node.name not in public:
            continue
        if not ast.get_docstring(node):
            missing.append(node.name)
        if isinstance(node, ast.ClassDef):
            missing += [
                f"{node.name}.{method.name}"
                for method in node.body
                if isinstance(method, FUNCTION)
                and not method.name.startswith("_")
                and not ast.get_docstring(method)
                and not is_override(method)
                and not any(method.name in methods(base) for base in bases(node))
            ]
    return missing


def is_override(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a method needs no docstring of its own: a setter or a typing overload."""
    decorators = map(ast.unparse, method.decorator_list)
    return any(name.endswith((".setter", "overload", "override")) for name in decorators)


def test_the_lowest_versions_allowed_are_tested() -> None:
    """By ``make test-oldest``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = dict(dependency.split(">=") for dependency in project["dependencies"])
    pins = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(pin.split("==") for pin in pins if not pin.startswith("#"))
    assert [name for name in lowest if not f"{pinned[name]}.".startswith(f"{lowest[name]}.")] == []
    python = project["requires-python"].removeprefix(">=")
    assert f".ci/versions {python} constraints-oldest.txt" in (ROOT / "Makefile").read_text()


def test_twins_are_listed() -> None:
    from minato import _core

    assert list(_core.DUAL_MODULES) == DUAL_MODULES


def load(name: str, half: str) -> ModuleType:
    return importlib.import_module(f"minato._core._{name}_{half}")


def public_names(name: str) -> list[str]:
    names = exported(parse(CORE / f"_{name}_py.py"))
    assert names, f"_{name}_py.py has no __all__"
    return names


def test_the_core_offers_the_names_of_all_twins() -> None:
    from minato import _core

    own = {"DUAL_MODULES", "USE_EXTENSIONS", "implementation", "now_ns"}
    twins = {public for name in DUAL_MODULES for public in public_names(name)}
    assert set(_core.__all__) == own | twins
    half = "c" if _core.USE_EXTENSIONS else "py"
    for name in DUAL_MODULES:
        for public in set(public_names(name)) & twins:
            assert getattr(_core, public) is getattr(load(name, half), public)


@pytest.mark.parametrize("name", DUAL_MODULES)
def test_twins_have_the_same_names_and_a_stub(name: str) -> None:
    public = public_names(name)
    for half in (load(name, "py"), load(name, "c")):
        assert getattr(half, "__all__", public) == public
        assert [missing for missing in public if not hasattr(half, missing)] == []
    assert (CORE / f"_{name}_c.pyi").exists()


def documentation(thing: object) -> str:
    """Docstring without the line that Cython's ``embedsignature`` puts before it."""
    text = inspect.getdoc(thing) or ""
    first, _, rest = text.partition("\n")
    name = getattr(thing, "__name__", "")
    # ``f(a, b)`` or ``Class.f(self, a)`` for a function, ``Class.f: type`` for the rest.
    embedded = name and re.match(rf"([\w.]+\.)?{name}(\(|: )", first)
    return inspect.cleandoc(rest) if embedded else text


def members(thing: object) -> dict[str, object]:
    """Public methods and properties that a class defines itself."""
    return {
        name: member
        for name, member in vars(thing).items()
        if not name.startswith("_") and (callable(member) or inspect.isdatadescriptor(member))
    }


def signature(thing: object) -> list[tuple[str, object]] | None:
    """Names and defaults of the parameters; annotations are the stub's and mypy's business."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    return [(p.name, p.default if p.default is not p.empty else "required") for p in parameters]


@pytest.mark.parametrize("name", DUAL_MODULES)
def test_twins_agree(name: str) -> None:
    pure, compiled = load(name, "py"), load(name, "c")
    differences = []

    def compare(path: str, ours: object, theirs: object) -> None:
        # The pure core describes the arguments, for both.
        if documentation(ours).partition("\n\n")[0] != documentation(theirs).partition("\n\n")[0]:
            differences.append(f"{path}: {documentation(ours)!r} and {documentation(theirs)!r}")
        if callable(ours) and signature(theirs) not in (None, signature(ours)):
            differences.append(f"{path}: {signature(ours)} and {signature(theirs)}")

    for public in public_names(name):
        ours, theirs = getattr(pure, public), getattr(compiled, public)
        if not callable(ours):
            assert ours == theirs, public
            continue
        compare(public, ours, theirs)
        if isinstance(ours, type):
            own, other = members(ours), members(theirs)
            differences += [f"{public}.{extra}: in one twin" for extra in own.keys() ^ other.keys()]
            for member in own.keys() & other.keys():
                compare(f"{public}.{member}", own[member], other[member])
    assert differences == []


@pytest.mark.slow
@pytest.mark.timeout(400)  # all of the core is translated, on however many cores are free
def test_cython_has_no_performance_hint(tmp_path: Path) -> None:
    script = "import sys, setup; setup.extensions(build_dir=sys.argv[1], force=True)"
    done = python("-c", script, tmp_path, timeout_s=390)
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if "hint" in line or "warning" in line] == []


def calls_of(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """What a module calls, as it is written there."""
    for node in of(path, ast.Call):
        yield ast.unparse(node.func), node


def unpickles(name: str, call: ast.Call) -> bool:
    allowed = ast.unparse(call).endswith("allow_pickle=False)")
    return re.fullmatch(r"(.*\.)?(loads?|Unpickler|read_array)", name) is not None and not (
        name.startswith(("json.", "self.", "CostStats.", "parquet.")) or allowed
    )


def test_what_is_unpickled_is_known() -> None:
    page = (ROOT / "docs" / "explanation" / "trust.md").read_text(encoding="utf-8")
    section = page.partition("## What is unpickled")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE))
    found = {
        relative(path)
        for path in SOURCES
        if any(ast.unparse(node) == "pickle.loads" for node in of(path, ast.Attribute))
        or any(
            unpickles(name, call) and ("pickle" in name or name.startswith(("np.", "torch.")))
            for name, call in calls_of(path)
        )
    }
    assert found == named


WRITES = re.compile(
    r"(.*\.)?(write_text|write_bytes|mkstemp|mkdtemp|NamedTemporaryFile|rename|touch)"
)


def writes(name: str, call: ast.Call) -> bool:
    """Whether a call may make or change a file by its name."""
    if name == "os.open":
        return any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "flags"))
    if name == "open" or name.endswith(".open"):
        given = [*call.args, *(each.value for each in call.keywords)]
        modes = {each.value for each in given if isinstance(each, ast.Constant)}
        texts = [mode for mode in modes if isinstance(mode, str)]
        return any(re.fullmatch(r"[wax+bt]+", mode) for mode in texts) and modes.isdisjoint("bt")
    return name == "os.replace" or WRITES.fullmatch(name) is not None


def test_files_are_written_in_one_place() -> None:
    """By ``_support.files``, which follows no link and replaces nothing foreign; or a comment here says why."""
    expected = {
        "_core/segment.py",  # its own file without a name
        "_support/files.py",
        "caching.py",  # O_EXCL and O_NOFOLLOW, below a directory that was checked
        "cli/main.py",  # /dev/null
        "shared_pool/rendezvous.py",  # O_EXCL, in a directory that it has made for this user alone
        "sources/objects.py",  # a pipe
    }
    found = {relative(path) for path in SOURCES for each in calls_of(path) if writes(*each)}
    assert found <= expected


WALL_CLOCKS = {
    *(("time", name) for name in ("time", "time_ns", "CLOCK_REALTIME")),
    *(("datetime", name) for name in ("now", "utcnow", "today")),
}


def test_no_module_waits_or_measures_by_the_wall_clock() -> None:
    """It jumps. But the age of a file, and of what another run has left in a cache, is told by no other clock."""
    found = []
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in nodes(path):
            match node:
                case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                    line = lines[node.lineno - 1]
                    is_an_age = ".st_mtime" in line or "compared with that of other runs" in line
                    if (owner, name) in WALL_CLOCKS and not is_an_age:
                        found.append(f"{relative(path)}:{node.lineno}")
                case ast.ImportFrom(module="time", names=names):
                    imported = {("time", alias.name) for alias in names}
                    found += [relative(path)] * bool(imported & WALL_CLOCKS)
    for path in (*CORE.rglob("*.pyx"), *CORE.rglob("*.h")):
        text = path.read_text(encoding="utf-8")
        found += re.findall(r"CLOCK_REALTIME|gettimeofday|time\.time", text)
    assert found == []
