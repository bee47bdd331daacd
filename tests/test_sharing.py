"""Datasets in memory that all workers share."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import mmap
import multiprocessing
import os
import pickle
import threading
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from operator import is_, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

import minato
from minato import DataLoader, SharedDict, SharedList, sharing
from minato._core.read_only import shared_base
from minato._core.segment import Segment
from minato.engine import pools
from tests.subprocesses import output

N = 2000


class Color(Enum):
    RED = 1


class Unequal:
    """Compares by identity."""


@dataclass
class Box:
    x: int
    y: float


class Files(Dataset[Any]):
    """What datasets keep: paths, labels, annotations."""

    def __init__(self) -> None:
        self.paths = [f"folder/ü{i}.jpg" for i in range(N)]
        self.samples = [(path, i % 7) for i, path in enumerate(self.paths)]
        self.imgs = self.samples
        self.boxes = {path: [i, i + 1] for i, path in enumerate(self.paths)}
        self.classes = ["a", "b"]
        self.features = np.arange(N * 16, dtype=np.float32).reshape(N, 16)
        self.weights = torch.arange(N)
        self.name = "x" * 5000
        self.parts: Any = {"train": list(range(N)), "few": [1, 2]}
        self.view = np.zeros(0)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        path, label = self.samples[index]
        assert path == self.paths[index]
        assert self.boxes[path] == [index, index + 1]
        where = self.inodes() if index == 0 and isinstance(self.paths, SharedList) else ""
        return label, self.features[index].copy(), self.parts["train"][index], os.getpid(), where

    def inodes(self) -> str:
        """The memory that is mapped for each kind of container."""
        containers: Any = self.paths, self.boxes
        arrays = [*(each._memory.array for each in containers), self.features, self.view]
        return " ".join(inode_of(array.ctypes.data) for array in arrays)


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    items=st.lists(values, max_size=30) | st.lists(st.text()) | st.lists(st.lists(st.integers()))
)
@example(["", "plain", "ümläut", "漢字🙂", "a\0b"])
@example(["\udc80", "a"])
@example([b"", b"\x00\xff"])
@example([0, -1, 2**63 - 1, -(2**63)])
@example([2**63, 1])
@example([0.0, -1.5, float("inf"), 1e-300])
@example([True, False])
@example([])
def test_lists_come_back_equal(items: list[Any]) -> None:
    shared: SharedList[Any] = SharedList(items)
    buffers: list[Any] = []
    content = pickle.dumps(shared, 5, buffer_callback=buffers.append)
    copies = pickle.loads(pickle.dumps(shared)), pickle.loads(content, buffers=buffers)
    for each in (shared, *copies):
        assert [*each] == items == each[:]
        assert [*map(type, each)] == [*map(type, items)]
        assert each == items


keys = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)


@given(items=st.dictionaries(keys, values, max_size=30), other=keys)
def test_dictionaries_come_back_equal(items: dict[Any, Any], other: Any) -> None:
    shared = SharedDict(items)
    assert dict(shared) == items == dict(shared.items())
    assert [*shared] == [*items]
    assert [*shared.values()] == [*items.values()]
    assert all(shared[key] == items[key] for key in items)
    assert (other in shared) == (other in items)
    assert shared.get(other, 7) == items.get(other, 7)
    assert pickle.loads(pickle.dumps(shared)) == items


def test_equal_keys_of_other_types_are_found() -> None:
    table = {1: "one", 2.0: "two", (3, "x"): "three", "1": "text", b"1": "bytes", 0.5: "half"}
    shared: Any = SharedDict(table)
    numbers = True, 1.0, np.int64(1), Decimal(1), Fraction(1), np.True_, np.uint8(1), 1 + 0j
    pairs = (3.0, "x"), Pair(3, "x")
    for key in (*numbers, 2, *pairs, "1", b"1", Fraction(1, 2)):
        assert shared[key] == table[key]
    nans = float("nan"), complex(0, float("nan")), np.float32("nan")
    for key in ("2", (3,), Path("x"), Color.RED, *nans):
        with pytest.raises(KeyError):
            shared[key]
    with pytest.raises(TypeError, match="unhashable"):
        shared[[1]]


def test_keys_with_equal_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "key_hash", lambda key: 7)
    assert dict(SharedDict({"a": 1, "b": 2})) == {"a": 1, "b": 2}
    assert "c" not in SharedDict({"a": 1, "b": 2})


def test_objects_that_compare_by_value() -> None:
    items = [Box(1, 2.0), Path("a"), Color.RED, np.arange(3), torch.arange(4), int, range(3), {4}]
    shared = SharedList(items)
    assert shared == items
    assert shared[2] is Color.RED


def test_objects_that_are_one_in_all_processes() -> None:
    items = [torch.float32, torch.channels_last, torch.sparse_coo, ..., NotImplemented]
    assert all(map(is_, SharedList(items), items))


def test_sparse_tensors_come_back_and_nothing_keeps_them() -> None:
    items = [{"at": torch.eye(3).to_sparse() * n} for n in range(3)]
    shared = SharedList(items)
    read = [shared[n]["at"] for n in range(3)]
    assert all(torch.equal(one.to_dense(), torch.eye(3) * n) for n, one in enumerate(read))
    references = [weakref.ref(one) for one in read]
    del read
    assert [each() for each in references] == [None] * 3


READS = """
import sys, torch
from minato.caching import MemoryCache
from minato.sharing import SharedList
shared, cache = SharedList([torch.arange(3)]), MemoryCache(9999)
cache.put(b"key", torch.arange(3))
before = {*sys.modules}
shared[0], cache.get(b"key")
print({*sys.modules} - before)
"""


def test_reading_a_tensor_imports_nothing() -> None:
    """A child that is forked while a thread imports a module waits for its lock forever."""
    assert output("-c", READS) == "set()\n"


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_tensors_that_pickle_cannot_load_come_back(dtype: torch.dtype) -> None:
    items = [torch.tensor([1, 2]).to(dtype), torch.tensor(3).to(dtype)]
    shared = SharedList(items)
    assert [one.dtype for one in shared] == [dtype, dtype]
    assert [one.tolist() for one in shared] == [[1, 2], 3]


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_arrays_of_other_shapes_are_not_equal(make: Any) -> None:
    shapes = [(), (1,), (3,), (1, 3), (0,)]
    for one, other in itertools.product(shapes, shapes):
        assert (SharedList([make(one)]) == [make(other)]) == (one == other)


CODES = [*np.typecodes["AllInteger"], *"?efdgFDG", "S3", "U3", "V5", "M8[s]", "m8[ns]", ">i4"]


@pytest.mark.parametrize("code", [*CODES, "i4,M8[s]"])
def test_arrays_come_back_equal(code: str) -> None:
    dtype = np.dtype(code)
    for shape in ((), (7,), (0, 3), (2, 3)):
        content = bytes(i % 2 for i in range(math.prod(shape) * dtype.itemsize))
        array = np.ndarray(shape, dtype, content or b"0")
        for each in (array, array.copy(order="F")):
            shared = minato.share(each)
            assert (shared.dtype, shared.shape) == (dtype, shape)
            assert shared.tobytes() == content


def test_what_a_file_maps_stays(tmp_path: Path) -> None:
    dataset: Any = Files()
    np.save(tmp_path / "array.npy", dataset.features)
    mapped = np.load(tmp_path / "array.npy", mmap_mode="r")
    with (tmp_path / "array.npy").open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    kept = {"mapped": mapped, "view": np.asarray(mapped)[5:], "bytes": np.frombuffer(buffer, "u1")}
    dataset.parts = dict(kept)
    minato.share(dataset)
    assert all(dataset.parts[name] is array for name, array in kept.items())
    assert isinstance(dataset.paths, SharedList)
    assert minato.share(mapped) is mapped


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([1, Unequal()], r"SharedList\[1\], a Unequal, cannot be shared.*equals only itself"),
        ([{"a": Unequal()}], r"SharedList\[0\]\['a'\], a Unequal, cannot be shared"),
        ([threading.Lock()], r"SharedList\[0\], a lock, cannot be shared: "),
        ([("a", lambda: 1)], r"SharedList\[0\]\[1\], a function, cannot be shared"),
        ([[1, 2], [3, Unequal()]], r"SharedList\[1\]\[1\], a Unequal, cannot be shared"),
        ({Color.RED: 1}, r"its key <Color.RED: 1> is a Color; keys can be"),
        ({"k": Unequal(), "j": 1}, r"SharedDict\['k'\], a Unequal, cannot be shared"),
        *(
            ({1: 2, nan: 3}, "its key .*nan.* numbers but NaN")
            for nan in (float("nan"), complex(0, float("nan")), np.float32("nan"))
        ),
    ],
)
def test_what_cannot_be_shared_is_named(items: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        SharedDict(items) if isinstance(items, dict) else SharedList(items)


def test_changes_raise() -> None:
    items, table = minato.share([1, 2, 3]), minato.share({"a": 1})
    of_list = {"append": (4,), "__setitem__": (0, 1), "sort": (), "__iadd__": ([1],), "clear": ()}
    of_dict = {"__setitem__": ("a", 2), "pop": ("a",), "__delitem__": ("a",)}
    for shared, changes in ((items, of_list), (table, of_dict)):
        for name, arguments in changes.items():
            with pytest.raises(TypeError, match=f"{type(shared).__name__} cannot be changed"):
                getattr(shared, name)(*arguments)
    with pytest.raises(TypeError, match="SharedDict cannot be changed"):
        table.update(b=2)
    array = minato.share(np.arange(5))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_shared_list_is_a_sequence() -> None:
    items = SharedList(["b", "a", "b"])
    assert items.index("a") == 1
    assert items.count("b") == 2
    assert "a" in items
    assert [*reversed(items)] == ["b", "a", "b"]
    assert items + ["c"] == ["b", "a", "b", "c"] == [*"ba"] + SharedList(["b", "c"])
    assert items == ("b", "a", "b")
    copies: Any = items.copy(), SharedDict({"a": 1}).copy()
    assert copies == (["b", "a", "b"], {"a": 1})
    assert items != ["b"]
    assert items != "bab"
    assert copy.deepcopy(items) is items
    assert np.asarray(SharedList([1, 2])).tolist() == [1, 2]
    assert repr(items) == "SharedList(3 items: 'b', 'a', 'b')"
    assert repr(SharedDict({"a": 1})) == "SharedDict(1 items: 'a')"
    with pytest.raises(TypeError, match="unhashable"):
        hash(items)


def test_the_large_parts_of_a_dataset_are_shared() -> None:
    dataset, plain = Files(), Files()
    dataset.parts["sub"] = [Subset(Files(), range(3))]
    assert minato.share(dataset) is dataset
    within = dataset.parts["sub"][0].dataset.paths
    assert [*map(type, (dataset.paths, dataset.parts["train"], within))] == [SharedList] * 3
    assert type(dataset.boxes) is SharedDict
    assert dataset.samples is dataset.imgs
    assert type(dataset.features) is np.ndarray
    for name in ("paths", "samples", "boxes"):
        assert getattr(dataset, name) == getattr(plain, name)
    assert np.array_equal(dataset.features, plain.features)
    assert [type(each) for each in (dataset.classes, dataset.name)] == [list, str]
    assert type(dataset.parts["few"]) is list
    again = dataset.paths
    assert minato.share(dataset).paths is again
    first = Files()
    minato.share(ConcatDataset([first, Subset(first, list(range(N)))]))
    assert isinstance(first.paths, SharedList)


def test_nothing_changes_if_a_part_cannot_be_shared() -> None:
    dataset = Files()
    dataset.parts["bad"] = [*range(N), Unequal()]
    with pytest.raises(TypeError, match=r"dataset\.parts\['bad'\]\[2000\], a Unequal"):
        minato.share(dataset)
    assert type(dataset.paths) is list
    assert type(dataset.parts["train"]) is list


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (set(range(N)), "set of 2000 items"),
        (defaultdict(int, enumerate(range(N))), "defaultdict of 2000 items"),
        (OrderedDict(enumerate(range(N))), "OrderedDict of 2000 items"),
        (np.array([None] * 20000), "ndarray of object"),
    ],
)
def test_other_containers_are_named(value: Any, named: str) -> None:
    dataset = Files()
    dataset.parts = value
    with pytest.raises(TypeError, match=rf"dataset\.parts is a {named}, which cannot be shared"):
        minato.share(dataset)
    assert type(dataset.paths) is list


@pytest.mark.parametrize("value", [5, "text", None, Files, object()])
def test_what_has_nothing_to_share_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="has nothing to share: pass a dataset"):
        minato.share(value)


METHODS = ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]


@pytest.mark.parametrize("method", METHODS)
def test_workers_see_the_same_memory(method: str) -> None:
    dataset = minato.share(Files())
    dataset.view = dataset.features[5:50, ::3]
    loader = DataLoader(dataset, 100, num_workers=2, multiprocessing_context=method)
    labels, features, numbers, pids, inodes = zip(*loader, strict=True)
    assert inodes[0][0] == dataset.inodes()
    assert len(set(dataset.inodes().split())) == 1
    assert torch.cat(labels).tolist() == [i % 7 for i in range(N)]
    assert torch.equal(torch.cat(features), torch.from_numpy(dataset.features.copy()))
    assert torch.cat(numbers).tolist() == list(range(N))
    assert os.getpid() not in torch.cat(pids)


def inode_of(address: int) -> str:
    """The file that is mapped at an address, by its number."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line.split()[4]
    raise AssertionError(hex(address))


@pytest.fixture
def num_segments() -> int:
    gc.collect()  # what earlier tests have left
    return Segment.num_living()


def test_the_memory_is_freed_with_its_last_user(num_segments: int) -> None:
    descriptors = psutil.Process().num_fds()
    shared = minato.share({"paths": ["x"] * N, "more": list(range(N))})
    words = shared["paths"]
    assert Segment.num_living() == num_segments + 1
    memory = weakref.ref(shared._memory)
    del shared
    assert words == ["x"] * N
    del words
    assert memory() is None
    assert Segment.num_living() == num_segments
    assert psutil.Process().num_fds() == descriptors


def test_a_view_costs_what_it_shows() -> None:
    rows = list(torch.arange(100_000).view(1000, 100))
    shared: Any = minato.share([{"row": row} for row in rows])
    assert all(torch.equal(one["row"], row) for one, row in zip(shared, rows, strict=True))
    assert len(shared._memory.array) < 2 * 800_000
    numbers = np.arange(20_000)
    for view in (
        np.lib.stride_tricks.sliding_window_view(numbers, 1000),
        np.lib.stride_tricks.sliding_window_view(numbers[::-2], 100),
        np.broadcast_to(np.float32(7), (1000, 1000)),
        numbers.reshape(100, 200).T,
    ):
        array = minato.share(view)
        assert np.array_equal(array, view)
        assert array.strides == view.strides
        memory = shared_base(array)
        assert memory is not None
        assert len(memory.memory.array) <= numbers.nbytes + 16


def test_an_array_keeps_the_memory(num_segments: int) -> None:
    row = minato.share(np.arange(1000).reshape(10, 100))[3]
    assert type(row) is np.ndarray
    assert row.tolist() == list(range(300, 400))
    assert Segment.num_living() == num_segments + 1
    assert pickle.loads(pickle.dumps(row)).tolist() == row.tolist()
    del row
    assert Segment.num_living() == num_segments


def test_without_workers_that_see_it_a_pickle_holds_the_content(tmp_path: Path) -> None:
    torch.save(minato.share(Files()), tmp_path / "dataset.pt")
    found = torch.load(tmp_path / "dataset.pt", weights_only=False)
    assert found.samples == Files().samples
    assert found.boxes == Files().boxes
    assert np.array_equal(found.features, Files().features)


def read_in_child(shared: Any, connection: Any) -> None:
    connection.send([*shared[:3], len(shared)])


def test_a_process_of_multiprocessing_maps_it_too() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_in_child, args=(SharedList([*"abcde"]), theirs))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == ["a", "b", "c", 5]
    process.join(60)


def test_private_memory_of_forked_workers_does_not_grow() -> None:
    grown = []
    for items in (Words(200_000), minato.share(Words(200_000))):
        _, before, after, _ = DataLoader(items, 1, num_workers=1, collate_fn=itemgetter(0))
        grown.append(after - before)
    assert grown[0] > 10 << 20
    assert grown[1] < 2 << 20


class Words(Dataset[int]):
    """Reads all of its words in its third sample; returns the private memory of the process."""

    def __init__(self, count: int) -> None:
        self.words = [f"a word that is number {i}" for i in range(count)]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            for word in self.words:
                assert word
        maps = psutil.Process().memory_maps()
        return sum(part.private_dirty for part in maps if part.path in ("[anon]", "[heap]"))


def test_a_dataset_may_be_frozen() -> None:
    @dataclass(frozen=True)
    class Frozen:
        words: Any
        function: Callable[[int], int]

    frozen = minato.share(Frozen([str(i) for i in range(N)], lambda i: i))
    assert isinstance(frozen.words, SharedList)


def warned(loader: DataLoader[Any]) -> list[str]:
    """Texts of the warnings of an epoch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", minato.MinatoWarning)
        list(loader)
    return [str(each.message) for each in caught if each.category is minato.MinatoWarning]


class TestWarning:
    """Where forked workers copy a dataset's objects, a warning says what to do, once."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pools, "_LEAST_NBYTES", 8 << 20)
        monkeypatch.setattr(pools, "_AFTER_BATCHES", (3,))
        monkeypatch.setattr(pools.CopiedObjects, "warned", False)

    def test_it_names_the_attribute_once(self) -> None:
        words = Words(400_000)
        text = warned(DataLoader(words, 1, num_workers=1))[0]
        assert "dataset.words holds 400000 Python objects" in text
        assert "dataset = minato.share(dataset)" in text
        assert warned(DataLoader(words, 1, num_workers=1)) == []

    @pytest.mark.parametrize("method", ["fork", "thread"])
    def test_not_where_nothing_is_copied(self, method: str) -> None:
        words: Any = minato.share(Words(400_000)) if method == "fork" else Words(400_000)
        options: Any = {"workers": "thread"} if method == "thread" else {}
        assert warned(DataLoader(words, 1, num_workers=1, **options)) == []

    def test_not_where_little_is_read(self) -> None:
        unread: Any = Files()
        # Beside other programs, a worker had 15 MiB of its own, which are half of what 400,000 words take.
        unread.unread = [f"a word that is number {i}" for i in range(1_000_000)]
        assert warned(DataLoader(unread, 100, num_workers=1)) == []


@dataclass(frozen=True, slots=True)
class Slotted:
    words: Any
    size: int = 3


class Pair(NamedTuple):
    words: Any
    size: int


class Pairs(tuple):  # type: ignore[type-arg]
    """A tuple with an attribute."""


def test_what_holds_a_list_in_slots_or_tuples_is_shared() -> None:
    words = [str(i) for i in range(N)]
    files: Any = Files()
    pairs = Pairs((words, 1))
    pairs.name = "pairs"  # type: ignore[attr-defined]
    files.slotted, files.pair, files.pairs = Slotted(words), Pair(words, 2), pairs
    files.twice = (files.pair, (files.pair,))
    minato.share(files)
    shared = files.slotted.words
    assert isinstance(shared, SharedList)
    assert files.slotted == Slotted(shared)
    assert type(files.pair) is Pair
    assert (files.pairs[0] is shared, files.pairs.name) == (True, "pairs")
    for pair in (files.pair, files.twice[0], files.twice[1][0]):
        assert pair.words is shared


def test_a_deep_structure_is_shared() -> None:
    files: Any = Files()
    held: Any = [str(i) for i in range(N)]
    for _ in range(20_000):
        held = (held,)
    files.held = held
    minato.share(files)
    held = files.held
    while type(held) is tuple:
        (held,) = held
    assert isinstance(held, SharedList)


@pytest.mark.parametrize("items", [[3, 1, 2], ["a", "bb", ""], [b"a", b""], [(1, "a"), (2, "b")]])
def test_indices_are_those_of_lists(items: list[Any]) -> None:
    shared: SharedList[Any] = SharedList(items)
    size = len(items)
    assert [shared[i] for i in range(-size, size)] == items * 2
    assert shared[np.int64(1)] == shared[True] == items[1]
    for part in (slice(None), slice(1, 3), slice(None, None, -2), slice(-2, 99), slice(4, 1)):
        assert shared[part] == items[part]
    for index in (size, -size - 1, 2**62, 2**70):
        with pytest.raises(IndexError, match=f"index {index} is out of range for {size} items"):
            shared[index]
    for odd in ("0", 1.0, None):
        with pytest.raises(TypeError):
            shared[odd]
