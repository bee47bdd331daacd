"""Collation: ``collate_fn`` is called on the samples of a batch; one that pads; batches without a ledger."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from minato._compat import collate_in_own_memory, collates_texts, converts_by_default
from minato._support.items import short_name_of
from minato._support.values import gives_keys, short, text_of, type_name
from minato.batching.arena import Arena, Slot
from minato.batching.layout import Buffer, Layout, Rows
from minato.checks import given_whole
from minato.errors import add_note, warn

Bind = Callable[[int, int, Any, int], AbstractContextManager[None]]
"""Binds randomness to a batch, by seed, epoch, and index and occurrence of its first sample."""

RunAgain = Callable[[int, int, Any], list[Any]]
"""Runs a sample of a batch in this worker, by its position and index; the list is empty if it is skipped."""


class Collate:
    """The loader's ``collate_fn``, called as torch calls it: with the sample itself if the loader has no batch size.

    Attributes:
        is_own: Whether batches are built by calling ``collate_fn`` instead of in fields.
        draws: Whether ``collate_fn`` is the program's own, which may draw random numbers.
        bind: Binds randomness to a batch while a worker collates it. None: it does not draw, or the caller does so.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], batched: bool, bind: Bind | None = None
    ) -> None:
        by_default, converts = collate_fn is default_collate, collate_fn is default_convert
        self.is_own = not (by_default and batched)
        self.draws = may_draw(collate_fn)
        self.bind = bind if self.draws else None
        self._batched = batched
        if by_default:
            collate_fn = collate_in_own_memory
        self._collate_fn = convert if converts else collate_fn

    def __call__(self, samples: Any) -> Any:
        """The batch of these samples, or of one call's result in their place."""
        return self._collate_fn(samples if self._batched else samples[0])

    def explain(
        self, error: BaseException, samples: Any, indices: Sequence[object], name: str
    ) -> str:
        """Lines for the message of an error of a batch with a name: which samples, where they differ, the remedy."""
        if self._collate_fn is not collate_in_own_memory:
            return f"  collate_fn was called for {name}."
        try:
            error.__suppress_context__ = True  # one more error of torch's for each container
            cause = _cause(list(samples), "")
            if cause is not None:
                return cause.lines(name, indices if len(indices) == len(samples) else ())
        except Exception:  # of a sample that is asked for its parts
            pass
        return f"  {name[0].upper()}{name[1:]} cannot be collated."


def unchanged(sample: object) -> object:
    """A single sample as the dataset and its transforms made it."""
    return sample


def may_draw(collate_fn: object) -> bool:
    """Whether a ``collate_fn`` is the program's own, which may draw random numbers."""
    return all(collate_fn is not each for each in (default_collate, default_convert, unchanged))


_UNCHANGED = {id(kind) for kind in (torch.Tensor, str, bytes, int, float, bool, type(None))}
"""By id: the class of a class may forbid to be asked."""


def convert(sample: object) -> Any:
    """What torch's ``default_convert`` makes of a single sample, five times as fast for lists of numbers."""
    if converts_by_default():
        try:  # `suppress` takes longer than most samples
            return _converted(sample)
        except TypeError:
            pass
    return default_convert(sample)  # for its error, or what it makes in its place


def _converted(sample: object) -> Any:
    kind, parts = type(sample), cast(Any, sample)
    if id(kind) in _UNCHANGED:
        return sample
    if kind is tuple or kind is list:
        return [_converted(part) for part in parts]
    if kind is dict:
        return {key: _converted(part) for key, part in parts.items()}
    return default_convert(sample)


# ---- why samples cannot be collated ----

_MOST_SHOWN = 200
_SAME_KIND = "Return the same kind of value for every sample, or pass a collate_fn of your own."
_SAME_SHAPE = "Give all samples one shape (resize, crop or pad them in a transform), or pass a collate_fn of your own."
_PADDED = (
    "Give all samples one length, or pad each batch to its longest: collate_fn=minato.PadCollate()."
)
_PADDED_PARTS = "Return lists and tuples of one length, or tensors, which are padded."
_PADDED_LISTS = "Return lists of one length, or tensors and collate_fn=minato.PadCollate(), which pads each batch."
_SAME_KEYS = "Return the same keys for every sample, or pass a collate_fn of your own."
_A_VALUE = (
    "Return a value from dataset and transforms, or pass a collate_fn of your own. To leave a sample out, raise there "
    "and pass errors='skip', or return minato.SKIP from the function for errors."
)
_KNOWN = (
    "Return tensors, arrays, numbers or texts, and lists, tuples or dictionaries of these; or pass a collate_fn of "
    "your own."
)
_DETACHED = "Return tensor.detach(): a worker cannot send the graph of its gradient."


class _Cause(NamedTuple):
    """Why samples cannot be collated: what is found at a place of sample ``k``, and in the first if that differs."""

    place: str
    k: int
    found: str
    remedy: str
    first: str = ""

    def lines(self, name: str, indices: Sequence[object]) -> str:
        """The cause as lines for a message."""
        where = f", field {self.place}" if self.place else ""
        which = [
            f"sample {k}" + (f" ({short_name_of(indices[k])})" if indices else "")
            for k in (0, self.k)
        ]
        values = [f"  {which[0]}{where}: {self.first}"] if self.first else []
        values.append(f"  {which[1]}{where}: {self.found}")
        head = f"  {name[0].upper()}{name[1:]} cannot be collated:"
        return "\n".join([head, *values, f"  {self.remedy}"])


def _cause(values: list[Any], place: str, *, pads: bool = False) -> _Cause | None:
    """Return the first cause among the values at one place of all samples; None: none is found.

    With ``pads``, arrays may differ in their length, and some may be tensors.
    """
    first, kinds = values[0], [_kind(each) for each in values]
    if pads:
        kinds = ["tensor" if kind == "array" else kind for kind in kinds]
    for k, value in enumerate(values):
        if value is None:
            return _Cause(place, k, "None", _A_VALUE)
    for k, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        if kind is None:
            return _Cause(place, k, _shown(value), _KNOWN)
        if kind != kinds[0]:
            return _Cause(place, k, _shown(value), _SAME_KIND, _shown(first))
    if kinds[0] == "mapping":
        return _cause_in_mappings(values, place, pads)
    if kinds[0] == "sequence":
        for k, value in enumerate(values):
            if len(value) != len(first):
                remedy = _PADDED_PARTS if pads else _PADDED_LISTS
                return _Cause(place, k, _shown(value), remedy, _shown(first))
        parts = ((f"{place}[{i}]", list(each)) for i, each in enumerate(zip(*values, strict=True)))
        return _first(parts, pads)
    if kinds[0] in ("tensor", "array") and not pads:  # else what differs is named in the error
        return _cause_in_arrays(values, place)
    return None


def _cause_in_mappings(
    values: list[Mapping[object, object]], place: str, pads: bool
) -> _Cause | None:
    keys = list(values[0])
    for k, value in enumerate(values):
        if not all(key in value for key in keys):
            return _Cause(place, k, _shown(value), _SAME_KEYS, _shown(values[0]))
    parts = ((f"{place}[{text_of(key)}]", [each[key] for each in values]) for key in keys)
    return _first(parts, pads)


def _cause_in_arrays(values: list[torch.Tensor | np.ndarray], place: str) -> _Cause | None:
    shape = tuple(values[0].shape)
    for k, value in enumerate(values):
        other = tuple(value.shape)
        if other != shape:
            by_length = other[1:] == shape[1:] and shape and other
            remedy = _PADDED if by_length else _SAME_SHAPE
            return _Cause(place, k, _shown(value), remedy, _shown(values[0]))
    for k, value in enumerate(values):
        if getattr(value, "requires_grad", False):
            return _Cause(place, k, "a tensor that requires a gradient", _DETACHED)
    return None


def _first(parts: Iterable[tuple[str, list[Any]]], pads: bool) -> _Cause | None:
    found = (_cause(each, place, pads=pads) for place, each in parts)
    return next(filter(None, found), None)


def _kind(value: object) -> str | None:
    """Return which of ``default_collate``'s rules is for a value; None: none is."""
    if isinstance(value, np.ndarray):
        return "array" if value.dtype.kind in "biufc" else None
    return next((kind for kind, types in _KINDS.items() if isinstance(value, types)), None)


_KINDS: dict[str, tuple[type, ...]] = {
    "tensor": (torch.Tensor,),
    "text": (str, bytes),
    "number": (int, float, np.number, np.bool_),
    "mapping": (Mapping,),
    "sequence": (Sequence,),
}


def _shown(value: Any) -> str:
    kind = _kind(value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        of = "" if kind else f" of dtype {value.dtype} and"
        return f"{type_name(value)}{of} of shape {tuple(value.shape)}"
    if kind == "mapping":
        return short(f"{type_name(value)} with the keys {text_of(list(value))}", _MOST_SHOWN)
    if kind == "sequence":
        return f"{type_name(value)} of length {len(value)}"
    words = f"{type_name(value, module=kind is None)} {text_of(value) if kind else ''}"
    return short(words.rstrip(), _MOST_SHOWN)


# ---- samples of different lengths ----


def pad_stack(
    arrays: Sequence[torch.Tensor | np.ndarray], value: float = 0, multiple_of: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack tensors or arrays of shape (length, …), padded to the longest.

    Args:
        arrays: They may differ in length and in dtype.
        value: Padding value.
        multiple_of: The common length is rounded up to a multiple of this.

    Returns:
        The stack, shape (number, longest, …), of the dtype to which torch promotes those of all; and the lengths,
        shape (number,), int64.

    Raises:
        ValueError: There are none, they differ in another dimension, or hold integers among which the padding value is
            not; or ``multiple_of`` is below 1.
        TypeError: The padding value is no number.
    """
    given_whole("multiple_of", multiple_of, 1)
    if not isinstance(value, (Number, np.bool_)):
        raise TypeError(f"the padding value {value!r} is a {type_name(value)}: give a number")
    tensors = [torch.as_tensor(each) for each in arrays]
    if not tensors:
        raise ValueError("there are no arrays to stack: give at least one")
    shapes = {tuple(each.shape[1:]) for each in tensors}
    if len(shapes) != 1 or any(each.ndim == 0 for each in tensors):
        raise ValueError(
            f"only the first dimension is padded, and samples have the shapes "
            f"{sorted({tuple(each.shape) for each in tensors})}"
        )
    lengths = torch.tensor([len(each) for each in tensors])
    longest = -(-int(lengths.max()) // multiple_of) * multiple_of
    dtype = functools.reduce(torch.promote_types, {each.dtype for each in tensors})
    shape = (len(tensors), longest, *shapes.pop())
    if not (dtype.is_floating_point or dtype.is_complex):
        try:
            held = torch.zeros((), dtype=dtype, device="cpu").fill_(value).item()
        except (RuntimeError, OverflowError):  # of some numbers; others it wraps
            held = None
        if held != value:
            raise ValueError(
                f"the padding value {value!r} is none of {dtype}, of which the samples are: give another, or convert "
                "them"
            )
    stack = tensors[0].new_full(shape, value, dtype=dtype)
    # Not over rows of the stack, whose gradients autograd refuses.
    for k, each in enumerate(tensors):
        stack[k, : len(each)] = each
    return stack, lengths


@dataclass(frozen=True)
class PadCollate:
    """A ``collate_fn`` that pads tensors and arrays to the longest of the batch, along their first dimension.

    The structure of batches is that of torch's ``default_collate``, which collates all other values.

    Attributes:
        value: Padding value; or a dictionary from names of fields to theirs, with 0 for other fields. A name that
            samples do not have is a warning.
        multiple_of: Lengths are rounded up to a multiple of this.
        masks: For samples that are dictionaries: from the name of a new field to the name of a padded one. The new
            field is True at content, and False at padding: bool, shape (samples, longest).

    Raises:
        ValueError: Samples differ in another dimension than the first, or in their number of parts; or ``masks`` names
            a new field that exists, or one that is not padded.
        KeyError: A field in ``masks`` does not exist.
        TypeError: ``masks`` is no dictionary, or samples are none; or a single sample is given.
    """

    value: float | Mapping[str, float] = 0
    multiple_of: int = 1
    masks: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.masks, Mapping):
            raise TypeError(
                f"masks={text_of(self.masks)} is a {type_name(self.masks)}: give a dictionary, from the name of each "
                "new field to that of a padded one"
            )

    def __call__(self, samples: object) -> Any:
        """Return the batch."""
        is_row = isinstance(samples, torch.Tensor) and samples.ndim < 2
        if is_row or gives_keys(samples) or not hasattr(samples, "__getitem__"):
            raise TypeError(
                f"PadCollate takes a list of samples and got a {type_name(samples)}: batch_size=None gives single "
                "samples, so give a batch_size, or return lists of samples from the dataset"
            )
        try:
            batch = self._collated(samples, None)
        except Exception as error:
            with contextlib.suppress(Exception):  # of a sample that is asked for its parts
                cause = _cause([*cast(Any, samples)], "", pads=True)
                if cause is not None:
                    add_note(error, cause.lines("the batch", ()))
            raise
        first = cast(Any, samples)[0]
        if isinstance(self.value, Mapping):
            self._check_names(first)
        if self.masks and not _has_fields(first):
            raise TypeError(
                f"masks={text_of(self.masks)} names fields, and samples are of type {type_name(first)}: return "
                "dictionaries from dataset and transforms, or leave masks out"
            )
        return batch

    def _check_names(self, sample: object) -> None:
        names = _names(sample)
        unknown = [name for name in self.value if name not in names]  # type: ignore[union-attr]
        if unknown:
            warn(
                f"value={text_of(self.value)} of PadCollate names {unknown[0]!r}, and samples have only the fields "
                f"{text_of([*names])}"
            )

    def _add_masks(
        self, batch: dict[object, object], samples: Sequence[Mapping[object, Sized]]
    ) -> None:
        fields = dict.fromkeys(batch)
        for mask, of in self.masks.items():
            padded = batch.get(of)
            is_new = of in fields and mask not in fields
            if not (is_new and isinstance(padded, torch.Tensor) and padded.ndim > 1):
                raise self._no_mask(mask, of, list(fields))
            lengths = torch.tensor([len(each[of]) for each in samples])
            batch[mask] = torch.arange(padded.shape[1]) < lengths[:, None]

    def _no_mask(self, mask: str, of: str, fields: list[object]) -> Exception:
        given = f"masks={text_of(self.masks)}"
        if of not in fields:
            return KeyError(f"{given}: samples have no field {of!r}, only {text_of(fields)}")
        if mask in fields:
            return ValueError(f"{given}: samples have a field {mask!r} already, so name another")
        return ValueError(f"{given}: field {of!r} is not padded, as it holds no arrays of a length")

    def _collated(self, samples: Any, name: Any) -> Any:
        first = samples[0]
        if isinstance(first, Mapping):
            batch = {key: self._collated([each[key] for each in samples], key) for key in first}
            if name is None:
                self._add_masks(batch, samples)
            return like(first, batch)
        if isinstance(first, (list, tuple)):
            parts = [self._collated(part, name) for part in zip(*samples, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else parts
        if isinstance(first, (torch.Tensor, np.ndarray)) and first.ndim:
            value = self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value
            return pad_stack(samples, value, self.multiple_of)[0]
        return collate_in_own_memory(samples)


def _names(sample: object) -> dict[object, None]:
    """The names of the fields of a sample, at any depth."""
    parts = [*sample.values()] if isinstance(sample, Mapping) else sample
    found = dict.fromkeys(sample if isinstance(sample, Mapping) else ())
    for part in parts if isinstance(parts, (list, tuple)) else ():
        if isinstance(part, (list, tuple, Mapping)):
            found.update(_names(part))
    return found


def _has_fields(sample: object) -> bool:
    """Whether a sample is a dictionary, or a list or tuple with one."""
    if isinstance(sample, (list, tuple)):
        return any(map(_has_fields, sample))
    return isinstance(sample, Mapping)


def like(first: Mapping[object, object], batch: dict[object, object]) -> Any:
    """The fields of a batch in a mapping of the first sample's class, where torch makes one."""
    try:
        if not isinstance(first, MutableMapping):
            made: Callable[[object], object] = type(first)
            return made(batch)
        clone = copy.copy(first)  # keeps attributes of a subclass
        clone.update(batch)
    except TypeError:
        return batch
    return clone


# ---- without workers ------------------------------------------------------------------------


_LEAST_RECYCLED_BYTES = 512 << 10
"""Smaller batches get memory of their own, which the C library hands out from warm pages."""
_MOST_KEPT_BYTES = 32 << 20  # glibc keeps no larger block, whatever it has got back
_SHARED_WORK_BYTES, _SHARED_TENSOR_BYTES = 512 << 10, 64 << 10
"""From these sizes of a batch and of a tensor on, several threads copy faster than one, even if they have to wake up
first: they may have made the samples, which then lie in the caches of their cores."""
_SHARED_SMALL_BYTES = 2 << 20
"""From this size of a batch on, more than two threads copy smaller tensors faster than one; two do not."""


class BatchBuilder:
    """Builds batches by the rules of ``default_collate``, with one copy, or by another ``collate_fn``.

    ``collates``, ``draws`` and ``explain`` are ``is_own``, ``draws`` and ``explain`` of :class:`Collate`. ``nbytes``
    are those of the last batch that was built in fields; 0 for any other.
    """

    def __init__(self, arena: Arena, collate: Collate) -> None:
        self.collates, self.draws, self.explain = collate.is_own, collate.draws, collate.explain
        self.nbytes = 0
        self._arena = arena
        self._collate_fn = collate
        self._largest = 0  # bytes of a batch that glibc has got back
        self._last: Layout | None = None
        self._slot: Slot | None = None
        self._last_slot: Slot | None = None

    @property
    def last_slot(self) -> Slot:
        """The slot of the arena that the last batch, or an earlier one, was built in."""
        return self._last_slot or self._next_slot()

    def _next_slot(self) -> Slot:
        if self._slot is None:
            self._slot = self._arena.acquire()
        return self._slot

    def pack(self, samples: list[object]) -> Any:
        """The batch of some samples, with one copy; None if they have no layout."""
        self.nbytes = 0
        kind, tried = type(samples[0]), self._last
        if kind is str or kind is bytes:
            return samples if collates_texts() else default_collate(samples)
        # Nearly always: the packer looks at each sample anyway.
        if tried is not None and tried.shows():
            batch = self._packed(tried, samples)
            if batch is not None:
                return batch
        else:
            tried = None
        layout = Layout.infer(samples[0], tried)
        if layout is None or layout is tried:
            return None
        self._last = layout
        return self._packed(layout, samples)

    def _packed(self, layout: Layout, samples: list[object]) -> Any:
        """The batch of samples of a layout; None if they have another one."""
        count = len(samples)
        nbytes = layout.fields_nbytes(count)
        slot = self._slot_for(nbytes)
        memory = None if slot is None else self._arena.view(slot)
        shared_nbytes = max(_SHARED_WORK_BYTES // count, _SHARED_TENSOR_BYTES)
        if nbytes >= _SHARED_SMALL_BYTES and torch.get_num_threads() > 2:
            shared_nbytes = min(_SHARED_SMALL_BYTES // count, shared_nbytes)
        batch = layout.collate(samples, shared_nbytes, memory)
        if batch is not None:
            self.nbytes = nbytes
            if slot is not None and memory is not None:
                self._lease(slot, nbytes, memory)
        return batch

    def gather(self, rows: Rows) -> Any:
        """The batch of samples that are rows; None if they must be packed one by one, which may also be faster."""
        count = rows.size
        nbytes = sum(source.shape[1] for source in rows.sources) * count
        layout = Layout.infer(rows.first, self._last) if nbytes < _SHARED_SMALL_BYTES else None
        if layout is None or not layout.packer(count).fits(rows.first):
            return None
        self._last, self.nbytes = layout, layout.fields_nbytes(count)
        slot = self._slot_for(self.nbytes)
        if slot is None:
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu").numpy()
        else:
            memory = self._arena.view(slot)
        layout.gather(memory, 0, count, 0, rows)
        if slot is not None:
            self._lease(slot, self.nbytes, memory)
        return layout.batch(memory, 0, count, ())

    def collate(self, samples: object) -> Any:
        """The batch that ``collate_fn`` makes of the samples."""
        self.nbytes = 0
        return self._collate_fn(samples)

    def _slot_for(self, nbytes: int) -> Slot | None:
        """The slot that a batch is built in; None: it gets memory of its own."""
        if nbytes < _LEAST_RECYCLED_BYTES and self._arena.pinned_slots is None:
            return None
        if self._largest < nbytes <= _MOST_KEPT_BYTES:
            # glibc keeps freed blocks that are no larger than the largest one that it has got back. torch's loader
            # frees its batches; without this, the kernel would clear new pages for each sample above 128 KiB.
            self._largest = nbytes
            torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        try:
            slot = self._next_slot()
        except MemoryError:  # the batches that the program keeps take all address space
            return None
        return slot if nbytes <= slot.end - slot.start else None

    def _lease(self, slot: Slot, nbytes: int, memory: Buffer) -> None:
        # First: an interruption may leave a slot unused, but never has two batches in one.
        self._slot, self._last_slot = None, slot
        self._arena.lease(slot, nbytes, memory)
