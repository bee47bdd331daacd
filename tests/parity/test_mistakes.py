"""Mistakes that people make, each with torch's loader and with ours: what they are told, judged by a machine.

A row of the table names the words that help: the value or the place that is wrong, and the remedy. Ours has all of
them, in few lines, and raises what torch raises. A row says whether torch's text lacks some of them.
"""

from __future__ import annotations

import math
import mmap
import sqlite3
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import minato
from minato import (
    AutoScale,
    CostBatchSampler,
    DataLoader,
    ErrorPolicy,
    Observe,
    RayWorkers,
    Readers,
)
from tests.datasets import Numbers, Samples, raising
from tests.parity.harness import TORCH_IS_UNTIDY, TorchLoader
from tests.parity.material import BadSample, Holding, NoLength

FOUR = Numbers(4)
PYTHON_SUGGESTS = sys.version_info >= (3, 13)
"""From then on Python itself suggests the names of arguments."""
MOST_LINES = 12
"""Of a text without the source of calls, of which each Python shows more or less; the test has three of them."""


class Mistake(NamedTuple):
    """One row.

    Attributes:
        run: Makes the mistake with a loader class.
        told: The words that help.
        better: Whether torch's text lacks some of them; None: torch has no such argument.
    """

    run: Callable[[Any], object]
    told: tuple[str, ...]
    better: bool | None = True


class Told(NamedTuple):
    """What somebody is told: the exception, and the text of warnings and traceback."""

    error: BaseException | None
    text: str

    def count(self, words: tuple[str, ...]) -> int:
        return sum(word in self.text for word in words)


def told(mistake: Mistake, loader: type) -> Told:
    error: BaseException | None = None
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            mistake.run(loader)
        except Exception as raised:
            error = raised
    text = [str(each.message) for each in caught if each.category is minato.MinatoWarning]
    if error is not None:
        text.append("".join(traceback.format_exception(error)))
        traceback.clear_frames(error.__traceback__)  # which hold iterators
    return Told(error, "\n".join(text))


def row(*told: str, dataset: Any = FOUR, better: bool | None = True, **arguments: Any) -> Mistake:
    """The mistake to iterate over a loader with these arguments."""
    return Mistake(lambda make: list(make(dataset, **arguments)), told, better)


def collated(samples: Any, *told: str, **arguments: Any) -> Mistake:
    """The mistake to collate these samples in pairs."""
    arguments = {"batch_size": 2, **arguments}
    return row("indices 0, 1", *told, dataset=samples, **arguments)


# ---- datasets that are mistakes ----------------------------------------------------------------


class NoItems:
    def __len__(self) -> int:
        return 4


class Lengths(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from shapes(2, 3)


class DataFrame:
    """As pandas' own: its length is that of its rows, and an index names a column."""

    __module__ = "pandas"

    def __len__(self) -> int:
        return 4

    def __getitem__(self, column: int) -> list[int]:
        return [column] * 4


class Box:
    """No rule collates it."""


def open_missing() -> object:
    return open("/nowhere/picture.png")


def shapes(*sizes: Any) -> list[torch.Tensor]:
    return [torch.zeros(size) for size in sizes]


def kept(function: Callable[[], Any], *told: str) -> Mistake:
    """The mistake to hold something of the training process in the dataset of spawned workers."""

    def run(make: Any) -> object:
        held = function()
        try:
            arguments = {"num_workers": 1, "multiprocessing_context": "spawn"}
            return next(iter(make(Holding(held), **arguments)))
        finally:
            getattr(held, "close", str)()

    return Mistake(run, ("dataset.held", *told))


def without(package: str, extra: str, act: Callable[[], object]) -> Mistake:
    """The mistake to do something where a package is not installed."""

    def run(make: Any) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            return act()

    return Mistake(run, (package, f"pip install 'minatoloader[{extra}]'"))


TWO = {"num_workers": 2}
ONE_WORKER = {"num_workers": 1, "batch_size": 2}
BATCH = {"batch_size": 4}
BAD = raising(ValueError, "bad")

NAMES = {
    name: row(f"{name}'", words, **{name: 2})
    for name, words in {
        "num_worker": "Did you mean 'num_workers'?",
        "batchsize": "Did you mean 'batch_size'?",
        "suffle": "Did you mean 'shuffle'?",
        "colate_fn": "Did you mean 'collate_fn'?",
        "persistent_worker": "Did you mean 'persistent_workers'?",
        "transform": "Did you mean 'transforms'?",
        "fetch_concurency": "Did you mean 'fetch_concurrency'?",
        "retries": "errors=minato.ErrorPolicy(retries=...)",
        "max_lag": "order=minato.Arrival(max_lag=...)",
        "trace": "observe=minato.Observe(trace=...)",
        "sample_timeout": "errors=minato.ErrorPolicy(sample_timeout=...)",
    }.items()
}
VALUES = {  # those of which torch tells as much are in test_arguments.py
    "batch_size text": row("batch_size='4'", "str", "batch_size=4?", batch_size="4"),
    "batch_size float": row("batch_size=4.0", "float", "batch_size=4?", batch_size=4.0),
    "batch_size infinite": row("batch_size=inf", "give a number", batch_size=math.inf),
    "num_workers text": row("num_workers='2'", "num_workers=2?", num_workers="2"),
    "num_workers automatic": row(
        "num_workers='automatic'", "did you mean 'auto'?", num_workers="automatic"
    ),
    "num_workers none": row("num_workers=None", "give a number", num_workers=None),
    "num_workers float": row("num_workers=2.0", "num_workers=2?", num_workers=2.0),
    "num_workers of NumPy": row(
        "num_workers=2.0", "float32", "num_workers=2?", num_workers=np.float32(2)
    ),
    "timeout text": row("timeout='1'", "timeout=1?", timeout="1"),
    "prefetch_factor text": row(
        "prefetch_factor='2'", "prefetch_factor=2?", prefetch_factor="2", num_workers=1
    ),
}
IS_A_CLASS = ("dataset=Numbers is a class", "Numbers(...)")
NO_ITEMS = ("NoItems", "__getitem__", "define it")
DATASETS = {
    "class": row(*IS_A_CLASS, dataset=Numbers),
    "class, shuffled": row(*IS_A_CLASS, dataset=Numbers, shuffle=True),
    "class, workers": row(*IS_A_CLASS, dataset=Numbers, **TWO),
    "none": row("dataset=None", "give a dataset", dataset=None),
    "generator": row(
        *("generator", "list(...)", "IterableDataset"), dataset=(i for i in range(3)), batch_size=2
    ),
    "iterator": row("list_iterator", "list(...)", "IterableDataset", dataset=iter([1, 2])),
    "no length": row("NoLength", "__len__", "IterableDataset", dataset=NoLength()),
    "no items": row(*NO_ITEMS, dataset=NoItems()),
    "no items, workers": row(*NO_ITEMS, dataset=NoItems(), **ONE_WORKER),
    "number": row("type int", "__getitem__", "define it", dataset=5, sampler=[0]),
    "table": row("pandas.DataFrame", "is a column", "row i", dataset=DataFrame()),
    "sampler as batch_sampler": row("gave 0, which is no list", "sampler=", batch_sampler=[0, 1]),
    "path": row("'/data/train'", "letters", "give a dataset", dataset="/data/train"),
}
OF_LENGTHS = ("indices 0, 1, 2, 3", "index 2", "shape (3,)", "shape (4,)", "minato.PadCollate()")
OF_KEYS = ("index 1", "'a', 'b'", "same keys")
OF_NONE = ("index 1", "None", "Return a value", "errors='skip'")
PAIR = shapes((1, 2), (1, 3))
SHAPES = {
    "lengths": row(*OF_LENGTHS, dataset=shapes(3, 3, 4, 3), **BATCH),
    "lengths, workers": row(*OF_LENGTHS, dataset=shapes(3, 3, 4, 3), **BATCH, **TWO),
    "sizes": collated(shapes((3, 8, 8), (3, 8, 9)), "index 1", "(3, 8, 8)", "(3, 8, 9)", "resize"),
    "sizes in a field": collated(
        [{"image": x, "label": 1} for x in PAIR],
        *("index 1", "field ['image']", "(1, 2)", "(1, 3)", "resize"),
    ),
    "sizes in a tuple, workers": collated(
        [(x, 1) for x in PAIR], "index 1", "field [0]", "(1, 2)", "(1, 3)", "resize", **TWO
    ),
    "lengths in a stream": row(
        *("batch of items 0, 1 of reader 0", "sample 1 (item 1 of reader 0)", "shape (2,)", "(3,)"),
        dataset=Lengths(),
        batch_size=2,
    ),
    "arrays": collated(
        [np.zeros(2), np.zeros(3)], "ndarray of shape (2,)", "(3,)", "minato.PadCollate()"
    ),
    "lists": collated([[1, 2], [1]], "list of length 2", "length 1", "minato.PadCollate()"),
    "keys": collated([{"a": 1, "b": 2}, {"a": 1}], *OF_KEYS),
    "keys, workers": collated([{"a": 1, "b": 2}, {"a": 1}], *OF_KEYS, **TWO),
    "none": collated([torch.zeros(2), None], *OF_NONE),
    "none, workers": collated([torch.zeros(2), None], *OF_NONE, sampler=[0, 1], **TWO),
    "none in a field": collated(
        [(1, None), (2, None)], "index 0", "field [1]", "None", "Return a value"
    ),
    "object": collated([Box(), Box()], "index 0", "Box", "collate_fn"),
    "object in a field, workers": collated(
        [{"box": Box()}] * 2, "index 0", "field ['box']", "Box", "collate_fn", **TWO
    ),
    "set": collated([{1}, {2}], "set", "collate_fn"),
    "texts in an array": collated([np.array(["a"])] * 2, "dtype <U1", "collate_fn"),
    "objects in an array": collated([np.array([Box()])] * 2, "dtype object", "collate_fn"),
    "kinds": collated([torch.zeros(2), 3], "index 1", "Tensor of shape (2,)", "int 3", "same kind"),
    "gradient, workers": collated(
        [torch.zeros(2, requires_grad=True)] * 2,
        *("index 0", "requires a gradient", "detach()"),
        **TWO,
    ),
}
OF_A_BATCH = ("bad", "batch of indices 0, 1, 2, 3")
OF_A_SAMPLE = ("bad", "the sample with index 2")
FUNCTIONS = {
    "collate_fn raises": row(*OF_A_BATCH, collate_fn=BAD, **BATCH),
    "collate_fn raises, workers": row(*OF_A_BATCH, collate_fn=BAD, **BATCH, **TWO),
    "collate_fn that is a number": row("'int'", "collate_fn was called", collate_fn=5, **BATCH),
    "worker_init_fn raises": row(
        "bad", "raised by worker_init_fn", worker_init_fn=BAD, **ONE_WORKER
    ),
    "worker_init_fn that is a number": row(
        "'int'", "raised by worker_init_fn", worker_init_fn=5, **ONE_WORKER
    ),
    "sample raises": row(*OF_A_SAMPLE, dataset=BadSample(4, BAD), **BATCH),
    "sample raises, workers": row(*OF_A_SAMPLE, dataset=BadSample(4, BAD), **BATCH, **TWO),
    "file that is missing": row(
        "picture.png", OF_A_SAMPLE[1], dataset=BadSample(4, open_missing), **BATCH, **TWO
    ),
    "sample beyond the end": row(
        *("the sample with index 5", "the dataset has 2 samples: make the sampler"),
        dataset=Samples([1, 2]),
        sampler=[0, 5],
    ),
    "costs of another dataset, workers": row(
        *("asked for index 4", "has 4 samples", "what it is given for each sample"),
        dataset=Samples([1, 2, 3, 4]),
        batch_sampler=CostBatchSampler([1] * 5, 8, seed=None),
        **TWO,
    ),
    "transform raises": row(
        "bad", "in act", "the sample with index 0", better=None, transforms=[BAD], **BATCH
    ),
}
HELD = {
    "connection": kept(lambda: sqlite3.connect(":memory:"), "Connection", "open or create"),
    "mapped file": kept(lambda: mmap.mmap(-1, 9), "mmap", "open or create"),
    "lock of a client": kept(
        lambda: Holding(threading.Lock()),
        *("dataset.held.held", "create it", "or dataset.held, which holds it"),
    ),
    "function": kept(lambda: lambda sample: sample)._replace(told=(), better=False),
}
OWN = {
    name: mistake._replace(better=None)
    for name, mistake in {
        "order": row(
            *("ValueError: order='random'", "'strict'", "'arrival'", "'fast_first'"), order="random"
        ),
        "order mistyped": row("order='arival'", "did you mean 'arrival'?", order="arival"),
        "order number": row("ValueError: order=3", "'strict'", order=3),
        "order list": row("ValueError: order=['strict']", "'strict'", order=["strict"]),
        "strict and free": row(
            "ValueError: order='strict'", "in_order=False", order="strict", in_order=False
        ),
        "batch_sampler": row(
            *("ValueError: order='arrival'", "batch_sampler", "order='batch'"),
            order="arrival",
            batch_sampler=[[0]],
        ),
        "workers": row("ValueError: workers='fiber'", "'thread'", "RayWorkers", workers="fiber"),
        "workers shared": row("ValueError: workers='shared'", "SharedPool()", workers="shared"),
        "workers number": row("workers=4", "did you mean num_workers=4?", workers=4),
        "workers mistyped": row("workers='threads'", "did you mean 'thread'?", workers="threads"),
        "memory_budget in gigabytes": row(
            "memory_budget=8", "bytes", "did you mean '8GB'?", memory_budget=8
        ),
        "memory_budget of none": row("ValueError: memory_budget=0", "at least 1", memory_budget=0),
        "memory_budget float": row(
            "TypeError: memory_budget=1000000000.0", "give an integer", memory_budget=1e9
        ),
        "memory_budget text": row(
            "ValueError: memory_budget='8 apples'", "write '8GB'", memory_budget="8 apples"
        ),
        "errors": row(
            *(
                "ValueError: errors='ignore'",
                "one of 'raise'",
                "'skip'",
                "a function",
                "ErrorPolicy",
            ),
            errors="ignore",
        ),
        "errors mistyped": row("errors='skipp'", "did you mean 'skip'?", errors="skipp"),
        "device": row("device='gpu'", device="gpu"),
        "seed text": row("TypeError: seed='1'", "str", "give an integer", seed="1"),
        "seed bool": row("TypeError: seed=True", "bool", "integer", seed=True),
        "compat": row("ValueError: compat='jax'", "None, 'torch'", compat="jax"),
        "stragglers": row("TypeError: stragglers=90", "int", "StragglerPolicy", stragglers=90),
        "observe": row(
            "ValueError: observe='run.json'", "True, False, Observe(...)", observe="run.json"
        ),
        "persistent_workers": row(
            *("ValueError: persistent_workers='yes'", "False, True, 'next_epoch'"),
            persistent_workers="yes",
        ),
        "transforms": row("TypeError: transforms[1] is not callable: 3", transforms=[abs, 3]),
        "transforms number": row(
            "TypeError: transforms must be a list of callables", "not 3", transforms=3
        ),
        "pin_memory": row("pin_memory='inplace'", "did you mean 'in_place'?", pin_memory="inplace"),
        "percentile as a share": Mistake(
            lambda make: minato.StragglerPolicy(percentile=0.9),
            ("percentile=0.9", "between 1 and 100", "did you mean 90?"),
        ),
        "errors with a function that returns none": row(
            *("index 2", "None", "return minato.SKIP"),
            dataset=BadSample(4, BAD),
            errors=lambda failure: None,
            **BATCH,
        ),
        "ranks": Mistake(
            lambda make: Readers(4, ranks="atuo"),
            ("ranks='atuo'", "integer", "did you mean 'auto'?"),
        ),
        "scale": Mistake(lambda make: AutoScale(min=4, max=2), ("min=4", "max=2", "in this order")),
        "sample_timeout without workers": row(
            *("sample_timeout=3", "use num_workers=1 or more"), errors=ErrorPolicy(sample_timeout=3)
        ),
        "cache without its package": without(
            *("lmdb", "cache"), lambda: minato.caching.DiskCache(tempfile.gettempdir(), 1 << 20)
        ),
        "metrics without their package": without(
            "prometheus_client", "metrics", lambda: Observe(metrics=0)
        ),
        "actors without their package": without(
            "ray", "ray", lambda: DataLoader(FOUR, num_workers=1, workers=RayWorkers())
        ),
    }.items()
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
def test_a_mistake(name: str, torch_looks_often: None) -> None:
    mistake = MISTAKES[name]
    ours, wanted = told(mistake, DataLoader), mistake.told
    missing = [word for word in wanted if word not in ours.text]
    assert missing == [], ours.text
    lines = [line for line in ours.text.splitlines() if not line.startswith("    ")]
    assert len(lines) <= MOST_LINES, ours.text
    if mistake.better is None:
        return
    theirs = told(mistake, TorchLoader)
    if theirs.error is not None and ours.error is not None:
        assert isinstance(ours.error, type(theirs.error)), theirs.text
    better = theirs.count(wanted) < len(wanted)
    assert better == mistake.better or (
        PYTHON_SUGGESTS and name.removeprefix("argument: ") in NAMES
    ), theirs.text


class Evasive:
    """It raises where it is asked for the method that it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise (ValueError if name == "__getitem__" else AttributeError)(name)


def test_a_number_that_torch_takes_until_iteration_begins_is_named() -> None:
    with pytest.raises(TypeError, match="'float' object cannot") as caught:
        iter(DataLoader(FOUR, num_workers=1, prefetch_factor=2.0))  # type: ignore[arg-type]
    assert "prefetch_factor=2.0" in caught.value.__notes__[0]
    assert "did you mean prefetch_factor=2?" in caught.value.__notes__[0]


def test_no_note_misleads() -> None:
    unlucky = BadSample(4, raising(TypeError, "'NoneType' object is not subscriptable"))
    for dataset, index in ((unlucky, 2), (Evasive(), 0)):
        with pytest.raises(TypeError, match="not subscriptable") as caught:
            list(DataLoader(dataset, sampler=[index]))
        assert caught.value.__notes__ == [f"raised by the sample with index {index}"]


def test_most_texts_are_better_than_torchs() -> None:
    assert len(MISTAKES) >= 83
    assert sum(mistake.better is True for mistake in MISTAKES.values()) >= 30
