"""Copies of samples to their place in a batch."""

from __future__ import annotations

import ctypes
import math
from typing import Any, final

import numpy as np
import torch

from minato._core.sample_spec import Spec, flatten, placed

__all__ = ["Packer", "types_in"]

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def types_in(values: list[object]) -> list[type]:
    """Return the types of some values, each once, in the order of their first values.

    Raises:
        TypeError: ``values`` is no list.
    """
    if not isinstance(values, list):
        raise TypeError(f"a list is required, not {type(values).__name__}")
    return [*{id(type(value)): type(value) for value in values}.values()]


@final
class Packer:
    """Writes samples of one known structure into the fields of a batch of ``n`` samples.

    Args:
        spec: What a sample looks like, as a tree of tuples. Offsets are in bytes from the start of
            the batch's region to the field, which is a C-contiguous array of ``n`` items:

            - ``("tensor", dtype_name, shape, offset)``: a plain ``torch.Tensor`` on the CPU, dense,
              of any strides, that requires no gradient;
            - ``("array", dtype_str, shape, offset)``: a ``numpy.ndarray`` or ``numpy.memmap`` that torch could
              view;
            - ``("scalar", dtype_str, offset)``: a numpy scalar;
            - ``("float" | "int" | "bool", offset)``: stored as float64, int64 or one byte;
            - ``("text", type)``: a ``str`` or ``bytes``, which is handed back instead of written;
            - ``("list" | "tuple" | "namedtuple", type, children)`` and
              ``("dict", keys, children)``: a container with exactly these members, in this order.

            All types are meant exactly: an instance of a subclass does not fit.
        n: Number of samples in the batch.

    Raises:
        ValueError: A node of the spec has an unknown tag or the wrong arguments.
    """

    def __init__(self, spec: Spec, n: int) -> None:
        nodes = flatten(spec)
        self._has_texts = any(node.tag == "text" for node in nodes)
        ends = [
            node.offset + math.prod(node.shape) * node.dtype.itemsize
            for node in nodes
            if node.dtype is not None
        ]
        self._item_nbytes = max(ends, default=0)
        self._num_fields = len(ends)
        self._spec = spec
        self._n = n

    def fits(self, sample: object) -> bool:
        """Whether :meth:`pack` could write this sample; nothing is written."""
        room = np.empty(self._item_nbytes, np.uint8)
        try:
            return _write(self._spec, sample, room.ctypes.data, 0, [], None)
        except Exception:  # only what an unusual sample raises when it is looked at
            return False

    def pack(self, sample: object, address: int, k: int) -> list[Any] | tuple[()] | None:
        """Write a sample to its place in the region, and nowhere else.

        Args:
            sample: What the dataset returned.
            address: Where the region starts in this process, in bytes; the caller keeps it mapped.
            k: Number of the sample in the batch.

        Returns:
            The sample's texts in the order of the spec (an empty tuple if the spec has none), or
            ``None`` if the sample does not fit; then parts of its place may have been written.

        Raises:
            IndexError: The batch has no sample ``k``.
        """
        if not 0 <= k < self._n:
            raise IndexError(f"sample {k} in a batch of {self._n}")
        texts: list[Any] = []
        try:
            fits = _write(self._spec, sample, address, k, texts, None)
        except Exception:  # only what an unusual sample raises when it is looked at
            return None
        return (texts or ()) if fits else None

    def pack_run(self, samples: list[object], address: int, k: int) -> list[Any] | None:
        """Write a run of samples from place k on.

        Args:
            samples: What the dataset returned.
            address: As for :meth:`pack`.
            k: Number of the first sample in the batch.

        Returns:
            Their texts, sample after sample in the order of the spec; ``None`` if a sample does not fit, and then any
            of the places may have been written.

        Raises:
            IndexError: The batch has fewer samples.
        """
        if not 0 <= k <= self._n - len(samples):
            raise IndexError(f"samples {k} to {k + len(samples) - 1} in a batch of {self._n}")
        texts: list[Any] = []
        try:
            fit = all(
                _write(self._spec, sample, address, k + i, texts, None)
                for i, sample in enumerate(samples)
            )
        except Exception:  # only what an unusual sample raises when it is looked at
            return None
        return texts if fit else None

    def pack_fields(
        self, samples: list[object], addresses: list[int], kept_nbytes: int
    ) -> list[Any] | None:
        """Write all samples of a batch into fields that lie anywhere, except texts and large tensors.

        Args:
            samples: What the dataset returned.
            addresses: Where each field starts in this process, in the order of the spec.
            kept_nbytes: Tensors of at least this many bytes are returned instead of written, if the spec has no texts.

        Returns:
            Those tensors, or the texts, sample after sample in the order of the spec; ``None`` if a sample does not
            fit, and then any of the places may have been written.

        Raises:
            IndexError: The batch has another number of samples, or another number of fields.
        """
        if len(samples) != self._n:
            raise IndexError(f"{len(samples)} samples in a batch of {self._n}")
        if len(addresses) != self._num_fields:
            raise IndexError(f"{len(addresses)} addresses of {self._num_fields} fields")
        spec = placed(self._spec, iter(addresses))
        aside: list[object] = []
        kept = None if self._has_texts else kept_nbytes
        try:
            fit = all(_write(spec, sample, 0, k, aside, kept) for k, sample in enumerate(samples))
        except Exception:  # only what an unusual sample raises when it is looked at
            return None
        return aside if fit else None


def _write(
    spec: Spec,
    x: Any,
    address: int,
    k: int,
    aside: list[object],
    kept_nbytes: int | None,
) -> bool:
    """Write what one node of the spec describes; False if it does not fit.

    What is not written, texts and tensors of at least ``kept_nbytes``, goes to the list ``aside``.
    """
    match spec:
        case ("tensor", dtype, shape, offset):
            fits = _is_plain(x) and x.dtype is getattr(torch, dtype) and x.shape == shape
            if fits and kept_nbytes is not None and x.nbytes >= kept_nbytes:
                aside.append(x)
                return True
            return fits and _put_tensor(x, address + offset, k)
        case ("array", dtype, shape, offset):
            return _is_array(x, dtype, shape) and _put(x, address + offset, k)
        case ("scalar", dtype, offset):
            return type(x) is np.dtype(dtype).type and _put(np.asarray(x), address + offset, k)
        case ("float", offset):
            return type(x) is float and _put(np.asarray(x, np.float64), address + offset, k)
        case ("int", offset):
            return (
                type(x) is int
                and _INT64_MIN <= x <= _INT64_MAX
                and _put(np.asarray(x, np.int64), address + offset, k)
            )
        case ("bool", offset):
            return type(x) is bool and _put(np.asarray(x), address + offset, k)
        case ("text", kind):
            if type(x) is kind:
                aside.append(x)
            return type(x) is kind
        case ("dict", keys, children):
            return (
                type(x) is dict
                and [*map(type, x)] == [*map(type, keys)]
                and tuple(x) == keys
                and all(
                    _write(child, value, address, k, aside, kept_nbytes)
                    for child, value in zip(children, x.values(), strict=True)
                )
            )
        case (_, kind, children):
            return (
                type(x) is kind
                and len(x) == len(children)
                and all(
                    _write(child, value, address, k, aside, kept_nbytes)
                    for child, value in zip(children, x, strict=True)
                )
            )
    raise AssertionError(spec)


def _is_array(x: object, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a value is an array of this dtype and shape that is copied as it is."""
    return (
        isinstance(x, np.ndarray)
        and type(x) in (np.ndarray, np.memmap)
        and x.dtype.num == np.dtype(dtype).num
        and x.dtype.isnative
        and x.shape == shape
        and all(step >= 0 and step % x.itemsize == 0 for step in x.strides)
    )


def _is_plain(x: object) -> bool:
    """Whether it is an ordinary tensor in host memory that needs no gradient and has no lazy operation."""
    return (
        type(x) is torch.Tensor
        and x.layout is torch.strided
        and x.is_cpu
        and not x.requires_grad
        and not x.is_neg()
        and not x.is_conj()
        and (x.numel() == 0 or x.untyped_storage().data_ptr() != 0)
    )


def _put_tensor(item: torch.Tensor, field: int, k: int) -> bool:
    """Do what :func:`_put` does, with a tensor."""
    if item.numel():
        place = (ctypes.c_char * item.nbytes).from_address(field + k * item.nbytes)
        torch.frombuffer(place, dtype=item.dtype).view(item.shape).copy_(item)
    return True


def _put(item: np.ndarray, field: int, k: int) -> bool:
    """Copy an item to place ``k`` of the field at an absolute address; always True."""
    if item.nbytes:
        place = (ctypes.c_char * item.nbytes).from_address(field + k * item.nbytes)
        np.copyto(np.frombuffer(memoryview(place), item.dtype).reshape(item.shape), item)
    return True
