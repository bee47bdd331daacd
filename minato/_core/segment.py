"""One anonymous stretch of memory that a loader shares with its workers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from minato._core.limits import explaining_limits

__all__ = ["Memory", "Segment", "anonymous_file"]

Memory: TypeAlias = "np.ndarray | memoryview | bytearray | mmap.mmap"
"""What maps memory that others may write."""

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""Linux's MAP_NORESERVE, which the mmap module does not name."""
_FIXED = 0x10
"""MAP_FIXED, which it does not name either."""

_mapped: list[weakref.ref[mmap.mmap]] = []
"""The memory of all segments of this process, and of some that are gone."""


def anonymous_file(nbytes: int) -> int:
    """Open a file without a name and give it a size; its pages exist once they are written."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("minato", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="minato") as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _shared(nbytes: int) -> tuple[int, mmap.mmap]:
    descriptor = anonymous_file(nbytes)
    try:
        return descriptor, _map(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def _map(descriptor: int, nbytes: int, read_only: bool = False) -> mmap.mmap:
    protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | _NO_RESERVE
    return _undumped(mmap.mmap(descriptor, nbytes, flags=flags, prot=protection))


def _undumped(memory: mmap.mmap) -> mmap.mmap:
    """Keep a mapping out of core dumps: the kernel would allocate a page for each hole of a sparse shared file."""
    if hasattr(mmap, "MADV_DONTDUMP"):
        with contextlib.suppress(OSError):  # the dump is then larger than it need be
            memory.madvise(mmap.MADV_DONTDUMP)
    return memory


def _private(nbytes: int) -> tuple[int, mmap.mmap]:
    if sys.platform == "win32":
        return -1, mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A small batch that is held would otherwise take two megabytes.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return -1, _undumped(memory)


@functools.cache
def _map_at() -> Callable[..., object]:
    """The system's ``mmap``, which can replace a mapping."""
    function = ctypes.CDLL(None).mmap
    function.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    function.restype = ctypes.c_void_p
    return function


def _call(held: mmap.mmap, function: Callable[..., object], *arguments: object) -> None:
    function(*arguments)


class Segment:
    """Memory without a name, mapped by every process that inherits or receives it.

    It does not count against the size of ``/dev/shm``, cannot be left behind there, and is gone with the last process
    that maps it, however that process ends. The mapping lives as long as the last array made from it. It is passed
    on by ``fork``, or by pickling it while a child is spawned.

    Args:
        nbytes: Size of the address range in bytes; only written pages take memory.
        least_bytes: Smallest useful size: where address space is short, a quarter of what is left is taken, but so
            much at least.
        shared: Whether other processes see what is written. If not, a forked child gets a copy.

    Raises:
        OSError: Not even ``least_bytes`` can be mapped; says which limit was met, and what to do.

    Attributes:
        descriptor: The file that is mapped; -1 if the memory is not shared.
        mapping: The memory itself.
    """

    def __init__(self, nbytes: int, least_bytes: int | None = None, shared: bool = True) -> None:
        least_bytes = max(nbytes if least_bytes is None else least_bytes, 1)
        with explaining_limits(f"reserve {least_bytes} bytes of memory for batches and workers"):
            self._adopt(*self._reserved(nbytes, least_bytes, shared))

    @staticmethod
    def _reserved(nbytes: int, least_bytes: int, shared: bool) -> tuple[int, mmap.mmap]:
        """Descriptor and memory, of ``nbytes`` or less where address space is short."""
        mapped = _shared if shared else _private
        size = nbytes
        while True:
            try:
                descriptor, memory = mapped(size)
                break
            except (OSError, ValueError):
                if size // 2 < least_bytes:
                    raise
                size //= 2
        if size < nbytes and size // 4 >= least_bytes:
            memory.close()
            if shared:
                os.close(descriptor)
            size //= 4
            descriptor, memory = mapped(size)
        return descriptor, memory

    @classmethod
    def filled(cls, write: Callable[[BinaryIO], object]) -> Segment:
        """A segment with what a function writes to a file, at least one byte, which nobody can change afterwards.

        Raises:
            OSError: There is no memory left, or no descriptor; says which limit was met.
        """
        with explaining_limits("share a dataset's memory"):
            descriptor = anonymous_file(0)
            segment = cls.__new__(cls)
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    write(file)
                    nbytes = file.tell()
                segment._map_received(descriptor, nbytes, read_only=True)
            except BaseException:
                os.close(descriptor)
                raise
        return segment

    def _adopt(self, descriptor: int, memory: mmap.mmap) -> None:
        self.mapping = memory
        self.descriptor = descriptor
        self.nbytes = len(memory)
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(memory, np.uint8)
        self.address: int = self.array.ctypes.data
        if descriptor >= 0:
            weakref.finalize(self, os.close, descriptor)
        _mapped[:] = [reference for reference in _mapped if reference() is not None]
        _mapped.append(weakref.ref(memory))

    def separate(self) -> None:
        """Have this process see a copy of its own from now on, at the same address; for a forked child."""
        if self.descriptor >= 0:
            protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
            _map_at()(self.address, self.nbytes, protection, flags | _FIXED, self.descriptor, 0)

    @staticmethod
    def num_living() -> int:
        """Segments of this process whose memory is still mapped."""
        return sum(reference() is not None for reference in _mapped)

    def before_unmapping(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function once no array of this memory is left, while it is still mapped.

        The end of the process does not call it. Neither the function nor the arguments may hold such an array.
        """
        # From 2.5 on, NumPy gives an array's memory up before the finalizer runs, which therefore holds the mapping.
        weakref.finalize(self.array, _call, self.mapping, function, *arguments).atexit = False

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of a few bytes; sooner made than by the array."""
        return self.mapping[offset : offset + nbytes]

    def write(self, offset: int, data: bytes) -> None:
        """Write a few bytes; sooner done than by the array."""
        self.mapping[offset : offset + len(data)] = data

    def discard(self, start: int, end: int) -> None:
        """Give the pages of [start, end) back to the system; they read as zero afterwards."""
        page = mmap.PAGESIZE
        start, end = -(-start // page) * page, end // page * page
        advice = "MADV_REMOVE" if self.descriptor >= 0 else "MADV_DONTNEED"
        if end > start and hasattr(mmap, advice):
            self.mapping.madvise(getattr(mmap, advice), start, end - start)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "descriptor": reduction.DupFd(self.descriptor),
            "nbytes": self.nbytes,
            "read_only": not self.array.flags.writeable,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._map_received(state["descriptor"].detach(), state["nbytes"], state["read_only"])

    @classmethod
    def received(cls, descriptor: int, nbytes: int) -> Segment:
        """The segment of another process, which has sent its descriptor; that is closed with the segment.

        Raises:
            ValueError: The file is not so large; reading behind its end would end this process.
            OSError: It cannot be mapped.
        """
        segment = cls.__new__(cls)
        try:
            if not 0 < nbytes <= os.fstat(descriptor).st_size:
                raise ValueError(f"a file of another size than {nbytes} bytes")
            segment._map_received(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        return segment

    def _map_received(self, descriptor: int, nbytes: int, read_only: bool = False) -> None:
        self._adopt(descriptor, _map(descriptor, nbytes, read_only))
