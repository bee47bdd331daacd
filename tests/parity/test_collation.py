"""What a batch is: every kind of sample, collated, converted, or handed to a function of the user."""

from __future__ import annotations

import array
import collections
import copy
import datetime
import fractions
import functools
import io
import pickle
import re
from collections import OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_convert
from torch.utils.data._utils.collate import default_collate_fn_map

import minato
from tests.datasets import TORCH_TAKES_BOOLS, Pair, Samples, outcomes, quietly
from tests.edges.travellers import Attributed, Colour, Number, Subclass, Text
from tests.parity.harness import TorchLoader, attempt, describe, each, same_for_both, without_worker
from tests.parity.material import identity
from tests.selection import mostly_slow

# ---- types of the user ----------------------------------------------------------------------


@dataclass
class Record:
    image: Any
    label: int


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be changed; its constructor takes a mapping."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self.items_of = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class Stubborn(Frozen):
    def __init__(self, *, items: Mapping[str, Any]) -> None:
        super().__init__(items)


class Noted(Frozen, MutableMapping[str, Any]):
    """A mapping with an attribute of its own."""

    def __init__(self, note: str, **items: Any) -> None:
        super().__init__(items)
        self.note = note

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __copy__(self) -> Noted:
        return Noted(self.note, **self.items_of)


class Steps(Sequence[Any]):
    """A sequence that cannot be changed."""

    def __init__(self, items: Any) -> None:
        self.steps = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)


class Track(Steps, MutableSequence[Any]):
    """A sequence with an attribute of its own."""

    def __init__(self, label: str, items: Any) -> None:
        self.label = label
        self.steps: Any = list(items)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.steps[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.steps[index]

    def insert(self, index: int, value: Any) -> None:
        self.steps.insert(index, value)

    def __copy__(self) -> Track:
        return Track(self.label, self.steps)


class Words(list):
    """A list that carries more than its items."""

    def __init__(self, items: Any, language: str = "en") -> None:
        super().__init__(items)
        self.language = language


class Table(dict):
    """A dict that carries more than its items."""

    unit = "kg"


class Wide(NamedTuple):
    first: Any
    second: Any = 7


class Point(tuple):
    """A subclass of tuple whose constructor takes one argument."""


class Loud(torch.Tensor):
    """A subclass of Tensor with an attribute."""

    loudness: int

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, Loud):
            result.loudness = 11
        return result


class Ratio(float):
    """A subclass of float."""


# ---- samples --------------------------------------------------------------------------------

TENSOR_DTYPES = sorted(
    {
        value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype) and not name.startswith(("q", "bits"))
    },
    key=str,
)
NUMPY_DTYPES = (
    *"?bBhHiIlLqQefdgFDG",
    *(">i2", ">i4", ">i8", ">u4", ">f4", ">f8", ">c8", "<f4", "S3", "U3", "O", "M8[s]", "m8[ms]", "V5"),
)  # fmt: skip


def of_dtype(dtype: torch.dtype, *shape: int) -> Any:
    """A tensor of any dtype, from its bytes."""
    try:
        numel = int(np.prod(shape))
        raw = torch.arange(numel * 16, dtype=torch.uint8)[: numel * dtype.itemsize] % 2
        return raw.clone().view(dtype).reshape(shape)
    except (RuntimeError, TypeError):
        return torch.empty(shape, dtype=dtype).fill_(1) if not dtype.is_complex else None


def creatable(dtype: torch.dtype) -> bool:
    """Whether this build can make and read tensors of a dtype at all."""
    try:
        describe(of_dtype(dtype, 2, 3))
    except Exception:
        return False
    return True


def numpy_samples() -> dict[str, list[Any]]:
    samples: dict[str, list[Any]] = {}
    for code in NUMPY_DTYPES:
        dtype = np.dtype(code)
        plain = np.arange(6).reshape(2, 3)
        values = plain.astype("S3") if code == "V5" else plain
        first = np.zeros((2, 3), dtype) if code == "V5" else values.astype(dtype)
        samples[f"array-{code}"] = [first, first[::-1].copy(), first]
        if code != "?" or TORCH_TAKES_BOOLS:
            samples[f"scalar-{code}"] = [first[0, 0], first[1, 0], first[0, 1]]
    return samples


def structured(n: int) -> Any:
    return np.array([(n, 1.5), (2, 2.5)], dtype=[("a", "i4"), ("b", "f8")])


def read_only(n: int) -> Any:
    values = np.full(3, n)
    values.flags.writeable = False
    return values


def quantized(n: int) -> Any:
    return quietly(lambda: torch.quantize_per_tensor(torch.ones(2, 3) * n, 0.5, 1, torch.quint8))


def nested(n: int) -> Any:
    return quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(n + 1)]))


def compressed(n: int) -> Any:
    return quietly(lambda: (torch.eye(3) * n).to_sparse_csr())


class Odd(Wide):
    """A named tuple that is read otherwise than its items say."""

    def __iter__(self) -> Iterator[int]:
        return iter((0, 0))


def numbers_of(kind: Any) -> list[Any]:
    return [kind(n) for n in range(3)]


base = torch.arange(24.0)
ODD: dict[str, list[Any]] = {
    "mkldnn": [torch.ones(2).to_mkldnn()] * 3,
    "zero-tensor": [torch._efficientzerotensor(2)] * 3,
    "rows-of-a-zero-tensor": [*torch._efficientzerotensor((4, 2))[1:]],
    "exotic-dtype": [torch.zeros(2, dtype=torch.uint8).view(torch.bits8)] * 3,
    "strides-between-elements": [np.zeros(2, dtype=[("a", "u1"), ("b", "<f4")])["b"]] * 3,
    "ulonglong": [np.zeros(2, np.ulonglong)] * 3,
    "longlong-scalar": numbers_of(np.longlong),
    "negative-stride-of-one": [np.zeros(3)[::-1][:1]] * 3,
    "arrays-channels-last": [np.zeros((2, 4, 4, 3)).transpose(0, 3, 1, 2)] * 3,
    "enum": [Colour.RED] * 3,
    "named-tuple-of-torch": [torch.max(torch.zeros(2, 2), 0)] * 3,
    "named-tuple-read-otherwise": [Odd(1, 2)] * 3,
    "key-of-a-class": [{Colour.RED: 1}] * 3,
    "key-that-is-a-tuple": [{(1, 2): 1}] * 3,
    "function": [print] * 3,
    "zero-size": [torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3)],
    "zero-size-inside": [torch.empty(2, 0, dtype=torch.int32)] * 3,
    "empty-array": [np.empty((0, 2), np.float32)] * 3,
    "zero-size-then-more": [torch.empty(0), torch.empty(1), torch.empty(0)],
    "sparse-coo": [torch.eye(3).to_sparse()] * 3,
    "sparse-csr": [compressed(n) for n in range(3)],
    "quantized": [quantized(n) for n in range(3)],
    "nested": [nested(n) for n in range(3)],
    "subclass": [torch.full((2,), n).as_subclass(Subclass) for n in range(3)],
    "subclass-then-plain": [torch.ones(2).as_subclass(Subclass), torch.ones(2), torch.ones(2)],
    "plain-then-subclass": [torch.ones(2), torch.ones(2).as_subclass(Subclass), torch.ones(2)],
    "subclass-with-function": [torch.full((2,), n).as_subclass(Loud) for n in range(3)],
    "subclass-that-is-no-leaf": [torch.ones(2, requires_grad=True).as_subclass(Subclass)] * 3,
    "parameter": [torch.nn.Parameter(torch.ones(2)) for _ in range(3)],
    "requires-grad": [torch.ones(2, requires_grad=True) for _ in range(3)],
    "some-require-grad": [torch.ones(2), torch.ones(2, requires_grad=True), torch.ones(2)],
    "meta": [torch.ones(2, device="meta")] * 3,
    "strided": [base.view(4, 6).t(), base.view(4, 6).t() + 1, base.view(6, 4)],
    "overlapping": [base.as_strided((3, 3), (1, 1))] * 3,
    "expanded": [torch.tensor([1.0, 2.0]).expand(3, 2)] * 3,
    "channels-last": [torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)] * 3,
    "conjugate": [torch.tensor([1 + 2j]).conj()] * 3,
    "negative-bit": [torch.tensor([1 + 2j]).conj().imag] * 3,
    "dtypes-grow": [torch.tensor(1), torch.tensor(2), torch.tensor(True)],
    "structured": [structured(n) for n in range(3)],
    "record": [np.rec.array([(n, 2.0)], dtype=[("a", int), ("b", float)]) for n in range(3)],
    "read-only": [read_only(n) for n in range(3)],
    "array-subclass": [np.arange(3.0).view(Attributed) for _ in range(3)],
    "matrix": [np.ones((2, 2)).view(np.matrix)] * 3,
    "masked": [np.ma.masked_array([1, 2], [True, False])] * 3,
    "zero-dimensional": [np.array(n) for n in range(3)],
    "fortran": [np.asfortranarray(np.arange(6).reshape(2, 3) + n) for n in range(3)],
    "backwards": [np.arange(6.0)[::-1]] * 3,
    "window": [np.lib.stride_tricks.sliding_window_view(np.arange(5.0), 3) for _ in range(3)],
    "float-subclass": [Ratio(n / 2) for n in range(3)],
    "int-subclass": [Number(n) for n in range(3)],
    "bool-then-int": [True, 2, 3],
    "int-then-bool": [1, True, 3],
    "int-then-float": [1, 2.5, 3],
    "int-then-numpy": [1, np.int64(2), np.float32(3)],
    "numpy-then-int": [np.int32(1), 2, 3.5],
    "float-then-int": [1.5, 2, 3],
    "text-then-number": ["a", 1, 2.0],
    "number-then-tensor": [1, torch.ones(2), 3],
    "tensor-then-array": [torch.ones(2), np.ones(2), torch.ones(2)],
    "other-dtype-later": [torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2)],
    "float32-then-float64": [np.ones(2, np.float32), np.ones(2), np.ones(2)],
    "later-none": [1, None, 3],
    "ragged-arrays": [np.ones(2), np.ones((2, 1)), np.ones(2)],
    "float-then-tensor": [1.5, torch.tensor(2.5), 3.5],
    "big-int": [2**63 - 1, 0, -(2**63)],
    "too-big-int": [0, 2**63, 1],
    "complex": [1 + 2j, 3j, 4],
    "none": [None] * 3,
    "ellipsis": [...] * 3,
    "text-subclass": [Text("a"), Text("b"), Text("c")],
    "user-string": [UserString("ab"), UserString("cd"), UserString("ef")],
    "bytearray": [bytearray(b"ab"), bytearray(b"cd"), bytearray(b"ef")],
    "memoryview": [memoryview(b"ab"), memoryview(b"cd"), memoryview(b"ef")],
    "array-module": [array.array("i", [1, n]) for n in range(3)],
    "range": [range(n, n + 2) for n in range(3)],
    "deque": [deque([n, 2]) for n in range(3)],
    "set": [{1}] * 3,
    "generator": [iter([1])] * 3,
    "datetime": [datetime.datetime(2024, 1, 1)] * 3,
    "fraction": [fractions.Fraction(1, 2)] * 3,
    "dataclass": [Record(np.ones(2), n) for n in range(3)],
    "namespace": [SimpleNamespace(a=1)] * 3,
    "slice": [slice(1)] * 3,
    "type": [int, str, float],
    "dict": [{"a": n, 1: "x", None: b"y", (1, 2): 2.5} for n in range(3)],
    "dict-subclass": [Table(a=n) for n in range(3)],
    "ordered": [OrderedDict(b=n, a=1) for n in range(3)],
    "defaultdict": [defaultdict(list, a=n) for n in range(3)],
    "counter": [collections.Counter("aab")] * 3,
    "chain-map": [collections.ChainMap({"a": n}, {"b": 1}) for n in range(3)],
    "user-dict": [UserDict(a=n) for n in range(3)],
    "frozen-mapping": [Frozen({"a": n, "b": np.ones(2)}) for n in range(3)],
    "stubborn-mapping": [Stubborn(items={"a": n}) for n in range(3)],
    "noted-mapping": [Noted(f"note {n}", a=n, b="t") for n in range(3)],
    "list-subclass": [Words([n, 1], "de") for n in range(3)],
    "user-list": [UserList([n, 1]) for n in range(3)],
    "frozen-sequence": [Steps([n, 1.5]) for n in range(3)],
    "track": [Track(f"track {n}", [n, 1]) for n in range(3)],
    "namedtuple": [Pair(n, Wide(np.ones(1))) for n in range(3)],
    "namedtuple-then-tuple": [Pair(1, 2), (3, 4), (5, 6)],
    "nested-containers": [{"a": [(n, {"b": [np.ones(1)]})], "c": ((),)} for n in range(3)],
    "ragged-nesting": [[[1], [2, 3]], [[1], [2, 3]], [[1, 4], [2, 3]]],
    "tuple-subclass": [Point([n, 2]) for n in range(3)],
    "list-then-tuple": [[1, 2], (3, 4), [5, 6]],
    "ragged-lists": [[1, 2], [3], [4, 5]],
    "empty-list": [[], [], []],
    "empty-dict": [{}, {}, {}],
    "equal-keys": [{1: 1, "b": 2}, {True: 3, "b": 4}, {1.0: 5, "b": 6}],
    "keys-in-other-order": [{"a": 1, "b": 2}, {"b": 4, "a": 3}, {"a": 5, "b": 6}],
    "more-keys": [{"a": 1}, {"a": 2, "b": 3}, {"a": 4}],
    "fewer-keys": [{"a": 1, "b": 1}, {"a": 2}, {"a": 3, "b": 3}],
    "none-in-dict": [{"a": 1}, {"a": None}, {"a": 3}],
    "ragged-in-dict": [{"a": torch.ones(2)}, {"a": torch.ones(2)}, {"a": torch.ones(1)}],
    "other-keys": [{"a": 1}, {"b": 2}, {"a": 1}],
    "deep": [[[[[[[[n]]]]]]] for n in range(3)],
    "hundred-levels": [[n] for n in range(3)],
}
for _ in range(60):
    ODD["hundred-levels"] = [[sample] for sample in ODD["hundred-levels"]]
ALL = {
    **{
        str(dtype).removeprefix("torch."): [of_dtype(dtype, 2, 3)] * 3
        for dtype in TENSOR_DTYPES
        if creatable(dtype)
    },
    **numpy_samples(),
    **ODD,
}
STRAIGHTENED_ON_THE_WAY = {"array-Q", "scalar-Q", "backwards", "window", "empty-array"}
"""Arrays that travel from one worker to another as a pickle, which makes ordinary ones of them."""


def collated(make: Any, names: list[str], **arguments: Any) -> dict[str, Any]:
    """What comes of each group of three samples."""
    samples = [sample for name in names for sample in ALL[name]]
    iterator = iter(make(Samples(samples), 3, **arguments))
    found = {name: attempt(lambda: next(iterator)) for name in names}
    assert attempt(lambda: next(iterator)) == ("raised", "StopIteration", "")
    return found


@pytest.mark.large  # nested tensors
def test_default_collate_in_line() -> None:
    quietly(lambda: collated(TorchLoader, [*ALL]))
    same_for_both(lambda make: collated(make, [*ALL]))


@pytest.mark.large
def test_default_collate_in_processes() -> None:
    names = [name for name in ALL if name not in STRAIGHTENED_ON_THE_WAY]
    theirs = quietly(lambda: collated(TorchLoader, names, num_workers=1))
    for number in (1, 2):
        assert collated(minato.DataLoader, names, num_workers=number) == theirs


@pytest.mark.large
def test_default_collate_in_threads() -> None:
    theirs = quietly(lambda: collated(TorchLoader, [*ALL]))
    ours = collated(minato.DataLoader, [*ALL], num_workers=2, workers="thread")
    assert without_worker(ours) == without_worker(theirs)


# ---- the function of the user ---------------------------------------------------------------

CONVERSIONS: dict[str, Callable[[list[Any]], Any]] = {
    "identity": identity,
    "convert": default_convert,
    "first": lambda samples: samples[0],
    "none": lambda samples: None,
    "twice": lambda samples: (samples[0], samples[0]),
    "set": lambda samples: {len(samples), "x"},
    "record": lambda samples: Record(len(samples), 2),
    "function": lambda samples: len,
    "exception": lambda samples: ValueError(len(samples)),
}
UNSENDABLE = "mkldnn", "zero-tensor", "rows-of-a-zero-tensor", "arrays-channels-last"
ARRIVES = [
    name
    for name in ALL
    if name not in {"generator", "memoryview", "mappingproxy", "meta", *UNSENDABLE}
]
"""What torch's workers can send."""
MUTILATED_BY_TORCH = {"conjugate", "quantized"}
"""Its workers lose what is not in a tensor's storage."""


@mostly_slow("how", CONVERSIONS)
def test_collate_fn_may_return_anything(how: str) -> None:
    def made(names: list[str], make: Any, workers: int) -> Any:
        return collated(make, names, collate_fn=CONVERSIONS[how], num_workers=workers)

    odd = MUTILATED_BY_TORCH | (STRAIGHTENED_ON_THE_WAY if how == "convert" else set())
    sent = [name for name in ARRIVES if name not in odd]
    for names, workers in ((ARRIVES, 0), (sent, 1)):
        case = functools.partial(made, names, workers=workers)
        quietly(lambda: case(TorchLoader))  # noqa: B023
        same_for_both(case)
    assert made(sent, minato.DataLoader, 2) == made(sent, minato.DataLoader, 1)


@pytest.mark.parametrize("name", sorted(MUTILATED_BY_TORCH))
def test_what_torchs_workers_mutilate_arrives_as_without_workers(name: str) -> None:
    theirs = collated(TorchLoader, [name], collate_fn=identity)
    for workers in (1, 2):
        ours = collated(minato.DataLoader, [name], collate_fn=identity, num_workers=workers)
        assert ours == theirs


@each
@pytest.mark.parametrize("change", [list.pop, list.clear, lambda samples: samples.append(0)])
def test_collate_fn_may_change_its_list(change: Any, workers: Any, own: Any) -> None:
    def case(make: Any) -> Any:
        return [
            *make(range(23), 5, collate_fn=lambda samples: [change(samples), samples], **workers)
        ]

    same_for_both(case, **own)


def test_results_that_cannot_be_sent_are_errors() -> None:
    """Torch prints a traceback and hangs."""
    errors = TypeError, AttributeError, pickle.PicklingError  # the last from Python 3.14 on
    for result in (lambda: None, (n for n in ()), memoryview(b""), MappingProxyType({"a": 1})):
        options = {"batch_size": None, "collate_fn": [1, result, 3].__getitem__}
        found = outcomes(iter(minato.DataLoader(range(3), num_workers=2, **options)))
        assert [outcome[0] for outcome in found] == ["batch", "raised", "batch"]
        assert issubclass(found[1][1], errors)
        assert re.search("pickle|local object", found[1][2])
        for workers in ({}, {"num_workers": 2, "workers": "thread"}):
            assert [*minato.DataLoader(range(3), **options, **workers)][1] is result


# ---- entries of the user in torch's map -----------------------------------------------------


@pytest.fixture
def collate_fn_map() -> Iterator[dict[Any, Any]]:
    """torch's map, as it was afterwards."""
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


def gathered(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return ["gathered", *batch]


@each
@pytest.mark.parametrize(
    "kind",
    [Record, torch.Tensor, np.ndarray, (Number, Ratio), int, dict, type(None), list, Subclass],
)
def test_user_entries_in_the_function_map(
    kind: Any, workers: Any, own: Any, collate_fn_map: dict[Any, Any]
) -> None:
    names = ["dataclass", "float32", "array-i", "int-subclass", "float-subclass", "dict", "none"]
    names += ["namedtuple", "subclass", "nested-containers", "list-subclass", "user-list"]
    collate_fn_map[kind] = gathered
    same_for_both(lambda make: collated(make, names, **workers), **own)


@each
def test_entry_that_is_made_after_the_loader(workers: Any, own: Any, collate_fn_map: Any) -> None:
    before = dict(collate_fn_map)

    def case(make: Any) -> Any:
        collate_fn_map.clear()
        collate_fn_map.update(before)
        loader = make(Samples([1, 2, 3]), 2, **workers)
        seen = [[*loader]]
        collate_fn_map[int] = gathered
        seen.append([*loader])
        del collate_fn_map[int]
        return [*seen, attempt(lambda: [*loader])]

    same_for_both(case, **own)


# ---- what can be done with a batch ----------------------------------------------------------


@each
def test_delivered_tensors_are_like_any_other(workers: Any, own: Any) -> None:
    samples = [{"x": torch.full((4, 3), float(n)), "y": np.arange(3) + n} for n in range(4)]

    def use(batch: Any) -> Any:
        x, y = batch["x"], batch["y"]
        seen = [x.untyped_storage().nbytes(), x.storage_offset(), x.is_contiguous(), x._is_view()]
        seen += [x.numpy().flags.writeable, x.data_ptr() % 4, x._base is None]
        x += 1
        x[0] = 5
        x.requires_grad_()
        (x * 2).sum().backward()
        seen += [x.grad, x.detach().clone(), copy.deepcopy(y), pickle.loads(pickle.dumps(y))]
        stream = io.BytesIO()
        torch.save(y, stream)
        seen += [len(stream.getvalue()), y.view(-1)[:2], y.t(), y.share_memory_().is_shared()]
        seen += [attempt(lambda: y.resize_(2, 2)), y.untyped_storage().nbytes(), y.to(torch.int8)]
        return seen

    same_for_both(
        lambda make: [use(batch) for batch in make(Samples(samples), 2, **workers)], **own
    )


@each
def test_objects_that_occur_twice_in_a_batch_are_one(workers: Any, own: Any) -> None:
    def twice(samples: list[Any]) -> Any:
        tensor, values, items = torch.ones(3), np.ones(3), [1]
        return [tensor, tensor[1:], tensor, values, values, items, items]

    def case(make: Any) -> Any:
        (batch,) = make(Samples([1]), collate_fn=twice, **workers)
        tensor, tail, again, values, likewise, items, too = batch
        tensor[1] = 7
        return [tail, tensor is again, values is likewise, items is too]

    same_for_both(case, **own)
