"""The structure of a sample, by the rules of ``default_collate``; whether another worker may get a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import PosixPath
from typing import Any

import numpy as np
import torch

from minato._compat import collates_by_default, in_worker_process, modes_are_devices, torch_modes
from minato._core import SharedWords
from minato._core.sample_spec import Spec
from minato._core.segment import Memory

_MAX_DEPTH = 32
_MAX_NDIM = 64
CHANNELS_NDIMS = (4, 5)  # numbers of dimensions of samples that can have channels last

NUMPY_DTYPES = {
    np.dtype(name).str: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""NumPy's native dtypes that torch can view."""
_TENSOR_DTYPES = {
    *NUMPY_DTYPES.values(),
    *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    *(torch.float8_e5m2, torch.float8_e5m2fnuz),
}
_KEY_TYPES = (str, int, bool, bytes, type(None))
"""Exact types of dictionary keys; keys of other types may differ between processes."""


def rules_hold() -> bool:
    """Return whether torch collates by its own rules, on the CPU: no program has changed that."""
    if not collates_by_default():
        return False
    if not torch_modes():
        return True
    if not modes_are_devices():  # what the program does with torch's operations, it does to batches
        return False
    # A new tensor shows the default device. torch 2.6's get_default_device() knows of no ``with torch.device(...)``.
    try:
        return torch.empty(0).device.type == "cpu"
    except RuntimeError:
        # Such as CUDA in a forked worker: torch's collate function raises it, as the batch's error.
        return False


def describe(sample: object) -> Spec | None:
    """Describe a sample as a spec with all offsets 0; None if torch itself has to collate such samples."""
    return _infer(sample, _MAX_DEPTH)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in torch."""
    return str(dtype).removeprefix("torch.")


def formats_matter() -> bool:
    """Return whether ``torch.stack`` may give a batch the memory format of samples with channels last."""
    return not in_worker_process()  # in workers ``default_collate`` allocates the result


def _infer(x: Any, depth: int) -> Spec | None:
    kind = type(x)
    if kind is torch.Tensor:
        return ("tensor", name_of(x.dtype), tuple(x.shape), 0) if is_plain_tensor(x) else None
    if kind is np.ndarray or kind is np.memmap:  # rows of a mapped file
        return ("array", x.dtype.str, x.shape, 0) if _is_plain_array(x) else None
    if kind in (float, bool):
        return (kind.__name__, 0)
    if kind is int:
        return ("int", 0) if -(1 << 63) <= x < 1 << 63 else None
    if kind in (str, bytes):
        return ("text", kind)
    if isinstance(x, np.generic):
        # torch reads no uint64 scalar; types such as longlong share the name of another one
        dtype = x.dtype.str
        known = dtype in NUMPY_DTYPES and dtype != np.dtype(np.uint64).str
        return ("scalar", dtype, 0) if known and np.dtype(dtype).type is kind else None
    return _infer_container(x, depth - 1) if depth else None


def _infer_container(x: Any, depth: int) -> Spec | None:
    kind = type(x)
    tag: str
    exact: Any
    if kind is dict:
        if not all(type(key) in _KEY_TYPES for key in x):
            return None
        tag, exact, members = "dict", tuple(x), x.values()
    elif kind in (list, tuple):
        tag, exact, members = kind.__name__, kind, x
    elif _is_namedtuple(x):
        tag, exact, members = "namedtuple", kind, x
    else:
        return None
    children = []
    for member in members:
        child = _infer(member, depth)
        if child is None:
            return None
        children.append(child)
    return (tag, exact, tuple(children))


def is_plain_tensor(x: torch.Tensor) -> bool:
    """Return whether a packer can copy a tensor as it stands in memory."""
    return (
        x.dtype in _TENSOR_DTYPES
        and x.layout is torch.strided
        and not x.is_nested
        and x.is_cpu
        and x.dim() <= _MAX_NDIM
        and not x.requires_grad
        and not x.is_neg()
        and not x.is_conj()
        and (x.numel() == 0 or _has_memory(x))
        and not _keeps_its_format(x.dim(), x.stride())
    )


def _has_memory(x: torch.Tensor) -> bool:
    try:
        # A zero tensor, which autograd makes, has none. The address of its row is the row's offset.
        return x.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


def _is_plain_array(x: np.ndarray) -> bool:
    """Return whether torch can view an array; unsigned longlong, a name of uint64, it cannot."""
    return (
        x.dtype.str in NUMPY_DTYPES
        and x.dtype.num == np.dtype(x.dtype.str).num
        and all(stride >= 0 and stride % x.itemsize == 0 for stride in x.strides)
        and not _keeps_its_format(x.ndim, x.strides)
    )


def _keeps_its_format(dim: int, strides: tuple[int, ...]) -> bool:
    return dim in CHANNELS_NDIMS and strides[1] < strides[-1] and formats_matter()


def _is_namedtuple(x: object) -> bool:
    """Return whether torch builds a named tuple again, and reads it as the tuple it is."""
    kind = type(x)
    return (
        isinstance(x, tuple)
        and hasattr(x, "_fields")
        and all(getattr(kind, name) is getattr(tuple, name) for name in ("__iter__", "__len__"))
    )


# ---- whether a copy may take its place ----

_PLAIN, _OTHERS = 0, 1
_MOST_PARTS = 4096
"""A sample of more parts takes longer to copy than it is worth, and may refer to something large of the dataset."""

_SCALARS = {np.dtype(np.dtype(code).str).type for code in "?bBhHiIlLqQefdgFDG"}
"""Of several of one size, the one that a pickle keeps."""
_ATOMS = frozenset(
    {
        *(int, float, bool, complex, str, bytes, type(None), PosixPath),
        *(torch.Size, torch.dtype, torch.device, *_SCALARS),
    }
)
"""Exact types of immutable values whose pickle is exact."""
_SEQUENCES = (tuple, list)
_PICKLES = {
    *("__getnewargs__", "__getnewargs_ex__", "__getstate__"),
    *("__reduce__", "__reduce_ex__", "__setstate__"),
}
_NUMBERS = "?biufcSUmM"  # kinds of NumPy's dtypes without objects or fields
_has_names: Callable[[torch.Tensor], bool] = getattr(
    torch.Tensor, "has_names", lambda tensor: False
)
"""Names of dimensions, which later versions of torch have no more."""


def are_plain(samples: Iterable[object]) -> bool:
    """Return whether samples are of types that are known to arrive in another process exactly as they are.

    They are numbers, strings, paths, plain tensors and arrays without attributes of their own, and lists, tuples, named
    tuples and dictionaries of these, of exactly those types. No list, dictionary, tensor or array may belong to two of
    the samples: what a dataset shares among its samples would be copied with each.
    """
    before: set[int] = set()
    for sample in samples:
        parts: set[int] = set()
        try:
            if not _is_plain(sample, parts) or not before.isdisjoint(parts):
                return False
        except Exception:  # a list that a thread changes meanwhile, for one
            return False
        before |= parts
    return True


def _is_plain(sample: Any, mutable: set[int]) -> bool:
    """Return whether one sample is plain; adds the ids of its mutable parts."""
    if type(sample) in _ATOMS:
        return True
    left, waiting = _MOST_PARTS, [sample]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if kind is torch.Tensor:
            if not is_plain_tensor(part) or part.__dict__ or _has_names(part):
                return False
            if part.is_inference():  # its pickle is an ordinary tensor
                return False
        elif kind is np.ndarray:
            if part.dtype.kind not in _NUMBERS or part.dtype.metadata:
                return False
        elif kind in _SEQUENCES or kind is dict or _is_plain_namedtuple(kind):
            left -= len(part) + 1
            if left < 0:
                return False
            if kind is dict:
                if not _ATOMS.issuperset(map(type, part)):
                    return False
                part_values: Iterable[Any] = part.values()
            else:
                part_values = part
            if not _ATOMS.issuperset(map(type, part_values)):
                waiting.extend(each for each in part_values if type(each) not in _ATOMS)
            if kind is not list and kind is not dict:
                continue
        else:
            return False
        mutable.add(id(part))
    return True


def _is_plain_namedtuple(kind: type) -> bool:
    """Return whether instances of a class are what ``namedtuple`` makes: their items, which arrive as they are."""
    return (
        kind.__bases__ == (tuple,)
        and hasattr(kind, "_fields")
        and kind.__dictoffset__ == 0
        and _PICKLES & vars(kind).keys() == {"__getnewargs__"}
    )


class Handover:
    """What is known of the samples of a loader, in memory that its workers share.

    A sample arrives in another process as a copy. Where the copy may differ, ``collate_fn`` would get something else
    than with torch. Then the worker that makes the samples of a batch collates them: from the first such sample on,
    each worker claims whole batches, and each sample keeps its place, whatever the order.

    Each word is only ever set, so that workers may do it at the same time; zeros mean that nothing is known.
    """

    NBYTES = 64

    def __init__(self, buffer: Memory, offset: int) -> None:
        self._words = SharedWords(buffer, offset, 2)

    @property
    def refused(self) -> bool:
        """Whether a sample has turned out to be one that must stay in its worker."""
        return self._words.load(_OTHERS) != 0

    @property
    def keeps_batches(self) -> bool:
        """Whether batches stay in one worker: samples were refused, or nothing is known of them."""
        words = self._words  # for each sample
        return words.load(_OTHERS) != 0 or not words.load(_PLAIN)

    @property
    def answer(self) -> bool | None:
        """Whether samples may be handed over; None while nothing is known."""
        return None if not self.refused and self.keeps_batches else not self.refused

    def settle(self, may_travel: bool) -> None:
        """Say that samples may be handed over, or that one may not be; a refusal is final."""
        self._words.store(_PLAIN if may_travel else _OTHERS, 1)
