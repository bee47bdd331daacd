"""Memory of a process that runs tests: most of them fork, and a fork takes the longer the more pages there are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

__all__ = ["gather", "trim"]

HUGE = 2 << 20
"""The size of a huge page, in bytes."""
MADV_COLLAPSE = 25
"""Of Linux 6.1 and later."""
LEAST_USED = 0.8
"""Of an area that is gathered: what was never used of it would take memory, too."""
SMAPS = Path("/proc/self/smaps")


def gather() -> None:
    """Put objects into huge pages where the kernel does that: for 512 pages a fork then copies one entry."""
    if not SMAPS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start, end in list(_areas()):
        first, last = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if first < last:
            advise(first, last - first, MADV_COLLAPSE)


def trim() -> None:
    """Give back pages that hold nothing any more."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def _areas() -> Iterator[tuple[int, int]]:
    """Where this process has objects: addresses of private memory that is in use, and is no file's."""
    area = None
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            start, end = (int(part, 16) for part in words[0].split("-"))
            is_ours = words[1] == "rw-p" and words[5:] in ([], ["[heap]"])
            area = (start, end) if is_ours else None
        elif words[0] == "Anonymous:" and area is not None:
            used = int(words[1]) * 1024
            if used >= LEAST_USED * (area[1] - area[0]):
                yield area
