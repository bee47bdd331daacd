"""What ``collate_fn`` gets: the objects that the dataset returned, whichever workers run the samples of a batch."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import itertools
import pathlib
import random
import threading
import time
import types
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from minato import DataLoader, ErrorPolicy
from minato.batching.sample_spec import are_plain
from minato.workers import worker
from tests.datasets import Numbers, Pair, flat, forked, wait_until
from tests.edges.travellers import Attributed, Items, Number, Subclass, Text, shown
from tests.selection import loaders

SIZE, BATCH = 12, 3


class Record(dict):  # type: ignore[type-arg]
    pass


class Two(tuple):  # type: ignore[type-arg]
    def __new__(cls, a: Any, b: Any) -> Two:
        return super().__new__(cls, (a, b))


class Lazy(Mapping):  # type: ignore[type-arg]
    """A row of a table, whose cells are read as they are needed."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __getitem__(self, key: str) -> Any:
        if key != "index":
            raise KeyError(key)
        return self.index

    def __iter__(self) -> Iterator[str]:
        return iter(["index"])

    def __len__(self) -> int:
        return 1


@dataclasses.dataclass
class Point:
    x: int
    y: list[int]


Row = namedtuple("Row", ["a", "b"])  # as programs have them


class Span(tuple):  # type: ignore[type-arg]
    """As a named tuple, but its constructor takes its items one by one, and its pickle calls it with all."""

    __slots__ = ()
    _fields = ("start", "end")

    def __new__(cls, *items: Any) -> Span:
        return super().__new__(cls, items)


class Cropped(NamedTuple):
    """A named tuple whose pickle is another one's."""

    image: Any
    border: int

    def __reduce__(self) -> Any:
        return Cropped, (self.image, 0)


class Kind(enum.Enum):
    CAT = 0
    DOG = 1


class Lossy:
    """An object whose pickle is another one's."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Lossy, (-1,)


class Stuck(Lossy):
    """An object that no pickle can be made of."""

    def __reduce__(self) -> Any:
        raise TypeError("a handle")


class Gone(Lossy):
    """An object that pickles, and does not unpickle."""

    def __reduce__(self) -> Any:
        return Gone, ()


def with_attribute(value: Any, index: int) -> Any:
    value.spacing = index
    return value


def image(index: int) -> Any:
    return with_attribute(pytest.importorskip("PIL.Image").new("L", (2, 2), index), index)


def series(index: int) -> Any:
    return with_attribute(pytest.importorskip("pandas").Series([index]), index)


SHARED = {"table": list(range(5))}
WORDS = {f"word {i}": i for i in range(1000)}
"""More parts than are looked at in a sample."""

OTHERS: dict[str, Callable[[int], Any]] = {
    "image": image,
    "series": series,
    "tensor subclass": lambda i: torch.full((2,), i).as_subclass(Subclass),
    "tensor with attribute": lambda i: with_attribute(torch.full((2,), i), i),
    "tensor with gradient": lambda i: torch.full((2,), float(i), requires_grad=True),
    "array subclass": lambda i: with_attribute(np.full(2, i).view(Attributed), i),
    "array of objects": lambda i: np.array([Lossy(i), None]),
    "masked array": lambda i: np.ma.masked_equal([i, 1], 1),
    "structured array": lambda i: np.array([(i, 2.0)], dtype=[("a", int), ("b", float)]),
    "text subclass": lambda i: with_attribute(Text(i), i),
    "number subclass": lambda i: with_attribute(Number(i), i),
    "dictionary subclass": lambda i: with_attribute(Record(a=i), i),
    "list subclass": lambda i: with_attribute(Items([i]), i),
    "tuple with arguments": lambda i: Two(i, [i]),
    "tuple with fields": Span,
    "named tuple with its own pickle": lambda i: Cropped(i, i),
    "tensor of inference": lambda i: torch.inference_mode()(torch.full)((2,), i),
    "other name of a scalar": np.longlong,
    "other name of an unsigned scalar": np.ulonglong,
    "ordered": lambda i: OrderedDict(a=i),
    "default": lambda i: defaultdict(list, a=[i]),
    "user dictionary": lambda i: UserDict(a=i),
    "mapping": Lazy,
    "dataclass": lambda i: Point(i, [i]),
    "enum": lambda i: Kind(i % 2),
    "decimal": decimal.Decimal,
    "fraction": lambda i: fractions.Fraction(i, 7),
    "date": lambda i: datetime.datetime(2020, 1, 1 + i, tzinfo=datetime.UTC),
    "namespace": lambda i: types.SimpleNamespace(a=i),
    "set": lambda i: {str(i)},
    "function": lambda i: lambda: i,
    "generator": lambda i: (each for each in [i]),
    "lock": lambda i: [threading.Lock(), i],
    "file": lambda i: io.BytesIO(bytes([i])),
    "lossy": Lossy,
    "stuck": Stuck,
    "gone": Gone,
    "inside": lambda i: {"a": [(i, {"b": Lossy(i)})]},
    "shared list": lambda i: (i, SHARED),
    "vocabulary": lambda i: (i, WORDS),
    "loop": lambda i: looped(i),
}
"""Samples that must stay in their worker."""


def looped(index: int) -> list[Any]:
    loop: list[Any] = [index]
    loop.append(loop)
    return loop


PLAIN: dict[str, Callable[[int], Any]] = {
    "number": lambda i: i,
    "nothing": lambda i: None,
    "text": lambda i: f"{i}",
    "tensor": lambda i: torch.full((2,), i),
    "0-d tensor": lambda i: torch.tensor(i),
    "bfloat16": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
    "permuted": lambda i: torch.full((2, 3), i).T,
    "array": lambda i: np.full(2, i),
    "0-d array": lambda i: np.array(i),
    "reversed array": lambda i: np.arange(i + 1)[::-1],
    "columns": lambda i: np.full((2, 3), i, order="F"),
    "read-only": lambda i: np.frombuffer(bytes([i, i]), np.uint8),
    "read-only dates": lambda i: np.frombuffer(bytes(7) + bytes([i]), "M8[s]"),
    "foreign order": lambda i: np.full(2, i, ">i4"),
    "dates of foreign order": lambda i: np.full(2, i, ">M8[s]"),
    "long doubles of foreign order": lambda i: np.full(2, i, ">g"),
    "scalar": lambda i: np.float32(i),
    "dates": lambda i: np.array(["2020-01-01"], "M8[D]") + np.timedelta64(i, "D"),
    "detection": lambda i: (torch.full((3, 2), i), {"boxes": torch.ones(i, 4), "labels": [i] * i}),
    "named": lambda i: Pair(torch.tensor(i), i),
    "row": lambda i: Row(i, [i, 2.5, True, None, b"x", 1j]),
    "path": lambda i: pathlib.Path(f"/x/{i}.png"),
    "tokens": lambda i: {"ids": list(range(1000)), "index": i},
}
"""Samples that another worker may collate."""

KINDS = {**OTHERS, **PLAIN}
LOADERS = {
    **loaders("inline", "fork", "batch", "arrival", "forkserver", "threads", "compat", "reads"),
    "fast first": {**forked(3), "order": "fast_first"},
}


MIXING = "arrival", "fast first"
"""Loaders whose batches may be of samples from several workers."""


class Made(Numbers):
    """Samples of one kind; the kind is a name, because functions without one do not travel."""

    def __init__(self, kind: str) -> None:
        super().__init__(SIZE)
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        return KINDS[self.kind](index)


def report(samples: list[Any]) -> list[str]:
    """A ``collate_fn`` that returns what it was given, and whether all samples refer to one object."""
    second = [id(each[1]) for each in samples if type(each) is tuple and len(each) == 2]
    return [*(str(shown(each)) for each in samples), f"{len(set(second))} objects"]


def check(kind: str, loader: str) -> None:
    expected = list(TorchLoader(Made(kind), BATCH, collate_fn=report))
    ours = DataLoader(Made(kind), BATCH, collate_fn=report, **LOADERS[loader])
    if loader in MIXING and kind in OTHERS:
        with pytest.warns(RuntimeWarning, match="each batch is made by one worker"):
            found = [list(ours), list(ours)]  # the warning comes once
    else:
        found = [list(ours)]
    for batches in found:
        if loader not in MIXING or kind in OTHERS:
            assert sorted(batches) == sorted(expected)
        else:  # whose batches are mixed
            told_each = sorted(each for batch in batches for each in batch[:-1])
            assert told_each == sorted(each for batch in expected for each in batch[:-1])


def of_kind(kind: str, *others: Any) -> Any:
    """Parameters of a test; pandas is large."""
    return pytest.param(kind, *others, marks=[pytest.mark.large] * (kind == "series"))


_SAMPLED = random.Random(5)


@pytest.mark.parametrize(
    ("kind", "loader"), [of_kind(kind, _SAMPLED.choice([*LOADERS])) for kind in KINDS]
)
def test_collate_fn_gets_what_the_dataset_returned(kind: str, loader: str) -> None:
    check(kind, loader)


FAMILIES = {
    "one process": ["inline", "threads"],
    "whole batches": ["fork", "compat", "forkserver", "batch", "reads"],
    "mixed batches": MIXING,
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_collate_fn_gets_what_the_dataset_returned_in_each_family_of_loaders(family: str) -> None:
    assert sorted(itertools.chain(*FAMILIES.values())) == sorted(LOADERS)
    for kind, loader in zip(KINDS, itertools.cycle(FAMILIES[family]), strict=False):
        check(kind, loader)


@pytest.mark.parametrize("kind", [of_kind(kind) for kind in KINDS])
def test_which_samples_may_leave_their_worker(kind: str) -> None:
    assert are_plain([KINDS[kind](i) for i in range(2)]) == (kind in PLAIN)


def test_a_list_that_a_thread_changes_is_no_plain_sample() -> None:
    class Changes(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError(name)

    assert not are_plain([Changes("Strange", (), {})()])


class Late(Numbers):
    """Tensors first, and then objects that must stay where they are; counts how often samples run.

    They cost so much that workers share each batch: one that makes a whole batch finds nothing that must stay. So
    sample 20 waits for the next one, where the test says so.
    """

    waits = False

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.counts = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.counts[index] += 1
        time.sleep(0.003)
        if self.waits and index == 20:
            wait_until(lambda: bool(self.counts[21] > 0))
        return Stuck(index) if index >= 20 else torch.tensor(index)


def values(samples: list[Any]) -> list[int]:
    return [int(each) if isinstance(each, torch.Tensor) else each.value for each in samples]


@pytest.mark.parametrize("loader", ["fork", "batch", "arrival", "fast first"])
def test_the_first_sample_that_must_stay_changes_how_batches_are_made(
    loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that stores samples slowly would count these as cheap.
    monkeypatch.setattr(worker, "_HANDOVERS", 0)
    dataset = Late(60)
    counts = dataset.counts
    dataset.waits = loader in MIXING
    ours = DataLoader(dataset, 4, collate_fn=values, **LOADERS[loader])
    told = pytest.warns(RuntimeWarning, match="use that, or let the dataset return tensors")
    with told if dataset.waits else nullcontext():
        batches = list(ours)
    assert sorted(flat(batches)) == [*range(60)]
    # Only what was in flight when it happened runs again; in the next epoch everything runs once.
    assert counts.max() <= 2
    counts.zero_()
    dataset.waits = False
    again = list(ours)
    assert sorted(again) == [[*range(k, k + 4)] for k in range(0, 60, 4)]
    assert counts.tolist() == [1] * 60


class Bad(Late):
    def __getitem__(self, index: int) -> Any:
        if index < 20:
            raise ValueError(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("loader", LOADERS)
def test_no_sample_runs_twice_where_all_must_stay(loader: str) -> None:
    dataset, mixes = Bad(80), loader in MIXING
    # Of the first batch nothing is left, which tells nothing of what samples are. Where others fill its places, the
    # workers begin to share batches at once.
    options: dict[str, Any] = {"sampler": range(20 if mixes else 16, 80)}
    options["errors"] = "raise" if mixes else "skip"
    ours = DataLoader(dataset, 4, collate_fn=values, **options, **LOADERS[loader])
    with pytest.warns(RuntimeWarning):
        batches = list(ours)
    assert sorted(batches) == [[*range(k, k + 4)] for k in range(20, 80, 4)]
    assert dataset.counts.tolist() == [0] * 20 + [1] * 60


class Broken(Late):
    def __getitem__(self, index: int) -> Any:
        if index % 7 == 3:
            raise ValueError(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("loader", ["fork", "batch", "arrival", "fast first", "compat", "reads"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_are_skipped_where_batches_stay_whole(loader: str, drop_last: bool) -> None:
    ours = DataLoader(
        Broken(40),
        4,
        collate_fn=values,
        drop_last=drop_last,
        errors=ErrorPolicy(on_error="skip"),
        sampler=range(20, 40),
        **LOADERS[loader],
    )
    with pytest.warns(RuntimeWarning):
        batches = list(ours)
    expected = [[i for i in range(k, k + 4) if i % 7 != 3] for k in range(20, 40, 4)]
    if loader not in MIXING:
        assert sorted(batches) == expected
    elif not drop_last:  # which drops the batch that no sample is left for
        assert sorted(flat(batches)) == flat(expected)
    assert ours.coverage().complete
