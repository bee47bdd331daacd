"""The adapter of Accelerate comes to it whichever of the two is imported first."""

from __future__ import annotations

import importlib.util
import types
from pathlib import Path

import pytest

from minato import MinatoWarning
from minato.integrations.trainers import install_accelerate
from tests.subprocesses import in_forks

ADAPTED = """
import inspect, sys
import accelerate.accelerator, accelerate.data_loader
import minato, minato.integrations
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
original = accelerate.accelerator.prepare_data_loader.__wrapped__
assert original.__globals__ is vars(accelerate.data_loader)
assert not hasattr(original, "__wrapped__")
finders = [each for each in sys.meta_path if type(each).__module__.startswith("minato")]
assert all("accelerate.data_loader" not in each._names for each in finders)
assert len(finders) == 1  # waits for the other trainers
"""

MADE_FIRST = (
    """
import sys, minato
finders = [*sys.meta_path]
loader = minato.DataLoader(range(8), 4, order="arrival")
assert len(sys.meta_path) == len(finders) + 1
minato.DataLoader(range(8))
assert len(sys.meta_path) == len(finders) + 1
import accelerate
"""
    + ADAPTED
)

PATCHED = (
    """
import sys, minato, torch.utils.data
minato.patch()
import accelerate.data_loader
assert accelerate.data_loader.DataLoader is minato.DataLoader
loader = torch.utils.data.DataLoader(range(8), 4)
assert accelerate.data_loader.DataLoader is not minato.DataLoader
assert type(accelerate.data_loader.prepare_data_loader(loader).base_dataloader) is minato.DataLoader
minato.unpatch()
"""
    + ADAPTED
)

REFUSED = """
import os, sys
os.environ["MINATO_INTEGRATIONS"] = "0"
import minato, accelerate.data_loader, torch.utils.data
finders = [*sys.meta_path]
minato.DataLoader(range(8), 4)
assert sys.meta_path == finders
assert accelerate.data_loader.DataLoader is torch.utils.data.DataLoader
"""

NEEDS_ACCELERATE = {
    "minato first": "import minato, accelerate" + ADAPTED,
    "accelerate first": "from accelerate import skip_first_batches; import minato" + ADAPTED,
    "a loader first": MADE_FIRST,
    "patched": PATCHED,
    "refused": REFUSED,
}

FAKE = """
from torch.utils.data import DataLoader
PartialState = None
class DataLoaderAdapter:
    state_dict = load_state_dict = None
class DataLoaderShard:
    set_epoch = set_sampler = None
class DataLoaderDispatcher(DataLoaderShard):
    pass
def prepare_data_loader(dataloader):
    return DataLoader(dataloader.dataset)
skip_first_batches = prepare_data_loader
"""

FAILS_AT_FIRST = """
import importlib, pathlib, sys
sys.dont_write_bytecode = True
sys.path.insert(0, FOLDER)
import minato
minato.DataLoader([1])
try:
    import accelerate.data_loader
except RuntimeError:
    pass
else:
    raise AssertionError
pathlib.Path(FOLDER, "accelerate", "data_loader.py").write_text(FAKE)
importlib.invalidate_caches()
import accelerate.data_loader
loader = minato.DataLoader([1], order="batch")
assert accelerate.data_loader.prepare_data_loader(loader).order == "batch"
"""


IMPORTED_ELSEWHERE = """
import os, signal, sys, threading
sys.dont_write_bytecode = True
sys.path.insert(0, FOLDER)
import minato
sys.begun, sys.may_end = threading.Event(), threading.Event()
importing = threading.Thread(target=__import__, args=("accelerate.data_loader",))
importing.start()
assert sys.begun.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(60)
    minato.DataLoader([1])  # nobody ends the import here
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
threading.Timer(0.2, sys.may_end.set).start()
loader = minato.DataLoader([1], order="batch")  # in the midst of the import
importing.join()
import accelerate.data_loader
assert accelerate.data_loader.prepare_data_loader(loader).order == "batch"
"""
REPLACED = """
import sys
from unittest.mock import MagicMock
sys.modules["accelerate.data_loader"] = MagicMock()
import minato
minato.DataLoader([1])
"""
WAITS = "import sys\nsys.begun.set()\nsys.may_end.wait(60)\n"


def test_imports_in_either_order_made_or_failing(tmp_path: Path) -> None:
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "data_loader.py").write_text("raise RuntimeError('not yet')")
    slow = tmp_path / "slow" / "accelerate"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text("")
    (slow / "data_loader.py").write_text(WAITS + FAKE)
    theirs = {"accelerate", "lightning", "pytorch_lightning", "transformers"}
    scripts = {
        **(NEEDS_ACCELERATE if importlib.util.find_spec("accelerate") else {}),
        "nothing of a trainer": f"import sys, minato; assert not {theirs} & {{*sys.modules}}",
        "fails at first": f"FOLDER, FAKE = {str(tmp_path)!r}, {FAKE!r}\n{FAILS_AT_FIRST}",
        "imported elsewhere": f"FOLDER = {str(slow.parent)!r}\n{IMPORTED_ELSEWHERE}",
        "replaced": REPLACED,
        "seen to fail": "raise KeyError",
    }
    _, failures = in_forks(scripts, may_warn=True)
    assert list(failures) == ["seen to fail"], failures


def test_an_unknown_version_is_told() -> None:
    unknown = types.ModuleType("accelerate.data_loader")
    unknown.DataLoader = unknown.prepare_data_loader = object()
    with pytest.warns(MinatoWarning, match="has no skip_first_batches, DataLoaderShard"):
        install_accelerate(unknown)
