"""The shared memory that a ledger lies in (pure Python).

Every operation of the pure ledger runs under one lock instead of through atomic words. It is a POSIX record lock on
the segment's descriptor, which the kernel releases when its holder dies, so a killed worker blocks no other process.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minato._core._wait_py import EventCount
from minato._core.codes import KIND_MASK, NO_INTEGER, NUM_EPOCH_SLOTS, RAGGED

if sys.platform != "win32":  # which has threads only
    import fcntl

__all__ = ["Records"]

# States of a ticket and of a place, in the upper two bits of their words.
FREE, CLAIMED, DONE, CANCELLED = (state << 62 for state in range(4))
BOUND, FILLED = 1 << 62, 2 << 62
STATE = 3 << 62
NUMBER = (1 << 48) - 1

_MAGIC = 0x6F74616E696D
_VERSION = 4
_HINTS, _MOST_AHEAD = 256, 65535
STOPPING, DRAINING = 1, 2
_INT64 = 1 << 63
_MAX_WORKERS = 4096
"""As many as have a number in the state of a batch."""

_HEADER = np.dtype(
    {
        "names": [
            "magic", "version", "compiled", "num_workers", "batch_capacity", "position_capacity",
            "slow_ns", "shutdown", "orphaned", "waiting", "orphans_checked", "head", "tail", "epoch_slots",
            "hints_used", "hints",
        ],
        "formats": [
            "u8", "u4", "u4", "u4", "u4", "u8",
            "u8", "u4", "u4", "u8", "u4", "u8", "u8", ([("cursor", "u8"), ("limit", "u8")], (NUM_EPOCH_SLOTS,)),
            "u4", ("u8", _HINTS),
        ],
        "offsets": [0, 8, 12, 16, 20, 24, 32, 40, 44, 48, 56, 64, 128, 320, 448, 512],
        "itemsize": 512 + 8 * _HINTS,
    }
)  # fmt: skip
_WORK_EVENTS, _READY_EVENTS = 192, 256
_WORKER = np.dtype(
    [
        ("position", "u8"), ("started_ns", "u8"), ("step", "i8"),
        ("samples", "u8"), ("busy_ns", "u8"), ("idle_ns", "u8"),
        ("pad", "u8", (2,)),
    ]
)  # fmt: skip
_BATCH = np.dtype(
    [
        ("state", "u8"), ("first", "u8"), ("count", "u4"), ("epoch_slot", "u4"), ("slot", "u8"),
        ("cursor", "u8"), ("layout", "u8"), ("flags", "u8"), ("hint", "u8"), ("result", "u8"),
        ("result_nbytes", "u8"), ("indices", "u8"), ("indices_nbytes", "u8"), ("epoch", "i8"), ("seed", "i8"),
        ("bound", "u4"), ("owner", "u4"), ("slot_end", "u8"),
    ]
)  # fmt: skip
_POSITION = np.dtype(
    [
        ("ticket", "u8"), ("place", "u8"), ("blob", "u8"), ("blob_nbytes", "u8"), ("index", "i8"),
        ("cost_ns", "u8"), ("position", "u8"), ("batch", "u4"), ("occurrence", "u4"),
    ]
)  # fmt: skip


class Records:
    """The ledger's memory: its header, and the records of workers, batches and samples.

    Args:
        buffer: Writable memory of ``Ledger.nbytes(...)`` that every party maps; it stays mapped for the ledger's life.
        sizes: ``(num_workers, batch_capacity, position_capacity)`` to create a ledger, None to attach to one.
        lock_fd: Descriptor of the memory; only the pure backend locks it.

    Raises:
        ValueError: The memory is too small, or the sizes make no sense.
        RuntimeError: The other side runs another implementation or version of minato.
    """

    @staticmethod
    def nbytes(num_workers: int, batch_capacity: int, position_capacity: int) -> int:
        """Bytes of a ledger with these capacities."""
        return (
            _HEADER.itemsize
            + num_workers * _WORKER.itemsize
            + batch_capacity * _BATCH.itemsize
            + position_capacity * _POSITION.itemsize
        )

    def __init__(
        self, buffer: Any, sizes: tuple[int, int, int] | None = None, lock_fd: int = -1
    ) -> None:
        view = memoryview(buffer)
        if view.readonly:
            raise BufferError("a ledger needs memory that can be written")
        size = view.nbytes
        if size < _HEADER.itemsize:
            raise ValueError(f"{size} bytes are no ledger: its header alone is larger")
        header: Any = np.frombuffer(buffer, _HEADER, 1)[0]
        if sizes is not None:
            num_workers, batch_capacity, position_capacity = sizes
            if not 0 < num_workers <= _MAX_WORKERS:
                raise ValueError(f"num_workers {num_workers} is not between 1 and {_MAX_WORKERS}")
            if position_capacity & (position_capacity - 1) or position_capacity <= 0:
                raise ValueError(f"position_capacity {position_capacity} is not a power of two")
            if Records.nbytes(*sizes) > size:
                raise ValueError(f"a ledger of {Records.nbytes(*sizes)} bytes does not fit {size}")
            # The positions need no initial values: none is read before it is published.
            blank = Records.nbytes(num_workers, batch_capacity, 0)
            np.frombuffer(buffer, np.uint8, blank)[:] = 0
            header["version"] = _VERSION
            header["num_workers"] = num_workers
            header["batch_capacity"] = batch_capacity
            header["position_capacity"] = position_capacity
            header["magic"] = _MAGIC
        if header["magic"] != _MAGIC or header["version"] != _VERSION:
            raise RuntimeError(
                "this memory is no ledger of this version of minato: all processes of a loader must "
                "run the same installation"
            )
        if header["compiled"] != 0:
            raise RuntimeError(
                "the loader runs the compiled implementation of minato and this process the pure one: "
                "set MINATO_NO_EXTENSIONS alike for both"
            )
        needed = Records.nbytes(
            *(int(header[name]) for name in ("num_workers", "batch_capacity", "position_capacity"))
        )
        if needed > size:
            raise ValueError(f"a ledger of {needed} bytes does not fit {size}")
        self._header = header
        self._epoch_slots = header["epoch_slots"]
        self._mask = int(header["position_capacity"]) - 1
        offset = _HEADER.itemsize
        self._workers: Any = np.frombuffer(buffer, _WORKER, int(header["num_workers"]), offset)
        offset += self._workers.nbytes
        self._batches: Any = np.frombuffer(buffer, _BATCH, int(header["batch_capacity"]), offset)
        offset += self._batches.nbytes
        self._positions: Any = np.frombuffer(buffer, _POSITION, self._mask + 1, offset)
        self._work = EventCount(buffer, _WORK_EVENTS)
        self._ready = EventCount(buffer, _READY_EVENTS)
        self._lock_fd = lock_fd
        self._thread_lock = threading.RLock()
        self._depth = 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Record locks belong to the process, so threads need a lock of their own; both may be entered again.
        with self._thread_lock:
            self._depth += 1
            try:
                if self._depth == 1 and self._lock_fd >= 0 and sys.platform != "win32":
                    fcntl.lockf(self._lock_fd, fcntl.LOCK_EX)
                yield
            finally:
                if self._depth == 1 and self._lock_fd >= 0 and sys.platform != "win32":
                    fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)
                self._depth -= 1

    @property
    def work_events_offset(self) -> int:
        """Where the gate lies that workers sleep on."""
        return _WORK_EVENTS

    @property
    def ready_events_offset(self) -> int:
        """Where the gate lies that the consumer sleeps on."""
        return _READY_EVENTS

    @property
    def capacity(self) -> tuple[int, int]:
        """``(batches, positions)`` that can be in flight."""
        return int(self._header["batch_capacity"]), self._mask + 1

    @property
    def stopping(self) -> bool:
        """True once ``shut_down`` was called: workers leave after their current lease."""
        return bool(self._header["shutdown"] == STOPPING)

    @property
    def draining(self) -> bool:
        """True once ``shut_down(drain=True)`` was called: workers leave when nothing is left to claim."""
        return bool(self._header["shutdown"] == DRAINING)

    @property
    def slow_ns(self) -> int:
        """Nanoseconds above which a sample counts as slow; 0: nothing does."""
        return int(self._header["slow_ns"])

    @slow_ns.setter
    def slow_ns(self, value: int) -> None:
        self._header["slow_ns"] = value

    @property
    def waiting(self) -> bool:
        """Whether the consumer waits for a batch; set by the consumer."""
        return bool(self._header["waiting"])

    @waiting.setter
    def waiting(self, value: bool) -> None:
        self._header["waiting"] = value

    @property
    def front(self) -> int:
        """How far claims in turn have come: all before this position are taken."""
        return int(self._header["head"])

    def begun(self) -> list[int]:
        """Start times of the workers' current samples, in ns of ``now_ns``, oldest first."""
        # Workers write these words without the lock.
        at_work = self._workers[self._workers["position"] != 0]
        return sorted(at_work["started_ns"].tolist())

    def describe(self, batch: int) -> tuple[int, int, int, bool, int, int, int, int, int]:
        """What a worker must know of a batch.

        Returns:
            ``(generation, first, count, bound, epoch, seed, indices_offset, indices_nbytes, epoch_slot)``; first is the
            position of its sample 0, and generation changes with each use of the record.
        """
        with self._locked():
            record = self._batches[batch]
            return (
                int(record["state"]) >> 16,
                int(record["first"]),
                int(record["count"]),
                bool(record["bound"]),
                int(record["epoch"]),
                int(record["seed"]),
                int(record["indices"]),
                int(record["indices_nbytes"]),
                int(record["epoch_slot"]),
            )

    @staticmethod
    def can_hold(indices: Any) -> bool:
        """Whether a record can hold the indices: a list, not empty, of integers of 64 bits and no other type."""
        integers = type(indices) is list and set(map(type, indices)) == {int}
        return integers and min(indices) >= -_INT64 and max(indices) < _INT64

    def indices(self, batch: int, k: int, count: int) -> list[int]:
        """The integer indices of samples k … k+count-1."""
        with self._locked():
            first = self._range(batch).start + k
            return [
                int(self._positions[position & self._mask]["index"])
                for position in range(first, first + count)
            ]

    def occurrences(self, position: int, count: int) -> list[int] | None:
        """How often the index of each of ``count`` samples from this position on came before; None: of none it did."""
        with self._locked():
            found = [
                int(self._positions[each & self._mask]["occurrence"])
                for each in range(position, position + count)
            ]
        return found if any(found) else None

    def fields(self, batch: int) -> tuple[int, int, int]:
        """``(generation, layout, count)``: what a worker needs to find a place in the batch's fields."""
        with self._locked():
            record = self._batches[batch]
            return int(record["state"]) >> 16, int(record["layout"]), int(record["count"])

    def contents(self, batch: int) -> tuple[int, int, int, int, int, int]:
        """``(flags, layout, result, result_nbytes, count, used_nbytes)`` of a full batch."""
        with self._locked():
            record = self._batches[batch]
            names = ("flags", "layout", "result", "result_nbytes", "count")
            flags, layout, result, result_nbytes, count = (int(record[name]) for name in names)
            used = int(record["cursor"]) - int(record["slot"])
            return flags, layout, result, result_nbytes, count, used

    def blobs(self, batch: int) -> list[tuple[int, int, int]]:
        """``(kind, offset, nbytes)`` of each place of a full batch; kind 0: it has no blob."""
        with self._locked():
            found = []
            for position in self._range(batch):
                record = self._positions[position & self._mask]
                blob = int(record["blob"])
                found.append((blob & KIND_MASK, blob & ~KIND_MASK, int(record["blob_nbytes"])))
            return found

    def start_early(self, position: int, ahead: int) -> bool:
        """Let an unbound sample start ``ahead`` samples early; return False if the table of hints is full."""
        with self._locked():
            free = np.flatnonzero(self._header["hints"] == 0)
            if not free.size:
                return False
            self._header["hints"][free[0]] = min(ahead, _MOST_AHEAD) << 48 | (position + 1)
            self._header["hints_used"] = max(int(self._header["hints_used"]), int(free[0]) + 1)
            return True

    def note_costs(self, position: int, costs: Any, count: int) -> None:
        """Say what ``count`` samples from this position on have cost, in int64 memory of ns; before they are filled."""
        words = memoryview(costs)
        if words.nbytes < 8 * count:
            raise ValueError(f"{words.nbytes} bytes hold no {count} costs")
        with self._locked():
            for i in range(count):
                self._positions[(position + i) & self._mask]["cost_ns"] = words[i]

    def is_placed(self, position: int) -> bool:
        """Whether it is settled in which batch this sample will lie."""
        with self._locked():
            return self._ticket(position) & NUMBER != 0

    def samples(self, batch: int) -> list[tuple[int, int, int, int]]:
        """``(position, index, cost in ns, bytes)`` of the samples at the places of a full batch.

        Samples without an integer index or a known cost are left out, and those whose own batch is long gone; bytes are
        0 for one that fits the layout.
        """
        with self._locked():
            found = []
            for place in self._range(batch):
                position = (self._place(place) & NUMBER) - 1
                sample = self._positions[position & self._mask]
                known = sample["position"] == position and sample["cost_ns"]
                if known and sample["index"] != NO_INTEGER:
                    there = self._positions[place & self._mask]
                    ragged = 1 << (int(there["blob"]) & KIND_MASK) == RAGGED
                    nbytes = int(there["blob_nbytes"]) if ragged else 0
                    found.append((position, int(sample["index"]), int(sample["cost_ns"]), nbytes))
            return found

    def num_slow(self, batch: int) -> int:
        """How many of the samples at the places of a full batch have cost more than ``slow_ns``; 0 while that is 0."""
        with self._locked():
            slow_ns = int(self._header["slow_ns"])
            count = 0
            for place in self._range(batch) if slow_ns else ():
                position = (self._place(place) & NUMBER) - 1
                sample = self._positions[position & self._mask]
                count += bool(sample["position"] == position and sample["cost_ns"] > slow_ns)
            return count

    def occupants(self, batch: int) -> list[int]:
        """Position of the sample that lies at each place of a full batch; -1: none does."""
        with self._locked():
            return [(self._place(position) & NUMBER) - 1 for position in self._range(batch)]

    # ---- inner parts, called with the lock held ---------------------------------------------

    def _range(self, batch: int) -> range:
        record = self._batches[batch]
        first = int(record["first"])
        return range(first, first + int(record["count"]))

    def _ticket(self, position: int) -> int:
        return int(self._positions[position & self._mask]["ticket"])

    def _set_ticket(self, position: int, word: int) -> None:
        self._positions[position & self._mask]["ticket"] = word

    def _place(self, position: int) -> int:
        return int(self._positions[position & self._mask]["place"])

    def _set_state(self, batch: int, code: int, worker: int = 0) -> None:
        state = int(self._batches[batch]["state"])
        self._batches[batch]["state"] = state >> 16 << 16 | worker << 4 | code

    def _epoch_slot_of(self, position: int) -> int:
        batch = int(self._positions[position & self._mask]["batch"])
        return int(self._batches[batch]["epoch_slot"])
