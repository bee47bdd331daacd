"""Copies of samples to their places. Every test runs on both twins."""

from __future__ import annotations

import collections
import itertools
import sys
import threading
import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets import quietly
from tests.subprocesses import python

TWIN = "packing"
N = 3
GUARD, GUARD_BYTES = 0xA5, 64


# ---------------------------------------------------------------------------------------- samples


class Region:
    """Fields of ``N`` samples between guards, and a check of who wrote where."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.full(nbytes + 2 * GUARD_BYTES, GUARD, np.uint8)
        self.bytes = self._memory[GUARD_BYTES:-GUARD_BYTES]
        self.address = self.bytes.ctypes.data

    def written(self) -> list[int]:
        return (np.flatnonzero(self._memory != GUARD) - GUARD_BYTES).tolist()

    def field(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        return np.frombuffer(self.bytes, dtype, N * count, offset).reshape(N, *shape)


class Point(collections.namedtuple("Point", ["x", "y"])):
    __slots__ = ()


class SubTensor(torch.Tensor):
    pass


class SubFloat(float):
    pass


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


IMAGE = np.arange(2 * 5 * 3, dtype=np.float32).reshape(5, 2, 3)
HALF = torch.arange(12, dtype=torch.float32).to(torch.bfloat16).reshape(3, 4)
COMPLEX = torch.tensor([1 + 2j, 3 - 4j])

HALVES = np.arange(9, dtype=np.uint8)[1:]

TENSORS = {
    "tensor": torch.from_numpy(IMAGE),
    "0-dim tensor": torch.tensor(-5),
    "bool tensor": torch.tensor([True, False]),
    "permuted tensor": torch.from_numpy(IMAGE).permute(2, 0, 1),
    "stepped tensor": torch.from_numpy(IMAGE)[::2, :, 1:],
    "expanded tensor": torch.arange(3, dtype=torch.int32).expand(4, 3),
    "bfloat16 tensor": HALF.t(),
    "float8 tensor": HALF.to(torch.float8_e5m2),
    "uint16 tensor": torch.tensor([1, 65535], dtype=torch.uint16),
    "complex tensor": COMPLEX,
    "resolved conjugate": COMPLEX.conj().resolve_conj(),
    "view": torch.arange(12.0).view(4, 3)[1],
    "tensor that required a gradient": torch.ones(2, requires_grad=True).requires_grad_(False),
    "part of one that requires a gradient": torch.ones(3, requires_grad=True).detach()[:2],
    "inference tensor": torch.inference_mode()(torch.ones)(2),
    "empty tensor": torch.zeros(0, 3),
}
ARRAYS = {
    "array": IMAGE,
    "row of a mapped file": IMAGE.view(np.memmap),
    "0-dim array": np.array(2.5),
    "transposed array": IMAGE.T,
    "stepped array": IMAGE[::2],
    "read-only array": np.broadcast_to(np.int32(7), (2, 3)),
    "unaligned array": HALVES.view("<f4"),
    "empty array": np.zeros(0, "u1"),
}
SCALARS = [np.float32(0.1), np.float64(0.1), np.True_, np.uint8(200), np.complex128(1 - 2j)]
# spec, sample, the item that must stand in the field at offset 64, the texts
FITS: dict[str, tuple[Any, Any, Any, Any]] = {
    **{
        name: (("tensor", str(one.dtype)[6:], tuple(one.shape), 64), one, bits_of(one), ())
        for name, one in TENSORS.items()
    },
    **{name: (("array", one.dtype.str, one.shape, 64), one, one, ()) for name, one in ARRAYS.items()},
    **{f"{one.dtype} scalar": (("scalar", one.dtype.str, 64), one, one, ()) for one in SCALARS},
    "float": (("float", 64), 0.1, np.float64(0.1), ()),
    "nan": (("float", 64), float("nan"), np.float64("nan"), ()),
    "least int": (("int", 64), -(1 << 63), np.int64(-(1 << 63)), ()),
    "largest int": (("int", 64), (1 << 63) - 1, np.int64((1 << 63) - 1), ()),
    "bool": (("bool", 64), True, np.True_, ()),
    "text": (("text", str), "a", None, ["a"]),
    "bytes": (("text", bytes), b"", None, [b""]),
    "list": (("list", list, (("text", str), ("int", 64))), ["a", 1], np.int64(1), ["a"]),
    "tuple": (("tuple", tuple, (("int", 64), ("text", str))), (1, "b"), np.int64(1), ["b"]),
    "namedtuple": (
        ("namedtuple", Point, (("int", 64), ("text", str))), Point(1, "b"), np.int64(1), ["b"],
    ),
    "dict": (
        ("dict", ("a", 2, None), (("int", 64), ("text", str), ("text", bytes))),
        {"a": 1, 2: "b", None: b""}, np.int64(1), ["b", b""],
    ),
    "empty containers": (
        ("tuple", tuple, (("list", list, ()), ("dict", (), ()), ("int", 64))), ([], {}, 3),
        np.int64(3), (),
    ),
    "nested": (
        ("list", list, (("dict", ("x",), (("tuple", tuple, (("text", str), ("bool", 64))),)),)),
        [{"x": ("t", False)}], np.False_, ["t"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FITS)
@pytest.mark.parametrize("k", [0, N - 1])
def test_pack_writes_its_place_only(twin: ModuleType, case: str, k: int) -> None:
    spec, sample, item, texts = FITS[case]
    item = b"" if item is None else np.asarray(item).tobytes()
    region, packer = Region(64 + N * len(item)), twin.Packer(spec, N)
    assert packer.fits(sample)
    assert packer.pack(sample, region.address, k) == texts
    place = 64 + k * len(item)
    assert region.bytes[place : place + len(item)].tobytes() == item
    assert set(region.written()) <= set(range(place, place + len(item)))


class Hostile:
    """A key that is as good as ``"a"``, until it is compared."""

    def __hash__(self) -> int:
        return hash("a")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")


FLOATS = ("tensor", "float32", (3,), 0)
FLOAT_ARRAY = ("array", "<f4", (3,), 0)
PAIR = ("tuple", tuple, (("int", 0), ("text", str)))
NAMED = ("namedtuple", Point, (("int", 0), ("text", str)))
LIST = ("list", list, (("int", 0),))
DICT = ("dict", ("a", "b"), (("int", 0), ("text", str)))

MISFITS: dict[str, tuple[Any, Any]] = {
    "tensor: other dtype": (FLOATS, torch.zeros(3, dtype=torch.float64)),
    "tensor: other dtype of equal size": (FLOATS, torch.zeros(3, dtype=torch.int32)),
    "tensor: uint1 for uint8": (
        ("tensor", "uint8", (3,), 0), torch.zeros(3, dtype=torch.uint8).view(torch.uint1),
    ),
    "tensor: longer": (FLOATS, torch.zeros(4)),
    "tensor: another axis": (FLOATS, torch.zeros(3, 1)),
    "tensor: 0-dim": (FLOATS, torch.tensor(1.0)),
    "tensor: empty one differs": (("tensor", "float32", (0, 3), 0), torch.zeros(0, 2)),
    "tensor: array": (FLOATS, np.zeros(3, np.float32)),
    "tensor: list": (FLOATS, [0.0, 0.0, 0.0]),
    "tensor: None": (FLOATS, None),
    "tensor: subclass": (FLOATS, torch.zeros(3).as_subclass(SubTensor)),
    "tensor: parameter": (FLOATS, torch.nn.Parameter(torch.zeros(3), requires_grad=False)),
    "tensor: requires grad": (FLOATS, torch.zeros(3, requires_grad=True)),
    "tensor: meta": (FLOATS, torch.zeros(3, device="meta")),
    "tensor: sparse": (FLOATS, torch.ones(3).to_sparse()),
    "tensor: csr": (
        ("tensor", "float32", (3, 3), 0), quietly(lambda: torch.ones(3, 3).to_sparse_csr()),
    ),
    "tensor: mkldnn": (FLOATS, torch.ones(3).to_mkldnn()),
    "tensor: quantised": (
        ("tensor", "uint8", (3,), 0),
        quietly(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
    ),
    "tensor: nested": (FLOATS, quietly(lambda: torch.nested.nested_tensor([torch.ones(3)]))),
    "tensor: zero tensor": (FLOATS, torch._efficientzerotensor(3)),
    "tensor: row of a zero tensor": (FLOATS, torch._efficientzerotensor(2, 3)[1]),
    "tensor: functional": (FLOATS, torch._to_functional_tensor(torch.zeros(2, 3))[1]),
    "tensor: conjugated": (("tensor", "complex64", (2,), 0), COMPLEX.conj()),
    "tensor: negated": (("tensor", "float32", (2,), 0), COMPLEX.conj().imag),
    "tensor: negated, contiguous": (("tensor", "float32", (1,), 0), COMPLEX.conj().imag[:1]),
    "tensor: negated, no view": (("tensor", "float32", (2,), 0), COMPLEX.conj().imag.data),
    "tensor: conjugated, no view": (("tensor", "complex64", (2,), 0), COMPLEX.conj().data),
    "tensor: part of one that requires a gradient": (FLOATS, torch.zeros(4, requires_grad=True)[1:]),
    "array: other dtype": (FLOAT_ARRAY, np.zeros(3, np.int32)),
    "array: other byte order": (FLOAT_ARRAY, np.zeros(3, ">f4")),
    "array: alias that torch refuses": (("array", "<u8", (3,), 0), np.zeros(3, np.ulonglong)),
    "array: longer": (FLOAT_ARRAY, np.zeros(4, np.float32)),
    "array: another axis": (FLOAT_ARRAY, np.zeros((1, 3), np.float32)),
    "array: negative stride": (FLOAT_ARRAY, np.zeros(3, np.float32)[::-1]),
    "array: negative stride of one": (
        ("array", "<f4", (1,), 0), np.zeros(3, np.float32)[::-1][:1],
    ),
    "array: stride between elements": (
        FLOAT_ARRAY, np.zeros(3, dtype=[("a", "u1"), ("b", "<f4")])["b"],
    ),
    "array: subclass": (FLOAT_ARRAY, np.zeros(3, np.float32).view(np.recarray)),
    "array: masked": (FLOAT_ARRAY, np.ma.masked_array(np.zeros(3, np.float32))),
    "array: tensor": (FLOAT_ARRAY, torch.zeros(3)),
    "array: scalar": (("array", "<f4", (), 0), np.float32(1)),
    "scalar: other dtype": (("scalar", "<f4", 0), np.float64(1)),
    "scalar: float": (("scalar", "<f8", 0), 1.0),
    "scalar: alias": (("scalar", "<i8", 0), np.longlong(1)),
    "scalar: array": (("scalar", "<f4", 0), np.array(1, np.float32)),
    "float: int": (("float", 0), 1),
    "float: numpy": (("float", 0), np.float64(1)),
    "float: subclass": (("float", 0), SubFloat(1)),
    "int: bool": (("int", 0), True),
    "int: float": (("int", 0), 1.0),
    "int: numpy": (("int", 0), np.int64(1)),
    "int: too large": (("int", 0), 1 << 63),
    "int: too small": (("int", 0), -(1 << 63) - 1),
    "bool: int": (("bool", 0), 1),
    "bool: numpy": (("bool", 0), np.True_),
    "text: bytes": (("text", str), b"a"),
    "text: numpy": (("text", str), np.str_("a")),
    "bytes: str": (("text", bytes), "a"),
    "list: longer": (LIST, [1, 2]),
    "list: empty": (LIST, []),
    "list: tuple": (LIST, (1,)),
    "list: wrong member": (LIST, ["a"]),
    "tuple: shorter": (PAIR, (1,)),
    "tuple: longer": (PAIR, (1, "a", 2)),
    "tuple: list": (PAIR, [1, "a"]),
    "tuple: namedtuple": (PAIR, Point(1, "a")),
    "tuple: wrong last member": (PAIR, (1, 2)),
    "namedtuple: tuple": (NAMED, (1, "a")),
    "namedtuple: another": (NAMED, collections.namedtuple("Point", ["x", "y"])(1, "a")),
    "dict: missing key": (DICT, {"a": 1}),
    "dict: extra key": (DICT, {"a": 1, "b": "b", "c": 3}),
    "dict: other key": (DICT, {"a": 1, "c": "b"}),
    "dict: other order": (DICT, {"b": "b", "a": 1}),
    "dict: equal key of another type": (("dict", (1,), (("int", 0),)), {True: 1}),
    "dict: subclass": (DICT, collections.OrderedDict(a=1, b="b")),
    "dict: pairs": (DICT, [("a", 1), ("b", "b")]),
    "dict: key that cannot be compared": (DICT, {Hostile(): 1, "b": "b"}),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_pack_refuses_what_does_not_fit(twin: ModuleType, case: str) -> None:
    spec, sample = MISFITS[case]
    region, packer = Region(N * 64), twin.Packer(spec, N)
    assert not packer.fits(sample)
    assert packer.pack(sample, region.address, 1) is None
    # Only ints in containers were met before what did not fit.
    assert set(region.written()) <= set(range(8, 16))


def test_fields_stand_side_by_side(twin: ModuleType) -> None:
    fields = ("tensor", "float32", (2,), 0), ("int", 64), ("list", list, (("bool", 128),))
    region, packer = Region(192), twin.Packer(("dict", ("x", "y", "z"), fields), N)
    for k in range(N):
        sample = {"x": torch.full((2,), float(k)), "y": -k, "z": [k == 1]}
        assert packer.pack(sample, region.address, k) == ()
    assert region.field(0, "<f4", (2,)).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert region.field(64, "<i8", ()).tolist() == [0, -1, -2]
    assert region.field(128, "?", ()).tolist() == [False, True, False]


def views(array: np.ndarray) -> list[tuple[tuple[Any, ...], Any]]:
    """The specs and samples of an array: itself, and as a tensor."""
    name = str(torch.from_numpy(array).dtype).removeprefix("torch.")
    return [
        (("array", array.dtype.str, array.shape, 0), array),
        (("tensor", name, array.shape, 0), torch.from_numpy(array)),
    ]


@st.composite
def strided_arrays(draw: st.DrawFn) -> np.ndarray:
    """Random bytes, permuted and stepped."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "f2", "f4", "i8", "c16"])))
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 18]), max_size=4))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in shape]
    whole = np.random.default_rng(1).integers(
        0, 256, (*(size * step for size, step in zip(shape, steps, strict=True)), dtype.itemsize)
    )
    items = whole.astype(np.uint8).view(dtype)[..., 0]
    view = items[(..., *(slice(None, None, step) for step in steps))]
    return view.transpose(list(draw(st.permutations(range(len(shape))))))


@given(array=strided_arrays())
def test_strided_samples(twin: ModuleType, array: np.ndarray) -> None:
    for spec, sample in views(array):
        region = Region(N * array.nbytes)
        assert twin.Packer(spec, N).pack(sample, region.address, 1) == ()
        written = region.bytes[array.nbytes : 2 * array.nbytes]
        assert written.tobytes() == array.tobytes()
        assert set(region.written()) <= set(range(array.nbytes, 2 * array.nbytes))


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16"])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((224, 225, 3), (2, 0, 1)),
        ((3, 224, 225), (1, 2, 0)),
        ((256, 128), (1, 0)),
        ((131, 257), (1, 0)),
        ((2, 66, 5, 67), (3, 2, 1, 0)),
        ((4, 33, 3, 65), (0, 3, 1, 2)),
        ((33, 65, 5, 3), (1, 0, 2, 3)),
    ],
)
def test_samples_copied_in_tiles(twin: ModuleType, dtype: str, shape: Any, order: Any) -> None:
    """Most lie above the size from which the GIL is released."""
    whole = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    array = whole.view(dtype)[..., 0].transpose(order)
    for spec, sample in views(array):
        region = Region(array.nbytes)
        assert twin.Packer(spec, 1).pack(sample, region.address, 0) == ()
        assert region.bytes.tobytes() == array.tobytes()


def test_large_copies_release_the_gil(twins: tuple[ModuleType, ModuleType]) -> None:
    src, dst = np.ones(1 << 26, np.uint8), np.zeros(1 << 26, np.uint8)
    packer, address = twins[1].Packer(("array", "|u1", src.shape, 0), 1), dst.ctypes.data
    stop, ticks = threading.Event(), [0] * (1 << 20)

    def tick() -> None:
        for i in itertools.count():
            ticks[i % len(ticks)] = time.perf_counter_ns()
            if stop.is_set():
                return

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(50):
            start = time.perf_counter_ns()
            packer.pack(src, address, 0)
            end = time.perf_counter_ns()
            margin = (end - start) // 4
            if any(start + margin < at < end - margin for at in ticks):
                return
    finally:
        stop.set()
        thread.join()
    pytest.fail("no other thread ran during 50 copies of 64 MiB")


@pytest.mark.parametrize("k", [-1, N, 1 << 40])
def test_pack_refuses_places_outside(twin: ModuleType, k: int) -> None:
    region = Region(64)
    with pytest.raises(IndexError, match=f"sample {k} in a batch of {N}"):
        twin.Packer(("int", 0), N).pack(1, region.address, k)
    assert region.written() == []


@pytest.mark.parametrize(
    "spec",
    [
        ("complex", 0),
        ("int",),
        ("text", int),
        ("list", tuple, ()),
        ("tuple", list, ()),
        ("dict", ("a",), ()),
        ("dict", ["a"], (("int", 0),)),
        ("list", list, (("list", list, (("object", 0),)),)),
    ],
    ids=repr,
)
def test_packer_refuses_what_is_no_spec(twin: ModuleType, spec: Any) -> None:
    with pytest.raises(ValueError, match="not a node of a spec"):
        twin.Packer(spec, N)


def test_types_come_once_in_order(twin: ModuleType) -> None:
    class Odd(type):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(cls, other: object) -> bool:
            raise AssertionError("code of the program's ran")

    made = Odd("Made", (), {})
    values = [1, 2, "a", 1, made(), True, "b", made(), None, made]
    expected = [int, str, made, bool, type(None), Odd]
    assert [*map(id, twin.types_in(values))] == [*map(id, expected)]
    assert twin.types_in([]) == []
    for other in ((1, 2), None, "ab"):
        with pytest.raises(TypeError):
            twin.types_in(other)


def test_pack_keeps_no_references(twin: ModuleType) -> None:
    array, tensor, text = np.zeros(3, "f4"), torch.zeros(3), "".join(["un", "shared"])
    sample = [array, tensor, text]
    fields = FLOAT_ARRAY, ("tensor", "float32", (3,), 64), ("text", str)
    region, packer = Region(128), twin.Packer(("list", list, fields), N)
    counts = [sys.getrefcount(x) for x in (sample, array, tensor, text, list)]
    for misfit in (None, [array], [array, tensor, 1], [array, tensor.int(), text]):
        for _ in range(100):
            assert packer.pack(sample, region.address, 1) == [text]
            assert packer.pack(misfit, region.address, 1) is None
            assert packer.fits(sample)
            assert not packer.fits(misfit)
    del misfit
    assert [sys.getrefcount(x) for x in (sample, array, tensor, text, list)] == counts


def test_pack_leaves_tensors_resizable(twin: ModuleType) -> None:
    tensor = torch.zeros(3)
    twin.Packer(FLOATS, N).pack(tensor, Region(64).address, 0)
    assert tensor.resize_(5).shape == (5,)


# ------------------------------------------------------------------------------------ whole runs

NEVER = 1 << 62
FIELDS = ("tensor", "uint8", (3, 4), 0), ("tensor", "int16", (2,), 64), ("array", "|u1", (5,), 128)
MIXED = ("tuple", tuple, (*FIELDS, ("int", 192)))


def mixed(number: int) -> tuple[Any, ...]:
    """A sample of ``MIXED``, whose first tensor is sometimes transposed."""
    pixels = torch.arange(12, dtype=torch.uint8) + number
    image = pixels.view(4, 3).T if number % 2 else pixels.view(3, 4)
    return image, torch.full((2,), -number, dtype=torch.int16), np.full(5, number, "u1"), number


@pytest.mark.parametrize("k", [0, 1])
def test_a_run_is_written_as_its_samples_are(twin: ModuleType, k: int) -> None:
    samples = [mixed(number) for number in range(N - k)]
    one_by_one, at_once = Region(256), Region(256)
    packer = twin.Packer(MIXED, N)
    for i, sample in enumerate(samples):
        assert packer.pack(sample, one_by_one.address, k + i) == ()
    assert packer.pack_run(samples, at_once.address, k) == []
    assert at_once.bytes.tobytes() == one_by_one.bytes.tobytes()


def anywhere(region: Region) -> list[int]:
    """Where the fields of ``MIXED`` lie, in an order of their own."""
    return [region.address + offset for offset in (192, 128, 64, 0)]


def test_fields_lie_anywhere(twin: ModuleType) -> None:
    samples = [mixed(number) for number in range(N)]
    region, expected, packer = Region(256), Region(256), twin.Packer(MIXED, N)
    assert packer.pack_fields(samples, anywhere(region), NEVER) == []
    assert packer.pack_run(samples, expected.address, 0) == []
    for here, there, nbytes in ((192, 0, 36), (128, 64, 12), (64, 128, 15), (0, 192, 24)):
        written = region.bytes[here : here + nbytes].tobytes()
        assert written == expected.bytes[there : there + nbytes].tobytes()


def test_large_tensors_are_handed_back(twin: ModuleType) -> None:
    samples = [mixed(number) for number in range(N)]
    for kept_nbytes, kept in ((4, (0, 1)), (5, (0,)), (12, (0,)), (13, ())):
        region = Region(256)
        tensors = twin.Packer(MIXED, N).pack_fields(samples, anywhere(region), kept_nbytes)
        expected = [sample[i] for sample in samples for i in kept]
        assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in expected]
        for i, place in enumerate((range(192, 192 + 3 * 12), range(128, 128 + 3 * 4))):
            assert set(region.written()).isdisjoint(place) == (i in kept)


def test_texts_are_handed_back_sample_after_sample(twin: ModuleType) -> None:
    spec = ("tuple", tuple, (("text", str), ("int", 0), ("text", bytes)))
    samples = [(str(number), number, b"%d" % number) for number in range(N)]
    region = Region(64)
    packer, texts = (
        twin.Packer(spec, N),
        [text for one, _, other in samples for text in (one, other)],
    )
    assert packer.pack_fields(samples, [region.address], NEVER) == texts
    assert packer.pack_run(samples[1:], region.address, 1) == texts[2:]
    assert region.bytes[: 8 * N].view(np.int64).tolist() == list(range(N))


def test_fields_take_a_whole_batch(twin: ModuleType) -> None:
    region = Region(64)
    packer = twin.Packer(("int", 0), N)
    with pytest.raises(IndexError, match=f"{N - 1} samples in a batch of {N}"):
        packer.pack_fields([1] * (N - 1), [region.address], NEVER)
    for addresses in ([], [region.address] * 2):
        with pytest.raises(IndexError):
            packer.pack_fields([1] * N, addresses, NEVER)
    assert region.written() == []


@pytest.mark.parametrize("misfit", [0, 1, 2])
def test_a_run_with_a_misfit_is_refused(twin: ModuleType, misfit: int) -> None:
    samples: list[Any] = [mixed(number) for number in range(N)]
    counts = [sys.getrefcount(tensor) for sample in samples for tensor in sample[:2]]
    packer, region = twin.Packer(MIXED, N), Region(256)
    for other in (None, (*mixed(0)[:3], 1.0), (torch.zeros(3, 4), *mixed(0)[1:])):
        run = [other if i == misfit else sample for i, sample in enumerate(samples)]
        assert packer.pack_run(run, region.address, 0) is None
        assert packer.pack_fields(run, anywhere(region), NEVER) is None
    del run
    assert [sys.getrefcount(t) for sample in samples for t in sample[:2]] == counts


def test_a_run_stays_in_its_batch(twin: ModuleType) -> None:
    region = Region(64)
    for k, count in ((-1, 1), (N, 1), (1, N)):
        with pytest.raises(IndexError, match=f"samples {k} to {k + count - 1} in a batch of {N}"):
            twin.Packer(("int", 0), N).pack_run([1] * count, region.address, k)
    assert region.written() == []


# ------------------------------------------------------------------------------------- both twins

SPECS = {repr(spec): spec for spec, *_ in (*FITS.values(), *MISFITS.values())}.values()
SAMPLES = [case[1] for case in (*FITS.values(), *MISFITS.values())]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_twins_agree(twins: tuple[ModuleType, ModuleType], spec: Any) -> None:
    for sample in SAMPLES:
        results = []
        for twin in twins:
            region, packer = Region(1024), twin.Packer(spec, N)
            run = packer.pack_run([sample, sample], region.address, 0)
            packed = packer.pack(sample, region.address, 1)
            assert packer.fits(sample) is (packed is not None)
            written = None if packed is None else region.bytes.tobytes()
            results.append((packed, type(packed), written, run))
        assert results[0] == results[1]


OTHER_TORCH = """
import sys, torch
{change}
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", {file!r},
                      "-k", "compiled and (place or refuses or strided)"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", ["del torch.Tensor.__dlpack_c_exchange_api__", "torch.Tensor._cdata = None"]
)
def test_compiled_twin_on_another_torch(change: str) -> None:
    """Without DLPack's exchange functions, or with other tensors in memory, these are described in Python."""
    if change.startswith("del") and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch is one of those, and all other tests have shown it")
    done = python("-c", OTHER_TORCH.format(change=change, file=__file__))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
