"""What travels between processes arrives as from torch's loader: samples, batches, the dataset, errors."""

from __future__ import annotations

import collections
import functools
import io
import multiprocessing
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import heap, resource_sharer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import get_worker_info

import minato
from minato import DataLoader
from minato._core.segment import Segment
from minato._support import pickling
from minato.batching import arena
from minato.batching.serialization import SharedStore
from tests import datasets, subprocesses
from tests.datasets import Numbers, drain, flat
from tests.edges.travellers import (
    ALIASED,
    KEPT,
    KEPT_EXACTLY,
    LEGACY,
    MAKERS,
    SENT_TO_ONE_CHILD,
    Holder,
    Samples,
    by_multiprocessing,
    itself,
    shares,
    shown,
)
from tests.threads import run_together

pytestmark = [
    pytest.mark.large,
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(ComplexHalf|Sparse CSR|nested|Sparse inv).*:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]
METHODS = ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No end of a pipe, nor the thread in which multiprocessing hands descriptors over."""
    yield
    resource_sharer.stop()
    while KEPT:
        KEPT.pop().close()


def one_worker(method: str) -> dict[str, Any]:
    return {"num_workers": 1, "multiprocessing_context": method}


def sent(value: Any, purpose: pickling.Purpose = "result") -> Any:
    """An object after its way through shared memory."""
    store = SharedStore(Segment(1 << 22))
    return store.get(*store.put(lambda nbytes: 4096, value, purpose))


# ---- one process -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_a_result_arrives_as_multiprocessing_sends_it(name: str) -> None:
    assert shown(sent(MAKERS[name]())) == shown(by_multiprocessing(MAKERS[name]()))


CHANGED = {
    *("registered array", "copyreg", "subclass of array", "memmap", "views of a dict"),
    "far apart",
}
"""Their own reducers change them."""
STAY = {"tensor of inference"}
"""Samples that no other worker gets, where that shows."""


@pytest.mark.parametrize("name", sorted({*MAKERS, *KEPT_EXACTLY} - CHANGED - STAY))
def test_a_sample_arrives_as_it_is(name: str) -> None:
    """A result does, too, where torch's workers would change it."""
    make = (MAKERS | KEPT_EXACTLY)[name]
    assert shown(sent(make(), "sample")) == shown(make())
    if name in KEPT_EXACTLY:
        assert shown(sent(make())) == shown(make())


def test_attributes_of_a_tensor_reach_the_collate_fn() -> None:
    tensor = torch.ones(2)
    tensor.note = "kept"  # type: ignore[attr-defined]
    assert sent(tensor, "sample").note == "kept"
    assert not hasattr(sent(tensor), "note")
    assert not hasattr(by_multiprocessing(tensor), "note")


@pytest.mark.parametrize("name", ALIASED)
def test_tensors_that_share_memory_still_do(name: str) -> None:
    expected = shares(by_multiprocessing(ALIASED[name]()))
    assert shares(sent(ALIASED[name]())) == expected
    if name != "one address":
        assert shares(ALIASED[name]()) == expected


VIEWS = st.lists(
    st.tuples(st.integers(0, 900), st.integers(1, 60), st.integers(1, 4), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(VIEWS)
def test_any_views_of_one_storage(views: list[tuple[int, int, int, bool]]) -> None:
    def make() -> list[torch.Tensor]:
        storage = torch.arange(1200, dtype=torch.float32)
        made = [storage[at : at + count * step : step] for at, count, step, _ in views]
        return [
            each.view(torch.int32) if as_int and each.is_contiguous() else each
            for each, (*_, as_int) in zip(made, views, strict=True)
        ]

    before, after = make(), sent(make())
    assert [each.tolist() for each in after] == [each.tolist() for each in before]
    for each in (*before, *after):
        each.zero_()
    assert shares(after) == shares(before)


def test_little_is_sent_of_a_large_storage() -> None:
    large = torch.zeros(1 << 20)
    for views in ([large[:10], large[-10:]], [large.view(1024, 1024)[:, 3]], [large[5:5]]):
        assert sum(raw.nbytes for raw in pickling.dumps(views, "result")[1]) < 10_000


def test_each_registered_type_has_an_example() -> None:
    """A type that a new version of Python or torch registers needs one, too."""
    found: set[type] = set()

    def look(value: Any) -> None:
        found.add(type(value))
        for part in value if isinstance(value, (list, tuple)) else ():
            look(part)

    for name in MAKERS.keys() - {"recursive"}:
        look(MAKERS[name]())
    found.add(heap.Arena)  # that of every shared value, which is sent to a child only
    registered = {
        each
        for each in pickling.process_reducers()
        if each.__module__.startswith(("torch", "multiprocessing", "builtins", "socket"))
        and not {"cuda", "xpu"} & {*each.__module__.split(".")}  # no device
        and each.__name__.removesuffix("Tensor").removesuffix("Storage") not in LEGACY  # no objects
    }
    assert len(registered) >= 10
    assert registered - found == set()


# ---- batches ---------------------------------------------------------------------------------


def seen(make: Any, method: str, batch_size: int | None) -> dict[str, Any]:
    """What arrives of each object."""
    batches = make(
        Samples(sorted({*MAKERS, *ALIASED})),
        batch_size,
        collate_fn=itself,
        timeout=60,
        **one_worker(method),
    )
    samples = batches if batch_size is None else flat(batches)
    return {name: shares(value) if name in ALIASED else shown(value) for name, value in samples}


@functools.cache
def seen_by_torch(batch_size: int | None) -> dict[str, Any]:
    return seen(TorchLoader, "fork", batch_size)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("method", ["fork", *METHODS])
def test_samples_arrive_as_from_torchs_loader(method: str, batch_size: int | None) -> None:
    assert seen(DataLoader, method, batch_size) == seen_by_torch(batch_size)


def test_a_pipe_arrives_although_its_worker_has_no_more_work() -> None:
    """What was sent into it is with the worker, which stays until the loop has it."""
    samples = Samples(["none", "none", "connection"])
    loader = DataLoader(samples, None, collate_fn=itself, prefetch_factor=2, **one_worker("fork"))
    kinds = [shown(value)[0] for _, value in loader]
    assert kinds == ["NoneType", "NoneType", "Connection"]


# ---- the dataset -----------------------------------------------------------------------------


def held(make: Any, method: str, names: list[str]) -> list[str]:
    """What a worker sees of objects that the dataset holds."""
    objects = {name: (MAKERS | SENT_TO_ONE_CHILD)[name]() for name in names}
    return [*make(Holder(objects), batch_size=None, **one_worker(method))]


@pytest.mark.parametrize("method", METHODS)
def test_the_dataset_arrives_as_with_torchs_loader(method: str) -> None:
    """Once pickled for all workers, and once for each, as it must be where a descriptor goes with it."""
    names = [*(MAKERS.keys() - SENT_TO_ONE_CHILD.keys())]
    expected = held(TorchLoader, method, [*names, *SENT_TO_ONE_CHILD])
    assert held(DataLoader, method, names) == expected[: len(names)]
    assert held(DataLoader, method, [*names, *SENT_TO_ONE_CHILD]) == expected


class Counting(Numbers):
    """Writes to its tensors; a sample is what they held before."""

    size = 8

    def __init__(self, tensors: dict[str, torch.Tensor], lock: Any) -> None:
        self.tensors, self.lock = tensors, lock

    def __getitem__(self, index: int) -> Any:
        before = [float(each.detach().sum()) for each in self.tensors.values()]
        with torch.no_grad():
            for each in self.tensors.values():
                each.view(-1)[index] += 1
        return before


def counted(make: Any, method: str, lock: Any = None, **arguments: Any) -> Any:
    """What the workers and the loop see of each other's writes, and of views of one storage."""
    whole = torch.zeros(30)
    tensors = {
        "plain": torch.zeros(8),
        "shared": torch.zeros(8).share_memory_(),
        "view": whole[5:13],
        "other view": whole[9:17],
        "parameter": torch.nn.Parameter(torch.zeros(8)),
        "from NumPy": torch.from_numpy(np.zeros(8)),
    }
    loader = make(Counting(tensors, lock), batch_size=None, **one_worker(method), **arguments)
    first = [*loader]
    tensors["plain"].fill_(5)
    return first, [*loader], [each.tolist() for each in tensors.values()], whole.tolist()


@pytest.mark.parametrize(
    ("method", "locked"), [("forkserver", False), ("forkserver", True), ("spawn", False)]
)
def test_tensors_of_the_dataset_are_shared(method: str, locked: bool) -> None:
    """Also where the dataset is pickled for each worker, because of a pipe that it holds."""
    with multiprocessing.Pipe()[0] as pipe:
        got = counted(DataLoader, method, pipe if locked else None)
    assert got == counted_by_torch(method)


@functools.cache
def counted_by_torch(method: str) -> Any:
    return counted(TorchLoader, method)


def test_persistent_workers_see_what_the_loop_writes() -> None:
    got = counted(DataLoader, "forkserver", persistent_workers=True, compat="torch")
    assert got == counted(TorchLoader, "forkserver", persistent_workers=True)


def tensors(count: int) -> datasets.Samples:
    return datasets.Samples(torch.full((3,), float(i)) for i in range(count))


def test_more_tensors_than_can_be_shared_are_copied(caplog: pytest.LogCaptureFixture) -> None:
    """Than a fork server takes descriptors."""
    pickling._say_copied.cache_clear()
    loader = DataLoader(tensors(300), 50, **one_worker("forkserver"))
    with caplog.at_level("WARNING", "minato"):
        assert torch.cat([*loader])[:, 0].tolist() == [*range(300)]
        assert sum(len(batch) for batch in loader) == 300
    (said,) = [each.getMessage() for each in caplog.records if "copied" in each.getMessage()]
    assert "more than 200" in said
    assert "set_sharing_strategy" in said


def test_without_shared_memory_tensors_are_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = Mock(side_effect=RuntimeError("unable to allocate shared memory: no space left"))
    monkeypatch.setattr(torch.UntypedStorage, "share_memory_", full)
    loader = DataLoader(tensors(3), 3, **one_worker("forkserver"))
    with caplog.at_level("WARNING", "minato"):
        assert next(iter(loader))[:, 0].tolist() == [0, 1, 2]
    assert "no space left" in caplog.text


class Verified(Numbers):
    """Counts wrong numbers in what it holds; the first worker dies."""

    size = 24

    def __init__(self, marker: Path) -> None:
        self.numbers = np.arange(2_000_000)
        self.marker = marker

    def __getitem__(self, index: int) -> Any:
        if index == 12 and not self.marker.exists():
            self.marker.touch()
            os._exit(1)
        return int((self.numbers != np.arange(2_000_000)).sum()), np.ones(50_000)


@pytest.mark.filterwarnings("ignore:A worker:RuntimeWarning", "ignore:.*worker:RuntimeWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_later_worker_gets_the_dataset_as_it_was(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dataset is larger than the memory of a batch, and changes after the start."""
    monkeypatch.setattr(arena, "_RESERVE_BYTES", 1 << 26)
    monkeypatch.setattr(arena, "_LEAST_RESERVE_BYTES", 1 << 26)
    dataset = Verified(tmp_path / "died")
    wrong = []
    for batch, _ in DataLoader(dataset, 2, **one_worker(method)):
        wrong += batch.tolist()
        dataset.numbers[:] = 0
    assert wrong == [0] * 24
    assert dataset.marker.exists()


class Meeting:
    """Is pickled while another thread pickles one, too."""

    def __init__(self, barrier: threading.Barrier | None = None) -> None:
        self.barrier = barrier

    def __reduce__(self) -> Any:
        if self.barrier is not None:
            self.barrier.wait(60)
        return Meeting, ()


class Named(Numbers):
    size = 100

    def __init__(self, number: int, barrier: threading.Barrier) -> None:
        self.names = minato.SharedList([f"{number}-{i}" for i in range(100)])
        self.meeting = Meeting(barrier)
        self.labels = minato.SharedList([number] * 100)

    def __getitem__(self, index: int) -> Any:
        return self.names[index], self.labels[index]


def test_threads_start_loaders_of_shared_lists_at_once() -> None:
    barrier = threading.Barrier(2)
    got: dict[int, Any] = {}

    def load(number: int) -> None:
        ((names, labels),) = DataLoader(Named(number, barrier), 100, **one_worker("forkserver"))
        got[number] = names[-1], labels.tolist()

    run_together(lambda: load(0), lambda: load(1), limit_s=100)
    assert got == {number: (f"{number}-99", [number] * 100) for number in range(2)}


class Writing(Numbers):
    """Writes a line for each sample to a file, which is flushed when the dataset is destroyed."""

    size = 6
    file: Any = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            self.file = (self.folder / str(os.getpid())).open("w")
        self.file.write(f"{index}\n")
        return index

    def __del__(self) -> None:
        if self.file is not None:
            info = get_worker_info()
            self.file.write(f"end of {info.id}\n" if info is not None else "no worker\n")
            self.file.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_destroys_its_dataset(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.workers.supervision._GRACE_S", 60.0)  # it may get no time
    loader = DataLoader(Writing(tmp_path), 2, **one_worker(method))
    assert sum(len(batch) for batch in loader) == 6
    (written,) = tmp_path.iterdir()
    assert written.read_text().splitlines() == [*"012345", "end of 0"]


@pytest.mark.slow
def test_a_context_of_another_package_sends_the_dataset_by_its_own_pickler() -> None:
    pytest.importorskip("joblib")
    assert subprocesses.run("foreign_context.py") == "[0, 1, 2] [3, 4, 5]\n"


# ---- errors ----------------------------------------------------------------------------------


def local_error() -> type[Exception]:
    class LocalError(Exception):
        pass

    return LocalError


class Raising(Numbers):
    """Raises an exception whose class cannot be sent, or is found in the worker alone."""

    size = 4

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __getitem__(self, index: int) -> int:
        if index < 2:
            return index
        if self.kind == "local":
            raise local_error()("file 5 is broken")
        module = ModuleType("found_in_the_worker")
        module.Own = type("Own", (Exception,), {"__module__": module.__name__})  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        raise module.Own("file 5 is broken")


@pytest.mark.parametrize("batch_size", [None, 2])
@pytest.mark.parametrize("kind", ["local", "worker's"])
def test_the_text_of_an_exception_arrives_without_its_class(
    kind: str, batch_size: int | None
) -> None:
    iterator = iter(DataLoader(Raising(kind), batch_size, **one_worker("fork")))
    for _ in range(2 if batch_size is None else 1):
        next(iterator)
    name = "LocalError" if kind == "local" else "Own"
    with pytest.raises(RuntimeError, match=f"{name}: file 5 is broken") as caught:
        next(iterator)
    assert caught.type is RuntimeError
    assert "in DataLoader worker process 0" in str(caught.value)
    assert "in __getitem__" in str(caught.value)


class OneWay:
    """An index that reaches the worker, and cannot be sent back."""

    def __init__(self, arrived: bool = False) -> None:
        self.arrived = arrived

    def __reduce__(self) -> Any:
        if self.arrived:
            raise TypeError("not back")
        return OneWay, (True,)


class RaisingAlways(Numbers):
    def __getitem__(self, index: Any) -> int:
        raise KeyError("file 5 is broken")


def test_the_text_of_an_exception_arrives_without_its_index() -> None:
    loader = DataLoader(RaisingAlways(2), sampler=[OneWay(), OneWay()], num_workers=1)
    with pytest.raises(KeyError, match="file 5 is broken"):
        next(iter(loader))


REFUSED = [
    np.arange(3)[::-1],
    np.zeros(3, [("a", "i1"), ("b", "<i4")])["b"],
    np.arange(1)[::-1],
    np.zeros(1, [("a", "i1"), ("b", "<i4")])["b"],
    np.arange(3).astype(np.ulonglong),
]
"""Arrays that torch does not take."""


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("order", ["strict", "batch"])
def test_arrays_that_torch_refuses_are_refused(order: Any, num_workers: int) -> None:
    """Whichever worker collates them."""
    dataset = datasets.Samples(array for array in REFUSED for _ in range(4))
    batches = [[i, i + 1] for i in range(0, len(dataset), 2)]
    workers = datasets.forked(num_workers)
    found, errors = drain(DataLoader(dataset, batch_sampler=batches, order=order, **workers))
    assert found == []
    assert sorted(map(type, errors), key=str) == [TypeError] * 2 + [ValueError] * 8


class Refusing:
    """Cannot be pickled, and says so."""

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


OPEN = "open or create it at its first use in the worker, or dataset.held, which holds it."
REMEDIES: dict[str, tuple[Callable[[], Any], str]] = {
    "file": (lambda: open(os.devnull, "rb"), OPEN),  # noqa: SIM115
    "text": (lambda: io.TextIOWrapper(io.BytesIO()), OPEN),
    "lock": (threading.Lock, OPEN),
    "generator": (lambda: (i for i in "ab"), OPEN),
    "other": (Refusing, "create it in worker_init_fn or at its first use in the worker, or use"),
}


@pytest.mark.parametrize("kind", REMEDIES)
@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_the_remedy_is_that_of_the_part(kind: str) -> None:
    make, remedy = REMEDIES[kind]
    part, path = make(), re.escape("dataset.held['a'].args[1].one")
    holder = Holder({"a": functools.partial(print, 1, Slotted(part))})
    with pytest.raises(minato.NotPicklableError, match=f"^{path} cannot") as caught:
        pickling.check_picklable("dataset", holder)
    assert remedy in str(caught.value)
    assert ("='fork'" in str(caught.value)) == (kind == "other")
    if hasattr(part, "close"):
        part.close()


class Slotted:
    __slots__ = ("one",)

    def __init__(self, one: Any) -> None:
        self.one = one

    def method(self) -> None:
        pass


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "[0]": lambda part: collections.deque([part]),
    "[1][0]": lambda part: (1, [part]),
    "['a']": lambda part: collections.OrderedDict(a=part),
    "[a tuple]": lambda part: {(1, 2): part},
    ".one": lambda part: SimpleNamespace(one=part),
    ".keywords['end']": lambda part: functools.partial(print, end=part),
    ".default_factory.args[0]": lambda part: collections.defaultdict(functools.partial(id, part)),
    ".__self__.one": lambda part: Slotted(part).method,
    ".part": lambda part: lambda: part,
    ".two": lambda part: _referring_back(part),
}


def _referring_back(part: Any) -> SimpleNamespace:
    holder = SimpleNamespace(one=None, two=part)
    holder.one = lambda: holder
    return holder


@pytest.mark.parametrize("path", HOLDERS)
def test_the_part_is_named(path: str) -> None:
    holder = Holder(HOLDERS[path](Refusing()))
    path = re.escape(f"dataset.held{path} cannot be pickled")
    with pytest.raises(minato.NotPicklableError, match=f"^{path}.*not this one.*a Refusing:"):
        pickling.check_picklable("dataset", holder)


class Saying:
    """Holds what cannot be pickled, and says what to do."""

    def __init__(self) -> None:
        self.part = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("not with this lock")


class WithoutLock(Holder):
    def __init__(self, held: Any) -> None:
        self.lock = threading.Lock()
        super().__init__(held)

    def __getstate__(self) -> Any:
        return {"held": self.held}


def _forked_lock() -> Any:
    if sys.version_info < (3, 11, 5):
        pytest.skip("this Python does not refuse it")
    return multiprocessing.get_context("fork").Lock()


@pytest.mark.parametrize("make", [Holder, WithoutLock])
@pytest.mark.parametrize("part", [Saying, _forked_lock])
def test_what_refuses_is_named_and_not_what_it_holds(make: Any, part: Any) -> None:
    held = part()
    message = (
        rf"^dataset\.held cannot.*(not with this lock|same context).* a {type(held).__name__}:"
    )
    with pytest.raises(minato.NotPicklableError, match=message):
        pickling.check_picklable("dataset", make(held))


def test_a_socket_of_the_dataset_travels() -> None:
    one, other = socket.socketpair()
    with one, other:
        pickling.check_picklable("dataset", one)
