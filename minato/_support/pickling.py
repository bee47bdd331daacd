"""Pickling with arrays outside of the pickle; the search for the part that cannot be pickled."""

from __future__ import annotations

import copyreg
import importlib
import io
import logging
import os
import pickle
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import reduction
from types import FunctionType
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np
import torch

from minato._compat import (
    duplicates_for_child,
    pickling_for_a_child,
    quantized_per_channel,
    quantized_per_tensor,
    typed_storage,
    untyped_storage,
)
from minato._core.read_only import shared_base
from minato._support.main_module import defined_under_guard
from minato.errors import NotPicklableError

__all__ = [
    "ForChild",
    "Purpose",
    "SidePickler",
    "advise",
    "check_picklable",
    "dumps",
    "holding_descriptors",
]

_log = logging.getLogger("minato")

Purpose: TypeAlias = Literal["sample", "result", "process"]
"""The purpose of a pickle; see :class:`SidePickler`."""

_ADVICE = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
"""torch's own words."""


_KEEPS_ARRAYS = pickle.DEFAULT_PROTOCOL >= 5
"""Whether arrays from torch's workers stay read-only, and in their byte order: from Python 3.14 on."""


class _StorageBytes:
    """A tensor's storage while it is pickled; tensors that share one still do on the other side."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _storage_tensor, (pickle.PickleBuffer(self._bytes),)


def _storage_tensor(data: object) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _rebuild_storage(base: torch.Tensor | None, dtype: torch.dtype | None) -> Any:
    storage = torch.UntypedStorage() if base is None else base.untyped_storage()
    if dtype is None:
        return storage
    return typed_storage(storage, dtype)


def _rebuild_tensor(
    base: torch.Tensor | None,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    if base is None:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    else:
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(base.untyped_storage(), offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


class _Writable(Protocol):
    """What a pickler needs of a file."""

    def write(self, data: Any, /) -> object:
        """Take bytes, or an object that holds them."""


class _Pieces(list[Any]):
    """The parts of a pickle: a pickler writes large ``bytes`` on their own, as the object itself."""

    write = list.append


class SidePickler(pickle.Pickler):
    """Pickles arrays and plain CPU tensors as out-of-band buffers; strides and shared storages are kept.

    Args:
        buffers: Receives the buffers, in the order of ``pickle.loads(buffers=…)``.
        purpose: ``"sample"``: everything arrives as it is. ``"result"``: arrays arrive as from torch's workers,
            before Python 3.14 writable and in native byte order. ``"process"``: the other side is being started;
            tensors in shared memory must be shared, so they are refused; no local class or function can be imported,
            nor what an interactive session, the ``__main__`` of a package, or a script under its guard has defined:
            cloudpickle carries them.
    """

    def __init__(
        self, file: _Writable, buffers: list[pickle.PickleBuffer], purpose: Purpose = "sample"
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._purpose = purpose
        self._storages: dict[int, _StorageBytes] = {}

    def reducer_override(self, value: Any) -> Any:
        """Pickle a plain tensor as its storage and its view of it; leave everything else to its own methods."""
        if not isinstance(value, torch.Tensor):
            typed = isinstance(value, torch.storage.TypedStorage)
            storage = untyped_storage(value) if typed else value
            if isinstance(storage, torch.UntypedStorage) and storage.device.type == "cpu":
                return _rebuild_storage, (self._shared(storage), value.dtype if typed else None)
            if isinstance(value, np.ndarray) and self._purpose == "result":
                ordinary = value.flags.writeable and value.dtype.isnative
                return NotImplemented if ordinary or _KEEPS_ARRAYS else value.__reduce_ex__(4)
            if self._purpose == "process":
                if isinstance(value, np.ndarray):
                    base = shared_base(value)
                    return NotImplemented if base is None else base.reduce_view(value)
                if _stays_behind(value):
                    return _by_value(value, copyreg.dispatch_table, _refuse_shared)
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise RuntimeError(
                "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not "
                "support crossing process boundaries.  If you just want to transfer the data, call detach() on "
                "the tensor before serializing (e.g., putting it on the queue)."
            )
        if not _is_plain(value):
            return _reduce_quantized(value) if value.is_quantized else NotImplemented
        offset = value.storage_offset()
        if value.untyped_storage().nbytes() > 2 * value.nbytes and not value.requires_grad:
            value, offset = _compact(value), 0
        return _rebuild_tensor, (
            self._shared(value.untyped_storage()),
            value.dtype,
            offset,
            tuple(value.shape),
            value.stride(),
            value.requires_grad,
        )

    def _shared(self, storage: torch.UntypedStorage) -> _StorageBytes | None:
        """The object that travels in place of a storage, the same each time; None if it is empty."""
        if self._purpose == "process":
            _refuse_shared(storage)
        if not storage.nbytes():
            return None
        return self._storages.setdefault(storage.data_ptr(), _StorageBytes(storage))


class _ChildPickler(reduction.ForkingPickler):
    """Pickles for a child that is being started: as multiprocessing does, and what no child can import by value."""

    def reducer_override(self, value: object) -> Any:
        return _by_value(value, self.dispatch_table) if _stays_behind(value) else NotImplemented


class ForChild:
    """Arrives as the object that it holds, in a child that is being started, with its locks and its shared memory.

    The start happens within :func:`holding_descriptors`.
    """

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        with duplicates_for_child(_held.get()):
            return pickle.loads, (_for_child(self._value),)


_held: ContextVar[list[int]] = ContextVar("_held")


@contextmanager
def holding_descriptors() -> Iterator[None]:
    """Hold the descriptors that a child gets until it has started."""
    held: list[int] = []
    before = _held.set(held)
    try:
        yield
    finally:
        _held.reset(before)
        for descriptor in held:
            os.close(descriptor)


def _for_child(value: object) -> bytes:
    file = io.BytesIO()
    _ChildPickler(file, 5).dump(value)
    return file.getvalue()


def _refuse_shared(value: object) -> None:
    storages = torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage
    if isinstance(value, storages) and value.device.type == "cpu" and value.is_shared():
        raise pickle.PicklingError("a tensor in shared memory would become a copy")


def _compact(view: torch.Tensor) -> torch.Tensor:
    """Copy only what a small view of a large storage sees; strides are kept, unless it sees little of what it spans."""
    shape, strides = view.shape, view.stride()
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if not view.numel() or span > 2 * view.numel():
        return view.clone()
    return view.as_strided((span,), (1,)).clone().as_strided(shape, strides)


def _reduce_quantized(tensor: torch.Tensor) -> Any:
    """Pickle without the typed storage that torch's own way warns of."""
    if tensor.dtype not in (torch.quint8, torch.qint8, torch.qint32):
        return NotImplemented
    build = quantized_per_tensor()
    if build is not None and tensor.qscheme() == torch.per_tensor_affine:
        scale = tensor.q_scale(), tensor.q_zero_point()
        return build, (tensor.int_repr(), *scale)
    build = quantized_per_channel()
    if build is not None and tensor.qscheme() == torch.per_channel_affine:
        scales = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        arguments = (tensor.int_repr(), *scales, tensor.q_per_channel_axis())
        return build, arguments
    return NotImplemented


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


def _stays_behind(value: object) -> bool:
    """Whether no new process can import a class or function: it has no name there, or its main module is left out."""
    if not isinstance(value, (type, FunctionType)) or value.__module__ in ("builtins", None):
        return False
    if not _has_name(value):
        return True
    if value.__module__ != "__main__":
        return False
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    # multiprocessing leaves out what ``python -m package`` has run.
    if (
        spec.name.rpartition(".")[2] == "__main__"
        if spec
        else getattr(main, "__file__", None) is None
    ):
        return True
    return defined_under_guard(value)


def _has_name(value: Any) -> bool:
    """Whether the module of a class or function has it under its name: a lambda or a local class has none."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _by_value(
    value: Any,
    reducers: MutableMapping[type, Callable[[Any], Any]],
    check: Callable[[Any], None] | None = None,
) -> Any:
    """Pickle a class or function by its code.

    Args:
        reducers: How the pickler around it reduces objects of some types, for what the code refers to.
        check: Raises for what must not be copied.
    """
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise NotPicklableError(
            f"{value.__qualname__} is local, a lambda, or defined in the __main__ of an interactive session or of a "
            "package, which workers that are not forked cannot import: install cloudpickle, move it to the top level "
            "of a module, or use multiprocessing_context='fork'"
        ) from None
    _log.info(
        "%s.%s goes to the workers by cloudpickle, because they cannot import it",
        value.__module__,
        value.__qualname__,
    )

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]  # an optional package's class
        dispatch_table: ClassVar = ChainMap({}, cloudpickle.Pickler.dispatch_table, reducers)

        def reducer_override(self, part: Any) -> Any:
            if check is not None:
                check(part)
            # cloudpickle would copy all of the main module, also classes that the worker has, and compares.
            of_main = isinstance(part, (type, FunctionType)) and part.__module__ == "__main__"
            if of_main and not _stays_behind(part):
                return part.__qualname__
            return super().reducer_override(part)

    file = io.BytesIO()
    Pickler(file, protocol=5).dump(value)
    return _define, (file.getvalue(),)


def _define(data: bytes) -> Any:
    """Unpickle an object of the main module, and register it there under its name: results refer to it."""
    value = pickle.loads(data)
    functions = [value, *vars(value).values()] if isinstance(value, type) else [value]
    for function in functions:
        for each in (function, *getattr(function, "__globals__", {}).values()):
            if isinstance(each, (type, FunctionType)) and each.__module__ == "__main__":
                vars(sys.modules["__main__"]).setdefault(each.__name__, each)
    return value


def dumps(value: object, purpose: Purpose = "sample") -> tuple[list[memoryview], list[memoryview]]:
    """Pickle an object; returns the parts of the pickle and its buffers as flat bytes, valid while it is unchanged."""
    pieces = _Pieces()
    buffers: list[pickle.PickleBuffer] = []
    SidePickler(pieces, buffers, purpose).dump(value)
    return [memoryview(piece) for piece in pieces], [buffer.raw() for buffer in buffers]


def advise(error: Exception) -> None:
    """Warn as torch does if a worker was not started because of something that cannot be pickled."""
    if isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):
        warnings.warn(_ADVICE, stacklevel=2)


def check_picklable(name: str, value: object) -> None:
    """Find out which part of an object cannot be sent to a process that is being started.

    Args:
        name: Name of the object in the message, e.g. ``"dataset"``.

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


def _failure(value: object) -> Exception | None:
    try:
        with pickling_for_a_child():
            _for_child(value)
    except Exception as error:
        return error
    return None


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    else:
        yield from ((f".{key}", item) for key, item in getattr(value, "__dict__", {}).items())
