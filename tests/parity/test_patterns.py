"""How programs of others use the loader: the table of ``docs/reference/compatibility.md``, each row as a small program.

A program makes and uses loaders of the class that it is given, and returns what it saw; minato's must give what torch's
gives. Rows whose programs are more than that have tests of their own below.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import itertools
import multiprocessing
import operator
import pickle
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

import minato
from minato._support.loader_class import TorchDataLoader
from tests.behaviour.states import HowFar, plain
from tests.datasets import InOrder, Numbers, Parts, Roll, wait_until
from tests.edges import test_indices, test_replaced_parts
from tests.parity.harness import describe
from tests.parity.material import Repeating, multi_epochs


@pytest.fixture(autouse=True)
def without_files_of_ended_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch's loader leaves a file in /dev/shm where a worker is ended while it hands over a tensor."""
    yield
    if "ended by hand" in request.node.name:
        for path in Path("/dev/shm").glob("torch_*"):
            if not psutil.pid_exists(int(path.name.split("_")[1])):
                path.unlink(missing_ok=True)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
Program = Callable[[Any, int], Any]
PATTERNS: dict[str, Program] = {}


def pattern(row: str) -> Callable[[Program], Program]:
    """Enter a program for a row of the page, by the name in its first column."""

    def enter(program: Program) -> Program:
        PATTERNS[row] = program
        return program

    return enter


def permuting(dataset: Any) -> RandomSampler:
    return RandomSampler(dataset, generator=torch.Generator().manual_seed(7))


def living() -> int:
    """How many worker processes there are, once those that were told to end have had time to."""
    until = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < until:
        time.sleep(0.01)
    return len(multiprocessing.active_children())


# ---- subclasses


@pattern("one endless iterator")
def one_endless_iterator(base: Any, workers: int) -> Any:
    dataset = Numbers(10)
    loader = multi_epochs(base)(dataset, 4, sampler=permuting(dataset), num_workers=workers)
    epochs = [plain(loader) for _ in range(3)]
    started = plain(itertools.islice(loader, 2))
    return epochs, started, plain(loader), len(loader)


class Scaled(Numbers):
    factor = 1

    def __getitem__(self, index: int) -> int:
        return self.factor * index


class NeedsBoth(Scaled):
    """The same, where two workers run: one that a short epoch does not need is not started."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.both = Roll(2)

    def __getitem__(self, index: int) -> int:
        if get_worker_info() is not None:
            self.both()
        return super().__getitem__(index)


@pattern("workers ended by hand")
def workers_ended_by_hand(base: Any, workers: int) -> Any:
    class Loader(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Repeating(self.batch_sampler))
            self.iterator: Any = None

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Any:
            if self.iterator is None:
                self.iterator = self._get_iterator()
            for _ in range(len(self)):
                yield next(self.iterator)

        def __del__(self) -> None:
            for worker in getattr(self.iterator, "_workers", ()):
                if worker.is_alive():
                    worker.terminate()
            self.close()

        def close(self) -> None:
            if hasattr(self.iterator, "_workers"):
                self.iterator._shutdown_workers()

        def reset(self) -> None:
            self.close()
            self.iterator = None

    dataset = NeedsBoth(6)
    loader = Loader(dataset, 2, num_workers=workers)
    epochs = [plain(loader), plain(loader)]
    count = len(getattr(loader.iterator, "_workers", ()))
    dataset.factor = 10
    loader.reset()
    epochs.append(plain(loader))
    loader.close()
    ended = living()
    loader.reset()
    epochs.append(plain(loader))
    del loader
    return epochs, count, ended, living()


@pattern("private iterator shut down")
def private_iterator_shut_down(base: Any, workers: int) -> Any:
    seen: list[Any] = []

    class Loader(base):  # type: ignore[misc]
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                seen.append(len(batch))
                yield batch

        def state_dict(self) -> Any:
            return {"mine": len(seen)}

        def load_state_dict(self, state: Any) -> None:
            seen.append(state["mine"])

        def __del__(self) -> None:
            if self._iterator is not None:
                self._iterator._shutdown_workers()

    loader = Loader(Numbers(5), 2, num_workers=workers, persistent_workers=workers > 0)
    epochs = [plain(loader), plain(loader)]
    state = loader.state_dict()
    loader.load_state_dict(state)
    persists = loader._iterator is not None
    del loader
    return epochs, state, persists, seen, living()


@pattern("wrapped iterator")
def wrapped_iterator(base: Any, workers: int) -> Any:
    class Wrapped:
        def __init__(self, iterator: Any) -> None:
            self.iterator = iterator

        def __iter__(self) -> Any:
            return self

        def _reset(self, loader: Any, first_iter: bool = False) -> None:
            self.iterator._reset(loader, first_iter)

        def __len__(self) -> int:
            return len(self.iterator)

        def __next__(self) -> Any:
            return -next(self.iterator)

    class Loader(base):  # type: ignore[misc]
        def _get_iterator(self) -> Any:
            return Wrapped(super()._get_iterator())

    found = []
    for persistent in {False, workers > 0}:
        loader = Loader(Numbers(7), 3, num_workers=workers, persistent_workers=persistent)
        found += [plain(loader), plain(loader), len(iter(loader))]
        del loader

    class Mapped(base):  # type: ignore[misc]
        def _get_iterator(self) -> Any:
            return map(operator.neg, super()._get_iterator())

    found.append(plain(Mapped(Numbers(7), 3, num_workers=workers)))
    return found, living()


def graph_loader(base: Any) -> Any:
    class Loader(base):  # type: ignore[misc]
        def __init__(self, data: Any, **kwargs: Any) -> None:
            self.data = data
            self.prepared: list[int] = []
            kwargs |= {"collate_fn": self.gather, "worker_init_fn": self.prepare}
            super().__init__(range(len(data)), **kwargs)

        def prepare(self, worker: int) -> None:
            self.prepared.append(worker)

        def gather(self, indices: Any) -> Any:
            return torch.stack([self.data[i] for i in indices]), len(self.prepared)

    return Loader


class OverTorch(graph_loader(TorchDataLoader)):  # type: ignore[misc]
    pass


class OverOurs(graph_loader(minato.DataLoader)):  # type: ignore[misc]
    pass


@pattern("the loader's own methods as functions")
def own_methods(base: Any, workers: int) -> Any:
    kind: Any = OverTorch if base is TorchDataLoader else OverOurs
    loader = kind(torch.arange(10) * 2, batch_size=3, num_workers=workers)
    seen = [(batch.tolist(), count) for _ in range(2) for batch, count in loader]
    if not workers:
        loader.iterator = iter(loader)
        next(loader.iterator)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    return seen, gone() is None, living()


@pattern("attributes before and after the constructor")
def attributes(base: Any, workers: int) -> Any:
    class Loader(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.num_workers = kwargs["num_workers"]
            self.prefetch_factor = 5
            self.extra, self.device, self.seed = "kept", "cuda:3", 7  # two are arguments of ours
            super().__init__(*args, **kwargs)
            self.order, self.transforms = "mine", [abs]

        def cache(self) -> str:
            return "a method"

        @contextmanager
        def prepared(self, function: Any) -> Iterator[None]:
            before = self.worker_init_fn
            self.worker_init_fn = function
            try:
                yield
            finally:
                self.worker_init_fn = before

    dataset = Scaled(6)
    loader = Loader(dataset, 2, num_workers=workers)
    with loader.prepared(double):
        changed = plain(loader)
    given = loader.prefetch_factor
    if workers:
        loader.prefetch_factor = 1
    one_each = plain(loader)
    loader.prefetch_factor = given
    if workers:
        loader.num_workers, loader.timeout = 1, 90
    loader.collate_fn = operator.itemgetter(0)
    loader.device = "cpu"
    own = loader.extra, loader.device, loader.seed, loader.order, loader.transforms, loader.cache()
    again = copy.copy(loader)
    return changed, one_each, plain(loader), own, len(loader), plain(again), again.device


def double(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.factor = 2  # type: ignore[attr-defined]


@pattern("frozen attributes by force")
def frozen_attributes(base: Any, workers: int) -> Any:
    dataset = Scaled(8)
    loader = base(dataset, 2, num_workers=workers, persistent_workers=workers > 0)
    epochs = [plain(loader)]
    dataset.factor = 3
    loader._DataLoader__initialized = False
    loader._iterator = None
    epochs.append(plain(loader))
    loader._DataLoader__initialized = True
    loader.batch_sampler.batch_size = 3
    epochs += [plain(loader), len(loader)]
    try:
        loader.batch_size = 4
    except ValueError as error:
        epochs.append(str(error))
    stream = base(Parts(12), 2, num_workers=workers, persistent_workers=workers > 0)
    for size in (2, 3, 4, 1):
        stream.batch_sampler.batch_size = size
        epochs.append(plain(stream))
    unbatched = base(Parts(6), None, num_workers=workers)
    unbatched._DataLoader__initialized = False
    unbatched.batch_size = 2
    epochs.append(plain(unbatched))
    return epochs


@pattern("__del__")
def finalizer(base: Any, workers: int) -> Any:
    ended: list[int] = []

    class Loader(base):  # type: ignore[misc]
        def __del__(self) -> None:
            ended.append(len(self))

    loader = Loader(Numbers(4), 2, num_workers=workers)
    epochs = [plain(loader), plain(loader)]
    if base is minato.DataLoader:
        batches = loader.headroom(steps=1)
        assert len([*batches]) > 0
        loader.report()
    gc.collect()
    alive = len(ended)
    del loader
    gc.collect()
    return epochs, alive


class Bare:
    """What a subclass does that sets torch's attributes itself."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        self.dataset = dataset
        self.num_workers = num_workers
        self.batch_size, self.drop_last, self.timeout = 2, False, 0
        self.sampler = SequentialSampler(dataset)
        self.batch_sampler = BatchSampler(self.sampler, 2, False)
        self.collate_fn = torch.utils.data.default_collate
        self.generator = self.worker_init_fn = None
        self.pin_memory, self.pin_memory_device, self.in_order = False, "", True
        self.persistent_workers = False
        self.prefetch_factor = 2 if num_workers else None
        self.multiprocessing_context = None
        self._dataset_kind = torch.utils.data.dataloader._DatasetKind.Map
        self._IterableDataset_len_called = self._iterator = None
        self._DataLoader__initialized = True


@pattern("a constructor that never calls its base's")
def own_constructor(base: Any, workers: int) -> Any:
    class Loader(Bare, base):  # type: ignore[misc]
        pass

    loader = Loader(Numbers(5), workers)
    again = copy.deepcopy(loader)
    names = ("set_epoch", "state_dict", "load_state_dict", "report", "consumers", "metrics_url")
    lacks = [name for name in names if hasattr(loader, name)]
    loader.in_order = False
    loader.order = "mine"
    kinds = isinstance(iter(loader), _BaseDataLoaderIter), isinstance(loader, base)
    state = loader.__getstate__() if hasattr(loader, "__getstate__") else vars(loader)
    return sorted(plain(loader)), plain(again), lacks, sorted(state), kinds, len(loader)


# ---- making one loader from another


@pattern("a loader from another's attributes")
def from_attributes(base: Any, workers: int) -> Any:
    found = []
    stream = Parts(8)
    for dataset, given in (
        (Numbers(8), {}),
        (Numbers(8), {"in_order": False}),
        (Numbers(8), {"shuffle": True}),
        (Numbers(8), {"pin_memory_device": ""}),
        (stream, {}),
        (stream, {"in_order": False}),
    ):
        loader = base(dataset, batch_size=2, num_workers=workers, **given)
        public = {name: value for name, value in vars(loader).items() if name[0] != "_"}
        for name in ("batch_size", "sampler", "drop_last", "batch_sampler"):
            public.pop(name, None)
        if dataset is not stream:
            public["batch_sampler"] = BatchSampler(range(8), 2, False)
        again = type(loader)(**public)
        found.append((sorted(plain(again), key=str), again.in_order))
    return found


@pattern("a loader from its class's signature")
def from_signature(base: Any, workers: int) -> Any:
    class Loader(base):  # type: ignore[misc]
        def __init__(self, dataset: Any, extra: int, *args: Any, **kwargs: Any) -> None:
            self.extra = extra
            super().__init__(dataset, *args, **kwargs)

    loader = Loader(Numbers(6), 3, batch_size=2, num_workers=workers, drop_last=True)
    known = {**inspect.signature(base.__init__).parameters}
    known.update(inspect.signature(Loader.__init__).parameters)
    given = {name: vars(loader)[name] for name in known if name in vars(loader)}
    for name in ("batch_size", "shuffle", "drop_last", "sampler"):
        given.pop(name, None)
    given["batch_sampler"] = BatchSampler(SequentialSampler(Numbers(6)), 3, False)
    given["multiprocessing_context"] = loader.multiprocessing_context
    again = type(loader)(**given)
    return plain(again), again.extra


@pattern("copies")
def copies(base: Any, workers: int) -> Any:
    loader = base(Numbers(6), 4, num_workers=workers)
    twins = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    next(iter(loader))
    return [plain(twin) for twin in (loader, *twins)]


# ---- iterating


@pattern("several iterators at once")
def several_iterators(base: Any, workers: int) -> Any:
    loader = base(Numbers(6), 2, num_workers=workers)
    nested = [(a.tolist(), b.tolist()) for a in loader for b in loader]
    zipped = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    cycled = plain(itertools.islice(itertools.cycle(loader), 7))
    return nested, zipped, cycled, plain(itertools.islice(loader, 1)), plain(loader)


@pattern("next() after the end")
def after_the_end(base: Any, workers: int) -> Any:
    dataset = Numbers(5)
    sampler = torch.utils.data.DistributedSampler(dataset, 1, 0, seed=3)  # type: ignore[arg-type]
    loader = base(dataset, 2, sampler=sampler, num_workers=workers)
    iterator, got, epoch = iter(loader), [], 0
    for _ in range(8):
        try:
            batch = next(iterator)
        except StopIteration:
            epoch += 1
            loader.sampler.set_epoch(epoch)
            iterator = iter(loader)
            batch = next(iterator)
        got.append(batch.tolist())
    rest = [next(iterator, "over") for _ in range(3)]
    return got, [each if isinstance(each, str) else each.tolist() for each in rest]


@pattern("the iterator's public side")
def iterator_side(base: Any, workers: int) -> Any:
    iterator = iter(base(Numbers(5), 2, num_workers=workers))
    next(iterator)
    seen = len(iterator), iterator._num_yielded, isinstance(iterator, _BaseDataLoaderIter)
    rest = [iterator._next_data().tolist(), *plain(iterator)]
    ended = {each.is_alive() for each in getattr(iterator, "_workers", ())}
    return seen, iter(iterator) is iterator, hasattr(iterator, "_workers"), rest, ended


@pattern("a patched iterator base")
def patched_base(base: Any, workers: int) -> Any:
    class Loader(base):  # type: ignore[misc]
        skip = 0
        iterator: Any = None

        def __iter__(self) -> Any:
            self.iterator = super().__iter__()
            return self.iterator

    original, reset = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter._reset

    def init(self: Any, loader: Any) -> None:
        original(self, loader)
        for i in range(loader.skip):
            next(self._sampler_iter)
            self._num_yielded = i + 1
        loader.skip = 0

    def keep(self: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter:
            reset(self, loader, first_iter)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(_BaseDataLoaderIter, "__init__", init)
        patches.setattr(_BaseDataLoaderIter, "_reset", keep)
        loader = Loader(Numbers(9), 2, num_workers=workers, persistent_workers=workers > 0)
        loader.skip = 3
        seen = [(batch.tolist(), loader.iterator._num_yielded) for batch in loader]
        return seen, plain(loader), loader.iterator._num_yielded


@pattern("lifetimes")
def lifetimes(base: Any, workers: int) -> Any:
    closed: list[str] = []

    class Opened(Parts):
        def __iter__(self) -> Iterator[int]:
            try:
                yield from super().__iter__()
            finally:
                if get_worker_info() is None:
                    closed.append("stream")

    loader = base(Opened(8), 2, num_workers=workers, persistent_workers=workers > 0)
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(loader)
    del iterator
    del loader
    return gone() is None, closed, living()


# ---- datasets


def refuse(self: Any, state: Any = None) -> Any:
    """A method for states that nobody may call."""
    raise AssertionError


class WithArguments(Numbers):
    """Its state is asked for by a loader of its own."""

    load_state_dict = refuse

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        raise AssertionError


class PartsWithArguments(Parts):
    load_state_dict = refuse

    def state_dict(self, num_samples: int, *, from_beginning: bool) -> dict[str, int]:
        raise AssertionError


class InOrderWithArguments(InOrder):
    load_state_dict = refuse

    def state_dict(self, iterator: Any) -> dict[str, int]:
        raise AssertionError


def again_from(loader: Any, batches: int) -> list[Any]:
    """An epoch that is broken off and gone on with, where the loader has that; and the next one."""
    if not isinstance(loader, minato.DataLoader):
        return [plain(loader), plain(loader)]
    iterator = iter(loader)
    got = plain(itertools.islice(iterator, batches))
    loader.load_state_dict(loader.state_dict())
    return [got + plain(loader), plain(loader)]


@pattern("state_dict() with arguments")
def state_with_arguments(base: Any, workers: int) -> Any:
    in_order = {"sampler": InOrderWithArguments(6)}
    cases = (WithArguments(6), 2, {}), (PartsWithArguments(6), 2, {}), (Numbers(6), 1, in_order)
    return [
        again_from(base(dataset, 2, num_workers=workers, **options), batches)
        for dataset, batches, options in cases
    ]


class Encoder(torch.nn.Module, Dataset[int]):  # type: ignore[misc]
    """A dataset that is a module; nobody asks for its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.weight.detach() * index

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


@pattern("a dataset that is a module")
def module_dataset(base: Any, workers: int) -> Any:
    loader = base(Encoder(), 2, num_workers=workers)
    return again_from(loader, 1), plain(loader)


class Held(Numbers):
    """What is rebuilt by a wrapper's ``__reduce__`` first takes the class itself."""

    state_dict = load_state_dict = refuse


@pattern("a class in the dataset's place")
def class_dataset(base: Any, workers: int) -> Any:
    loader = base(Held, sampler=[0, 1], num_workers=workers)
    if isinstance(loader, minato.DataLoader):
        loader.state_dict()
    vars(loader)["dataset"] = Numbers(2)
    return again_from(loader, 1), len(loader)


class Delegating(Dataset[int]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "__getitems__") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


@pattern("a dataset that passes names on")
def delegating_dataset(base: Any, workers: int) -> Any:
    found = []
    for inner in (Numbers(4), WithArguments(4), [3, 1, 2]):
        found += again_from(base(Delegating(inner), 2, num_workers=workers), 1)
    return found


@pattern("a dataset that changes between epochs")
def changing_dataset(base: Any, workers: int) -> Any:
    rows = [0, 1, 2]
    loader = base(rows, 2, num_workers=workers, shuffle=False)
    first = plain(loader), len(loader)
    rows += [3, 4]
    second = plain(loader), len(loader)
    del rows[:4]
    return first, second, plain(loader), len(loader)


class Listed(Numbers):
    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        return [{"index": index, "of": len(indices)} for index in indices]


@pattern("__getitems__")
def getitems(base: Any, workers: int) -> Any:
    loaders = (
        base(Listed(7), 3, num_workers=workers, collate_fn=list),
        base(Listed(4), 2, num_workers=workers),
    )
    return [describe([*loader]) for loader in loaders]


@pattern("a stream that the loop feeds")
def fed_stream(base: Any, workers: int) -> Any:
    waiting: queue.Queue[int] = queue.Queue()

    class Fed(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield waiting.get(timeout=60)

    got = []
    waiting.put(1)
    for batch in base(Fed(), batch_size=None):
        got.append(batch)
        if batch == 5:
            break
        waiting.put(batch + 1)  # only now is there another one
    return got, waiting.qsize()


@pattern("an endless sampler shared by a stream's workers")
def sampler_in_a_stream(base: Any, workers: int) -> Any:
    def endless() -> Iterator[int]:
        generator = torch.Generator().manual_seed(11)
        while True:
            yield from torch.randperm(9, generator=generator).tolist()

    class Sampled(IterableDataset[Any]):
        def __iter__(self) -> Any:
            info = get_worker_info()
            first, step = (info.id, info.num_workers) if info else (0, 1)
            return itertools.islice(endless(), first, None, step)

    pairs: dict[int, list[int]] = {0: [], 1: []}
    grouped = []
    for number in base(Sampled(), None, num_workers=workers, collate_fn=abs):
        pair = pairs[number % 2]
        pair.append(number)
        if len(pair) == 2:
            grouped.append(pair[:])
            pair.clear()
        if len(grouped) == 12:
            return grouped
    raise AssertionError


# ---- samplers


@dataclasses.dataclass
class Cut:
    """What a sampler gives: neither a number nor hashable."""

    name: str
    seconds: float


class Cuts(Sampler[Any]):
    """Is its own iterator, has no length, and fills batches by their duration."""

    def __init__(self) -> None:
        self.epoch = 0
        self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Cuts:
        self.at = 0
        return self

    def __next__(self) -> list[Cut]:
        if self.at == 4:
            raise StopIteration
        self.at += 1
        return [Cut(f"{self.epoch}-{self.at}-{i}", i / 2) for i in range(self.at)]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state.pop("epoch"), state.pop("at")


class Speech(Dataset[Any]):
    def __getitem__(self, cuts: list[Cut]) -> Any:
        return [cut.name for cut in cuts], torch.tensor([cut.seconds for cut in cuts])


@pattern("indices that are objects")
def object_indices(base: Any, workers: int) -> Any:
    sampler = Cuts()
    loader = base(Speech(), None, sampler=sampler, num_workers=workers)
    epochs = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        epochs.append([(names, seconds.tolist()) for names, seconds in loader])
    return epochs, sampler.state_dict()


class InWorkers(IterableDataset[Any]):
    """Has its sampler with it in the worker, and goes on with it from epoch to epoch."""

    def __init__(self) -> None:
        self.sampler = Cuts()
        self.iterator: Any = None

    def __iter__(self) -> InWorkers:
        if self.iterator is None:
            self.iterator = iter(self.sampler)
        return self

    def __next__(self) -> Any:
        try:
            return [cut.name for cut in next(self.iterator)]
        except StopIteration:
            self.iterator = None
            self.sampler.set_epoch(self.sampler.epoch + 1)
            raise


@pattern("a sampler inside a stream")
def sampler_inside(base: Any, workers: int) -> Any:
    loader = base(InWorkers(), None, num_workers=workers, persistent_workers=workers > 0)
    epochs = [list(loader), list(loader)]
    iterator = iter(loader)
    next(iterator)
    return epochs, list(iterator)


class SaysHowFar(HowFar, InOrder):
    def __iter__(self) -> Iterator[int]:
        yield from self.left(range(self.size))


@pattern("a sampler that says how far it is")
def sampler_says_how_far(base: Any, workers: int) -> Any:
    found = []
    for batches in (0, 4):
        loader = base(Numbers(7), 2, sampler=SaysHowFar(7), num_workers=workers)
        found += [plain(loader), *again_from(loader, batches)]
    return found


@pattern("indices that repeat")
def repeated_indices(base: Any, workers: int) -> Any:
    class Repeats(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for index in torch.randperm(4, generator=torch.Generator().manual_seed(1)).tolist():
                for _ in range(3):
                    yield index

        def __len__(self) -> int:
            return 12

    loader = base(Numbers(4), 5, sampler=Repeats(), num_workers=workers, drop_last=True)
    return plain(loader), plain(loader), len(loader)


# ---- running them


def rows() -> list[str]:
    found = re.findall(r"^(?:\| )?\*\*(.+?)\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [row.replace("\\", "") for row in found]


def test_the_page_lists_what_is_run_here() -> None:
    assert sorted(rows()) == sorted([*PATTERNS, *ELSEWHERE])


SHARED = {
    *(
        "a loader from another's attributes",
        "a sampler inside a stream",
        "a stream that the loop feeds",
    ),
    *("an endless sampler shared by a stream's workers", "frozen attributes by force"),
    *("lifetimes", "workers ended by hand", "wrapped iterator"),
}
"""Rows in which it matters that workers are several."""


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize(
    ("row", "workers"),
    [
        pytest.param(row, workers, marks=[pytest.mark.slow] * (row not in SHARED and workers == 2))
        for row in PATTERNS
        for workers in ((0, 2) if row in SHARED else (0, 1, 2))
    ],
)
def test_a_program_sees_what_it_sees_with_torch(row: str, workers: int) -> None:
    program = PATTERNS[row]
    assert program(minato.DataLoader, workers) == program(TorchDataLoader, workers)


@pytest.mark.parametrize(
    "row", ["workers ended by hand", "a constructor that never calls its base's", "__del__"]
)
def test_under_the_name_of_torchs_class(row: str) -> None:
    program = PATTERNS[row]
    expected = program(TorchDataLoader, 2)
    with minato.patch():
        assert program(torch.utils.data.DataLoader, 2) == expected


class Thread(threading.Thread):
    pid = property(id)

    def run(self) -> None:
        try:
            super().run()
        finally:
            torch.utils.data._utils.worker._worker_info = None


class Queue(queue.Queue):  # type: ignore[type-arg]
    def close(self) -> None:
        pass

    cancel_join_thread = close


class Context(SpawnContext):
    _name = "threads"
    Process = Thread  # type: ignore[assignment]
    Queue = Queue  # type: ignore[assignment]


def seed_from_info(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert (info.id, info.num_workers) == (worker, 2)
    info.dataset.seeds[worker] = info.seed  # type: ignore[attr-defined]


class Seeded(Numbers):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.seeds: dict[int, int] = {}

    def __getitem__(self, index: int) -> int:
        wait_until(lambda: len(self.seeds) == 2)
        return index


def test_processes_that_are_threads() -> None:
    seen = []
    for base in (TorchDataLoader, minato.DataLoader):
        dataset = Seeded(8)
        threads = {"num_workers": 2, "multiprocessing_context": Context()}
        seeds = {"worker_init_fn": seed_from_info, "generator": torch.Generator().manual_seed(3)}
        loader = base(dataset, 2, **threads, **seeds)
        for _ in range(2):
            dataset.seeds = {}
            seen.append((plain(loader), dataset.seeds))
            assert get_worker_info() is None
    assert seen[:2] == seen[2:]


def test_a_context_of_threads_that_is_set_later() -> None:
    loader = minato.DataLoader(Numbers(4), num_workers=2)
    loader.multiprocessing_context = Context()
    assert loader._minato_options.workers == "thread"
    assert plain(loader) == [[0], [1], [2], [3]]
    loader.multiprocessing_context = "fork"
    assert loader._minato_options.workers == loader.workers == "process"
    stream = minato.DataLoader(Parts(4), num_workers=2, multiprocessing_context=Context())
    assert sorted(plain(stream)) == [[0], [1], [2], [3]]


def test_threads_are_no_shared_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    how: Any = {"num_workers": 2, "workers": minato.SharedPool()}
    with pytest.raises(ValueError, match="shares processes, and those of this"):
        minato.DataLoader(Numbers(4), multiprocessing_context=Context(), **how)
    loader = minato.DataLoader(Numbers(4), **how)
    with pytest.raises(ValueError, match="shares processes, and those of this"):
        loader.multiprocessing_context = Context()
    loader.multiprocessing_context = "fork"
    assert plain(loader) == [[0], [1], [2], [3]]


def test_a_loader_that_its_persistent_workers_refer_to_is_collected() -> None:
    loader = OverOurs(torch.arange(6), batch_size=3, num_workers=2, persistent_workers=True)
    seen = [[batch.tolist() for batch, _ in loader] for _ in range(2)]
    assert seen == [[[0, 1, 2], [3, 4, 5]]] * 2
    del loader
    gc.collect()
    assert living() == 0


@pytest.mark.slow
def test_the_loaders_own_methods_with_spawned_workers() -> None:
    seen = []
    spawned = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"}
    for kind in (OverTorch, OverOurs):
        loader = kind(torch.arange(6), batch_size=3, **spawned)
        seen.append([[(batch.tolist(), n) for batch, n in loader] for _ in range(2)])
        del loader
        gc.collect()
    assert seen[0] == seen[1]


def test_torchdatas_way_to_ask_for_states_less_often() -> None:
    loader = minato.DataLoader(Parts(8), 2, snapshot_every_n_steps=4)
    assert loader.snapshot_every_n_steps == 4  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="snapshot_every_n_steps=-1"):
        minato.DataLoader(Parts(8), 2, snapshot_every_n_steps=-1)


REPLACED = test_replaced_parts.test_what_a_program_has_put_in_the_place_of_a_part_is_used
ELSEWHERE = {
    "processes that are threads": test_processes_that_are_threads,
    "snapshot_every_n_steps": test_torchdatas_way_to_ask_for_states_less_often,
    "a batch sampler that yields more than indices": (
        test_indices.test_a_dataset_that_takes_lists_gets_the_samplers_object
    ),
    "a replaced `__next__`": REPLACED,
    "a replaced fetcher": REPLACED,
    "other replaced parts": test_replaced_parts.test_torchs_engine_uses_the_other_parts,
    "a replaced `default_collate`": REPLACED,
}
"""Rows with tests of their own."""
