"""Mistakes that people make, each with torch's loader and with ours: what they are told, judged by a machine.

A row of the table names the words that help: the value or the place that is wrong, and the remedy. Ours has all of
them, in few lines, and raises what torch raises. A row says whether torch's text lacks some of them.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import minato
from minato import AutoScale, DataLoader, ErrorPolicy, Observe, RayWorkers
from tests.datasets import Numbers, Samples, wait_until
from tests.parity.harness import TORCH_IS_UNTIDY, TorchLoader

FOUR = Numbers(4)
PYTHON_SUGGESTS = sys.version_info >= (3, 13)
"""From then on Python itself suggests the names of arguments."""
MOST_LINES = 18
"""Of a text, of which the test has six: less than the lines of a terminal."""


class Mistake(NamedTuple):
    """One row.

    Attributes:
        run: Makes the mistake with a loader class.
        told: The words that help.
        better: Whether torch's text lacks some of them; None: torch has no such argument.
        lines: Most lines of our text.
    """

    run: Callable[[Any], object]
    told: tuple[str, ...]
    better: bool | None = True
    lines: int = MOST_LINES


class Told(NamedTuple):
    """What somebody is told: the exception, and the text of warnings and traceback."""

    error: BaseException | None
    text: str

    def count(self, words: tuple[str, ...]) -> int:
        return sum(word in self.text for word in words)


def told(mistake: Mistake, loader: type) -> Told:
    error: BaseException | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mistake.run(loader)
        except Exception as raised:
            error = raised
    warned = [str(each.message) for each in caught if each.category is minato.MinatoWarning]
    raised_text = [] if error is None else traceback.format_exception(error)
    if error is not None:
        traceback.clear_frames(error.__traceback__)  # which hold iterators
    return Told(error, "\n".join([*warned, "".join(raised_text)]))


def given(dataset: Any = FOUR, **arguments: Any) -> Callable[[Any], object]:
    """Iterate over a loader with these arguments."""
    return lambda make: list(make(dataset, **arguments))


# ---- datasets that are mistakes ----------------------------------------------------------------


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class NoItems:
    def __len__(self) -> int:
        return 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Lengths(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from shapes(2, 3)


class Box:
    """No rule collates it."""


class Holder(Numbers):
    def __init__(self, held: Any) -> None:
        super().__init__(4)
        self.held = held


class Nested:
    def __init__(self, held: Any) -> None:
        self.held = held


class Bad(Numbers):
    """Its sample 2 does something else."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(4)
        self.act = act

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.act()
        return index


class Later(Bad):
    """Its sample 2 leaves the process alone with time to deliver those before it."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return super().__getitem__(index)


def raises(kind: type[Exception], *given: object) -> Callable[..., object]:
    def act(*arguments: object) -> object:
        raise kind(*given)

    return act


def stop() -> None:
    os._exit(3)


class Stuck(Numbers):
    """Its samples say that they run, and end when the test is over."""

    def __init__(self) -> None:
        super().__init__(4)
        self.runs, self.is_over = (multiprocessing.RawValue("b", 0) for _ in range(2))

    def __getitem__(self, index: int) -> int:
        self.runs.value = 1
        wait_until(lambda: bool(self.is_over.value))
        return index


def timed_out(make: Any) -> object:
    """Wait too long for a sample; the start of its worker may take longer than that."""
    dataset = Stuck()
    iterator = iter(make(dataset, sampler=[2], num_workers=1, timeout=0.5))
    wait_until(lambda: bool(dataset.runs.value))
    try:
        return next(iterator)
    finally:
        dataset.is_over.value = 1


def open_missing() -> object:
    return open("/nowhere/picture.png")


def shapes(*sizes: Any) -> list[torch.Tensor]:
    return [torch.zeros(size) for size in sizes]


def kept(function: Callable[[], Any]) -> Callable[[Any], object]:
    """Iterate over a dataset that holds something of the training process, with spawned workers."""

    def run(make: Any) -> object:
        held = function()
        try:
            arguments = {"num_workers": 1, "multiprocessing_context": "spawn"}
            return next(iter(make(Holder(held), **arguments)))
        finally:
            getattr(held, "close", str)()

    return run


def without(package: str, act: Callable[[], object]) -> Callable[[Any], object]:
    """Do something where a package is not installed."""

    def run(make: Any) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            return act()

    return run


TWO = {"num_workers": 2}
ONE_WORKER = {"num_workers": 1, "batch_size": 2}
BATCH = {"batch_size": 4}

NAMES: dict[str, Mistake] = {
    "num_worker": Mistake(given(num_worker=2), ("num_worker'", "Did you mean 'num_workers'?")),
    "batchsize": Mistake(given(batchsize=2), ("batchsize", "Did you mean 'batch_size'?")),
    "suffle": Mistake(given(suffle=True), ("suffle", "Did you mean 'shuffle'?")),
    "colate_fn": Mistake(given(colate_fn=list), ("colate_fn", "Did you mean 'collate_fn'?")),
    "persistent_worker": Mistake(
        given(persistent_worker=True), ("persistent_worker'", "Did you mean 'persistent_workers'?")
    ),
    "transform": Mistake(given(transform=abs), ("transform'", "Did you mean 'transforms'?")),
    "fetch_concurency": Mistake(
        given(fetch_concurency=2), ("fetch_concurency", "Did you mean 'fetch_concurrency'?")
    ),
    "retries": Mistake(given(retries=2), ("retries", "errors=minato.ErrorPolicy(retries=...)")),
    "max_lag": Mistake(given(max_lag=2), ("max_lag", "order=minato.Arrival(max_lag=...)")),
    "trace": Mistake(given(trace="t"), ("trace", "observe=minato.Observe(trace=...)")),
    "sample_timeout": Mistake(
        given(sample_timeout=2), ("sample_timeout", "errors=minato.ErrorPolicy(sample_timeout=...)")
    ),
}
VALUES: dict[str, Mistake] = {
    "batch_size text": Mistake(given(batch_size="4"), ("batch_size='4'", "str", "batch_size=4?")),
    "batch_size float": Mistake(
        given(batch_size=4.0), ("batch_size=4.0", "float", "batch_size=4?")
    ),
    "batch_size zero": Mistake(given(batch_size=0), ("batch_size=0", "positive"), better=False),
    "batch_size negative": Mistake(
        given(batch_size=-1), ("batch_size=-1", "positive"), better=False
    ),
    "num_workers text": Mistake(given(num_workers="2"), ("num_workers='2'", "num_workers=2?")),
    "num_workers automatic": Mistake(
        given(num_workers="automatic"), ("num_workers='automatic'", "did you mean 'auto'?")
    ),
    "num_workers none": Mistake(given(num_workers=None), ("num_workers=None", "give a number")),
    "num_workers float": Mistake(given(num_workers=2.0), ("num_workers=2.0", "num_workers=2?")),
    "num_workers negative": Mistake(
        given(num_workers=-1), ("num_workers", "non-negative"), better=False
    ),
    "timeout text": Mistake(given(timeout="1"), ("timeout='1'", "timeout=1?")),
    "timeout negative": Mistake(given(timeout=-1), ("timeout", "non-negative"), better=False),
    "prefetch_factor text": Mistake(
        given(prefetch_factor="2", num_workers=1), ("prefetch_factor='2'", "prefetch_factor=2?")
    ),
    "drop_last without batches": Mistake(
        given(batch_size=None, drop_last=True), ("batch_size=None", "drop_last"), better=False
    ),
    "shuffle and sampler": Mistake(
        given(shuffle=True, sampler=[1]), ("sampler", "exclusive", "shuffle"), better=False
    ),
    "shuffle and batch_sampler": Mistake(
        given(shuffle=True, batch_sampler=[[1]]), ("batch_sampler", "exclusive"), better=False
    ),
    "batch_size and batch_sampler": Mistake(
        given(batch_size=2, batch_sampler=[[1]]), ("batch_sampler", "exclusive"), better=False
    ),
    "sampler and batch_sampler": Mistake(
        given(sampler=[1], batch_sampler=[[1]]), ("batch_sampler", "exclusive"), better=False
    ),
    "prefetch_factor without workers": Mistake(
        given(prefetch_factor=2), ("prefetch_factor", "num_workers > 0"), better=False
    ),
    "persistent_workers without workers": Mistake(
        given(persistent_workers=True), ("persistent_workers", "num_workers > 0"), better=False
    ),
    "context without workers": Mistake(
        given(multiprocessing_context="fork"), ("num_workers > 0",), better=False
    ),
    "context unknown": Mistake(
        given(multiprocessing_context="forks", num_workers=1), ("'forks'", "spawn"), better=False
    ),
    "stream and shuffle": Mistake(given(Stream(), shuffle=True), ("shuffle=True",), better=False),
    "stream and sampler": Mistake(given(Stream(), sampler=[1]), ("sampler",), better=False),
    "sampler that is a number": Mistake(given(sampler=5), ("'int'", "iterable"), better=False),
    "empty and shuffled": Mistake(given([], shuffle=True), ("num_samples=0",), better=False),
}
DATASETS: dict[str, Mistake] = {
    "class": Mistake(given(Numbers), ("dataset=Numbers is a class", "Numbers(...)")),
    "class, shuffled": Mistake(
        given(Numbers, shuffle=True), ("dataset=Numbers is a class", "Numbers(...)")
    ),
    "class, workers": Mistake(
        given(Numbers, **TWO), ("dataset=Numbers is a class", "Numbers(...)")
    ),
    "none": Mistake(given(None), ("dataset=None", "give a dataset")),
    "generator": Mistake(
        given((i for i in range(3)), batch_size=2), ("generator", "list(...)", "IterableDataset")
    ),
    "iterator": Mistake(given(iter([1, 2])), ("list_iterator", "list(...)", "IterableDataset")),
    "no length": Mistake(given(NoLength()), ("NoLength", "__len__", "IterableDataset")),
    "no items": Mistake(given(NoItems()), ("NoItems", "__getitem__", "define it")),
    "no items, workers": Mistake(
        given(NoItems(), **ONE_WORKER), ("NoItems", "__getitem__", "define it")
    ),
    "number": Mistake(given(5, sampler=[0]), ("type int", "__getitem__", "define it")),
    "path": Mistake(given("/data/train"), ("'/data/train'", "letters", "give a dataset")),
}
SHAPES: dict[str, Mistake] = {
    "lengths": Mistake(
        given(shapes(3, 3, 4, 3), **BATCH),
        ("indices 0, 1, 2, 3", "index 2", "shape (3,)", "shape (4,)", "minato.PadCollate()"),
    ),
    "lengths, workers": Mistake(
        given(shapes(3, 3, 4, 3), **BATCH, **TWO),
        ("indices 0, 1, 2, 3", "index 2", "shape (3,)", "shape (4,)", "minato.PadCollate()"),
    ),
    "sizes": Mistake(
        given(shapes((3, 8, 8), (3, 8, 9)), batch_size=2),
        ("indices 0, 1", "index 1", "(3, 8, 8)", "(3, 8, 9)", "resize"),
    ),
    "sizes in a field": Mistake(
        given([{"image": x, "label": 1} for x in shapes((1, 2), (1, 3))], batch_size=2),
        ("indices 0, 1", "index 1", "field ['image']", "(1, 2)", "(1, 3)", "resize"),
    ),
    "sizes in a tuple, workers": Mistake(
        given([(x, 1) for x in shapes((1, 2), (1, 3))], batch_size=2, **TWO),
        ("indices 0, 1", "index 1", "field [0]", "(1, 2)", "(1, 3)", "resize"),
    ),
    "lengths in a stream": Mistake(
        given(Lengths(), batch_size=2),
        ("batch of items 0, 1 of reader 0", "sample 1 (item 1 of reader 0)", "shape (2,)", "(3,)"),
    ),
    "arrays": Mistake(
        given([np.zeros(2), np.zeros(3)], batch_size=2),
        ("indices 0, 1", "ndarray of shape (2,)", "(3,)", "minato.PadCollate()"),
    ),
    "lists": Mistake(
        given([[1, 2], [1]], batch_size=2),
        ("indices 0, 1", "list of length 2", "length 1", "minato.PadCollate()"),
    ),
    "keys": Mistake(
        given([{"a": 1, "b": 2}, {"a": 1}], batch_size=2),
        ("indices 0, 1", "index 1", "'a', 'b'", "same keys"),
    ),
    "keys, workers": Mistake(
        given([{"a": 1, "b": 2}, {"a": 1}], batch_size=2, **TWO),
        ("indices 0, 1", "index 1", "'a', 'b'", "same keys"),
    ),
    "none": Mistake(
        given([torch.zeros(2), None], batch_size=2),
        ("indices 0, 1", "index 1", "None", "Return a value", "errors='skip'"),
    ),
    "none, workers": Mistake(
        given([torch.zeros(2), None], batch_size=2, sampler=[0, 1], **TWO),
        ("indices 0, 1", "index 1", "None", "Return a value", "errors='skip'"),
    ),
    "none in a field": Mistake(
        given([(1, None), (2, None)], batch_size=2),
        ("indices 0, 1", "index 0", "field [1]", "None", "Return a value"),
    ),
    "object": Mistake(
        given([Box(), Box()], batch_size=2), ("indices 0, 1", "index 0", "Box", "collate_fn")
    ),
    "object in a field, workers": Mistake(
        given([{"box": Box()}] * 2, batch_size=2, **TWO),
        ("indices 0, 1", "index 0", "field ['box']", "Box", "collate_fn"),
        lines=20,
    ),
    "set": Mistake(given([{1}, {2}], batch_size=2), ("indices 0, 1", "set", "collate_fn")),
    "texts in an array": Mistake(
        given([np.array(["a"])] * 2, batch_size=2), ("indices 0, 1", "dtype <U1", "collate_fn")
    ),
    "objects in an array": Mistake(
        given([np.array([Box()])] * 2, batch_size=2), ("indices 0, 1", "dtype object", "collate_fn")
    ),
    "kinds": Mistake(
        given([torch.zeros(2), 3], batch_size=2),
        ("indices 0, 1", "index 1", "Tensor of shape (2,)", "int 3", "same kind"),
    ),
    "gradient, workers": Mistake(
        given([torch.zeros(2, requires_grad=True)] * 2, batch_size=2, **TWO),
        ("indices 0, 1", "index 0", "requires a gradient", "detach()"),
    ),
}
FUNCTIONS: dict[str, Mistake] = {
    "collate_fn raises": Mistake(
        given(collate_fn=raises(ValueError, "bad"), **BATCH), ("bad", "batch of indices 0, 1, 2, 3")
    ),
    "collate_fn raises, workers": Mistake(
        given(collate_fn=raises(ValueError, "bad"), **BATCH, **TWO),
        ("bad", "batch of indices 0, 1, 2, 3"),
    ),
    "collate_fn that is a number": Mistake(
        given(collate_fn=5, **BATCH), ("'int'", "collate_fn was called")
    ),
    "worker_init_fn raises": Mistake(
        given(worker_init_fn=raises(ValueError, "bad"), **ONE_WORKER),
        ("bad", "raised by worker_init_fn"),
    ),
    "worker_init_fn that is a number": Mistake(
        given(worker_init_fn=5, **ONE_WORKER), ("'int'", "raised by worker_init_fn")
    ),
    "sample raises": Mistake(
        given(Bad(raises(ValueError, "bad")), **BATCH), ("bad", "the sample with index 2")
    ),
    "sample raises, workers": Mistake(
        given(Bad(raises(ValueError, "bad")), **BATCH, **TWO), ("bad", "the sample with index 2")
    ),
    "file that is missing": Mistake(
        given(Bad(open_missing), **BATCH, **TWO), ("picture.png", "the sample with index 2")
    ),
    "sample beyond the end": Mistake(
        given(Samples([1, 2]), sampler=[0, 5]), ("index", "the sample with index 5")
    ),
    "sample stops an iterator": Mistake(
        given(Bad(raises(StopIteration)), **BATCH),
        ("the sample with index 2 raised StopIteration",),
    ),
    "transform raises": Mistake(
        given(transforms=[raises(ValueError, "bad")], **BATCH),
        ("bad", "in act", "the sample with index 0"),
        better=None,
    ),
    "timeout": Mistake(
        timed_out,
        ("timed out after 0.5 s", "index 2", "in __getitem__", "sample_timeout"),
    ),
    "worker exits": Mistake(
        given(Later(stop), num_workers=1), ("exited unexpectedly", "code 3", "index 2"), lines=22
    ),
}
HELD: dict[str, Mistake] = {
    "file": Mistake(kept(lambda: open(os.devnull)), ("dataset.held", "open or create it")),  # noqa: SIM115
    "connection": Mistake(
        kept(lambda: sqlite3.connect(":memory:")), ("dataset.held", "Connection", "open or create")
    ),
    "mapped file": Mistake(
        kept(lambda: mmap.mmap(-1, 9)), ("dataset.held", "mmap", "open or create")
    ),
    "lock": Mistake(kept(threading.Lock), ("dataset.held", "lock", "create it")),
    "generator": Mistake(
        kept(lambda: (i for i in "ab")), ("dataset.held", "generator", "open or create it")
    ),
    "lock of a client": Mistake(
        kept(lambda: Nested(threading.Lock())),
        ("dataset.held.held", "create it", "or dataset.held, which holds it"),
    ),
    "function": Mistake(kept(lambda: lambda sample: sample), (), better=False),
}
OWN: dict[str, Mistake] = {
    "order": Mistake(given(order="random"), ("order='random'", "'strict'", "'arrival'"), None),
    "order mistyped": Mistake(
        given(order="arival"), ("order='arival'", "did you mean 'arrival'?"), None
    ),
    "order and in_order": Mistake(
        given(order="strict", in_order=False), ("order='strict'", "in_order=False"), None
    ),
    "order and batch_sampler": Mistake(
        given(order="arrival", batch_sampler=[[1]]), ("order='arrival'", "use order='batch'"), None
    ),
    "workers number": Mistake(given(workers=4), ("workers=4", "did you mean num_workers=4?"), None),
    "workers mistyped": Mistake(
        given(workers="threads"), ("workers='threads'", "did you mean 'thread'?"), None
    ),
    "memory_budget in gigabytes": Mistake(
        given(memory_budget=8), ("memory_budget=8", "bytes", "did you mean '8GB'?"), None
    ),
    "memory_budget text": Mistake(
        given(memory_budget="8 apples"), ("'8 apples'", "write '8GB'"), None
    ),
    "memory_budget float": Mistake(
        given(memory_budget=1e9), ("memory_budget=1000000000.0", "give an integer"), None
    ),
    "errors": Mistake(
        given(errors="ignore"), ("errors='ignore'", "'skip'", "a function", "ErrorPolicy"), None
    ),
    "errors mistyped": Mistake(
        given(errors="skipp"), ("errors='skipp'", "did you mean 'skip'?"), None
    ),
    "errors class": Mistake(
        given(errors=ErrorPolicy), ("errors=ErrorPolicy", "ErrorPolicy(...)"), None
    ),
    "seed": Mistake(given(seed="1"), ("seed='1'", "give an integer"), None),
    "compat": Mistake(given(compat="jax"), ("compat='jax'", "'torch'"), None),
    "device": Mistake(given(device="gpu"), ("device='gpu'",), None),
    "stragglers": Mistake(given(stragglers=90), ("stragglers=90", "StragglerPolicy"), None),
    "shared_pool": Mistake(given(workers="shared"), ("workers='shared'", "SharedPool()"), None),
    "observe": Mistake(given(observe="run.json"), ("observe='run.json'", "True, False"), None),
    "recording": Mistake(given(recording="r"), ("recording='r'", "a Record or a Replay"), None),
    "transforms": Mistake(given(transforms=[abs, 3]), ("transforms[1]", "not callable"), None),
    "pin_memory": Mistake(
        given(pin_memory="inplace"), ("pin_memory='inplace'", "did you mean 'in_place'?"), None
    ),
    "scale": Mistake(
        lambda make: AutoScale(min=4, max=2), ("min=4", "max=2", "in this order"), None
    ),
    "sample_timeout without workers": Mistake(
        given(errors=ErrorPolicy(sample_timeout=3)),
        ("sample_timeout=3", "use num_workers=1 or more"),
        None,
    ),
    "cache without its package": Mistake(
        without("lmdb", lambda: minato.caching.DiskCache(tempfile.gettempdir(), 1 << 20)),
        ("lmdb", "pip install 'minatoloader[cache]'"),
        None,
    ),
    "metrics without their package": Mistake(
        without("prometheus_client", lambda: Observe(metrics=0)),
        ("prometheus_client", "pip install 'minatoloader[metrics]'"),
        None,
    ),
    "actors without their package": Mistake(
        without("ray", lambda: DataLoader(FOUR, num_workers=1, workers=RayWorkers())),
        ("ray", "pip install 'minatoloader[ray]'"),
        None,
    ),
}
MISTAKES: dict[str, Mistake] = {
    f"{part}: {name}": mistake
    for part, some in {
        "argument": NAMES,
        "value": VALUES,
        "dataset": DATASETS,
        "collation": SHAPES,
        "function": FUNCTIONS,
        "spawned with": HELD,
        "own": OWN,
    }.items()
    for name, mistake in some.items()
}


@TORCH_IS_UNTIDY
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name: str, torch_looks_often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minato.workers.sample_timeout._STACK_S", 60.0)
    mistake = MISTAKES[name]
    ours, wanted = told(mistake, DataLoader), mistake.told
    missing = [word for word in wanted if word not in ours.text]
    assert missing == [], ours.text
    assert len(ours.text.splitlines()) <= mistake.lines, ours.text
    if mistake.better is None:
        return
    theirs = told(mistake, TorchLoader)
    if theirs.error is not None and ours.error is not None:
        assert isinstance(ours.error, type(theirs.error)), theirs.text
    better = theirs.count(wanted) < len(wanted)
    assert better == mistake.better or (PYTHON_SUGGESTS and name in NAMES), theirs.text


class Evasive:
    """It raises where it is asked for the method that it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise (ValueError if name == "__getitem__" else AttributeError)(name)


def test_no_note_misleads() -> None:
    unlucky = Bad(raises(TypeError, "'NoneType' object is not subscriptable"))
    for make, notes in (
        (given(unlucky), ["raised by the sample with index 2"]),
        (given(Evasive(), sampler=[0]), ["raised by the sample with index 0"]),
    ):
        with pytest.raises(TypeError, match="not subscriptable") as caught:
            make(DataLoader)
        assert caught.value.__notes__ == notes


def test_most_texts_are_better_than_torchs() -> None:
    assert len(MISTAKES) >= 83
    assert sum(mistake.better is True for mistake in MISTAKES.values()) >= 30
