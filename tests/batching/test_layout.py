"""Layouts: the batches that they deliver are those of torch's ``default_collate``."""

from __future__ import annotations

import dataclasses
import enum
import gc
import importlib
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate_str_fn, default_collate_fn_map

import minato
from minato.batching import layout as layout_module
from minato.batching import sample_spec
from minato.batching.layout import Layout
from tests.datasets import TORCH_TAKES_BOOLS, assert_same, quietly
from tests.parity.test_collation import ALL, ODD

GUARD = 0xA5
SHIFT = 128
"""Bytes between the start of the buffer and the region."""


class Point(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


class Colour(enum.IntEnum):
    RED = 1


class Words(str):
    __slots__ = ()


@dataclasses.dataclass
class Record:
    x: int


@pytest.fixture(params=["pure", "compiled"], autouse=True)
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every test with both packers; layouts that hold one are not carried over."""
    half = "py" if request.param == "pure" else "c"
    twin = importlib.import_module(f"minato._core._packing_{half}").Packer
    monkeypatch.setattr(layout_module, "Packer", twin)
    Layout.from_bytes.cache_clear()
    yield
    Layout.from_bytes.cache_clear()


def layout_of(sample: Any) -> Layout:
    layout = Layout.infer(sample)
    assert layout is not None
    return layout


def region(layout: Layout, n: int) -> np.ndarray:
    """A buffer with the fields of ``n`` samples at ``SHIFT``, and guards around them."""
    memory = np.full(layout.fields_nbytes(n) + 2 * SHIFT + 64, GUARD, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + layout.fields_nbytes(n) + 2 * SHIFT]


def packed(samples: list[Any], n: int | None = None) -> tuple[Layout, np.ndarray, list[Any]]:
    """Samples of a batch of ``n``: their layout, the buffer that holds them, and their texts."""
    n, layout = n or len(samples), layout_of(samples[0])
    buffer = region(layout, n)
    address, pack = buffer.ctypes.data + SHIFT, layout.packer(n).pack
    return layout, buffer, [pack(sample, address, k) for k, sample in enumerate(samples)]


def deliver(samples: list[Any]) -> Any:
    """Build the batch of ``samples`` as the loader does."""
    layout, buffer, texts = packed(samples)
    assert None not in texts
    outside = np.concatenate([buffer[:SHIFT], buffer[len(buffer) - SHIFT :]])
    assert (outside == GUARD).all()
    return layout.batch(buffer, SHIFT, len(samples), [*itertools.chain(*texts)])


def contiguous(sample: Any) -> Any:
    """A sample as a layout restores it."""
    return tree_map_only(torch.Tensor, torch.Tensor.contiguous, sample)


# ------------------------------------------------------------------------------- what is supported

RNG = np.random.default_rng(0)


def images() -> list[np.ndarray[Any, Any]]:
    return [RNG.integers(0, 256, (6, 5, 3), np.uint8) for _ in range(3)]


def is_laid_out(samples: list[Any]) -> bool:
    layouts = {Layout.infer(sample) for sample in samples}
    return len(layouts) == 1 and layouts != {None}


SAMPLES: dict[str, list[Any]] = {
    **{name: samples for name, samples in ALL.items() if is_laid_out(samples)},
    "extreme scalars": [
        (np.uint32(2**32 - 1), np.int64(-(2**63)), np.uint16(65535), np.float64("nan")),
        (np.uint32(0), np.int64(2**63 - 1), np.uint16(0), np.float64("-inf")),
    ],
    "permuted tensors": [torch.from_numpy(x).permute(2, 0, 1) for x in images()],
    "stepped tensors": [torch.from_numpy(x)[::2, 1:, ::2] for x in images()],
    "transposed arrays": [x.T for x in images()],
    "unaligned arrays": [np.frombuffer(bytes(range(9)), "<f4", 2, 1) for _ in range(2)],
    "inference tensors": [torch.inference_mode()(torch.ones)(2) for _ in range(2)],
    "float": [0.0, -0.0, float("nan"), 5e-324, 1e308],
    "bool": [True, False, True],
    "str": ["a", "", "ü"],
    "bytes": [b"a", b"", b"\0"],
    "texts everywhere": [
        {"a": ["x", {"b": "y", "c": ("z", Point(b"p", {"q": "q"}))}]},
        {"a": ["1", {"b": "2", "c": ("3", Point(b"4", {"q": "5"}))}]},
    ],
    "only texts": [("a", "b"), ("c", "d")],
    "empty named tuple": [(Nothing(), 1), (Nothing(), 2)],
    "dict": [{"x": k, "y": np.ones(3) * k} for k in range(3)],
    "keys": [{1: k, "1": k, b"1": k, None: k, True - 2: k} for k in range(3)],
    "keys that are bool": [{True: 1, 0: 2}, {True: 3, 0: 4}],
    "empty containers": [([], (), {}), ([], (), {})],
    "nested": [{"a": [(k, {"b": Point([k], {"c": torch.ones(2) * k})})]} for k in range(3)],
    "one sample": [(torch.ones(2), "a")],
}  # fmt: skip


def test_tensors_arrays_and_scalars_of_these_dtypes_have_a_layout() -> None:
    signed = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    small = [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")]
    others = ["bool", "float16", "float32", "float64", "complex64", "complex128", "bfloat16"]
    numpys = [f"{kind}-{code}" for kind in ("array", "scalar") for code in "?bBhHiIlefdFD"]
    untaken = set() if TORCH_TAKES_BOOLS else {"scalar-?"}
    assert {*signed, *small, *others, *numpys, "array-L"} - untaken <= set(SAMPLES)


@pytest.mark.parametrize("case", SAMPLES)
def test_batches_equal_default_collate(case: str) -> None:
    samples = SAMPLES[case]
    assert_same(deliver(samples), quietly(lambda: default_collate(samples)))


@pytest.mark.parametrize("case", SAMPLES)
def test_samples_are_restored(case: str) -> None:
    samples = SAMPLES[case]
    n = len(samples) + 2
    layout, buffer, texts = packed(samples, n)
    rebuilt = [layout.sample(buffer, SHIFT, n, k, texts[k]) for k in range(len(samples))]
    assert_same(rebuilt, contiguous(samples))
    assert_same(default_collate(rebuilt), quietly(lambda: default_collate(samples)))


# ---------------------------------------------------------------------------- what is left to torch


def test_rows_of_a_mapped_file_are_arrays() -> None:
    image = images()[0]
    assert sample_spec.describe(image.view(np.memmap)) == sample_spec.describe(image) is not None
    loader = minato.DataLoader(image.view(np.memmap), 3, num_workers=1)
    assert_same(next(iter(loader)), torch.from_numpy(image)[:3])


def test_endless_structures_are_left_to_torch() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert Layout.infer(endless) is None
    deep: Any = 1
    for _ in range(32):
        deep = [deep]
    assert Layout.infer(deep) is not None
    assert Layout.infer([deep]) is None


def test_changed_collate_functions_and_default_devices_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in (str, dict, Record):
        with monkeypatch.context() as patch:
            patch.setitem(default_collate_fn_map, key, lambda batch, **_: batch)
            assert Layout.infer(1) is None
    with monkeypatch.context() as patch:
        patch.setitem(default_collate_fn_map, int, collate_str_fn)
        assert Layout.infer(1) is None
    with monkeypatch.context() as patch:
        patch.delitem(default_collate_fn_map, float)
        assert Layout.infer(1) is None
    with torch.device("meta"):
        assert Layout.infer(1) is None
    assert Layout.infer(1) is not None


def test_batches_stay_on_the_cpu_whatever_the_default_device() -> None:
    samples = [(1, torch.zeros(0)), (2, torch.zeros(0))]
    layout, buffer, texts = packed(samples)
    with torch.device("meta"):
        batch = layout.batch(buffer, SHIFT, 2, texts)
        sample = layout.sample(buffer, SHIFT, 2, 1, ())
    assert [x.device.type for x in batch] == ["cpu", "cpu"]
    assert sample[1].device.type == "cpu"


# -------------------------------------------------------------------------------- a likely layout

IMAGES = [
    *(torch.zeros(2, 3, 4, 4), torch.zeros(1, 3, 4, 4), torch.zeros(2, 1, 4, 4)),
    *(np.zeros((2, 3, 4, 4)), torch.zeros(1, 2, 3, 4, 4)),
]
CHANNELS_LAST = [
    image.permute(*order) if isinstance(image, torch.Tensor) else image.transpose(order)
    for image in (torch.zeros(2, 4, 4, 3), np.zeros((2, 4, 4, 3)), torch.zeros(2, 4, 4, 1))
    for order in [(0, 3, 1, 2)]
]


@pytest.mark.parametrize("where", ["in line", "process"])
def test_a_likely_layout_changes_nothing(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "process":
        monkeypatch.setattr(sample_spec, "in_worker_process", lambda: True)
    firsts = [samples[0] for samples in SAMPLES.values()]
    odd = [sample for three in ODD.values() for sample in three]
    samples = [*firsts, *odd, *IMAGES, *CHANNELS_LAST]
    expected = [Layout.infer(sample) for sample in samples]
    likely: set[Any] = set(expected) - {None}
    assert len(likely) > 80
    for layout in likely:
        layout.packer(3)  # a layout that was used
        for sample, result in zip(samples, expected, strict=True):
            assert Layout.infer(sample, layout) is result


def test_a_likely_layout_is_found_without_a_description(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of((torch.zeros(3), 7))
    layout.packer(2)
    monkeypatch.setattr(layout_module, "describe", lambda sample: None)
    assert Layout.infer((torch.ones(3), 1), layout) is layout
    assert Layout.infer((torch.ones(3), 1)) is None


def test_a_likely_layout_is_no_reason_to_collate_by_other_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = layout_of(1)
    layout.packer(2)
    with torch.device("meta"):
        assert Layout.infer(1, layout) is None
    monkeypatch.setitem(default_collate_fn_map, int, collate_str_fn)
    assert Layout.infer(1, layout) is None


# ------------------------------------------------------------------------------------- as bytes


def test_bytes_are_a_function_of_the_structure() -> None:
    def sample(prefix: str) -> Any:
        key = "".join([prefix, "ey"])
        return {key: torch.zeros(1000), "x": ({key: np.zeros(1000, "f4")}, Point("a", 1))}

    key = "key"
    shared = {key: torch.zeros(1000), "x": ({key: np.zeros(1000, "f4")}, Point("b", 2))}
    one, other = layout_of(sample("k")), layout_of(shared)
    assert one.to_bytes() == other.to_bytes()
    assert one == other
    assert hash(one) == hash(other)
    assert one is other


def test_layouts_differ() -> None:
    samples = [
        *(1, 1.0, True, "a", b"a", [1], (1,), {"a": 1}, {"b": 1}, {1: 1}, {True: 1}, [1, 1]),
        *(np.float32(1), np.zeros(1, "f4"), torch.zeros(1), torch.zeros(2), torch.zeros(1, 1)),
        *({"a": 1, "b": 2}, {"b": 2, "a": 1}, Point(1, 2), (1, 2)),
    ]
    layouts = [layout_of(sample) for sample in samples]
    assert len(set(layouts)) == len({x.to_bytes() for x in layouts}) == len(samples)
    assert layouts[0] != layouts[0].to_bytes()


def test_from_bytes_returns_one_layout() -> None:
    layout = layout_of({"a": Point(torch.zeros(2), "a")})
    copied = bytes(bytearray(layout.to_bytes()))
    assert Layout.from_bytes(copied) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout


def test_packers_are_kept() -> None:
    layout = layout_of(1)
    assert layout.packer(2) is layout.packer(2)
    assert layout.packer(3) is not layout.packer(2)
    packers = [layout.packer(n) for n in range(1, 500)]
    assert len(set(map(id, packers))) == len(packers)
    assert len(layout._plans) < 100


# ---------------------------------------------------------------------------------- in memory


def test_fields_are_aligned_and_apart() -> None:
    samples = [
        (k > 1, torch.full((3,), k, dtype=torch.uint8), float(k), np.ones(5, "f4"))
        for k in range(5)
    ]
    layout, buffer, texts = packed(samples)
    assert layout.fields_nbytes(5) == 64 + 64 + 64 + 128
    assert layout.fields_nbytes(1) == 4 * 64
    batch = layout.batch(buffer, SHIFT, 5, texts)
    addresses = [tensor.data_ptr() - buffer.ctypes.data - SHIFT for tensor in batch]
    assert addresses == [0, 64, 128, 192]
    assert [tensor.untyped_storage().nbytes() for tensor in batch] == [5, 15, 40, 100]
    assert all(tensor.is_contiguous() for tensor in batch)


def test_each_tensor_keeps_the_buffer_alive_and_nothing_else() -> None:
    samples = [(torch.ones(4), 1, torch.zeros(0), "a")] * 2
    layout, buffer, given = packed(samples)
    batch = layout.batch(buffer, SHIFT, 2, [*itertools.chain(*given)])
    alive = weakref.ref(buffer)
    row, labels, empty, texts = batch[0][1, 2:], batch[1].numpy(), batch[2], batch[3]
    del buffer, batch, samples
    gc.collect()
    assert alive() is not None
    assert row.tolist() == [1, 1]
    del row
    assert alive() is not None
    assert labels.tolist() == [1, 1]
    del labels
    gc.collect()
    assert alive() is None
    assert (empty.shape, texts) == ((2, 0), ("a", "a"))


def test_restored_samples_keep_the_buffer_alive() -> None:
    layout, buffer, _ = packed([(torch.ones(4), np.ones(4))])
    tensor, array = layout.sample(buffer, SHIFT, 1, 0, ())
    alive = weakref.ref(buffer if buffer.base is None else buffer.base)
    del buffer
    assert tensor.sum() + array.sum() == 8
    del tensor, array
    gc.collect()
    assert alive() is None


def test_a_buffer_that_is_too_small_is_an_error() -> None:
    layout = layout_of(torch.zeros(64))
    with pytest.raises(ValueError, match="buffer"):
        layout.batch(np.zeros(3 * 256 - 1, np.uint8), 0, 3, [])


# -------------------------------------------------------------------------------- random structures

LEAVES: dict[str, Callable[[np.random.Generator], Any]] = {
    "int": lambda rng: int(rng.integers(-(2**63), 2**63 - 1)),
    "float": lambda rng: float(rng.choice([rng.normal(), np.nan, -0.0, np.inf])),
    "bool": lambda rng: bool(rng.integers(2)),
    "str": lambda rng: chr(rng.integers(32, 1000)) * int(rng.integers(3)),
    "bytes": lambda rng: rng.bytes(2),
    "tensor": lambda rng: torch.from_numpy(rng.normal(size=(2, 3))),
    "array": lambda rng: rng.normal(size=4).astype("f2"),
    "permuted": lambda rng: torch.from_numpy(rng.integers(0, 256, (4, 3, 2), "u1")).permute(
        2, 0, 1
    ),
    "stepped": lambda rng: rng.normal(size=(4, 6)).astype("c8")[::2, 1::3],
    "scalar": lambda rng: np.int16(rng.integers(-5, 5)),
    "bfloat16": lambda rng: torch.from_numpy(rng.normal(size=3)).bfloat16(),
    "empty": lambda rng: torch.zeros(0, 2, dtype=torch.int8),
    "0-dim": lambda rng: torch.tensor(rng.normal()),
}


def draw_sample(template: Any, rng: np.random.Generator) -> Any:
    match template:
        case str():
            return LEAVES[template](rng)
        case dict():
            return {key: draw_sample(member, rng) for key, member in template.items()}
        case Point():
            return Point(*[draw_sample(member, rng) for member in template])
    return type(template)([draw_sample(member, rng) for member in template])


TEMPLATES = st.recursive(
    st.sampled_from([*LEAVES]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Point, inner, inner),
        st.dictionaries(st.one_of(st.sampled_from("abc"), st.integers(0, 2)), inner, max_size=3),
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(template=TEMPLATES, n=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_random_structures(template: Any, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = [draw_sample(template, rng) for _ in range(n)]
    assert_same(deliver(samples), default_collate(samples))
    layout, buffer, texts = packed(samples)
    assert Layout.infer(samples[-1], layout) is layout
    for k, sample in enumerate(samples):
        assert_same(layout.sample(buffer, SHIFT, n, k, texts[k]), contiguous(sample))
