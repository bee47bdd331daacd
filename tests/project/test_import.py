"""Importing: each module alone, no side effects, no more than is used, and the core that one asked for."""

from __future__ import annotations

import importlib.machinery
import json
from pathlib import Path

import pytest

import minato
from tests import subprocesses
from tests.project.test_layering import PACKAGE, dotted

OPTIONAL = {"IPython", "matplotlib", "nibabel", "nilearn", "rich", "scipy", "sklearn"}

ALONE = """
# Torch is imported once, and no module finds another one of minato loaded. The package's own __init__ is left out,
# because it imports most modules in one fixed order.
import importlib, os, sys, types, warnings
package = types.ModuleType("minato")
package.__path__ = [os.path.join(os.getcwd(), "minato")]
sys.modules["minato"] = package
os.environ["MINATO_NO_EXTENSIONS"] = {pure!r}
warnings.simplefilter("error")
importlib.import_module({module!r})
"""

PARTS = 5
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

MOST_MODULES, MOST_MODULES_IN_WORKERS = 60, 112
"""Of minato, by ``import minato``, and in a worker process that has imported the script."""
ON_DEMAND = {
    *(f"minato.observe.{name}" for name in ("report", "live", "metrics", "gpus")),
    *(f"minato.shared_pool.{name}" for name in ("session", "server", "channel")),
    *("minato.consumers", "minato.workers.autoscale", "minato.ray"),
    *("minato.caching", "minato.engine.caching", "minato.sources", "minato.cli.main"),
    *("minato.patching", "minato.integrations.trainers", "accelerate", "ray"),
    *("http.server", "html", "sqlite3", "rich", "lightning"),
}
"""What an ordinary epoch does not use."""
BY_ITER = {
    *(f"minato.engine.{name}" for name in ("engine", "inline", "inspector")),
    *("minato.delivery", "minato.observe.trace", "minato.workers.worker", "psutil"),
}
"""What the first iterator imports, and ``import minato`` does not."""
NOT_IN_WORKERS = {
    *(f"minato.engine.{name}" for name in ("engine", "pools", "history")),
    *("minato.delivery", "psutil"),
}

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


MODULES = [name for name in map(dotted, sorted(PACKAGE.rglob("*.py"))) if name != "minato"]
"""Dispatchers and pure twins included."""


def missing_extensions() -> list[str]:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    sources = (PACKAGE / "_core").glob("_*_c.pyx")
    return [path.name for path in sources if not path.with_name(path.stem + suffix).exists()]


needs_extensions = pytest.mark.skipif(
    bool(missing_extensions()), reason=f"not compiled: {missing_extensions()}"
)


def failures_alone(modules: list[str], pure: str = "") -> dict[str, str]:
    scripts = {module: ALONE.format(module=module, pure=pure) for module in modules}
    return subprocesses.in_forks(scripts)[1]


@needs_extensions
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_module_imports_alone(part: int) -> None:
    assert failures_alone(MODULES[part::PARTS]) == {}


@pytest.mark.slow
def test_every_module_of_the_core_imports_alone_in_pure_python() -> None:
    """The others import no twin by its name: test_layering.py."""
    names = [name for name in MODULES if name.startswith("minato._core")]
    assert failures_alone(names, pure="1") == {}


PURE = "import os\nos.environ['MINATO_NO_EXTENSIONS'] = '1'\n"
NAMES = """
import minato
print(*dir(minato))
print(*{'minato', 'psutil', 'in_starting_child'} & set(vars(minato)))
print(*[name for name in minato.__all__ if getattr(minato, name) is None])
print(minato.caching.DiskCache.__name__, minato.sources.__name__, 'patch' in dir(minato))
print(hasattr(minato, 'no_such_name'), [name for name in dir(minato) if not hasattr(minato, name)])
"""


@pytest.mark.slow
@needs_extensions
def test_no_more_is_imported_than_is_used(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ORDINARY)
    seen = json.loads(subprocesses.output(program, MINATO_NO_EXTENSIONS=""))
    assert BY_ITER.isdisjoint(seen["import"])
    assert "minato.workers.worker_process" in seen["spawned worker"]
    assert len(of_minato(seen["import"])) <= MOST_MODULES, of_minato(seen["import"])
    ours = of_minato(seen["spawned worker"])
    assert len(ours) <= MOST_MODULES_IN_WORKERS, ours
    for moment, modules in seen.items():
        assert ON_DEMAND.intersection(modules) == set(), moment
    assert NOT_IN_WORKERS.intersection(seen["spawned worker"]) == set()
    # A forked worker has what it needs from its parent: it would import each missing module again in each epoch.
    assert set(seen["forked worker"]) <= set(seen["iter, fork"])
    assert set(seen["epoch, fork"]) <= set(seen["iter, fork"])


def of_minato(modules: list[str]) -> list[str]:
    return [name for name in modules if name.partition(".")[0] == "minato"]


OTHER = "class Minato:\n    pass\n"
"""Like the other project's package: its ``__init__.py`` does not know ours."""


IMPORTS = """
import importlib, os
os.chdir({folder!r})
try:
    importlib.import_module({module!r})
    print("imported")
except ImportError as error:
    print(error)
"""


def of_two_projects(folder: Path) -> dict[str, str]:
    scripts = {}
    for later in ("minato", "minatoloader"):
        package = folder / later / "minato"
        package.mkdir(parents=True)
        for path in PACKAGE.iterdir():
            (package / path.name).symlink_to(path)
        (package / "minato.py").write_text(OTHER)
        if later == "minato":
            (package / "__init__.py").unlink()
            (package / "__init__.py").write_text("from minato.minato import Minato\n")
        for module in ("minato", "minato.loader", "minato.cli.main"):
            name = f"{package} {module}"
            scripts[name] = IMPORTS.format(folder=str(package.parent), module=module)
    return scripts


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What scripts that import minato print, in forks of one Python; of two projects by a path and a module."""
    scripts = {"default": SIDE_EFFECTS, "pure": PURE + SIDE_EFFECTS, "names": NAMES}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv("MINATO_NO_EXTENSIONS", raising=False)
        scripts |= of_two_projects(tmp_path_factory.mktemp("projects"))
        found, failures = subprocesses.in_forks(scripts, "-W", "error")
    assert failures == {}
    return found


def test_import_has_no_side_effects_and_takes_the_core_and_the_names_that_are_asked_for(
    told: dict[str, str],
) -> None:
    seen = json.loads(told["default"])
    kind, reason = seen.pop("implementation")
    assert (kind, bool(reason)) == ("pure" if missing_extensions() else "compiled", True)
    assert OPTIONAL.intersection(seen.pop("modules")) == set()
    assert seen.pop("threads") == ["MainThread"]
    nothing = {name: [] for name in ("processes", "descriptors", "changed")}
    assert seen == {**nothing, "native threads": 0, "start method": None}

    seen = json.loads(told["pure"])
    assert seen["implementation"] == ["pure", "MINATO_NO_EXTENSIONS is set"]
    assert [name for name in of_minato(seen["modules"]) if name.endswith("_c")] == []

    listed, private, *names = told["names"].splitlines()
    assert listed.split() == sorted([*minato.__all__, "caching", "sources"])
    assert private == ""
    assert names == ["", "DiskCache minato.sources True", "False []"]


def test_the_other_project_of_this_name_is_refused(told: dict[str, str]) -> None:
    """PyPI's minato, installed into the same directory: ours to refuse, where a module of ours is imported at all."""
    of_two = {name: text for name, text in told.items() if " " in name}
    imported = [name for name, text in of_two.items() if text == "imported\n"]
    assert [name.endswith("/minato/minato minato") for name in imported] == [True]
    assert len(of_two) == 6
    for name in of_two.keys() - imported:
        error = of_two[name]
        assert error.startswith(f"{name.split()[0]} holds the files of two projects")
        assert "pip uninstall minato minatoloader" in error
