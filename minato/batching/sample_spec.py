"""The structure of a sample, by the rules of torch's ``default_collate``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from minato._compat import collates_by_default, torch_modes
from minato._core.sample_spec import Spec

__all__ = [
    "CHANNELS_NDIMS",
    "NUMPY_DTYPES",
    "Spec",
    "describe",
    "formats_matter",
    "is_plain_tensor",
    "name_of",
    "rules_hold",
]

_MAX_DEPTH = 32
_MAX_NDIM = 64
CHANNELS_NDIMS = (4, 5)
"""Numbers of dimensions of samples that can have channels last."""

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
    # A new tensor shows the default device. torch 2.6's get_default_device() knows of no ``with torch.device(...)``.
    return collates_by_default() and not (torch_modes() and torch.empty(0).device.type != "cpu")


def describe(sample: object) -> Spec | None:
    """Describe a sample as a spec with all offsets 0; None if torch itself has to collate such samples."""
    return _infer(sample, _MAX_DEPTH)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in torch."""
    return str(dtype).removeprefix("torch.")


def formats_matter() -> bool:
    """Return whether ``torch.stack`` may give a batch the memory format of samples with channels last.

    In worker processes it does not, as ``default_collate`` allocates the result there.
    """
    return get_worker_info() is None


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
        and (x.data_ptr() != 0 or x.numel() == 0)
        and not _keeps_its_format(x.dim(), x.stride())
    )


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
