"""The layout of a batch in memory, by the rules of torch's ``default_collate``, and how its workers share it."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from minato._core import Packer, WorkerLedger
from minato._core.sample_spec import Spec, flatten, placed
from minato._core.segment import Segment
from minato._support.objects import is_exactly
from minato.batching.arena import Slot
from minato.batching.sample_spec import (
    CHANNELS_NDIMS,
    NUMPY_DTYPES,
    describe,
    formats_matter,
    name_of,
    rules_hold,
)
from minato.batching.serialization import damaged

Buffer: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Collator: TypeAlias = Callable[[Iterator[Any], Iterator[Any]], Any]
"""Makes a batch of its tensors and its columns of strings."""

_ALIGNMENT_BYTES = 64  # each field of a batch starts on its own cache line
_ALIKE_BYTES = 64 << 10
_KEPT_LAYOUTS = 256
_KEPT_BATCH_SIZES = 64  # a loader needs one or two of each, unless shapes or batch sizes vary

_HEAD = struct.Struct("<QQQ16sQ")
"""Offset of the fields, number of samples that they are for, bytes of the layout, which follows the head, its digest,
and the checksum of all this."""
_HEAD_BYTES, _SUM_BYTES, _DIGEST_BYTES = _HEAD.size, 8, 16

_NUMBER_DTYPES = {"float": torch.float64, "int": torch.int64, "bool": torch.bool}


class _Field(NamedTuple):
    """Elements and bytes are those of an item."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    is_tensor: bool


_Placed: TypeAlias = tuple[torch.dtype, int, int, tuple[int, ...]]
"""Of a field, dtype, number of elements, offset and shape with the batch's dimension."""


class _Plan(NamedTuple):
    """A layout for one batch size; offsets are in bytes from the start of the region, which has ``nbytes``.

    Of a small batch, it has tensors ``alike``: ``empty_like`` takes half as long as ``empty``.
    """

    packer: Packer
    nbytes: int
    tensors: list[_Placed]
    alike: list[torch.Tensor]


class Layout:
    """Places of all parts of all samples of a batch, for samples of one structure.

    The numbers of the samples become contiguous *fields* in shared memory; strings stay outside: each sample has
    ``num_texts`` of them. :meth:`infer` and :meth:`from_bytes` make layouts; two are equal if their bytes are.
    """

    def __init__(self, data: bytes) -> None:
        self._bytes = data
        self.digest = _digest(data)
        self._spec: Spec = pickle.loads(data)
        nodes = flatten(self._spec)
        self._fields = [
            _field(node.tag, node.shape, node.dtype) for node in nodes if node.dtype is not None
        ]
        self._may_have_formats = any(len(field.shape) in CHANNELS_NDIMS for field in self._fields)
        self._collated = _collator(self._spec, list)
        self._plans: dict[int, _Plan] = {}
        self._packer: Packer | None = None  # of any plan: all check samples in the same way
        self.num_texts = sum(node.tag == "text" for node in nodes)

    @staticmethod
    def infer(sample: object, likely: Layout | None = None) -> Layout | None:
        """Derive the layout of batches from a first sample; a ``likely`` one is tried first, which is much faster.

        None if torch's own function must build the batch: the sample holds objects other than plain tensors and arrays
        in host memory, numbers, strings and standard containers, torch refuses it, or the program has changed how torch
        collates.
        """
        if likely is not None and likely.shows() and likely._packer and likely._packer.fits(sample):
            return likely
        if not rules_hold():
            return None
        spec = describe(sample)
        if spec is None:
            return None
        try:
            return Layout.from_bytes(_dump(spec))
        except Exception:  # a type whose pickling may raise anything
            return None

    @staticmethod
    @functools.lru_cache(_KEPT_LAYOUTS)
    def from_bytes(data: bytes) -> Layout:
        """Return the layout that :meth:`to_bytes` wrote, the same object for the same bytes."""
        return Layout(data)

    def shows(self) -> bool:
        """Return whether a packer can tell that samples have this layout, and torch collates by its own rules."""
        return rules_hold() and not (self._may_have_formats and formats_matter())

    def to_bytes(self) -> bytes:
        """Return the layout as bytes, which are equal in all processes; they refer to named tuples by name."""
        return self._bytes

    def __eq__(self, other: object) -> bool:
        return self._bytes == other._bytes if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes)

    def __reduce__(self) -> tuple[Callable[[bytes], Layout], tuple[bytes]]:
        return Layout.from_bytes, (self._bytes,)

    def fields_nbytes(self, n: int) -> int:
        """Return the size in bytes of the region that holds the fields of ``n`` samples."""
        return (self._plans.get(n) or self._plan(n)).nbytes

    def packer(self, n: int) -> Packer:
        """Return the packer of batches of ``n`` samples."""
        return self._plan(n).packer

    def gather(self, buffer: Buffer, offset: int, n: int, k: int, rows: Rows) -> None:
        """Copy rows to the places from sample ``k`` on. The other arguments are those of :meth:`batch`."""
        for field, source, (_, _, start, _) in zip(
            self._fields, rows.sources, self._plan(n).tensors, strict=True
        ):
            first = offset + start + k * field.nbytes
            place = buffer[first : first + rows.size * field.nbytes].reshape(rows.size, -1)
            if isinstance(rows.indices, slice):
                place[...] = source[rows.indices]
            else:  # all are in range; mode="raise" would copy twice
                source.take(rows.indices, axis=0, out=place, mode="clip")

    def batch(self, buffer: Buffer, offset: int, n: int, texts: Sequence[str | bytes]) -> Any:
        """Build the batch that ``default_collate`` would have built, without copying, of ``n`` packed samples.

        Args:
            buffer: Writable memory, shape (bytes,), uint8. Each tensor keeps it alive.
            offset: Where in the buffer the region starts, in bytes; a multiple of 64.
            texts: Strings of all samples, one after the other, from the packer.

        Returns:
            Tensors of shape (n, *shape of the item), each with its own storage in the buffer, in the containers of a
            sample; tuples become lists.
        """
        tensors = [
            _viewed(buffer, dtype, numel, offset + start, shape)
            for dtype, numel, start, shape in (self._plans.get(n) or self._plan(n)).tensors
        ]
        return self._collated(iter(tensors), self._columns(texts))

    def _columns(self, texts: Sequence[str | bytes]) -> Iterator[Sequence[str | bytes]]:
        return (texts[i :: self.num_texts] for i in range(self.num_texts))

    def collate(self, samples: list[object], kept_nbytes: int, memory: Buffer | None = None) -> Any:
        """Build the batch that ``default_collate`` would have built, as :meth:`batch`, with one copy.

        Tensors of at least ``kept_nbytes`` are copied by all threads of torch in this process. Without ``memory``, each
        has its own. None if a sample has another layout.
        """
        count = len(samples)
        plan = self._plans.get(count) or self._plan(count)
        if memory is None:
            tensors = list(map(torch.empty_like, plan.alike)) or _empty(plan.tensors)
        else:
            tensors = [_viewed(memory, *place) for place in plan.tensors]
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        aside = plan.packer.pack_fields(samples, addresses, kept_nbytes)
        if aside is None:
            return None
        if aside and not self.num_texts:
            large = [field.is_tensor and field.nbytes >= kept_nbytes for field in self._fields]
            kept = list(itertools.compress(tensors, large))
            for i, place in enumerate(kept):
                torch.stack(aside[i :: len(kept)], out=place)
        return self._collated(iter(tensors), self._columns(aside))

    def sample(
        self, buffer: Buffer, offset: int, n: int, k: int, texts: Sequence[str | bytes]
    ) -> Any:
        """Rebuild sample ``k`` of a batch as the dataset returned it; its arrays are contiguous.

        They are copies: beside a string, ``default_collate`` puts what it gets into the batch as it is, which outlives
        the buffer. ``texts`` begin with its strings. The other arguments are those of :meth:`batch`.
        """
        items = (
            buffer[start : start + field.nbytes].copy()
            for field, (_, _, first, _) in zip(self._fields, self._plan(n).tensors, strict=True)
            for start in [offset + first + k * field.nbytes]
        )
        return _restored(self._spec, items, iter(texts))

    def _plan(self, n: int) -> _Plan:
        plan = self._plans.get(n)
        if plan is None:
            if len(self._plans) >= _KEPT_BATCH_SIZES:
                self._plans.clear()
            sizes = [
                -(-n * field.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                for field in self._fields
            ]
            *offsets, end = itertools.accumulate(sizes, initial=0)
            tensors = [
                (field.dtype, n * field.numel, start, (n, *field.shape))
                for field, start in zip(self._fields, offsets, strict=True)
            ]
            packer = Packer(placed(self._spec, iter(offsets)), n)
            alike = _empty(tensors) if end <= _ALIKE_BYTES else []
            plan = self._plans[n] = _Plan(packer, end, tensors, alike)
            self._packer = packer
        return plan


def _dump(spec: Spec) -> bytes:
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.fast = True  # with a memo, the bytes depend on which equal strings are one object
    pickler.dump(spec)
    return stream.getvalue()


def _field(tag: str, shape: tuple[int, ...], dtype: torch.dtype | np.dtype) -> _Field:
    torch_dtype = dtype if isinstance(dtype, torch.dtype) else NUMPY_DTYPES[dtype.str]
    numel = math.prod(shape)
    return _Field(torch_dtype, shape, numel, numel * torch_dtype.itemsize, tag == "tensor")


def _empty(fields: Iterable[_Placed]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="cpu") for dtype, _, _, shape in fields]


def _viewed(
    buffer: Buffer, dtype: torch.dtype, numel: int, offset: int, shape: tuple[int, ...]
) -> torch.Tensor:
    if numel == 0:  # torch.frombuffer makes no empty tensors
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset)
    # twice as fast as a view, and like in torch not a view of another tensor
    if len(shape) == 1:
        return flat
    return flat.resize_(*shape) if shape else flat.resize_(shape)


def _collator(spec: Spec, sequence: type) -> Collator:
    """Return a function that puts tensors into containers, and strings into the sequence type that torch uses."""
    match spec:
        case ("text", _):
            return lambda tensors, texts: sequence(next(texts))
        case ("dict", keys, children):
            of_keys = [
                (key, _collator(child, list)) for key, child in zip(keys, children, strict=True)
            ]
            return lambda tensors, texts: {key: part(tensors, texts) for key, part in of_keys}
        case ("list" | "tuple" | "namedtuple" as tag, kind, children):
            parts = [_collator(child, tuple) for child in children]
            if tag == "namedtuple":
                return lambda tensors, texts: kind(*[part(tensors, texts) for part in parts])
            return lambda tensors, texts: [part(tensors, texts) for part in parts]
    return lambda tensors, texts: next(tensors)


def _restored(spec: Spec, items: Iterator[Buffer], texts: Iterator[str | bytes]) -> Any:
    match spec:
        case ("text", _):
            return next(texts)
        case ("dict", keys, children):
            return {
                key: _restored(child, items, texts)
                for key, child in zip(keys, children, strict=True)
            }
        case ("list" | "tuple" | "namedtuple", kind, children):
            members = [_restored(child, items, texts) for child in children]
            return members if kind is list else tuple.__new__(kind, members)
        case ("tensor", name, shape, _):
            return _viewed(next(items), getattr(torch, name), math.prod(shape), 0, shape)
        case ("array", dtype, shape, _):
            return next(items).view(dtype).reshape(shape)
        case ("scalar", dtype, _):
            return next(items).view(dtype)[0]
        case (tag, _):
            return next(items).view(name_of(_NUMBER_DTYPES[tag]))[0].item()
    raise AssertionError(spec)


class LayoutRecord(NamedTuple):
    """The layout of a batch, and the number of samples that it is for; its fields lie in [fields, end) of the arena."""

    fields: int
    end: int
    num_samples: int
    layout: Layout


def share_layout(
    ledger: WorkerLedger, segment: Segment, batch: int, count: int, layout: Layout
) -> LayoutRecord:
    """Reserve the fields of a batch and offer their layout; returns the first offer. MemoryError: the slot is full."""
    fields = ledger.reserve_fields(batch, layout.fields_nbytes(count))
    if not fields:
        return read_layout(segment, ledger.describe(batch).layout)
    data = layout.to_bytes()
    head = fields, count, len(data), layout.digest
    data = _HEAD.pack(*head, crc32(_HEAD.pack(*head, 0)[:-_SUM_BYTES])) + data
    offset = ledger.allocate(batch, len(data))
    segment.write(offset, data)
    first = ledger.publish_layout(batch, offset)
    if first != offset:
        return read_layout(segment, first)
    return LayoutRecord(fields, fields + layout.fields_nbytes(count), count, layout)


def read_layout(segment: Segment, offset: int, slot: Slot | None = None) -> LayoutRecord:
    """Read the layout of a batch, whose fields must lie in a known ``slot``; DamagedError: it was changed."""
    head = segment.read(offset, _HEAD_BYTES)
    record = _opened.get(head) or _open(segment, offset, head)
    if slot is not None and not slot.start <= record.fields <= record.end <= slot.end:
        raise damaged("the layout of a batch")
    return record


_opened: dict[bytes, LayoutRecord] = {}
"""By their heads: the batches that a slot holds one after the other mostly have the same layout."""


def _open(segment: Segment, offset: int, head: bytes) -> LayoutRecord:
    """Read a layout whose head is not known. Its size is used only if the checksum is right."""
    fields, count, nbytes, digest, checksum = _HEAD.unpack(head.ljust(_HEAD_BYTES, b"\0"))
    if crc32(head[:-_SUM_BYTES]) != checksum:
        raise damaged("the layout of a batch")
    data = segment.read(offset + _HEAD_BYTES, nbytes)
    if _digest(data) != digest:
        raise damaged("the layout of a batch")
    if len(_opened) >= _KEPT_LAYOUTS:
        _opened.clear()
    layout = Layout.from_bytes(data)
    end = fields + layout.fields_nbytes(count)
    _opened[head] = record = LayoutRecord(fields, end, count, layout)
    return record


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


# ---- rows -----------------------------------------------------------------------------------


Array: TypeAlias = "np.ndarray[Any, Any]"

_INDEX_TYPES = {int, np.int64}  # not bool, which adds a dimension to what it indexes
_ARRAYS = (np.ndarray, np.memmap)
_OF_ROWS = (torch.Tensor, TensorDataset, *_ARRAYS)


class Rows(NamedTuple):
    """Consecutive samples of a batch that are rows."""

    first: Any  # the first sample, as the dataset returns it
    # For each tensor of a sample, the memory of which it is a row: shape (rows, bytes), uint8, C-contiguous.
    sources: list[Array]
    indices: Array | slice  # indices of the rows, in range: int64 of shape (count,), or a slice
    size: int

    def part(self, k: int, count: int) -> Rows:
        """Rows k … k+count-1 of these."""
        if count == self.size:
            return self
        indices, end = self.indices, k + count
        if isinstance(indices, slice):
            return self._replace(indices=slice(indices.start + k, indices.start + end), size=count)
        return self._replace(indices=indices[k:end], size=count)


def has_rows(dataset: object) -> bool:
    """Whether the samples of a dataset are rows: a tensor, an array, a ``TensorDataset``, or a ``Subset`` of one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return is_exactly(dataset, _OF_ROWS)


def rows_of(dataset: Any, indices: list[Any]) -> Rows | None:
    """Return the rows that are the samples of these indices, of a dataset of which :func:`has_rows` is true.

    None if the samples must be loaded one by one: an index is negative, out of range or not an integer, or NumPy cannot
    view the memory as contiguous rows.
    """
    while type(dataset) is Subset:
        if type(dataset.indices) not in (list, tuple, range, np.ndarray):
            return None
        try:
            indices = [dataset.indices[index] for index in indices]
        except (IndexError, TypeError):
            return None
        dataset = dataset.dataset
    parts = dataset.tensors if type(dataset) is TensorDataset else (dataset,)
    sources = [source for part in parts if (source := _memory(part)) is not None]
    if not sources or len(sources) < len(parts):
        return None
    rows = _in_range(indices, min(map(len, sources)))
    return None if rows is None else Rows(dataset[indices[0]], sources, rows, len(indices))


def _memory(part: Any) -> Array | None:
    """Return the bytes of each row of a tensor or an array of numbers; None if they are not contiguous in memory."""
    kind = type(part)
    try:
        if kind is torch.Tensor and part.is_contiguous():
            array: Array = part.view(torch.uint8).numpy()
        elif kind in _ARRAYS and part.flags.c_contiguous and part.dtype.kind in "biufc":
            if not part.dtype.isnative:  # a sample's bytes are not those in memory
                return None
            array = np.asarray(part).view(np.uint8)  # without what np.memmap does for each slice
        else:
            return None
        return array.reshape(len(part), -1)
    except (RuntimeError, TypeError, ValueError):  # on a device, sparse, or without rows
        return None


def _in_range(indices: list[Any], length: int) -> Array | slice | None:
    if not _INDEX_TYPES.issuperset(map(type, indices)):
        return None
    first, last = min(indices), max(indices)
    if first < 0 or last >= length:
        return None
    if last - first == len(indices) - 1 and indices == list(range(first, last + 1)):
        return slice(first, last + 1)
    return np.array(indices, np.int64)
