"""Datasets whose samples are rows of tensors or arrays: batches are those of torch, and are copied together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset, TensorDataset

from minato import DataLoader, Observe
from minato.batching.layout import Layout, has_rows, rows_of
from tests.datasets import ORDERS, TORCH_TAKES_BOOLS, assert_same, flat
from tests.observe.events import check_nesting, read
from tests.selection import sweep

COUNT = 50
TORCH_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
NUMPY_DTYPES = (
    *("bool", "uint8", "int16", "uint32", "int64", "uint64", "float16", "float32", "complex64"),
    *(">f4", "longlong", "longdouble", "datetime64[s]", "U3", "object"),
)


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.rand(COUNT, *shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)


def array(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(0).integers(0, 100, (COUNT, *shape))
    return values.astype(dtype)


def pair() -> TensorDataset:
    return TensorDataset(tensor(torch.float32, 3), tensor(torch.int64))


class Labelled(torch.Tensor):
    """As torchvision's images and boxes are."""


SHAPES = [
    *itertools.product([tensor], TORCH_DTYPES, [(), (3,), (2, 0), (2, 3, 4)]),
    *itertools.product([array], NUMPY_DTYPES, [(), (2,)]),
]
DATASETS: dict[str, Any] = {
    **{
        f"{of.__name__} {dtype} {shape}": of(dtype, *shape)
        for of, dtype, shape in SHAPES
        if (dtype, shape) != ("bool", ()) or TORCH_TAKES_BOOLS
    },
    "requires a gradient": tensor(torch.float32, 2).requires_grad_(),
    "columns": tensor(torch.float32, COUNT).T,
    "channels last": tensor(torch.float32, 3, 4, 5).permute(0, 2, 3, 1),
    "conjugate": tensor(torch.complex64, 2).conj(),
    "every second row": tensor(torch.float32, 4)[::2],
    "of a class of its own": TensorDataset(tensor(torch.float32, 3).as_subclass(Labelled)),
    "pair": pair(),
    "part": Subset(pair(), range(3, 40)),
    "part of a part": Subset(Subset(pair(), torch.randperm(COUNT).tolist()), (*range(0, 40, 2),)),
    "part by an array": Subset(pair(), np.arange(COUNT - 1, 0, -1)),
    "part from the end": Subset(pair(), [-1, -2, -3, 4, 5]),
    "part by a tensor": Subset(pair(), torch.arange(8)),
}


def batches(kind: type, dataset: Any, **arguments: Any) -> Any:
    """The batches of an epoch, or the kind of the error that ends it."""
    torch.manual_seed(3)
    try:
        return [*kind(dataset, **{"batch_size": 12, **arguments})]
    except Exception as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_those_of_torch(name: str, shuffle: bool) -> None:
    kinds = DataLoader, TorchDataLoader
    assert_same(*(batches(kind, DATASETS[name], shuffle=shuffle) for kind in kinds))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were copied together, for each time."""
    found: list[int] = []
    gather = Layout.gather

    def counted(self: Layout, *arguments: Any) -> None:
        found.append(arguments[-1].size)
        gather(self, *arguments)

    monkeypatch.setattr(Layout, "gather", counted)
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dataset", [pair(), tensor(torch.bfloat16, 4), array("float32", 2)])
def test_rows_are_copied_together(dataset: Any, shuffle: bool, copies: list[int]) -> None:
    batches(DataLoader, dataset, batch_size=12, shuffle=shuffle)
    # The first samples, and the two of the last batch, come one by one.
    assert copies[-3:] == [12] * 3


def test_rows_of_a_mapped_file(tmp_path: Path, copies: list[int]) -> None:
    values = array("float32", 5)
    np.save(tmp_path / "values.npy", values)
    dataset = np.load(tmp_path / "values.npy", mmap_mode="r")
    found = batches(DataLoader, dataset)
    assert np.array_equal(torch.cat(found).numpy(), values)
    assert copies[-3:] == [12] * 3


INDICES: dict[str, Any] = {
    "negative": [0, -1, -COUNT, 3],
    "out of range": [0, COUNT, 1],
    "too negative": [0, -COUNT - 1],
    "booleans": [True, 2, False],
    "tensors": [torch.tensor(3), torch.tensor(1)],
    "NumPy's": [np.int64(3), np.int32(4), np.int64(1)],
    "floats": [1.0, 2.0],
    "lists": [[1, 2], [3, 4]],
    "slices": [slice(0, 2), slice(2, 4)],
    "huge": [2**70, 1],
    "repeated": [4, 4, 4, 5],
    "none": [],
}


@sweep(
    num_workers=[0, 1],
    indices=INDICES,
    dataset={"pair": pair(), "tensor": tensor(torch.float32, 2), "array": array("float32", 2)},
)
def test_other_indices(dataset: Any, indices: list[Any], num_workers: int) -> None:
    given: Any = {"sampler": 4 * indices, "batch_size": 9}
    assert_same(
        batches(DataLoader, dataset, **given, num_workers=num_workers),
        batches(TorchDataLoader, dataset, **given),
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("workers", ["process", "thread"])
def test_workers(order: str, workers: str) -> None:
    loader = DataLoader(pair(), 12, shuffle=True, num_workers=2, order=order, workers=workers)
    values, labels = pair().tensors
    expected = zip(values.tolist(), labels.tolist(), strict=True)
    found = [zip(rows.tolist(), labels.tolist(), strict=True) for rows, labels in loader]
    assert sorted(flat(found)) == sorted(expected)
    assert loader.report().run.throughput.samples == COUNT


def test_samples_pass_what_the_loader_is_given() -> None:
    """A transform, and another collation, get samples."""
    doubled = DataLoader(tensor(torch.float32, 2), 7, transforms=[lambda row: row * 2])
    assert torch.equal(torch.cat([*doubled]), tensor(torch.float32, 2) * 2)
    listed = DataLoader(tensor(torch.float32, 2), 7, collate_fn=list)
    assert [len(batch) for batch in listed] == [7] * 7 + [1]


def test_memory_may_change_between_batches() -> None:
    values = torch.zeros(60)
    found = []
    for batch in DataLoader(values, 12):
        found.append(set(batch.tolist()))
        values += 1
    assert found == [{0}, {1}, {2}, {3}, {4}]


def test_the_trace_shows_the_samples(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    batches(DataLoader, pair(), observe=Observe(trace=str(trace)))
    events = read(trace)
    check_nesting(events)
    together = [event["args"]["count"] for event in events if event["name"] == "samples"]
    assert together[-3:] == [12] * 3
    assert sum(together) + sum(event["name"] == "sample" for event in events) == COUNT


def test_which_datasets_have_rows() -> None:
    class Mine(TensorDataset):
        pass

    assert has_rows(Subset(Subset(pair(), [1]), [0]))
    assert not has_rows(Mine(torch.zeros(3)))
    assert not has_rows(Subset([1, 2], [0]))  # type: ignore[arg-type]  # torch takes any sequence


def test_consecutive_rows_are_a_slice() -> None:
    found = [rows_of(pair(), indices) for indices in ([3, 4, 5], [3, 5, 4], [3, 3, 5])]
    assert [rows and rows.indices == slice(3, 6) for rows in found[:1]] == [True]
    assert [rows.indices.tolist() for rows in found[1:]] == [[3, 5, 4], [3, 3, 5]]  # type: ignore[union-attr]
