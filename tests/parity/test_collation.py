"""What a batch is: every kind of sample, collated, converted, or handed to a function of the user."""

from __future__ import annotations

import array
import collections
import datetime
import fractions
from collections import OrderedDict, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.datasets import Pair, Samples
from tests.parity.harness import describe, drain, each, same_for_both

# ---- types of the user ----------------------------------------------------------------------


@dataclass
class Record:
    """A dataclass, which torch does not collate."""

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
    """A mapping whose constructor takes something else."""

    def __init__(self, *, items: Mapping[str, Any]) -> None:
        super().__init__(items)


class Noted(MutableMapping[str, Any]):
    """A mapping with an attribute of its own."""

    def __init__(self, note: str, **items: Any) -> None:
        self.note = note
        self.parts = items

    def __getitem__(self, key: str) -> Any:
        return self.parts[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.parts[key] = value

    def __delitem__(self, key: str) -> None:
        del self.parts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __copy__(self) -> Noted:
        return Noted(self.note, **self.parts)


class Steps(Sequence[Any]):
    """A sequence that cannot be changed."""

    def __init__(self, items: Any) -> None:
        self.steps = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)


class Track(MutableSequence[Any]):
    """A sequence with an attribute of its own."""

    def __init__(self, label: str, items: Any) -> None:
        self.label = label
        self.points = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self.points[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.points[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.points[index]

    def __len__(self) -> int:
        return len(self.points)

    def insert(self, index: int, value: Any) -> None:
        """As lists do."""
        self.points.insert(index, value)

    def __copy__(self) -> Track:
        return Track(self.label, self.points)


class Words(list):
    """A list that carries more than its items."""

    def __init__(self, items: Any, language: str = "en") -> None:
        super().__init__(items)
        self.language = language


class Table(dict):
    """A dict that carries more than its items."""

    unit = "kg"


class Wide(NamedTuple):
    """A named tuple with a default."""

    first: Any
    second: Any = 7


class Special(torch.Tensor):
    """A subclass of Tensor."""


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


class Measure(np.ndarray):
    """A subclass of ndarray."""


class Text(str):
    """A subclass of str."""


class Count(int):
    """A subclass of int."""


class Ratio(float):
    """A subclass of float."""


# ---- samples --------------------------------------------------------------------------------

TENSOR_DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
NUMPY_DTYPES = (
    *("?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "g", "F", "D", "G"),
    *(
        ">i2",
        ">i4",
        ">i8",
        ">u4",
        ">f4",
        ">f8",
        ">c8",
        "<f4",
        "S3",
        "U3",
        "O",
        "M8[s]",
        "m8[ms]",
        "V5",
    ),
)


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
    """Arrays and scalars of every dtype."""
    samples: dict[str, list[Any]] = {}
    for code in NUMPY_DTYPES:
        dtype = np.dtype(code)
        plain = np.arange(6).reshape(2, 3)
        values = plain.astype("S3") if code == "V5" else plain
        first = np.zeros((2, 3), dtype) if code == "V5" else values.astype(dtype)
        samples[f"array-{code}"] = [first, first[::-1].copy(), first]
        samples[f"scalar-{code}"] = [first[0, 0], first[1, 0], first[0, 1]]
    return samples


def structured(n: int) -> Any:
    return np.array([(n, 1.5), (2, 2.5)], dtype=[("a", "i4"), ("b", "f8")])


def read_only(n: int) -> Any:
    values = np.full(3, n)
    values.flags.writeable = False
    return values


def quantized(n: int) -> Any:
    return torch.quantize_per_tensor(torch.ones(2, 3) * n, 0.5, 1, torch.quint8)


def nested(n: int) -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(n + 1)])


base = torch.arange(24.0)
ODD: dict[str, list[Any]] = {
    "zero-size": [torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3)],
    "zero-size-inside": [torch.empty(2, 0, dtype=torch.int32)] * 3,
    "empty-array": [np.empty((0, 2), np.float32)] * 3,
    "zero-size-then-more": [torch.empty(0), torch.empty(1), torch.empty(0)],
    "sparse-coo": [torch.eye(3).to_sparse()] * 3,
    "sparse-csr": [torch.eye(3).to_sparse_csr()] * 3,
    "quantized": [quantized(n) for n in range(3)],
    "nested": [nested(n) for n in range(3)],
    "subclass": [torch.full((2,), n).as_subclass(Special) for n in range(3)],
    "subclass-then-plain": [torch.ones(2).as_subclass(Special), torch.ones(2), torch.ones(2)],
    "plain-then-subclass": [torch.ones(2), torch.ones(2).as_subclass(Special), torch.ones(2)],
    "subclass-with-function": [torch.full((2,), n).as_subclass(Loud) for n in range(3)],
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
    "array-subclass": [np.arange(3.0).view(Measure) for _ in range(3)],
    "matrix": [np.ones((2, 2)).view(np.matrix)] * 3,
    "masked": [np.ma.masked_array([1, 2], [True, False])] * 3,
    "zero-dimensional": [np.array(n) for n in range(3)],
    "fortran": [np.asfortranarray(np.arange(6).reshape(2, 3) + n) for n in range(3)],
    "window": [np.lib.stride_tricks.sliding_window_view(np.arange(5.0), 3) for _ in range(3)],
    "float-subclass": [Ratio(n / 2) for n in range(3)],
    "int-subclass": [Count(n) for n in range(3)],
    "bool-then-int": [True, 2, 3],
    "int-then-bool": [1, True, 3],
    "int-then-float": [1, 2.5, 3],
    "int-then-numpy": [1, np.int64(2), np.float32(3)],
    "numpy-then-int": [np.int32(1), 2, 3.5],
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
    "other-keys": [{"a": 1}, {"b": 2}, {"a": 1}],
    "deep": [[[[[[[[n]]]]]]] for n in range(3)],
    "hundred-levels": [[n] for n in range(3)],
}
for _ in range(60):
    ODD["hundred-levels"] = [[sample] for sample in ODD["hundred-levels"]]
UNPICKLABLE = ("memoryview", "generator", "mappingproxy")
"""With torch's workers these never arrive; the loader waits for ever."""
ODD["mappingproxy"] = [MappingProxyType({"a": n}) for n in range(3)]

ALL = {
    **{
        f"{str(dtype).removeprefix('torch.')}": [of_dtype(dtype, 2, 3)] * 3
        for dtype in TENSOR_DTYPES
        if creatable(dtype)
    },
    **numpy_samples(),
    **ODD,
}


def collated(make: Any, names: list[str], **arguments: Any) -> list[Any]:
    samples = [sample for name in names for sample in ALL[name]]
    return drain(iter(make(Samples(samples), 3, **arguments)), most=4 * len(names))


def plain(outcome: Any) -> Any:
    """Of what a worker raised, only the error itself."""
    return outcome


@each
def test_default_collate(workers: dict[str, Any], own: dict[str, Any]) -> None:
    names = [*ALL]
    if workers["num_workers"] and not own:
        names = [name for name in names if name not in ARRIVES_OTHERWISE]
    same_for_both(
        lambda make: dict(zip(names, collated(make, names, **workers), strict=False)), **own
    )


ARRIVES_OTHERWISE: set[str] = set()
