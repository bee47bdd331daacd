"""Importing: each module alone, no side effects, no more than is used, and the core that one asked for."""

from __future__ import annotations

import importlib.machinery
import json
from pathlib import Path

import pytest

import minato
from tests import subprocesses

PACKAGE = Path(__file__).parents[2] / "minato"
OPTIONAL = ["IPython", "matplotlib", "nibabel", "nilearn", "rich", "scipy", "sklearn"]

EACH_ALONE = """
# A fork per module: torch is imported once, and no module finds another one of minato loaded. The
# package's own __init__ is left out, because it imports most modules in one fixed order.
import importlib, os, sys, traceback, types, warnings
import numpy, psutil, torch.utils.data, torch.multiprocessing
running = 0
for module in sys.argv[1:]:
    if running == os.cpu_count():
        os.wait()
        running -= 1
    pid = os.fork()
    if pid == 0:
        package = types.ModuleType("minato")
        package.__path__ = [os.path.join(os.getcwd(), "minato")]
        sys.modules["minato"] = package
        warnings.simplefilter("error")
        try:
            importlib.import_module(module)
        except BaseException as error:
            print(module, *traceback.format_exception_only(error), sep=": ", end="", flush=True)
        os._exit(0)
    running += 1
for _ in range(running):
    os.wait()
"""

PARTS = 3
"""In so many tests: imports take long on a busy machine."""

SIDE_EFFECTS = """
import json, os, sys, threading
import torch.utils.data, torch.multiprocessing
import signal, warnings
before = set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
def state():
    return [
        [*sys.meta_path], [*sys.path_hooks], [*sys.path], dict(os.environ), [*warnings.filters],
        [signal.getsignal(number) for number in signal.valid_signals()],
        sys.excepthook, threading.excepthook, torch.utils.data.DataLoader,
        torch.utils.data.dataloader.DataLoader, torch.get_num_threads(), sys.getswitchinterval(),
    ]
before_all = state()
import minato
changed = [i for i, (old, new) in enumerate(zip(before_all, state())) if old != new]
import multiprocessing, psutil
print(json.dumps({
    "processes": [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)],
    "threads": [t.name for t in threading.enumerate()],
    "descriptors": sorted(set(os.listdir("/proc/self/fd")) - before[0]),
    "native threads": len(os.listdir("/proc/self/task")) - before[1],
    "modules": sorted(sys.modules),
    "changed": changed,
    "start method": multiprocessing.get_start_method(allow_none=True),
    "implementation": minato.implementation(),
}))
"""

MOST_MODULES = 60
"""Of minato, by ``import minato``."""
MOST_MODULES_IN_WORKERS = 112
"""Of minato, in a worker process that has imported the script."""
ON_DEMAND = [
    *(
        "minato.observe.report",
        "minato.observe.live",
        "minato.observe.metrics",
        "minato.observe.gpus",
    ),
    *(
        "minato.shared_pool.session",
        "minato.shared_pool.server",
        "minato.shared_pool.channel",
        "minato.consumers",
    ),
    "minato.workers.autoscale",
    *("minato.ray.pool", "minato.ray.actor", "ray"),
    *(
        "minato.caching",
        "minato.engine.caching",
        "minato.sources",
        "minato.cli.main",
    ),
    *("minato.patching", "minato.integrations.trainers", "accelerate"),
    *("http.server", "html", "sqlite3", "rich", "lightning"),
]
"""What an ordinary epoch does not use."""
BY_ITER = [
    "minato.delivery",
    "minato.engine.engine",
    "minato.engine.inline",
    "minato.engine.inspector",
    "minato.observe.trace",
    "minato.workers.worker",
    "psutil",
]
"""What the first iterator imports, and ``import minato`` does not."""
NOT_IN_WORKERS = [
    "minato.engine.engine",
    "minato.engine.pools",
    "minato.engine.history",
    "minato.delivery",
    "psutil",
]

ORDINARY = """
import json
import sys

import minato

if __name__ == "__main__":
    seen = {"import": sorted(sys.modules)}


class Loaded:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return sorted(sys.modules)


def collate(samples):
    return samples[0]


if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = minato.DataLoader(
            Loaded(), 4, num_workers=2, collate_fn=collate, multiprocessing_context=method
        )
        iterator = iter(loader)
        seen[f"iter, {method}"] = sorted(sys.modules)
        seen[f"{method}ed worker"] = list(iterator)[0]
        seen[f"epoch, {method}"] = sorted(sys.modules)
    print(json.dumps(seen))
"""


def run(script: str, *arguments: str, **variables: str) -> str:
    """Run a script in a fresh interpreter at the root, warnings being errors; return its output."""
    return run_python("-W", "error", "-c", script, *arguments, **variables)


def run_python(*arguments: str, **variables: str) -> str:
    """Run a fresh interpreter at the root; return its output."""
    return subprocesses.output(*arguments, **{"MINATO_NO_EXTENSIONS": "", **variables})


def modules() -> list[str]:
    """Dotted names of all modules but the package itself, dispatchers and pure twins included."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if name != "minato"]


def missing_extensions() -> list[str]:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    sources = (PACKAGE / "_core").glob("_*_c.pyx")
    return [path.name for path in sources if not path.with_name(path.stem + suffix).exists()]


needs_extensions = pytest.mark.skipif(
    bool(missing_extensions()), reason=f"not compiled: {missing_extensions()}"
)


@needs_extensions
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_module_imports_alone(part: int) -> None:
    assert run(EACH_ALONE, *modules()[part::PARTS]).splitlines() == []


@pytest.mark.slow
def test_every_module_of_the_core_imports_alone_in_pure_python() -> None:
    """The others import no twin by its name: test_layering.py."""
    names = [name for name in modules() if name.startswith("minato._core")]
    assert run(EACH_ALONE, *names, MINATO_NO_EXTENSIONS="1").splitlines() == []


@needs_extensions
def test_import_has_no_side_effects_and_the_compiled_core_is_the_default() -> None:
    seen = json.loads(run(SIDE_EFFECTS))
    kind, reason = seen["implementation"]
    assert (kind, bool(reason)) == ("compiled", True)
    assert seen["processes"] == []
    assert seen["threads"] == ["MainThread"]
    assert seen["native threads"] == 0
    assert seen["descriptors"] == []
    assert seen["start method"] is None
    assert seen["changed"] == []
    assert [name for name in OPTIONAL if name in seen["modules"]] == []


def test_pure_core_on_demand() -> None:
    seen = json.loads(run(SIDE_EFFECTS, MINATO_NO_EXTENSIONS="1"))
    assert seen["implementation"] == ["pure", "MINATO_NO_EXTENSIONS is set"]
    ours = [name for name in seen["modules"] if name.startswith("minato.")]
    assert [name for name in ours if name.endswith("_c")] == []


@pytest.mark.slow
@needs_extensions
def test_no_more_is_imported_than_is_used(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ORDINARY)
    seen = json.loads(run_python(str(program), PYTHONPATH=str(PACKAGE.parent)))
    assert [name for name in BY_ITER if name in seen["import"]] == []
    assert "minato.workers.worker_process" in seen["spawned worker"]
    assert len(of_minato(seen["import"])) <= MOST_MODULES, of_minato(seen["import"])
    ours = of_minato(seen["spawned worker"])
    assert len(ours) <= MOST_MODULES_IN_WORKERS, ours
    for moment, modules in seen.items():
        assert [name for name in ON_DEMAND if name in modules] == [], moment
    assert [name for name in NOT_IN_WORKERS if name in seen["spawned worker"]] == []
    # A forked worker has what it needs from its parent: it would import each missing module again in each epoch.
    assert set(seen["forked worker"]) <= set(seen["iter, fork"])
    assert set(seen["epoch, fork"]) <= set(seen["iter, fork"])


def of_minato(modules: list[str]) -> list[str]:
    return [name for name in modules if name.partition(".")[0] == "minato"]


def test_dir_lists_the_public_names_alone_and_they_are_imported_on_demand() -> None:
    listed, private, *names = run(
        "import minato; print(*dir(minato));"
        "print(*{'minato', 'psutil', 'in_starting_child'} & set(vars(minato)));"
        "print(*[name for name in minato.__all__ if getattr(minato, name) is None]);"
        "print(minato.caching.DiskCache.__name__, minato.sources.__name__, 'patch' in dir(minato));"
        "print(hasattr(minato, 'no_such_name'), [name for name in dir(minato) if not hasattr(minato, name)])"
    ).splitlines()
    assert listed.split() == sorted([*minato.__all__, "caching", "sources"])
    assert private == ""
    assert names == ["", "DiskCache minato.sources True", "False []"]


OTHER = "class Minato:\n    pass\n"
"""Like the other project's package: its ``__init__.py`` does not know ours."""


# A fork per module, as above.
REFUSED = """
import importlib, os, sys
import numpy, psutil, torch.utils.data, torch.multiprocessing
for module in sys.argv[1:]:
    if os.fork() == 0:
        try:
            importlib.import_module(module)
            print("imported", flush=True)
        except ImportError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("later", ["minato", "minatoloader"])
def test_the_other_project_of_this_name_is_refused(tmp_path: Path, later: str) -> None:
    """PyPI's minato, installed into the same directory: ours to refuse, where a module of ours is imported at all."""
    package = tmp_path / "minato"
    package.mkdir()
    for path in PACKAGE.iterdir():
        (package / path.name).symlink_to(path)
    (package / "minato.py").write_text(OTHER)
    if later == "minato":
        (package / "__init__.py").unlink()
        (package / "__init__.py").write_text("from minato.minato import Minato\n")
    ours = ["minato.loader", "minato.cli.main"]
    told = subprocesses.output("-c", REFUSED, "minato", *ours, cwd=tmp_path).splitlines()
    if later == "minato":
        assert told.pop(0) == "imported"
    assert len(told) == len(ours) + (later != "minato")
    for error in told:
        assert error.startswith(f"{package} holds the files of two projects")
        assert "pip uninstall minato minatoloader" in error
