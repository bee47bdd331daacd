"""Values of NumPy, torch, pandas and subclasses are what they equal: indices, keys, labels, costs, options, lengths."""

from __future__ import annotations

import enum
import json
import math
from collections import UserList, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import DistributedSampler

import minato
from minato import (
    Arrival,
    CostBatches,
    CostBatchSampler,
    DataLoader,
    DeviceCopies,
    ErrorPolicy,
    FetchOptions,
    PaperController,
    StragglerPolicy,
)
from minato._support.hashes import index_hash
from minato._support.values import integer_of, items_of, number_of, plain
from minato.caching import DiskCache, MemoryCache
from minato.checks import check_number, check_whole
from minato.observe.meters import SlowestSamples
from minato.scheduling.slow_samples import CostModel, integers_of
from minato.sources.base import Retry
from minato.sources.splits import folds, load_splits, save_splits, split
from tests.datasets import Numbers, Pair, Stream, flat, forked, indices
from tests.edges.travellers import Items


class Whole(int):
    def __repr__(self) -> str:
        return "a number of another kind"

    __str__ = __repr__


class Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return "a text of another kind"

    __str__ = __repr__


class Share(float):
    def __repr__(self) -> str:
        return "a share of another kind"


class Raw(bytes):
    pass


class Row(tuple):  # type: ignore[type-arg]
    __slots__ = ()


class Level(enum.IntEnum):
    THREE = 3


class Name(str, enum.Enum):  # noqa: UP042  # as programs still write it
    A = "a"


INTEGERS = [np.dtype(code) for code in np.typecodes["AllInteger"]]
FLOATS = [np.dtype(code) for code in np.typecodes["Float"]]
TORCH_INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
TORCH_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

AS_INTEGER: dict[str, Callable[[int], Any]] = {
    "int": int,
    "a subclass": Whole,
    **{str(dtype): dtype.type for dtype in INTEGERS},
    **{f"array {dtype}": lambda x, dtype=dtype: np.array(x, dtype) for dtype in INTEGERS},
    **{str(dtype): lambda x, dtype=dtype: torch.tensor(x, dtype=dtype) for dtype in TORCH_INTEGERS},
}
AS_FLOAT: dict[str, Callable[[float], Any]] = {
    "float": float,
    "a subclass": Share,
    **{str(dtype): dtype.type for dtype in FLOATS},
    **{str(dtype): lambda x, dtype=dtype: torch.tensor(x, dtype=dtype) for dtype in TORCH_FLOATS},
}
AS_TEXT: dict[str, Callable[[str], Any]] = {"str": str, "a subclass": Text, "np.str_": np.str_}
EQUAL: list[tuple[Any, Any]] = [
    *((make(7), 7) for make in AS_INTEGER.values()),
    *((make(0.5), 0.5) for make in AS_FLOAT.values()),
    *((make("x"), "x") for make in AS_TEXT.values()),
    (Level.THREE, 3),
    (Name.A, "a"),
    (True, True),
    (np.bool_(True), True),
    (torch.tensor(True), True),
    (None, None),
    (np.bytes_(b"x"), b"x"),
    (Raw(b"x"), b"x"),
    (np.complex64(1j), 1j),
    (np.clongdouble(1j), 1j),
    ((1, 2), (1, 2)),
    ([1, 2], (1, 2)),
    (Row([1, np.int8(2)]), (1, 2)),
    (Pair(1, Text("x")), (1, "x")),
    (Items([1, [2]]), (1, (2,))),
    (np.array([1, 2]), (1, 2)),
    (np.array([[1], [2]]), ((1,), (2,))),
    (np.array(["x", None], object), ("x", None)),
    (torch.tensor([1, 2]), (1, 2)),
    (torch.tensor([0.5], requires_grad=True), (0.5,)),
    (torch.nn.Parameter(torch.tensor(0.5)), 0.5),
]


@pytest.mark.parametrize(("value", "expected"), EQUAL, ids=lambda value: type(value).__name__)
def test_plain_values(value: Any, expected: Any) -> None:
    found = plain(value)
    assert type(found) is type(expected)
    assert found == expected
    assert hash(found) == hash(expected)
    assert repr(found) == repr(expected)
    assert index_hash(value) == index_hash(expected)


def test_missing_values_are_one_value() -> None:
    nans = [math.nan, float("nan"), np.float32("nan"), torch.tensor(math.nan), Share("nan")]
    assert len({plain(value) for value in nans}) == 1
    assert plain(None) is None


@pytest.mark.parametrize("value", [Ellipsis, {}, {1}, Decimal(1), Fraction(1), range(3)], ids=repr)
def test_other_objects_stay(value: Any) -> None:
    assert plain(value) is value


@pytest.mark.parametrize("make", AS_INTEGER.values(), ids=AS_INTEGER)
def test_integers(make: Callable[[int], Any]) -> None:
    value = make(7)
    assert integer_of(value) == number_of(value) == check_whole("n", value, 0) == 7
    assert type(check_whole("n", value, 0)) is int
    assert type(check_number("n", value)) is int
    assert index_hash(value) == 7
    with pytest.raises(ValueError, match="n=7 is too small: give at least 8"):
        check_whole("n", value, 8)
    costs, slowest = CostModel(), SlowestSamples()
    costs.observe(make(3), 5.0)
    assert costs.predict(3) == costs.predict(make(3)) == 5.0
    slowest.offer(make(3), 0, 9, -1, 5)
    slowest.offer(3, 1, 10, -1, 5)
    assert [(each.key, each.epoch) for each in slowest.read()] == [(3, 1)]


@pytest.mark.parametrize("make", AS_FLOAT.values(), ids=AS_FLOAT)
def test_floats(make: Callable[[float], Any]) -> None:
    value = make(0.5)
    assert integer_of(value) is None
    assert number_of(value) == check_number("n", value) == 0.5
    assert type(check_number("n", value)) is float
    with pytest.raises(TypeError, match=r"^n=0.5 is a \w+: give an integer"):
        check_whole("n", value, None)


@pytest.mark.parametrize(
    "value", [True, np.bool_(True), torch.tensor(True), "1", [1], None, 1j, {}]
)
def test_what_is_no_number(value: Any) -> None:
    assert number_of(value) is None
    if value is not None:
        for check in (check_number, lambda name, value: check_whole(name, value, None)):
            with pytest.raises(TypeError, match="^n="):
                check("n", value)


# ---- containers ------------------------------------------------------------------------------


class Lazy:
    """As a dataset: a length and items, and no error at the end."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i] if i < len(self.items) else self.items[0]


def _series(items: list[Any]) -> Any:
    """A column in another order than its own index says."""
    pandas = pytest.importorskip("pandas")
    return pandas.Series(items, index=list(range(len(items)))[::-1])


def _shuffled(items: list[Any]) -> Any:
    """A column of a table of which rows were left out."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"x": [item for item in items for _ in range(2)]})
    return table[table.index % 2 == 0]["x"]


CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "subclass": Items,
    "UserList": UserList,
    "deque": deque,
    "lazy": Lazy,
    "array": np.array,
    "array of objects": lambda items: np.array(items, object),
    "Series": _series,
    "part of a table": _shuffled,
    "Index": lambda items: pytest.importorskip("pandas").Index(items),
    "Categorical": lambda items: pytest.importorskip("pandas").Categorical(items),
    "nullable": lambda items: pytest.importorskip("pandas").array(items),
    "array of values": lambda items: [np.array(item)[()] for item in items],
    "pyarrow": lambda items: pytest.importorskip("pyarrow").array(items),
    "chunks": lambda items: pytest.importorskip("pyarrow").chunked_array([items[:3], items[3:]]),
}
OF_NUMBERS: dict[str, Callable[[list[Any]], Any]] = {
    **CONTAINERS,
    "tensor": torch.tensor,
    "list of tensors": lambda items: [torch.tensor(item) for item in items],
    "integers": lambda items: [np.int16(item) for item in items],
    "subclasses": lambda items: [Whole(item) for item in items],
    "memoryview": lambda items: memoryview(np.array(items)),
}
PATIENTS = [i // 3 for i in range(30)]
CLASSES = [i % 3 for i in range(30)]
SHARES = {"train": 2, "test": 1}


@pytest.mark.large
@pytest.mark.parametrize("hold", OF_NUMBERS.values(), ids=OF_NUMBERS)
def test_splits_depend_on_the_values_alone(hold: Callable[[list[Any]], Any]) -> None:
    keys = list(range(100, 130))
    expected = split(keys, SHARES, seed=1, labels=CLASSES, entities=PATIENTS)
    assert not {keys.index(key) // 3 for key in expected["train"]} & {
        keys.index(key) // 3 for key in expected["test"]
    }
    given = split(hold(keys), SHARES, seed=1, labels=hold(CLASSES), entities=hold(PATIENTS))
    assert given == expected
    of_folds = folds(hold(keys), 3, seed=1, labels=hold(CLASSES), entities=hold(PATIENTS))
    assert of_folds == folds(keys, 3, seed=1, labels=CLASSES, entities=PATIENTS)


@pytest.mark.large
@pytest.mark.parametrize("hold", CONTAINERS.values(), ids=CONTAINERS)
def test_splits_of_texts(hold: Callable[[list[Any]], Any]) -> None:
    keys = [f"key {i}" for i in range(30)]
    patients, classes = [f"patient {i}" for i in PATIENTS], [f"class {i}" for i in CLASSES]
    expected = split(keys, SHARES, seed=1, labels=classes, entities=patients)
    shares: Any = {"train": np.float32(2), "test": torch.tensor(1)}
    seed: Any = np.int64(1)
    given = split(hold(keys), shares, seed=seed, labels=hold(classes), entities=hold(patients))
    assert given == expected


@pytest.mark.large
def test_rows_of_tables_are_entities() -> None:
    pandas = pytest.importorskip("pandas")
    pairs = [(i, i % 2) for i in PATIENTS]
    expected = split(range(30), SHARES, seed=1, entities=pairs)
    for hold in (pandas.DataFrame, np.array, torch.tensor, lambda rows: [*map(list, rows)]):
        assert split(range(30), SHARES, seed=1, entities=hold(pairs)) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"entities": {i: i for i in range(30)}}, TypeError, "entities is a dict"),
        ({"labels": set(range(30))}, TypeError, "labels is a set"),
        ({"labels": 3}, TypeError, "labels is a int"),
        ({"entities": [{}] * 30}, TypeError, r"entities\[0\] is {} of type dict"),
        ({"shares": {"a": math.inf, "b": 1}}, ValueError, "give whole numbers"),
        ({"shares": {"a": math.nan}}, ValueError, "give whole numbers"),
        ({"shares": {"a": 1.5, "b": 1}}, ValueError, "give whole numbers"),
        ({"shares": {"a": True}}, ValueError, "give whole numbers"),
        ({"shares": {"a": "8"}}, ValueError, "give whole numbers"),
        ({"seed": Ellipsis}, TypeError, "seed=Ellipsis is a ellipsis: give an integer"),
    ],
    ids=str,
)
def test_what_cannot_be_split(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    shares = arguments.pop("shares", SHARES)
    with pytest.raises(error, match=text):
        split(range(30), shares, **{"seed": 0, **arguments})


def parquet(kind: str, **numbers: Any) -> object:
    from minato.sources import parquet

    return getattr(parquet, kind)("unused", **numbers)


TAKE_A_NUMBER: dict[str, tuple[Callable[[Any], object], str]] = {
    "MemoryCache": (MemoryCache, "quota_bytes"),
    "DiskCache": (lambda value: DiskCache("unused", value), "quota_bytes"),
    "Retry": (Retry, "attempts"),
    "Retry-pause": (lambda value: Retry(first_s=value), "first_s"),
    "Parquet": (lambda value: parquet("Parquet", kept_groups=value), "kept_groups"),
    "ParquetStream": (lambda value: parquet("ParquetStream", window_rows=value), "window_rows"),
    "PaperController": (PaperController, "alpha"),
    "DeviceCopies": (lambda value: DeviceCopies("cpu", value), "ahead"),
    "FetchOptions": (FetchOptions, "concurrency"),
    "CostBatches": (lambda value: CostBatches(4, max_wait=value), "max_wait"),
    "shuffle": (lambda value: minato.shuffle(Stream(4), value), "buffer_size"),
    "shuffle-seed": (lambda value: minato.shuffle(Stream(4), 2, value), "seed"),
    "mix": (lambda value: minato.mix({"a": Stream(4)}, seed=value), "seed"),
    "pack": (lambda value: minato.pack(Stream(4), value), "length"),
    "pack-rows": (lambda value: minato.pack(Stream(4), 4, open_rows=value), "open_rows"),
    "split": (lambda value: split(range(30), SHARES, seed=value), "seed"),
    "folds": (lambda value: folds(range(30), value, seed=0), "count"),
    "headroom": (lambda value: DataLoader(Numbers(4)).headroom(value), "steps"),
}


@pytest.mark.parametrize("value", ["5", None])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.large] * name.startswith("Parquet"))
        for name in TAKE_A_NUMBER
    ],
)
def test_what_takes_a_number_names_another_value(name: str, value: object) -> None:
    call, argument = TAKE_A_NUMBER[name]
    with pytest.raises(TypeError, match=f"^{argument}={value!r} is a {type(value).__name__}: give"):
        call(value)


def test_saved_keys_of_any_type(tmp_path: Path) -> None:
    keys = [np.int32(3), torch.tensor(4), np.str_("x"), Text("y"), (np.int8(1), "z"), Raw(b"\0")]
    save_splits(tmp_path / "splits.json", {"a": keys, "b": np.arange(2)})
    found = load_splits(tmp_path / "splits.json")
    assert found == {"a": [3, 4, "x", "y", (1, "z"), b"\0"], "b": [0, 1]}


def test_items_that_are_not_several() -> None:
    for values in (3, object(), None):
        with pytest.raises(TypeError, match="^labels is a "):
            items_of("labels", values)
    assert items_of("labels", (i for i in range(3))) == [0, 1, 2]


# ---- the indices of a sampler ----------------------------------------------------------------


class Asked(Numbers):
    """Every sample is the type and value of what the loader asked for; one fails."""

    def __getitem__(self, index: Any) -> Any:
        if int(index) == 5:
            raise ValueError("five")
        return f"{type(index).__name__} {int(index)}"


SOME = ["int", "a subclass", "int64", "uint8", "array int32", "torch.int64"]


@pytest.mark.parametrize("workers", [{}, forked(2), {"num_workers": 2, "workers": "thread"}])
@pytest.mark.parametrize("kind", SOME)
def test_integers_of_a_sampler(kind: str, workers: dict[str, Any], tmp_path: Path) -> None:
    sampler = [AS_INTEGER[kind](i) for i in range(12)]
    path = tmp_path / "failures.jsonl"
    policy = ErrorPolicy("skip", log=path)
    loader = DataLoader(Asked(12), 4, sampler=sampler, errors=policy, **workers)
    with pytest.warns(RuntimeWarning, match="1 sample of this epoch was skipped"):
        batches = list(loader)
    name = type(sampler[0]).__name__
    assert flat(batches) == [f"{name} {i}" for i in range(12) if i != 5]
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [5]
    report = loader.report()
    assert report.run.throughput.samples == loader.metrics()["samples_total"] == 11
    assert all(type(each.index) is int for each in report.slowest)


def test_the_ledger_knows_the_integers() -> None:
    assert integers_of([np.int64(3), torch.tensor(4), True]) == [3, 4, 1]
    assert integers_of(np.arange(3)) == [0, 1, 2]
    assert integers_of(torch.arange(3)) == [0, 1, 2]
    assert integers_of(["a", (1, 2)]) is None
    assert integers_of([]) is None
    least = -(1 << 63)
    assert integers_of(["a", 1, 1 << 63]) == [least, 1, least]


@pytest.mark.parametrize("make", AS_INTEGER.values(), ids=AS_INTEGER)
def test_options_take_integers(make: Callable[[int], Any]) -> None:
    options = {"seed": make(7), "memory_budget": make(100), "order": Arrival(make(3))}
    loader = DataLoader(Numbers(8), 4, shuffle=True, **options)
    expected = DataLoader(Numbers(8), 4, shuffle=True, seed=7)
    loader.set_epoch(make(3))
    expected.set_epoch(3)
    assert torch.cat(list(loader)).tolist() == torch.cat(list(expected)).tolist()
    dealt: Any = DistributedSampler(Numbers(8), 1, 0)
    DataLoader(Numbers(8), 4, sampler=dealt).set_epoch(make(3))
    assert type(dealt.epoch) is int  # torch's generators take no other
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
    assert ErrorPolicy("skip", max_failures=make(3)).max_failures == 3
    scale = minato.AutoScale(min=make(2), max=make(2), start=make(2))
    assert (type(scale.min), scale.limits()[0]) == (int, 2)


@pytest.mark.parametrize("make", AS_FLOAT.values(), ids=AS_FLOAT)
def test_options_take_floats(make: Callable[[float], Any]) -> None:
    assert ErrorPolicy("skip", max_failures=make(0.5)).max_failures == 0.5
    assert StragglerPolicy(after_s=make(0.5)).after_s == 0.5
    assert StragglerPolicy(percentile=make(50)).share == 0.5
    assert ErrorPolicy(sample_timeout=make(2)).sample_timeout == 2


@pytest.mark.parametrize("value", [math.inf, 1e300, 1e10, Decimal(10**30), np.float32("inf")])
def test_no_sample_is_slow_after_ever(value: Any) -> None:
    loader = DataLoader(Numbers(8), 4, stragglers=StragglerPolicy(after_s=value))
    assert torch.cat(list(loader)).tolist() == list(range(8))
    assert "slow" in str(loader.slow_samples())


@pytest.mark.parametrize("value", [math.nan, -1, 1.0, math.inf, np.float32("nan")])
def test_impossible_budgets(value: Any) -> None:
    with pytest.raises(ValueError, match="is not possible"):
        ErrorPolicy("skip", max_failures=value)


# ---- costs -----------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize("hold", OF_NUMBERS.values(), ids=OF_NUMBERS)
def test_batches_by_cost_depend_on_the_values_alone(hold: Callable[[list[Any]], Any]) -> None:
    costs = [3, 1, 2, 5, 4, 2, 1, 3]
    expected = list(CostBatchSampler(costs, 10, seed=3))
    options: Any = {"seed": np.int64(3), "max_size": torch.tensor(8)}
    options["shard"] = np.uint8(0), np.int32(1)
    made: Any = CostBatchSampler(hold(costs), np.float32(10), **options)  # type: ignore[arg-type]
    made.set_epoch(np.int64(0))
    assert list(made) == expected
    assert all(type(i) is int for batch in made for i in batch)


@pytest.mark.parametrize("costs", [{0: 1.0}, {1.0}, ["a"], [None], [[1.0], [1.0, 2.0]], 3])
def test_costs_that_are_none(costs: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="costs|cost of index"):
        CostBatchSampler(costs, 10)


@pytest.mark.parametrize("dtype", TORCH_FLOATS + TORCH_INTEGERS)
def test_costs_of_any_dtype(dtype: torch.dtype) -> None:
    costs = torch.tensor([3, 1, 2, 5], dtype=dtype)
    expected = list(CostBatchSampler([3, 1, 2, 5], 10))
    assert list(CostBatchSampler(costs, 10)) == expected
    assert list(CostBatchSampler((costs[i] for i in range(4)), 10)) == expected


# ---- lengths ---------------------------------------------------------------------------------


class Long(Numbers):
    """Its length is of any type."""

    def __len__(self) -> Any:
        if isinstance(self.size, Exception):
            raise type(self.size)(*self.size.args)  # a new one: its traceback keeps the loader
        return self.size


@pytest.mark.parametrize(
    "length",
    [12, np.int64(12), np.uint8(12), Whole(12), True, torch.tensor(12), 12.0, "12", 1 << 80, -1]
    + [TypeError("no"), RuntimeError("not yet"), KeyError("length"), None],
    ids=repr,
)
@pytest.mark.parametrize(
    "arguments", [{}, {"sampler": range(12)}, {"batch_sampler": [[0, 1], [2]]}]
)
def test_lengths_as_with_torch(length: Any, arguments: dict[str, Any]) -> None:
    def outcome(make: Any) -> Any:
        batch_size = 1 if "batch_sampler" in arguments else 4
        try:
            return indices(make(Long(length), batch_size, **arguments))
        except Exception as error:
            return type(error)

    assert outcome(DataLoader) == outcome(TorchLoader)


# ---- classes in the place of objects, and other near misses -----------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("errors", ErrorPolicy),
        ("stragglers", StragglerPolicy),
        ("workers", minato.SharedPool),
        ("workers", minato.RayWorkers),
        ("fetch_concurrency", minato.FetchOptions),
        ("num_workers", minato.AutoScale),
        ("cache", minato.caching.MemoryCache),
        ("seed", int),
        ("device", minato.DeviceCopies),
        ("observe", minato.Observe),
        ("recording", minato.Record),
        ("collate_fn", minato.PadCollate),
    ],
)
def test_a_class_where_an_object_belongs_is_refused(name: str, value: Any) -> None:
    text = f"{name}={value.__name__} is a class: give an object of it, {value.__name__}\\("
    with pytest.raises(TypeError, match=text):
        DataLoader(Numbers(8), **{name: value})


def test_classes_within_groups_are_refused() -> None:
    with pytest.raises(TypeError, match="on_error=ErrorPolicy is a class"):
        ErrorPolicy(ErrorPolicy)
    with pytest.raises(TypeError, match="controller=PaperController is a class"):
        minato.AutoScale(controller=minato.PaperController)  # type: ignore[arg-type]


def test_a_class_may_transform_and_collate() -> None:
    loader = DataLoader(Numbers(4), 2, transforms=[str, Text], collate_fn=tuple)
    assert list(loader) == [("0", "1"), ("2", "3")]
