"""The adapter of Accelerate comes to it whichever of the two is imported first."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from minato.integrations import accelerate as adapter
from tests.subprocesses import environment

ORDERS = {
    "minato first": "import minato, accelerate",
    "accelerate first": "import accelerate, minato",
    "names first": "from accelerate import Accelerator, skip_first_batches; import minato",
}

CHECK = """
import inspect, sys
import accelerate.accelerator, accelerate.data_loader, torch
before = len(sys.meta_path)
import minato
import minato.integrations
loader = minato.DataLoader(range(8), 4, order="arrival")
for module in (accelerate, accelerate.accelerator, accelerate.data_loader, sys.modules["__main__"]):
    skip = getattr(module, "skip_first_batches", None)
    if skip is not None:
        assert type(skip(loader, 1)) is minato.DataLoader, module
shard = accelerate.data_loader.prepare_data_loader(loader)
assert type(shard.base_dataloader) is minato.DataLoader
assert shard.order == "arrival"
assert "def prepare_data_loader" in inspect.getsource(accelerate.data_loader)
minato.integrations.connect()  # once more changes nothing
assert accelerate.accelerator.prepare_data_loader.__wrapped__.__globals__ is vars(accelerate.data_loader)
assert not hasattr(accelerate.accelerator.prepare_data_loader.__wrapped__, "__wrapped__")
assert not any(type(finder).__module__.startswith("minato") for finder in sys.meta_path)
"""


@pytest.mark.parametrize("order", ORDERS)
def test_either_import_may_be_first(order: str) -> None:
    pytest.importorskip("accelerate", "1.0")
    run(f"{ORDERS[order]}\n{CHECK}")


def test_nothing_is_imported_for_it() -> None:
    run("import sys, minato; assert not {'accelerate', 'lightning', 'transformers'} & {*sys.modules}")


def test_a_module_that_fails_is_adapted_when_it_works(tmp_path: Path) -> None:
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data_loader.py").write_text("raise RuntimeError('not yet')")
    run(
        f"""
import importlib, pathlib, sys
sys.dont_write_bytecode = True
sys.path.insert(0, {str(tmp_path)!r})
import minato
try:
    import accelerate.data_loader
except RuntimeError:
    pass
else:
    raise AssertionError
pathlib.Path({str(package / "data_loader.py")!r}).write_text('''
from torch.utils.data import DataLoader
class DataLoaderShard:
    set_epoch = None
class DataLoaderDispatcher(DataLoaderShard):
    pass
def prepare_data_loader(dataloader):
    return DataLoader(dataloader.dataset)
skip_first_batches = prepare_data_loader
''')
importlib.invalidate_caches()
import accelerate.data_loader
assert accelerate.data_loader.prepare_data_loader(minato.DataLoader([1], order="batch")).order == "batch"
"""
    )


def test_an_unknown_version_is_told() -> None:
    unknown = types.ModuleType("accelerate.data_loader")
    unknown.DataLoader = unknown.prepare_data_loader = object()
    with pytest.warns(UserWarning, match="has no skip_first_batches, DataLoaderShard"):
        adapter.install(unknown)


def run(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
