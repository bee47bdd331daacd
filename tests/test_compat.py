"""Private names of other packages: in one module, each with a probe, and what happens without them."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import profiler
from torch.utils.data import dataloader, default_collate, get_worker_info
from torch.utils.data._utils import collate, worker

from minato import _compat
from minato._support import counters, pickling
from minato.batching.sample_spec import rules_hold
from tests.datasets import assert_same
from tests.subprocesses import output

PACKAGE = Path(_compat.__file__).parent
SOURCES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
QUARANTINED = {"_compat.py", "_core/tensor_memory.py", "transforms/rng_memory.py"}
PUBLIC = {
    *("_thread", "_typeshed.DataclassInstance", "_typeshed.SupportsWrite"),
    *("os._exit", "sys._getframe", "sys._current_frames"),
}
"""Documented, in spite of their names."""
INHERITED = {
    "batching/writer.py": {"_auto_collation"},  # one of its own
    "delivery/iterator.py": {
        *("_base_seed", "_num_workers", "_num_yielded", "_persistent_workers", "_pin_memory"),
        *("_pin_memory_device", "_sampler_iter", "_timeout", "_next_data", "_reset"),
    },
    "insight.py": {"_iterator"},
    "loader.py": {"_get_iterator", "_iterator"},
    "engine/factory.py": {"_iterator"},
    "sampling/rng_state.py": {"_iterator"},  # one of its own
}
"""Names of torch's classes in the classes that extend them."""


def is_private(name: str) -> bool:
    return re.match(r"_(?!_.*__$)", name) is not None


KNOWN = {
    name
    for each in _compat.PRIVATE_NAMES
    for name in re.findall(r"\w+", each.name)
    if is_private(name) and len(name) > 3
}


def foreign_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a module imports from other packages: the name here, and the dotted name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def reaches(source: str, inherited: set[str] | None = None) -> list[str]:
    """Private names of other packages that a module uses."""
    tree, known = ast.parse(source), KNOWN - (inherited or set())
    ours = ("minato", "__future__")
    foreign = {n: there for n, there in foreign_names(tree) if there.partition(".")[0] not in ours}
    named = set(foreign.values()) - PUBLIC
    found = [there for there in named if any(map(is_private, there.split(".")))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            text = ast.unparse(node)
            if (root(node) in foreign and text not in PUBLIC) or node.attr in known:
                found.append(text)
        elif isinstance(node, ast.Constant) and node.value in known:
            found.append(str(node.value))
    return found


def test_private_names_stand_in_one_module() -> None:
    for name in SOURCES.keys() - QUARANTINED:
        assert reaches(SOURCES[name].read_text("utf-8"), INHERITED.get(name)) == [], name


@pytest.mark.parametrize(
    "line",
    [
        "import _random",
        "from torch._utils import ExceptionWrapper",
        "from torch.utils.data import _utils",
        "import numpy as np\nrand = np.random.mtrand._rand",
        "import torch\ntorch._C._set_worker_signal_handlers()",
        "from multiprocessing import process\nprocess._children.clear()",
        "sampler = loader._index_sampler",
        "bits = getattr(generator, '_bit_generator')",
        "address = tensor._cdata",
    ],
)
def test_the_checker_sees_what_is_forbidden(line: str) -> None:
    assert reaches(line) != []


def test_attributes_of_foreign_objects_are_known() -> None:
    """A private attribute that no module of the package defines belongs to somebody else."""
    defined, used = set[str](), list[tuple[str, str]]()
    for name, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                if isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
                elif name not in QUARANTINED and ast.unparse(node) not in PUBLIC:
                    used.append((node.attr, name))
    foreign = [(name, file) for name, file in used if name not in defined]
    assert [each for each in foreign if each[0] not in INHERITED.get(each[1], ())] == []


@pytest.mark.parametrize("name", _compat.PRIVATE_NAMES, ids=lambda name: name.name.split(",")[0])
def test_each_is_as_expected_here(name: _compat.PrivateName) -> None:
    """A release that moves one must be noticed."""
    if not name.is_installed():
        pytest.skip(f"{name.package} is not installed")
    assert name.is_present()
    assert name.without


def test_the_reference_says_what_each_is_for() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "private-names.md"
    rows = re.findall(r"^\| `(.+?)` \| \S.* \|$", page.read_text("utf-8"), re.MULTILINE)
    assert rows == [name.name for name in _compat.PRIVATE_NAMES]


def test_probes_change_nothing() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert all(name.is_present() for name in _compat.PRIVATE_NAMES if name.package is None)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.utils.data.get_worker_info() is None


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (dataloader, "_DatasetKind"),
        (dataloader.DataLoader, "_get_iterator"),
        (dataloader._BaseDataLoaderIter, "_reset"),
        (torch._C, "_len_torch_function_stack"),
        (np.random.mtrand, "_rand"),
    ],
)
def test_probes_notice(where: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(where, name)
    assert not all(each.is_present() for each in _compat.PRIVATE_NAMES if each.package is None)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (torch._utils, "ExceptionWrapper"),
        (dataloader, "_BaseDataLoaderIter"),
        (torch.utils.data._utils.worker, "_generate_state"),
    ],
)
def test_a_missing_name_without_fallback_is_named(
    where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(where, name)
    version = re.escape(torch.__version__)
    with pytest.raises(ImportError, match=f"this version of torch \\({version}\\).*{name}"):
        runpy.run_path(str(PACKAGE / "_compat.py"))


def test_what_workers_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_set_worker_signal_handlers")
    monkeypatch.delattr(torch.multiprocessing, "_set_thread_name")
    _compat.set_signal_handlers()
    _compat.name_process_thread("some name")


def test_modes_that_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"), monkeypatch.context() as without:  # torch itself asks at both ends
        without.delattr(torch._C, "_len_torch_function_stack")
        assert not rules_hold()
    monkeypatch.delattr(torch._C, "_len_torch_function_stack")
    assert rules_hold()


def test_modes_that_torch_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.overrides, "_get_current_function_mode_stack")
    with torch.device("cpu"):
        assert rules_hold()


def test_a_profiler_that_does_not_say_whether_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _compat.is_profiling()
    with profiler.profile():
        assert _compat.is_profiling()
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert _compat.is_profiling()


def test_devices_that_torch_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda index: index == 1, raising=False
    )
    assert [_compat.has_cuda_context(i) for i in range(3)] == [False, True, False]
    monkeypatch.delattr(torch._C, "_cuda_hasPrimaryContext")
    assert _compat.has_cuda_context(0) == torch.cuda.is_initialized()


def test_shared_integers_that_torch_cannot_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "shared_file_storage", lambda descriptor, nbytes: None)
    numbers = counters.shared_integers(2, 3)
    assert numbers.is_shared()
    assert numbers.tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.fixture
def in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_worker_info", _compat.worker_info(0, 1, 1, None))


@pytest.mark.usefixtures("in_a_worker")
@pytest.mark.parametrize(
    "samples",
    [
        [torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)],
        [torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)],
        [torch.ones(2), torch.ones(2, dtype=torch.float64)],
        [torch.rand(1, 4, 2, 2).to(memory_format=torch.channels_last)[0] for _ in range(2)],
        [{"a": np.arange(3), "b": (1, "x", [2.5])}, {"a": np.arange(3), "b": (2, "y", [3.5])}],
        [torch.nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(2)],
        [torch.empty(0), torch.empty(0)],
    ],
)
def test_batches_in_own_memory_are_those_of_torch(samples: list[Any]) -> None:
    expected = default_collate(samples)
    found = _compat.collate_in_own_memory(samples)
    assert_same(found, expected)
    for ours, torchs in zip(_tensors(found), _tensors(expected), strict=True):
        assert type(ours) is type(torchs)
        assert ours.stride() == torchs.stride()
        assert not ours.is_shared()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.usefixtures("in_a_worker")
@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), torch.ones(2), torch.ones(1)],
        [torch.ones(2), torch.ones(2, dtype=torch.complex64)],
        [torch.ones(2, requires_grad=True)] * 2,
        [torch.ones(2, dtype=torch.uint8).view(torch.uint2)] * 2,
        [torch.ones(2).to_sparse()] * 2,
        [object(), object()],
        pytest.param(nested, marks=pytest.mark.large),
    ],
)
def test_errors_in_own_memory_are_those_of_torch(samples: Any) -> None:
    samples = [samples()] * 2 if callable(samples) else samples
    with pytest.raises((RuntimeError, TypeError)) as expected:
        default_collate(samples)
    with pytest.raises(expected.type) as found:
        _compat.collate_in_own_memory(samples)
    assert str(found.value) == str(expected.value)


@pytest.mark.usefixtures("in_a_worker")
@pytest.mark.parametrize("name", ["collate", "default_collate_fn_map", "collate_tensor_fn"])
def test_own_memory_that_torch_does_not_allow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collate, "default_collate", lambda samples: "torch's")
    if name == "collate_tensor_fn":  # a program's own rule
        rules = {**collate.default_collate_fn_map, torch.Tensor: len}
        monkeypatch.setattr(collate, "default_collate_fn_map", rules)
    else:
        monkeypatch.delattr(collate, name)
    assert _compat.collate_in_own_memory([torch.ones(1)]) == "torch's"


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("attribute", ["quantized_per_tensor", "quantized_per_channel"])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensors_that_torch_cannot_rebuild(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = torch.tensor([0.5, 0.25]), torch.tensor([0, 0])
    given = (*scales, 0) if attribute == "quantized_per_channel" else (0.5, 0)
    quantize = getattr(torch, attribute.replace("quantized", "quantize"))
    tensor = quantize(torch.ones(2, 2), *given, torch.qint8)
    assert pickling._reduce_quantized(tensor) is not NotImplemented
    monkeypatch.setattr(pickling, attribute, lambda: None)
    assert pickling._reduce_quantized(tensor) is NotImplemented


def test_it_is_light() -> None:
    """At its import it needs torch, NumPy and Python's own modules alone."""
    body = ast.parse(SOURCES["_compat.py"].read_text(encoding="utf-8")).body
    top_level = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = foreign_names(ast.Module(top_level, []))
    imported = {there.partition(".")[0] for _, there in names}
    assert imported - sys.stdlib_module_names == {"numpy", "torch"}


DRAWS = """
import json, random, sys
import numpy, torch
import minato
from minato._core import tensor_memory
from minato.transforms import rng_memory

class Draws(torch.utils.data.Dataset):
    def __init__(self):
        self.own = random.Random(1)
        self.generator = numpy.random.default_rng(2)
        self.torch = torch.Generator().manual_seed(3)
    def __len__(self):
        return 12
    def __getitem__(self, index):
        drawn = [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]
        drawn += [self.own.random(), self.generator.random()]
        last = torch.rand(2, generator=self.torch, dtype=torch.float64)
        return torch.cat([torch.tensor(drawn, dtype=torch.float64), torch.rand(2).double(), last])

batches = [
    batch.tolist() for workers in (0, 2)
    for batch in minato.DataLoader(Draws(), 4, seed=7, num_workers=workers)
]
found = rng_memory.found_in_memory() | {"tensors": tensor_memory.find() is not None}
print(json.dumps([found, batches]))
"""


@pytest.mark.slow
def test_memory_is_left_alone_if_asked_for() -> None:
    """The numbers are the same, by public calls only."""
    program = "-W", "ignore:This DataLoader", "-c", DRAWS
    (usual, expected), (without, batches) = (
        json.loads(output(*program, MINATO_DIRECT_MEMORY=value)) for value in ("", "0")
    )
    assert all(usual.values())
    assert not any(without.values())
    assert batches == expected
    assert expected[:3] == expected[3:]


def test_worker_info_is_that_of_the_thread_or_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outer, inner, of_process = (_compat.worker_info(i, 3, i, None) for i in range(3))
    elsewhere: list[Any] = []

    def note_elsewhere() -> None:
        thread = threading.Thread(target=lambda: elsewhere.append(get_worker_info()))
        thread.start()
        thread.join()

    with _compat.AsWorker(outer):
        assert get_worker_info() is torch.utils.data.get_worker_info() is outer
        with pytest.raises(KeyError), _compat.AsWorker(inner):
            assert get_worker_info() is inner
            raise KeyError
        note_elsewhere()
        assert get_worker_info() is outer
        monkeypatch.setattr(worker, "_worker_info", of_process)
        with _compat.AsWorker(None):
            assert get_worker_info() is of_process
        note_elsewhere()
        assert get_worker_info() is outer
        _compat.be_worker(inner)  # as in a process that this thread has forked
        assert get_worker_info() is inner
    monkeypatch.undo()
    assert get_worker_info() is None
    assert elsewhere == [None, of_process]
