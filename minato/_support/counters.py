"""Counters in shared memory that several processes increment."""

from __future__ import annotations

import math
import os
import threading
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from minato._compat import shared_file_storage
from minato._core.limits import explaining_limits
from minato._core.segment import anonymous_file
from minato._fork_safety import renew_in_children

_BLOCKS, _ROWS = 65, 64
"""A row for the training process and one for each of the 4096 workers that a loader may have; most blocks are never
used."""
_LANES = 8
"""Processes of one row that may count at the same time: workers of several loaders have the same numbers."""


def shared_integers(*shape: int) -> torch.Tensor:
    """An int64 tensor of zeros in shared memory, which multiprocessing knows how to hand on.

    As torch's ``share_memory_()``, but the memory never has a name that a killed process could leave in ``/dev/shm``.
    """
    nbytes, storage = 8 * math.prod(shape), None
    if hasattr(os, "memfd_create"):
        with explaining_limits("share counters"):
            descriptor = anonymous_file(nbytes)
        try:
            storage = shared_file_storage(descriptor, nbytes)
        finally:
            os.close(descriptor)
    if storage is None:
        ordinary: torch.Tensor = torch.zeros(shape, dtype=torch.int64, device="cpu")
        return ordinary.share_memory_()  # type: ignore[no-any-return]
    flat: torch.Tensor = torch.empty(0, dtype=torch.int64, device="cpu").set_(storage)
    return flat.view(shape)


class SharedIntegers:
    """A tensor of :func:`shared_integers`, which children and deep copies share; other pickles have what is not 0.

    Attributes:
        array: The memory, which is quicker than a tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.array = tensor, tensor.numpy()

    def __deepcopy__(self, memo: object) -> SharedIntegers:
        """Readers of a stream have copies of the dataset, and share its numbers."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        places = self.array.nonzero()
        return _copied, (self.array.shape, places, self.array[places])


def _copied(
    shape: tuple[int, ...], places: tuple[np.ndarray, ...], numbers: np.ndarray
) -> SharedIntegers:
    found = SharedIntegers(shared_integers(*shape))
    found.array[places] = numbers
    return found


def _for_child(integers: SharedIntegers) -> tuple[Any, ...]:
    return SharedIntegers, (integers._tensor,)


ForkingPickler.register(SharedIntegers, _for_child)


class Counters:
    """Named counters that forked and started children share; each process increments its own lane of a row.

    So none is lost, also if workers of several loaders count. A lane begins with the number of its process.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._counts = SharedIntegers(shared_integers(_BLOCKS, _ROWS, _LANES, 1 + len(names)))
        self._used = SharedIntegers(shared_integers(_BLOCKS))
        self._open()

    def __fingerprint__(self) -> None:
        """Counts change with each sample, and no sample with them."""

    def __deepcopy__(self, memo: object) -> Counters:
        """Readers of a stream have copies of the dataset, and count together."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"_names": self._names, "_counts": self._counts, "_used": self._used}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open()

    def _open(self) -> None:
        self._renew()
        renew_in_children(self, Counters._renew)
        self._rows, self._marks = self._counts.array, self._used.array

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def add(self, **by: int) -> None:
        """Increment counters by name."""
        worker = get_worker_info()
        # The number of a reader may be larger, where many ranks share the readers of a stream.
        row_number = 0 if worker is None else (1 + worker.id) % (_BLOCKS * _ROWS)
        block, row_number = divmod(row_number, _ROWS)
        self._marks[block] = 1  # every writer stores the same value
        with self._lock:
            lane = _lane_in(self._rows[block, row_number])
            for name, number in by.items():
                lane[1 + self._names.index(name)] += number

    def by_name(self) -> dict[str, int]:
        """Return the totals of all processes by name."""
        return dict(zip(self._names, self.totals(), strict=True))

    def totals(self) -> list[int]:
        """Return the totals of all processes, in the order of the names."""
        totals: list[int] = self._rows[self._marks.nonzero()[0]].sum((0, 1, 2))[1:].tolist()
        return totals


def _lane_in(row: np.ndarray) -> np.ndarray:
    """The lane of this process; two that take one at the same moment see that at their next count."""
    lanes: list[np.ndarray] = list(row)
    pid = os.getpid()
    for lane in lanes:
        if lane[0] == pid:
            return lane
    for lane in lanes:
        if _is_over(int(lane[0])):
            lane[0] = pid
            return lane
    return lanes[-1]  # of too many processes, several have the last one


def _is_over(pid: int) -> bool:
    """Whether there is no process with this number; 0 is none's."""
    try:
        if pid:
            os.kill(pid, 0)
    except OSError as error:  # else it is another user's
        return isinstance(error, ProcessLookupError)
    return pid == 0
