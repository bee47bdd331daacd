"""Pickling with the arrays beside the pickle, and finding what cannot be pickled."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import warnings
from collections.abc import Iterator
from multiprocessing import context, reduction
from types import FunctionType
from typing import Any, cast

import torch

from minato.errors import NotPicklableError

__all__ = ["SidePickler", "advise", "check_picklable", "dumps"]

_ADVICE = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
"""torch's own words."""


class _StorageBytes:
    """A tensor's storage while it is pickled; tensors that share one still do on the other side."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _storage_tensor, (pickle.PickleBuffer(self._bytes),)


def _storage_tensor(data: Any) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _rebuild_tensor(
    base: torch.Tensor | None,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    if base is None:
        tensor = torch.empty_strided(size, stride, dtype=dtype)
    else:
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(base.untyped_storage(), offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


class SidePickler(pickle.Pickler):
    """Pickles arrays and plain CPU tensors as out-of-band buffers; strides and shared storages are kept.

    Args:
        buffers: Receives the buffers, in the order in which ``pickle.loads(buffers=…)`` wants them.
        for_new_process: The other side is a process that is being started. It must share tensors that are in shared
            memory, so they are refused; and it does not know what an interactive session has defined.
    """

    def __init__(
        self, file: io.BytesIO, buffers: list[pickle.PickleBuffer], for_new_process: bool = False
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._for_new_process = for_new_process
        self._storages: dict[int, _StorageBytes] = {}

    def reducer_override(self, value: Any) -> Any:
        """Pickle a plain tensor as its storage and its view of it; leave everything else to its own methods."""
        if not isinstance(value, torch.Tensor):
            if self._for_new_process and _stays_behind(value):
                return _by_value(value)
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise RuntimeError(
                "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not "
                "support crossing process boundaries.  If you just want to transfer the data, call detach() on "
                "the tensor before serializing (e.g., putting it on the queue)."
            )
        if self._for_new_process and value.is_shared():
            raise pickle.PicklingError("a tensor in shared memory would become a copy")
        if not _is_plain(value):
            return NotImplemented
        offset = value.storage_offset()
        if value.untyped_storage().nbytes() > 2 * value.nbytes and not value.requires_grad:
            # A small view of a large storage: only what is seen travels.
            value, offset = value.clone(), 0
        data = None
        if value.untyped_storage().nbytes():
            key = value.untyped_storage().data_ptr()
            if key not in self._storages:
                self._storages[key] = _StorageBytes(value.detach())
            data = self._storages[key]
        return _rebuild_tensor, (
            data,
            value.dtype,
            offset,
            tuple(value.shape),
            value.stride(),
            value.requires_grad,
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _stays_behind(value: Any) -> bool:
    """Tell whether something is defined in a main module that no new process can import (a notebook's)."""
    if not isinstance(value, (type, FunctionType)) or value.__module__ != "__main__":
        return False
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and getattr(main, "__file__", None) is None


def _by_value(value: Any) -> Any:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise NotPicklableError(
            f"{value.__qualname__} is defined in an interactive session, which workers that are not forked cannot "
            "import: install cloudpickle, move it to a module, or use multiprocessing_context='fork'"
        ) from None
    return _define, (cloudpickle.dumps(value),)


def _define(data: bytes) -> Any:
    """Unpickle what was defined in the main module, and make it known under its name there: results refer to it."""
    value = pickle.loads(data)
    functions = [value, *vars(value).values()] if isinstance(value, type) else [value]
    for function in functions:
        for each in (function, *getattr(function, "__globals__", {}).values()):
            if isinstance(each, (type, FunctionType)) and each.__module__ == "__main__":
                vars(sys.modules["__main__"]).setdefault(each.__name__, each)
    return value


def dumps(value: Any, for_new_process: bool = False) -> tuple[memoryview, list[memoryview]]:
    """Pickle an object; returns the pickle and its buffers as flat bytes, valid while the object is unchanged."""
    file = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    SidePickler(file, buffers, for_new_process).dump(value)
    return file.getbuffer(), [buffer.raw() for buffer in buffers]


def advise(error: Exception) -> None:
    """Warn as torch does if a worker was not started because of something that cannot be pickled."""
    if isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):
        warnings.warn(_ADVICE, stacklevel=2)


def check_picklable(name: str, value: Any) -> None:
    """Find out which part of an object cannot be sent to a process that is being started.

    Args:
        name: What to call the object in the message, e.g. ``"dataset"``.

    Raises:
        NotPicklableError: Names the innermost attribute or item that cannot be pickled.
    """
    error = _failure(value)
    if error is None:
        return
    path, seen = name, {id(value)}
    while True:
        for step, part in _parts(value):
            if id(part) not in seen and (inner := _failure(part)) is not None:
                path, value, error = path + step, part, inner
                seen.add(id(part))
                break
        else:
            break
    raise NotPicklableError(
        f"{path} cannot be pickled, as it must be for workers that are not forked ({error}). It is a "
        f"{type(value).__qualname__}: define it at the top level of an importable module, create it in "
        "worker_init_fn or on first use, or use multiprocessing_context='fork'."
    ) from error


class _Spawning:
    """Stands for a child that is being started, so that locks and queues may be pickled."""

    def duplicate_for_child(self, descriptor: int) -> int:
        return descriptor


def _failure(value: Any) -> Exception | None:
    context.set_spawning_popen(cast(Any, _Spawning()))
    try:
        reduction.ForkingPickler.dumps(value)
    except Exception as error:
        return error
    finally:
        context.set_spawning_popen(None)
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    else:
        yield from ((f".{key}", item) for key, item in getattr(value, "__dict__", {}).items())
