"""Pickling with arrays outside of the pickle; the search for the part that cannot be pickled."""

from __future__ import annotations

import functools
import importlib
import io
import linecache
import logging
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from multiprocessing import current_process, reduction
from multiprocessing.process import BaseProcess
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, NoReturn, TypeAlias, TypeGuard

import numpy as np
import torch

from minato._compat import (
    duplicates_for_child,
    pickling_for_a_child,
    process_reducers,
    quantized_per_channel,
    quantized_per_tensor,
    typed_storage,
    untyped_storage,
)
from minato._core.read_only import ReadOnlyMemory, shared_base
from minato._core.segment import Segment
from minato._support.objects import failing_part
from minato._support.values import message_of
from minato.errors import UNGUARDED, NotPicklableError, log, outside

with suppress(ImportError):
    # torch.load imports it with the first tensor, maybe in a thread: a child forked meanwhile would wait forever.
    import torch.utils.serialization.config

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

Purpose: TypeAlias = Literal["sample", "result"]
"""The purpose of a pickle; see :class:`SidePickler`."""
Reducer: TypeAlias = Callable[[Any], Any]  # returns what an object's ``__reduce__`` would return

_ADVICE = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)
"""torch's own words."""


_TORCH_REDUCTIONS = "torch.multiprocessing.reductions"
_KEEPS_ARRAYS = pickle.DEFAULT_PROTOCOL >= 5
"""Whether arrays from torch's workers stay read-only, permuted, and in their byte order: from Python 3.14 on."""
_KNOWN_REDUCERS = ("minato", "multiprocessing", "torch")
"""Packages whose reducers need no own pickle for each child, or say so by an exception."""
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_KNOWN_TYPES = {np.dtype(np.dtype(code).str).num for code in np.typecodes["All"]}
"""Numbers of NumPy's types that their pickle keeps: of several of one size, one."""
_CACHED: Any = type(functools.cache(len))  # what functools.cache makes of a function
_GUARD = re.compile(r"""if\s*\(?\s*__name__\s*==\s*["']__main__["']""")
_STEP = re.compile(r"\.\w+|\[[^]]*\]")
_SPARSE_BYTES = 1 << 20
"""A view that spans more than this, and sees less than half of it, is copied without what it does not see."""
_ALIGNMENT = 64
_MOST_SHARED = 200
"""Storages that are shared with a child: each takes a descriptor, of which a fork server takes about 250."""


class _Storage:
    """A storage while it is pickled, which tensors still share then: if ``whole``, or else what these see of it."""

    def __init__(self, storage: torch.UntypedStorage, whole: bool) -> None:
        self._bytes = _bytes_of(storage)
        self._spans: list[tuple[int, int]] | None = None if whole else []
        self._buffers: tuple[pickle.PickleBuffer, ...] = ()

    def see(self, start: int, end: int) -> None:
        """Send these bytes."""
        if self._spans is not None:
            first, last = start // _ALIGNMENT, -(-end // _ALIGNMENT)
            self._spans.append((first * _ALIGNMENT, last * _ALIGNMENT))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        data = pickle.PickleBuffer(self._bytes)
        if self._spans is None:
            return _storage_tensor, (data,)
        self._buffers = data, pickle.PickleBuffer(b"")
        return _cut_storage, self._buffers

    def cut(self) -> Iterator[tuple[pickle.PickleBuffer, memoryview]]:
        """The buffers of a storage that was not sent whole, and what they hold: what is seen, and where that was."""
        if not self._buffers:
            return
        pieces: list[list[int]] = []
        for start, end in sorted(self._spans or ()):
            if pieces and start <= pieces[-1][1]:
                pieces[-1][1] = max(pieces[-1][1], end)
            else:
                pieces.append([start, end])
        seen = [self._bytes[start:end] for start, end in pieces]
        data, table = self._buffers
        yield data, memoryview(seen[0] if len(seen) == 1 else np.concatenate(seen))
        yield table, memoryview(np.array(pieces, np.int64).reshape(-1).view(np.uint8))


class _Cut(NamedTuple):
    """What has arrived of a storage: the bytes that are seen, and where each piece was in the one sent."""

    base: torch.Tensor
    pieces: list[list[int]]

    def moved(self, start: int) -> int:
        """Where byte ``start`` of the storage that was sent is now."""
        before = 0
        for first, end in self.pieces:
            if start < end:
                return before + start - first
            before += end - first
        raise IndexError(start)


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()


def _storage_tensor(data: object) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _cut_storage(data: object, table: memoryview) -> _Cut:
    return _Cut(_storage_tensor(data), np.frombuffer(table, np.int64).reshape(-1, 2).tolist())


def _rebuild_storage(base: torch.Tensor | _Cut | None, dtype: torch.dtype | None) -> Any:
    base = base.base if isinstance(base, _Cut) else base
    storage = torch.UntypedStorage() if base is None else base.untyped_storage()
    return storage if dtype is None else typed_storage(storage, dtype)


def _rebuild_tensor(
    base: torch.Tensor | _Cut | None,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    if base is None:
        tensor = torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    else:
        if isinstance(base, _Cut):
            offset = base.moved(offset * dtype.itemsize) // dtype.itemsize
            base = base.base
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(base.untyped_storage(), offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


_REBUILD_SPARSE = torch.zeros(1, device="cpu").to_sparse().__reduce_ex__(5)[0]
"""torch's function keeps each tensor that it makes until the next ``torch.load()``."""


def _sparse_rebuilder() -> Callable[..., torch.Tensor]:
    return _rebuild_sparse_tensor


def _rebuild_sparse_tensor(layout: torch.layout, data: tuple[object, ...]) -> torch.Tensor:
    is_coo = layout is torch.sparse_coo
    build: Any = torch.sparse_coo_tensor if is_coo else torch.sparse_compressed_tensor
    options = {"is_coalesced": data[-1]} if is_coo else {"layout": layout}
    made: torch.Tensor = build(*data[: 3 if is_coo else 4], **options, check_invariants=False)
    return made


class _Pieces(list[Any]):
    """The parts of a pickle: a pickler writes large ``bytes`` on their own, as the object itself."""

    write = list.append


class ViewPickler(pickle.Pickler):
    """Keeps of a tensor that views a larger one what it sees: pickle would store all of the larger one.

    Keeps tensors of torch's newer dtypes too, such as ``uint16``: pickle stores them, and cannot load them.
    """

    def reducer_override(self, value: Any) -> Any:
        if value is _REBUILD_SPARSE:
            return _sparse_rebuilder, ()
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        if not plain or value.is_quantized or value.requires_grad or value.__dict__:
            return NotImplemented
        if value.untyped_storage().nbytes() > 2 * value.nbytes:
            value = value.clone()
        reduced = value.__reduce_ex__(5)
        if isinstance(reduced[1][0], torch.UntypedStorage):
            return _viewed_as, (value.view(INTEGERS[value.itemsize]), value.dtype)
        return reduced


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An old dtype of each size."""


def _viewed_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype)


def pickled(value: object) -> bytes:
    """A value as :class:`ViewPickler` pickles it."""
    to = io.BytesIO()
    ViewPickler(to, 5).dump(value)
    return to.getvalue()


class SidePickler(pickle.Pickler):
    """Pickles arrays and CPU tensors as out-of-band buffers; strides and shared storages are kept.

    Args:
        purpose: ``"sample"``: everything arrives as it is. ``"result"``: arrays arrive as from torch's workers,
            before Python 3.14 writable, contiguous, and in native byte order.
        reducers: How objects of some types are reduced; others as :mod:`pickle` does.
    """

    def __init__(
        self, file: SupportsWrite[bytes], purpose: Purpose, reducers: Mapping[type, Reducer]
    ) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        super().__init__(file, protocol=5, buffer_callback=self._buffers.append)
        self._purpose, self._reducers = purpose, reducers
        self._storages: dict[tuple[int, int], _Storage] = {}
        self._left_alone = set[type]()  # types whose objects go by their own methods

    def raws(self) -> list[memoryview]:
        """The buffers as flat bytes, as ``pickle.loads(buffers=…)`` takes them; valid while the object is unchanged."""
        cut = {id(buffer): raw for each in self._storages.values() for buffer, raw in each.cut()}
        return [cut[id(each)] if id(each) in cut else each.raw() for each in self._buffers]

    def reducer_override(self, value: object) -> Any:
        """Pickle a tensor as its storage and its view of it; leave everything else to its own methods."""
        kind = type(value)
        if kind in self._left_alone:
            return NotImplemented
        if value is _REBUILD_SPARSE:
            return _sparse_rebuilder, ()
        reduce = self._reducers.get(kind)
        if reduce is not None and reduce.__module__ != _TORCH_REDUCTIONS:
            return reduce(value)
        if isinstance(value, torch.Tensor):
            return self._reduce_tensor(value, reduce)
        if isinstance(value, np.ndarray):
            if self._purpose == "sample":
                return _reduce_exactly(value)
            flags = value.flags
            ordinary = _KEEPS_ARRAYS or (
                (flags.c_contiguous or flags.f_contiguous)
                and flags.writeable
                and value.dtype.isnative
            )
            return NotImplemented if ordinary else value.__reduce_ex__(4)
        dtype: torch.dtype | None = None
        if isinstance(value, torch.storage.TypedStorage):
            dtype, value = value.dtype, untyped_storage(value)
        if isinstance(value, torch.UntypedStorage):
            is_here = value.device.type == "cpu"
            return (_rebuild_storage, (self._shared(value), dtype)) if is_here else NotImplemented
        if kind is not type(_REBUILD_SPARSE):
            self._left_alone.add(kind)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor, reduce: Reducer | None) -> Any:
        # As torch's reducer does; a subclass has none, and arrives without its graph.
        if reduce is not None and tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not "
                "support crossing process boundaries.  If you just want to transfer the data, call detach() on "
                "the tensor before serializing (e.g., putting it on the queue)."
            )
        if tensor.is_quantized:
            return _reduce_quantized(tensor)
        # Attributes of a tensor do not arrive from torch's workers, but reach collate_fn.
        if not _is_plain(tensor) or (self._purpose == "sample" and vars(tensor)):
            # A tensor's own methods keep more than torch's reducer: attributes of parameters, conjugation.
            # Memory of a device is received once, which suits a result; a copy of a sample goes through the host.
            own = _is_here(tensor) or reduce is None or self._purpose == "sample"
            return NotImplemented if own or reduce is None else reduce(tensor)
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        strides, size = tensor.stride(), tuple(tensor.shape)
        base: _Storage | None = None
        if storage.nbytes() <= 2 * tensor.nbytes:
            base = self._shared(storage)
        elif tensor.numel():
            itemsize, seen = tensor.itemsize, tensor.numel()
            span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
            if span > 2 * seen and span * itemsize > _SPARSE_BYTES:
                copy = tensor.detach().clone()
                offset, strides = 0, copy.stride()
                base = self._shared(copy.untyped_storage())
            elif (base := self._shared(storage, whole=False)) is not None:
                start = int(offset) * itemsize
                base.see(start, start + int(span) * itemsize)
        return _rebuild_tensor, (base, tensor.dtype, offset, size, strides, tensor.requires_grad)

    def _shared(self, storage: torch.UntypedStorage, whole: bool = True) -> _Storage | None:
        """The object that travels in place of a storage, the same each time; None if it is empty."""
        nbytes = storage.nbytes()
        if not nbytes:
            return None
        key = storage.data_ptr(), nbytes
        known = self._storages.get(key)
        if known is None:
            known = self._storages[key] = _Storage(storage, whole)
        elif whole:
            known.see(0, nbytes)
        return known


class _ChildPickler(reduction.ForkingPickler):
    """Pickles for a child that is being started: as multiprocessing does, and what no child can import by value."""

    _by_value: Any = None  # cloudpickle's pickler, once there is something that no child can import

    def reduce_part(self, value: object) -> Any:
        """Reduce what must not be copied, also where a class or function that goes by value refers to it."""
        if isinstance(value, np.ndarray) and (base := shared_base(value)) is not None:
            return base.reduce_view(value)
        if type(value) in _TENSORS and isinstance(value, torch.Tensor) and _is_here(value):
            # A tensor's own methods keep more than torch's reducer, which refuses what is no leaf.
            refused = value.requires_grad and not value.is_leaf
            if not refused and (vars(value) or not _is_plain(value)):
                return _reduce_quantized(value) if value.is_quantized else value.__reduce_ex__(4)
        return NotImplemented

    def reducer_override(self, value: object) -> Any:
        reduced = self.reduce_part(value)
        if reduced is not NotImplemented:
            return reduced
        if not _stays_behind(value):
            return NotImplemented if self._by_value is None else self._reduce_of_code(value)
        self._by_value = self._by_value or _code_pickler(value)
        log(
            "%s.%s goes to the workers by cloudpickle, because they cannot import it",
            value.__module__,
            value.__qualname__,
        )
        if isinstance(value, _CACHED):
            reduced = _cached, (value.__wrapped__, *value.cache_parameters().values())
        else:
            reduced = self._copied(value)
        if value.__module__ != "__main__" or not _has_name(value):
            return reduced
        make, arguments, *state = reduced
        return _define, (value.__qualname__, make, *arguments), *state

    def _copied(self, value: type | FunctionType) -> Any:
        """Reduce by cloudpickle, but for the globals of a module that the child imports: its functions see those."""
        if not isinstance(value, FunctionType):
            return self._by_value.reducer_override(value)
        known, key = self._by_value.globals_ref, id(value.__globals__)
        if key not in known and (name := _imported_as(value)) is not None:
            known[key] = _Globals(_module_globals, name)
        reduced = self._by_value.reducer_override(value)
        is_imported = getattr(known.get(key), "find", None) is _module_globals
        if is_imported and reduced is not NotImplemented:
            _, slots = reduced[2]
            slots["__globals__"] = {}
        return reduced

    def _reduce_of_code(self, value: object) -> Any:
        """Reduce what code consists of, or refers to."""
        if isinstance(value, (type, FunctionType)):
            # cloudpickle would copy all of the main module, also classes that the worker has, and compares.
            return NotImplemented if value.__module__ == "__main__" else self._copied(value)
        reduce = self._by_value.dispatch_table.maps[0].get(type(value))
        # cloudpickle would make a copy of the text of an open file.
        is_file = isinstance(value, io.IOBase) and value not in (sys.stdout, sys.stderr)
        return NotImplemented if reduce is None or is_file else reduce(value)


class ForChild:
    """Arrives, with its locks and shared memory, in a child that starts within :func:`holding_descriptors`."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        with duplicates_for_child(_held.get()):
            return _loaded, (_for_child(self._value),)


class _NeedsEachError(Exception):
    """An object must be pickled for each child."""


class _CannotShareError(Exception):
    """A storage cannot be shared; says why."""


class _SnapshotPickler(_ChildPickler):
    """Pickles once for all children; memory that they share becomes a number in the list ``parts``."""

    def __init__(self, file: BinaryIO, parts: list[object], shares: bool) -> None:
        super().__init__(file)
        self._parts, self._shares = parts, shares
        self._reducers = process_reducers()

    def reduce_part(self, value: object) -> Any:
        reduce = self._reducers.get(type(value))
        if reduce and str(reduce.__module__).partition(".")[0] not in _KNOWN_REDUCERS:
            raise _NeedsEachError
        kinds = (torch.Tensor, torch.UntypedStorage)
        known = type(value) in (*_TENSORS, torch.UntypedStorage)
        if known and isinstance(value, kinds) and not _is_here(value):
            raise _NeedsEachError
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
            return self._reduce_storage(value)
        if isinstance(value, ReadOnlyMemory):
            return self._numbered(value)
        return super().reduce_part(value)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if not storage.nbytes():
            return torch.UntypedStorage, ()
        if not storage.is_shared():
            if not self._shares:
                return _copied_storage, (_bytes_of(storage),)
            in_files = torch.multiprocessing.get_sharing_strategy() == "file_system"
            if len(self._parts) == _MOST_SHARED and not in_files:
                raise _CannotShareError(f"it has more than {_MOST_SHARED} of them")
            try:
                storage.share_memory_()
            except RuntimeError as error:
                raise _CannotShareError(str(error)) from error
        return self._numbered(storage)

    def _numbered(self, part: object) -> tuple[Any, ...]:
        self._parts.append(part)
        return _arrived_part, (len(self._parts) - 1,)


class Snapshot:
    """Arrives as the object that it holds, as that is now, in each child that is being started.

    The object is pickled once. Tensors are shared with the children, as torch shares them. What pickling raises is
    raised, also if a part of the object can only be sent to one child at a time.
    """

    def __init__(self, value: object) -> None:
        try:
            self._pickle(value, shares=True)
        except _CannotShareError as error:
            _say_copied(str(error))
            self._pickle(value, shares=False)

    def _pickle(self, value: object, shares: bool) -> None:
        parts: list[object] = []
        with pickling_for_a_child(several=True):
            self._memory = Segment.filled(
                lambda file: _SnapshotPickler(file, parts, shares).dump(value)
            )
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._memory, ForChild(self._parts))


def for_children(value: object) -> Snapshot | ForChild:
    """What arrives as an object, in children that are being started; NotPicklableError: a package for that is missing.

    Locks, pipes and the like are sent to one child at a time: then the object is pickled for each child.
    """
    try:
        return Snapshot(value)
    except NotPicklableError:
        raise
    except Exception:  # what cannot be pickled at all is found when the first child starts
        return ForChild(value)


@functools.cache
def _say_copied(reason: str) -> None:
    log(
        "the dataset's tensors are copied to each worker, not shared as with torch: %s. If workers must see what is "
        "written to them, call torch.multiprocessing.set_sharing_strategy('file_system'), keep fewer tensors, or use "
        "multiprocessing_context='fork' and share_memory_()",
        reason,
        level=logging.WARNING,
    )


_arrived: ContextVar[list[Any]] = ContextVar("_arrived")


def _arrived_part(number: int) -> Any:
    return _arrived.get()[number]


def _copied_storage(data: np.ndarray) -> torch.UntypedStorage:
    return _storage_tensor(bytearray(data)).untyped_storage()


def _restored(memory: Segment, parts: list[object]) -> Any:
    token = _arrived.set(parts)
    try:
        return _loaded(memoryview(memory.array))
    finally:
        _arrived.reset(token)


def _loaded(data: bytes | memoryview) -> Any:
    try:
        return pickle.loads(data)
    except AttributeError as error:
        # Since Python 3.14 the error is that of the module, or calls a nested name a path.
        texts = ("Can't get attribute", "Can't resolve path")
        if not (str(error).startswith(texts) or type(error.obj) is ModuleType):
            raise
        raise NotPicklableError(
            f"{error}: workers that are not forked import the main module again, without the code under "
            "if __name__ == '__main__'. Define it above"
        ) from error


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
    _ChildPickler(file).dump(value)
    return file.getvalue()


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
        return build, (tensor.int_repr(), *scales, tensor.q_per_channel_axis())
    return NotImplemented


class _Bytes:
    """The memory of an array, for NumPy; nobody writes to it."""

    def __init__(self, array: np.ndarray, start: int, nbytes: int) -> None:
        self._array = array
        self.__array_interface__ = {
            "data": (start, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def span_of(array: np.ndarray) -> tuple[np.ndarray, int]:
    """The bytes from the first to the last that an array sees, and where its first item begins there."""
    sizes = zip(array.shape, array.strides, strict=True)
    steps = [(n - 1) * step for n, step in sizes if array.size]
    before = -sum(step for step in steps if step < 0)
    nbytes = sum(map(abs, steps)) + array.itemsize * min(array.size, 1)
    start = array.__array_interface__["data"][0] - before
    return np.asarray(_Bytes(array, start, nbytes)), before


def _reduce_exactly(array: np.ndarray) -> Any:
    """Pickle an array with its strides and its exact dtype, of which its own pickle does not keep all."""
    flags, dtype = array.flags, array.dtype
    known = dtype.num in _KNOWN_TYPES or dtype.isbuiltin != 1
    whole = (flags.c_contiguous or flags.f_contiguous) and not (
        1 in array.shape  # whose strides NumPy ignores, and torch refuses
        and array.nbytes
        and any(step < 0 or step % array.itemsize for step in array.strides)
    )
    # NumPy pickles dates in another way, which forgets that an array is read-only.
    kept = whole and known and dtype.isnative and dtype.kind not in "mM"
    if type(array) is not np.ndarray or dtype.hasobject or kept:
        return NotImplemented
    span, before = span_of(array)
    if span.nbytes > 2 * array.nbytes and span.nbytes > _SPARSE_BYTES:
        return NotImplemented
    data = pickle.PickleBuffer(span)
    kind = dtype if known else dtype.char
    return _strided_array, (data, kind, before, array.shape, array.strides, flags.writeable)


def _strided_array(
    data: memoryview,
    dtype: np.dtype | str,
    before: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writeable: bool,
) -> np.ndarray:
    array: np.ndarray = np.ndarray(shape, dtype, data, before, strides)
    array.flags.writeable = writeable
    return array


def _is_here(value: torch.Tensor | torch.UntypedStorage) -> bool:
    """Whether no device has it."""
    return value.device.type in ("cpu", "meta")


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


def _stays_behind(value: object) -> TypeGuard[type | FunctionType]:
    """Whether no new process can import a class or function: it has no name there, or its main module is left out."""
    kinds = (type, FunctionType, _CACHED)
    if not isinstance(value, kinds) or value.__module__ in ("builtins", None):
        return False
    if not _has_name(value):
        return True
    if value.__module__ != "__main__":
        return False
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    # multiprocessing leaves out what ``python -m package`` has run.
    without_file = getattr(main, "__file__", None) is None
    left_out = spec.name.rpartition(".")[2] == "__main__" if spec else without_file
    return left_out or _defined_under_guard(value)


def _is_guarded(path: str, number: int) -> bool:
    """Whether line ``number`` of a file is in a block of the top level that begins with the guard."""
    for line in reversed(linecache.getlines(path)[:number]):
        if line.strip() and line[0] not in " \t#)]}":
            return _GUARD.match(line) is not None
    return False


def _defined_under_guard(value: type | FunctionType) -> bool:
    """Whether a class or function of the main module is defined under the guard, so that no child has it."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:
        return False
    if isinstance(value, FunctionType):
        code = value.__code__
        return code.co_filename == path and _is_guarded(path, code.co_firstlineno)
    for part in vars(value).values():
        if isinstance(part, FunctionType) and part.__code__.co_filename == path:
            return _is_guarded(path, part.__code__.co_firstlineno)
    # Without methods of its own: only the text tells.
    defines = re.compile(rf"\s+class\s+{value.__name__}\b")
    lines = enumerate(linecache.getlines(path), 1)
    return any(defines.match(line) and _is_guarded(path, number) for number, line in lines)


def _has_name(value: type | FunctionType) -> bool:
    """Whether the module of a class or function has it under its name: a lambda or a local class has none."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


def _code_pickler(first: type | FunctionType) -> Any:
    """Cloudpickle's pickler, which knows how code is reduced; ``first`` is named if that is not installed."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise NotPicklableError(
            f"{first.__qualname__} is local, a lambda, or defined in the __main__ of an interactive session or of a "
            "package, which workers that are not forked cannot import: install cloudpickle, move it to the top level "
            "of a module, or use multiprocessing_context='fork'"
        ) from None
    pickler = cloudpickle.Pickler(io.BytesIO(), protocol=5)
    # All functions of the main module see the same globals, as in this process, also those that go by name.
    main = _main_globals({})
    names = {name: main.get(name) for name in ("__package__", "__file__")}
    pickler.globals_ref[id(main)] = _Globals(_main_globals, names)
    return pickler


def _imported_as(function: FunctionType) -> str | None:
    """The name under which other processes import the module that a function is of; None if they cannot."""
    names = function.__globals__
    name: str | None = names.get("__name__")
    module = sys.modules.get(name or "")
    if name is None or getattr(module, "__dict__", None) is not names:
        return None
    parent = sys.modules.get(name.rpartition(".")[0])
    path = getattr(parent, "__path__", None)
    found = (each.find_spec(name, path) for each in sys.meta_path if hasattr(each, "find_spec"))
    spec = next(filter(None, found), None)
    # One that is loaded from a file by hand may have the name of another.
    return name if spec is not None and spec.origin == names.get("__file__") else None


class _Globals:
    """Arrives as the globals that a function finds in the process that it is sent to."""

    def __init__(self, find: Callable[..., object], argument: object) -> None:
        self.find, self._argument = find, argument

    def __reduce__(self) -> tuple[Any, ...]:
        return self.find, (self._argument,)


def _module_globals(name: str) -> dict[str, Any]:
    return vars(importlib.import_module(name))


def _main_globals(names: dict[str, object]) -> dict[str, object]:
    """Those of the main module, which takes missing ``names``."""
    main = vars(sys.modules["__main__"])
    # multiprocessing copies what it has run to the module, whose functions keep their own globals.
    parts = [part for value in list(main.values()) for part in _with_methods(value)]
    own = (part.__globals__ for part in parts if isinstance(part, FunctionType))
    found = next((each for each in own if each.get("__name__") == "__mp_main__"), main)
    found.update({name: value for name, value in names.items() if found.get(name) is None})
    return found


def _with_methods(value: object) -> list[object]:
    return [value, *vars(value).values()] if isinstance(value, type) else [value]


def _cached(function: Callable[..., object], maxsize: int | None, typed: bool) -> object:
    return functools.lru_cache(maxsize, typed)(function)


def _define(name: str, make: Callable[..., object], *arguments: object) -> object:
    """Make a class or function of the main module, and register it there under its name: results refer to it."""
    made = make(*arguments)
    if isinstance(made, type):
        made.__qualname__ = name  # cloudpickle forgets in which class a class is
    vars(sys.modules["__main__"])[name] = made
    return made


def dumps(value: object, purpose: Purpose = "sample") -> tuple[list[memoryview], list[memoryview]]:
    """Pickle an object for a process here: parts of the pickle, and flat buffers, valid while it is unchanged."""
    pieces = _Pieces()
    pickler = SidePickler(pieces, purpose, process_reducers())
    pickler.dump(value)
    return [memoryview(piece) for piece in pieces], pickler.raws()


def advise(error: Exception) -> None:
    """Warn as torch does if a worker was not started because of something that cannot be pickled."""
    if isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):
        warnings.warn(_ADVICE, stacklevel=2)


def check_picklable(name: str, value: object) -> None:
    """Raise NotPicklableError, which names it, for the innermost part of an object that no started process can get."""
    error = _failure(value)
    if error is None:
        return
    path, part, reason = failing_part(value, error, _failure)
    outer = _STEP.match(path)
    holder = f", or {name}{outer[0]}, which holds it" if outer and outer[0] != path else ""
    raise NotPicklableError(
        f"{name}{path} cannot be pickled, as it must be for workers that are not forked ({message_of(reason)}). "
        f"It is a {type(part).__qualname__}: {_remedy(part)}{holder}."
    ) from _own_cause(reason)


def _own_cause(error: Exception) -> Exception | None:
    """Return an exception of pickling with the frames of the program's own methods; None if there are none."""
    trace = outside(error.__traceback__)
    if trace is None:
        return None
    with suppress(Exception):  # it allows no attributes
        error.__suppress_context__ = True
    return BaseException.with_traceback(error, trace)


def _remedy(value: object) -> str:
    cls = type(value)
    own = any(isinstance(each, FunctionType) for c in cls.__mro__ for each in vars(c).values())
    if isinstance(value, (type, FunctionType)) or (own and not _has_name(cls)):
        return "define it at the top level of an importable module"
    # A handle that forked workers share has one offset and one stream of answers for all of them.
    if isinstance(value, io.IOBase) or hasattr(cls, "fileno") or not own:
        return "open or create it at its first use in the worker"
    return "create it in worker_init_fn or at its first use in the worker, or use multiprocessing_context='fork'"


def _failure(value: object) -> Exception | None:
    try:
        with pickling_for_a_child():
            _for_child(value)
    except Exception as error:
        return error
    return None


# ---- the guard of the main module ----

_STARTS = "minato worker: "
"""Begins the name of a worker while it starts and imports the main module."""


@contextmanager
def named_as_worker(process: BaseProcess) -> Iterator[None]:
    """Have a process know, while it starts without a fork, that a pool waits for it."""
    name = process.name
    process.name = _STARTS + name
    try:
        yield
    finally:
        process.name = name


def take_own_name() -> None:
    """Have a worker that has started take the name that multiprocessing gave it."""
    process = current_process()
    process.name = process.name.removeprefix(_STARTS)


def refuse_unguarded() -> NoReturn:
    """End this process, which imports the main module to become a worker, and is to start workers by that.

    A worker of a pool ends silently: the training process raises an error that says so. Where the program itself has
    started this process, SystemExit: multiprocessing's own error has fifty lines.
    """
    name, command = current_process().name, " ".join(sys.orig_argv)
    is_server = name == "MainProcess" and "minato.workers." in command
    if name.startswith(_STARTS) or is_server:
        os._exit(UNGUARDED)
    main = sys.modules.get("__mp_main__") or sys.modules["__main__"]
    words = (
        f"the main module ({getattr(main, '__file__', None)}) starts workers where it is imported, and processes that "
        "are not forked import it: put what the script does under if __name__ == '__main__'"
    )
    # In one piece: several processes may say so at the same moment.
    print(f"minato: {words}\n", end="", file=sys.stderr, flush=True)
    ending = SystemExit(1)
    ending.args = (words,)  # for the log of a fork server; the exit status stays 1
    raise ending


def is_unguarded() -> bool:
    """Whether this thread runs a line of the main module that is not under the guard, in a file that others import."""
    if getattr(sys.modules["__main__"], "__file__", None) is None:
        return False  # as with ``python -c``
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return not _is_guarded(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return False
