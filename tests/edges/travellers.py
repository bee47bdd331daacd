"""Objects of many types that travel between processes, importable by workers that are not forked."""

from __future__ import annotations

import array
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import io
import multiprocessing
import multiprocessing.managers  # it registers reducers
import pickle
import re
import socket
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import heap
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.datasets import Numbers, Pair
from tests.parity.harness import describe_tensor

KEPT: list[Any] = []
"""Ends of pipes that were made here."""


class Registered:
    """Sent by a function that is registered with multiprocessing; its own pickle loses the value."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Registered, (-1,)


class RegisteredArray(np.ndarray[Any, Any]):
    """As :class:`Registered`, an array."""


class Copied:
    """Sent by a function that is registered with copyreg."""

    def __init__(self, value: int, note: str = "") -> None:
        self.value = value
        self.note = note


ForkingPickler.register(Registered, lambda each: (Registered, (each.value,)))
ForkingPickler.register(
    RegisteredArray, lambda each: (_registered_array, (each.tolist(), "as registered"))
)
copyreg.pickle(Copied, lambda each: (Copied, (each.value, "by copyreg")))


def _registered_array(items: list[float], note: str) -> Any:
    made = np.array(items).view(RegisteredArray)
    made.note = note  # type: ignore[attr-defined]
    return made


class Attributed(np.ndarray[Any, Any]):
    """An array whose attribute its pickle loses."""


class Subclass(torch.Tensor):
    """A tensor with attributes, which its pickle keeps."""


class Text(str):
    """A text with attributes."""


class Number(int):
    """A number with attributes."""


class Items(list):  # type: ignore[type-arg]
    """A list with attributes."""


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


class Slots:
    """Has no ``__dict__``."""

    __slots__ = ("one", "two")

    def __init__(self) -> None:
        self.one = 1

    def method(self) -> int:
        return self.one


@dataclass(frozen=True)
class Frozen:
    """Holds a tensor."""

    tensor: torch.Tensor


class Colour(enum.IntEnum):
    RED = 1


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def _read_only(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    value.flags.writeable = False
    return value


def _listening() -> Any:
    ends = multiprocessing.Pipe(duplex=False)
    ends[1].send_bytes(b"said")
    KEPT.extend(ends)
    return ends[0]


def _socket() -> socket.socket:
    one, other = socket.socketpair()
    other.sendall(b"said")
    KEPT.extend((one, other))
    return one


def _recursive() -> list[Any]:
    items: list[Any] = [1]
    items.append({"items": items})
    return items


def _frame() -> Any:
    pandas = import_module("pandas")
    return pandas.DataFrame(
        {"a": [1, 2], "b": ["x", None], "c": pandas.Categorical(["u", "v"]), "d": [0.5, 1.5]}
    )


def _series() -> Any:
    pandas = import_module("pandas")
    return pandas.Series(pandas.date_range("2020", periods=3), name="when")


ROW = torch.arange(1000.0)
GRID = np.arange(60.0).reshape(6, 10)

DTYPES = [
    *("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "F", "D", "G"),
    *(">i4", ">f8", ">g", "S3", "U3", "M8[s]", "m8[s]", ">M8[s]", ">m8[s]", "O"),
]
TENSOR_TYPES = [
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16"),
    *("bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2"),
]
LEGACY = [
    *("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"),
    *("ComplexFloat", "ComplexDouble", "QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4"),
]
"""Types that torch still registers; their constructors make other objects."""

MAKERS: dict[str, Callable[[], Any]] = {
    # the standard library
    "none": lambda: None,
    "numbers": lambda: [True, 2**70, -1.5, 1j, float("inf")],
    "texts": lambda: ["ä\ud800", b"a" * 100_000, bytearray(b"b" * 70_000)],
    "containers": lambda: {"a": [1, (2,)], 3: {4}, None: frozenset({5})},
    "collections": lambda: [
        collections.deque([1, 2], 3),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(int, a=1),
        collections.Counter("aab"),
    ],
    "array": lambda: array.array("d", [1, 2]),
    "array.array of integers": lambda: array.array("q", range(1000)),
    "views of a dict": lambda: [{"a": 1}.keys(), {"a": 1}.values(), {"a": 1}.items()],
    "values": lambda: [
        decimal.Decimal("1.50"),
        fractions.Fraction(1, 3),
        datetime.date(2020, 1, 2),
        datetime.timedelta(1),
        range(3),
        slice(1, 2),
        Colour.RED,
        Path("a/b"),
        io.BytesIO(b"abc").getvalue(),
    ],
    "instances": lambda: [Slots(), Pair(1, torch.ones(2)), Frozen(torch.ones(2))],
    "text with attributes": lambda: _with(Text("a"), note=1),
    "functions": lambda: [len, _with, Colour, functools.partial(_with, 1, a=2)],
    "methods": lambda: [Slots().method, [1, 2].index, str.upper, int.__add__, Node.__init__],
    "self": Node,
    "recursive": _recursive,
    "registered": lambda: Registered(5),
    "registered array": lambda: np.arange(3.0).view(RegisteredArray),
    "copyreg": lambda: Copied(5),
    "connection": _listening,
    "socket": _socket,
    # NumPy
    **{
        f"array of {name}": functools.partial(lambda name: np.arange(4).astype(name), name)
        for name in DTYPES
    },
    "scalars": lambda: [np.float32(1.5), np.int64(3), np.bool_(1), np.str_("a"), np.void(b"ab")],
    "structured": lambda: np.zeros(3, [("a", "i4"), ("b", ">f8", 2)]),
    "aligned": lambda: np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "records": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "masked": lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0], fill_value=9),
    "matrix": lambda: np.eye(2).view(np.matrix),
    "memmap": lambda: np.memmap(Path(__file__), np.uint8, "r", shape=(50,)),
    "subclass of array": lambda: _with(np.arange(3).view(Attributed), note="lost"),
    "objects": lambda: np.array([None, "x", torch.ones(1)], object),
    "array 0-d": lambda: np.array(1.5),
    "array of none": lambda: np.empty((0, 3)),
    "transposed": lambda: GRID.T,
    "Fortran": lambda: np.asfortranarray(GRID),
    "permuted": lambda: np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
    "a field": lambda: np.zeros(3, [("a", "i1"), ("b", "<i4")])["b"],
    "a field of one": lambda: np.zeros((2, 1), [("a", "i1"), ("b", "<i4")])["b"][1:],
    "one reversed": lambda: np.arange(1)[::-1],
    "empty": lambda: [np.empty((0, 3), kind) for kind in (">i4", np.ulonglong)],
    "none of one": lambda: np.empty((2, 1, 3))[:0, ::-1],
    "other name": lambda: [np.arange(3).astype(np.longlong), np.arange(3).astype(np.ulonglong)],
    "far apart": lambda: np.arange(1 << 19)[:: 1 << 17],
    "sliced": lambda: GRID[::2, 1:7:3],
    "reversed": lambda: GRID[::-1],
    "broadcast": lambda: np.broadcast_to(np.arange(3), (2, 3)),
    "read-only": lambda: _read_only(np.arange(5)),
    "large read-only": lambda: _read_only(np.arange(50_000)),
    "dtypes": lambda: [np.dtype("f4"), np.dtype([("a", "i4")])],
    "generator": lambda: np.random.default_rng(3).random(2),
    # torch
    **{
        f"tensor of {name}": functools.partial(
            lambda name: torch.arange(8, dtype=torch.uint8).to(getattr(torch, name)), name
        )
        for name in TENSOR_TYPES
    },
    "tensor 0-d": lambda: torch.tensor(3),
    "tensor of inference": lambda: torch.inference_mode()(torch.ones)(3),
    "tensor of none": lambda: torch.empty(2, 0, 3),
    "tensor with strides": lambda: torch.arange(12.0).view(3, 4).t(),
    "every other": lambda: torch.arange(12.0)[1::2],
    "expanded": lambda: torch.ones(1).expand(1000),
    "channels last": lambda: torch.rand(2, 3, 4, 5).zero_().to(memory_format=torch.channels_last),
    "small view": lambda: ROW[500:505],
    "column": lambda: ROW.view(100, 10)[:, 3],
    "empty view": lambda: ROW[7:7],
    "needs gradient": lambda: torch.ones(3, requires_grad=True),
    "small view needs gradient": lambda: ROW[5:7].detach().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "module": lambda: torch.nn.Linear(2, 1).requires_grad_(False).apply(_zero),
    "subclass of tensor": lambda: _with(torch.ones(3).as_subclass(Subclass), note="kept"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.ones(2), (2,), check_invariants=True
    ),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "storages": lambda: [torch.arange(3.0).untyped_storage(), torch.UntypedStorage()],
    "typed storages": lambda: [getattr(torch, f"{name}Storage")(3).fill_(0) for name in LEGACY],
    "sizes": lambda: [torch.Size([1, 2]), torch.float32, torch.device("cpu"), torch.strided],
    "packed": lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.zeros(1)]),
}
if find_spec("pandas"):
    MAKERS["frame"] = _frame
    MAKERS["series"] = _series
if find_spec("PIL"):
    MAKERS["image"] = lambda: import_module("PIL.Image").new("RGB", (4, 3), (1, 2, 3))
    MAKERS["palette"] = lambda: import_module("PIL.Image").new("P", (4, 3), 5)

KEPT_EXACTLY: dict[str, Callable[[], Any]] = {
    "conjugate": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
    "parameter with attributes": lambda: _with(torch.nn.Parameter(torch.ones(3)), note="kept"),
}
"""What arrives as it is; from torch's workers it does not."""

ALIASED: dict[str, Callable[[], list[torch.Tensor]]] = {
    "overlapping": lambda: [(whole := torch.zeros(30))[:10], whole[5:15]],
    "views of one": lambda: [*(whole := torch.zeros(1000)).split(500), whole],
    "small views": lambda: [(large := torch.zeros(10_000))[10:20], large[15:25], large[9000:9001]],
    "whole last": lambda: [(large := torch.zeros(10_000))[10:20], large],
    "whole first": lambda: [(large := torch.zeros(10_000)), large[10:20]],
    "other type": lambda: [(large := torch.zeros(1000))[8:16], large.view(torch.int32)[10:12]],
    "twice": lambda: [(one := torch.zeros(3)), one, one.view(3)],
    "one address": lambda: [torch.from_numpy((base := np.zeros(100))[:10]), torch.from_numpy(base)],
}
"""Tensors of which some share memory."""

SENT_TO_ONE_CHILD: dict[str, Callable[[], Any]] = {
    "connection": _listening,
    "socket": _socket,
    "heap": lambda: heap.BufferWrapper(64),
}
"""What multiprocessing sends with a descriptor."""


def _zero(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


def shown(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """What can be seen of an object: type, content, attributes, layout."""
    if id(value) in seen:
        return "again", len(seen) - seen.index(id(value))
    seen = (*seen, id(value))

    def inner(each: Any) -> Any:
        return shown(each, seen)

    name = type(value).__qualname__
    attributes = sorted((key, str(each)) for key, each in getattr(value, "__dict__", {}).items())
    if isinstance(value, torch.Tensor):
        return name, describe_tensor(value), sorted(getattr(value, "__dict__", {}).items())
    if isinstance(value, np.ma.MaskedArray):
        return name, inner(value.data.view(np.ndarray)), value.mask.tolist(), value.fill_value
    if isinstance(value, np.ndarray):
        flags = value.flags
        layout = flags.writeable, value.strides if value.size else None, value.dtype.num
        each_by_each = value.dtype == object or value.dtype.char in "gG"  # which have padding
        content = [*map(inner, value.ravel())] if each_by_each else value.tobytes()
        kind = str(value.dtype), value.dtype.isnative, value.shape
        return name, kind, layout, content, attributes
    if isinstance(value, (torch.UntypedStorage, torch.storage.TypedStorage)):
        untyped = value if isinstance(value, torch.UntypedStorage) else value.untyped()
        return name, str(value.device), getattr(value, "dtype", None), untyped.tolist()
    if isinstance(value, Mapping):
        return name, [(inner(key), inner(each)) for key, each in value.items()], attributes
    if isinstance(value, (list, tuple, collections.deque)):
        return name, [inner(each) for each in value], attributes
    if isinstance(value, types.GeneratorType):
        return name, list(value)
    if isinstance(value, io.BytesIO):
        return name, value.getvalue()
    if isinstance(value, torch.nn.Module):
        return name, inner(dict(value.state_dict()))
    if isinstance(value, socket.socket):
        with value:
            return name, value.recv(4)
    if name == "Connection":
        with value:
            return name, value.recv_bytes()
    if type(value).__module__ == "PIL.Image":
        spacing = getattr(value, "spacing", None)
        return name, value.mode, value.size, value.tobytes(), value.getpalette(), spacing
    if type(value).__module__.partition(".")[0] == "pandas":
        return name, repr(value), str(getattr(value, "dtypes", "")), getattr(value, "spacing", None)
    if isinstance(value, heap.BufferWrapper):
        return name, bytes(value.create_memoryview()[:4])
    if isinstance(value, Slots):
        return name, value.one, hasattr(value, "two")
    if isinstance(value, (Node, Registered, Copied, Frozen)):
        return name, inner(vars(value))
    if isinstance(value, functools.partial):
        return name, inner([value.func, value.args, value.keywords])
    if callable(value):
        itself = getattr(value, "__self__", None)
        held = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return name, getattr(value, "__qualname__", repr(value)), repr(itself)[:20], held
    return name, re.sub("0x[0-9a-f]+", "0x", repr(value)), getattr(value, "__dict__", None)


def shares(tensors: list[torch.Tensor]) -> list[list[int]]:
    """Which tensors see what is written to each; and that strides and offsets lead to the same elements."""
    seen = []
    for each in tensors:
        each.fill_(1)
        seen.append([int((other != 0).sum()) for other in tensors])
        for other in tensors:
            other.zero_()
    return seen


class Samples(Numbers):
    """Makes each object where the sample is loaded."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(len(names))
        self.names = names

    def __getitem__(self, index: int) -> Any:
        name = self.names[index]
        return name, (MAKERS | ALIASED | KEPT_EXACTLY)[name]()


class Holder(Numbers):
    """Holds objects that were made in the training process; a sample is what a worker sees of one."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> Any:
        name = [*self.held][index]
        return f"{name}: {shown(self.held[name])}"


def itself(value: Any) -> Any:
    """A ``collate_fn`` that keeps the samples."""
    return value


def by_multiprocessing(value: Any) -> Any:
    """An object as torch's workers send it."""
    return pickle.loads(ForkingPickler.dumps(value))
