"""Who works on which sample, and where its result goes (pure Python).

The readable specification of the compiled ledger: the same records, each operation under one lock. It is a POSIX record
lock on the segment's descriptor, which the kernel releases when its holder dies, so a killed worker blocks no other
process.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from minato._core._sample_loop_py import Lease
from minato._core._wait_py import EventCount
from minato._core.codes import (
    CLOSED,
    COLLATING,
    ENDED,
    FAILED,
    KIND_MASK,
    MUST_COLLATE,
    NO_INTEGER,
    NOT_COMPLETE,
    NUM_EPOCH_SLOTS,
    OPEN,
    PUBLISHED,
    RAGGED,
    READY,
    SKIP_BLOB,
    SKIPPED,
    VACANT,
    Activity,
    LeaseState,
)
from minato._core.limits import slot_overflow

if sys.platform != "win32":  # which has threads only
    import fcntl
from minato._core.segment import Memory

__all__ = [
    "READY_EVENTS_OFFSET",
    "WORK_EVENTS_OFFSET",
    "BatchRecord",
    "Claim",
    "ConsumerLedger",
    "Ledger",
    "WorkerLedger",
]

WORK_EVENTS_OFFSET = 192
"""Where the event count of a ledger lies that workers sleep on."""
READY_EVENTS_OFFSET = 256
"""Where the event count of a ledger lies that the consumer sleeps on."""

# States of a ticket and of a place, in the upper two bits of their words.
FREE, CLAIMED, DONE, CANCELLED = (state << 62 for state in range(4))
BOUND, FILLED = 1 << 62, 2 << 62
STATE = 3 << 62
OFFERED = 0x3FFF << 48
"""Of a free ticket: not only the owner of its batch may claim it."""
NUMBER = (1 << 48) - 1

RESERVED = 1
"""Bit of a batch's layout: none is published, and the other bits are the bytes reserved for its fields."""

ALIGNMENT = 64
"""Of whatever is written to a slot; the kind of a blob lies below it."""

_MAGIC = 0x6F74616E696D
_VERSION = 5
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


class _Lock:
    """Excludes all other processes and threads from the ledger; may be entered again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._threads = threading.RLock()  # record locks belong to the process
        self._depth = 0

    def __enter__(self) -> None:
        self._threads.acquire()
        self._depth += 1
        if self._depth == 1:
            self._lock_file("LOCK_EX")

    def __exit__(self, *_: object) -> None:
        if self._depth == 1:
            self._lock_file("LOCK_UN")
        self._depth -= 1
        self._threads.release()

    def _lock_file(self, operation: str) -> None:
        if self._descriptor >= 0 and sys.platform != "win32":
            fcntl.lockf(self._descriptor, getattr(fcntl, operation))


@final
@dataclass(frozen=True, slots=True)
class Claim:
    """A run of samples that a worker has claimed: k … k+count-1 of the batch.

    With count 0, no samples: the worker is to collate this batch, whose worker died.
    """

    batch: int
    k: int
    count: int


@final
@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as it is now; what it says of its content holds once it is full.

    Attributes:
        generation: Changes with each use of the record.
        first: Position of its sample 0.
        count: Number of its samples.
        bound: Whether each sample has its own place in it.
        indices_offset: Arena offset of its pickled indices; 0: the positions hold them.
        layout: Arena offset of the published layout of its fields; 0: none yet.
        flags: 1 << kind for each kind of blob at its places.
        result: Arena offset of the collated batch, with its kind in the low bits; 0: the fields are the result.
        used_nbytes: Bytes of its slot that are in use.
    """

    generation: int
    first: int
    count: int
    epoch_slot: int
    bound: bool
    epoch: int
    seed: int
    indices_offset: int
    indices_nbytes: int
    layout: int
    flags: int
    result: int
    result_nbytes: int
    used_nbytes: int


def _layout_of(record: np.void) -> int:
    """Arena offset of the published layout of a batch; 0: none yet."""
    layout = int(record["layout"])
    return 0 if layout & RESERVED else layout


class Ledger:
    """All scheduling state of one loader, in memory that its workers share: what both of its ends may ask.

    Every sample in flight owns a position with two words: its ticket (who works on it) and its place (whose
    result lies there). A transition is one atomic store or compare-and-swap, so a worker may be killed at any
    instruction: what it did not finish is still claimed by it, and the consumer's ``release`` gives it out again.
    """

    def __init__(self, buffer: Memory, sizes: tuple[int, int, int] | None, lock_fd: int) -> None:
        if type(self) is Ledger:
            raise TypeError("a ledger has two ends: ConsumerLedger and WorkerLedger")
        view = memoryview(buffer)
        if view.readonly:
            raise BufferError("a ledger needs memory that can be written")
        size = view.nbytes
        if sizes is not None:
            _create(buffer, size, *sizes)
        if size < _HEADER.itemsize:
            raise ValueError(f"{size} bytes are no ledger: its header alone is larger")
        header: Any = np.frombuffer(buffer, _HEADER, 1)[0]
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
        needed = Ledger.nbytes(
            *(int(header[name]) for name in ("num_workers", "batch_capacity", "position_capacity"))
        )
        if needed > size:
            raise ValueError(f"a ledger of {needed} bytes does not fit {size}")
        self._buffer = buffer
        self._header = header
        self._epoch_slots = header["epoch_slots"]
        self._mask = int(header["position_capacity"]) - 1
        offset = _HEADER.itemsize
        self._workers: Any = np.frombuffer(buffer, _WORKER, int(header["num_workers"]), offset)
        offset += self._workers.nbytes
        self._batches: Any = np.frombuffer(buffer, _BATCH, int(header["batch_capacity"]), offset)
        offset += self._batches.nbytes
        self._positions: Any = np.frombuffer(buffer, _POSITION, self._mask + 1, offset)
        self._work = EventCount(buffer, WORK_EVENTS_OFFSET)
        self._ready = EventCount(buffer, READY_EVENTS_OFFSET)
        self._lock = _Lock(lock_fd)

    @staticmethod
    def nbytes(num_workers: int, batch_capacity: int, position_capacity: int) -> int:
        """Bytes of a ledger with these capacities."""
        return (
            _HEADER.itemsize
            + num_workers * _WORKER.itemsize
            + batch_capacity * _BATCH.itemsize
            + position_capacity * _POSITION.itemsize
        )

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
        """Nanoseconds above which a sample counts as slow; 0: nothing does. The consumer sets it."""
        return int(self._header["slow_ns"])

    @property
    def waiting(self) -> bool:
        """Whether the consumer waits for a batch. The consumer sets it."""
        return bool(self._header["waiting"])

    def unclaimed(self) -> int:
        """Upper bound on the number of published, unclaimed samples."""
        return int(self._header["tail"]) - int(self._header["head"])

    def describe(self, batch: int) -> BatchRecord:
        """What the record of a batch says."""
        with self._lock:
            record = self._batches[batch]
            return BatchRecord(
                generation=int(record["state"]) >> 16,
                first=int(record["first"]),
                count=int(record["count"]),
                bound=bool(record["bound"]),
                epoch=int(record["epoch"]),
                seed=int(record["seed"]),
                indices_offset=int(record["indices"]),
                indices_nbytes=int(record["indices_nbytes"]),
                epoch_slot=int(record["epoch_slot"]),
                flags=int(record["flags"]),
                layout=_layout_of(record),
                result=int(record["result"]),
                result_nbytes=int(record["result_nbytes"]),
                used_nbytes=int(record["cursor"]) - int(record["slot"]),
            )

    @staticmethod
    def can_hold(indices: Any) -> bool:
        """Whether a record can hold the indices: a list, not empty, of integers of 64 bits and no other type."""
        integers = type(indices) is list and set(map(type, indices)) == {int}
        return integers and min(indices) >= -_INT64 and max(indices) < _INT64

    def indices(self, batch: int, k: int, count: int) -> list[int]:
        """The integer indices of samples k … k+count-1."""
        with self._lock:
            first = self._range(batch).start + k
            return [
                int(self._positions[position & self._mask]["index"])
                for position in range(first, first + count)
            ]

    def occurrences(self, position: int, count: int) -> list[int] | None:
        """How often the index of each of ``count`` samples from this position on came before; None: of none it did."""
        with self._lock:
            found = [
                int(self._positions[each & self._mask]["occurrence"])
                for each in range(position, position + count)
            ]
        return found if any(found) else None

    def locate(self, position: int) -> tuple[int, int]:
        """``(batch, k)``: the position is that of sample k of the batch."""
        with self._lock:
            batch = int(self._positions[position & self._mask]["batch"])
            return batch, position - self._range(batch).start

    def is_placed(self, position: int) -> bool:
        """Whether it is settled in which batch this sample will lie."""
        with self._lock:
            return self._ticket(position) & NUMBER != 0

    def occupants(self, batch: int) -> list[int] | range:
        """Position of the sample that lies at each place of a full batch; -1: none does, as it was skipped.

        A range if each sample lies at its own place, which is the usual case.
        """
        with self._lock:
            own = self._range(batch)
            found = [
                -1 if self._is_skipped(place) else (self._place(place) & NUMBER) - 1
                for place in own
            ]
            return own if found == [*own] else found

    def blobs(self, batch: int) -> dict[int, tuple[int, int, int]]:
        """``(kind, offset, nbytes)`` of each place of a full batch that has a blob, by the place's number k."""
        with self._lock:
            found = {}
            for k, position in enumerate(self._range(batch)):
                record = self._positions[position & self._mask]
                if blob := int(record["blob"]):
                    nbytes = int(record["blob_nbytes"])
                    found[k] = (blob & KIND_MASK, blob & ~KIND_MASK, nbytes)
            return found

    # ---- inner parts, called with the lock held ---------------------------------------------

    def _range(self, batch: int) -> range:
        record = self._batches[batch]
        first = int(record["first"])
        return range(first, first + int(record["count"]))

    def _ticket(self, position: int) -> int:
        return int(self._positions[position & self._mask]["ticket"])

    def _set_ticket(self, position: int, word: int) -> None:
        self._positions[position & self._mask]["ticket"] = word

    def _is_skipped(self, place: int) -> bool:
        return int(self._positions[place & self._mask]["blob"]) & KIND_MASK == SKIP_BLOB

    def _place(self, position: int) -> int:
        return int(self._positions[position & self._mask]["place"])

    def _set_state(self, batch: int, code: int, worker: int = 0) -> None:
        state = int(self._batches[batch]["state"])
        self._batches[batch]["state"] = state >> 16 << 16 | worker << 4 | code

    def _epoch_slot_of(self, position: int) -> int:
        batch = int(self._positions[position & self._mask]["batch"])
        return int(self._batches[batch]["epoch_slot"])

    def _is_claimed(self, position: int, worker: int) -> bool:
        ticket = self._ticket(position)
        return ticket & STATE == CLAIMED and (ticket >> 48) & 0x3FFF == worker

    def _is_collating(self, batch: int, worker: int) -> bool:
        state = int(self._batches[batch]["state"])
        return state & 15 == COLLATING and (state >> 4) & 0xFFF == worker

    def _is_in_epoch_slot(self, place: int, epoch_slot: int) -> bool:
        # A closed batch leaves its places behind; the batch that reuses its record begins after them.
        batch = int(self._positions[place & self._mask]["batch"])
        return self._epoch_slot_of(place) == epoch_slot and place in self._range(batch)

    def _take(self, places: Iterable[int], epoch_slot: int, position: int) -> int:
        """Bind the first open place of the epoch among these to a sample; returns place + 1, 0 if there is none."""
        for place in places:
            # An open place says its own number, so none is taken for one that has gone round the ring.
            if self._place(place) == place + 1 and self._is_in_epoch_slot(place, epoch_slot):
                self._positions[place & self._mask]["place"] = BOUND | (position + 1)
                return place + 1
        return 0

    def _take_oldest(self, epoch_slot: int, position: int) -> int:
        record = self._epoch_slots[epoch_slot]
        place = self._take(range(int(record["cursor"]), int(record["limit"])), epoch_slot, position)
        if not place:
            raise AssertionError("as many places are open as samples are unplaced")
        record["cursor"] = place
        return place

    def _held(self, position: int) -> int:
        """The place (+ 1) that a worker took for this sample before it died, 0 if there is none."""
        held = np.flatnonzero(self._positions["place"] == BOUND | (position + 1))
        return int(self._positions["position"][held[0]]) + 1 if held.size else 0

    def _give_back(self, place: int) -> None:
        self._positions[(place - 1) & self._mask]["place"] = place
        record = self._epoch_slots[self._epoch_slot_of(place - 1)]
        record["cursor"] = min(int(record["cursor"]), place - 1)


def _create(
    buffer: Memory, size: int, num_workers: int, batch_capacity: int, position_capacity: int
) -> None:
    if not 0 < num_workers <= _MAX_WORKERS:
        raise ValueError(f"num_workers {num_workers} is not between 1 and {_MAX_WORKERS}")
    if position_capacity & (position_capacity - 1) or position_capacity <= 0:
        raise ValueError(f"position_capacity {position_capacity} is not a power of two")
    needed = Ledger.nbytes(num_workers, batch_capacity, position_capacity)
    if needed > size:
        raise ValueError(f"a ledger of {needed} bytes does not fit {size}")
    header: Any = np.frombuffer(buffer, _HEADER, 1)[0]
    if header["magic"]:
        raise ValueError("a ledger is made in memory of zeros, and this one has been used")
    header["version"] = _VERSION
    header["num_workers"] = num_workers
    header["batch_capacity"] = batch_capacity
    header["position_capacity"] = position_capacity
    header["magic"] = _MAGIC


@final
class WorkerLedger(Ledger):
    """The end of one worker: it claims samples, fills places, and publishes the batches that are full.

    Args:
        buffer: Memory of a ledger, which stays mapped for this end's life.
        number: The worker's, from 0 on.
        lock_fd: Descriptor of the memory; only the pure backend locks it.

    Raises:
        IndexError: The ledger has no worker of this number.
        ValueError: The memory is too small.
        RuntimeError: The other side runs another implementation or version of minato.
    """

    def __init__(self, buffer: Memory, number: int, lock_fd: int = -1) -> None:
        super().__init__(buffer, None, lock_fd)
        if not 0 <= number < len(self._workers):
            raise IndexError(f"worker {number} is not below {len(self._workers)}")
        self._number = number
        self._lease = Lease(buffer, _HEADER.itemsize + number * _WORKER.itemsize)

    @property
    def number(self) -> int:
        """The worker's, from 0 on."""
        return self._number

    @property
    def lease(self) -> Lease:
        """What the worker is on; nobody else writes it while the worker lives."""
        return self._lease

    def claim(self, max_run: int, fresh: bool = False) -> Claim | None:
        """Claim the oldest free samples: up to ``max_run`` consecutive ones of a batch, or one that begins early.

        Args:
            max_run: 0: a whole batch, or what is left of one whose first sample is done.
            fresh: None that was offered.

        Returns:
            None if there is nothing to claim.
        """
        with self._lock:
            if self._header["orphaned"] != self._header["orphans_checked"]:
                for index in range(len(self._batches)):
                    if self._publish_if_full(index) == MUST_COLLATE:
                        return Claim(index, 0, 0)
                self._header["orphans_checked"] = self._header["orphaned"]
            tail = int(self._header["tail"])
            position = int(self._header["head"])
            early = self._claim_hinted(position) if max_run else None
            if early is not None:
                index = int(self._positions[early & self._mask]["batch"])
                return Claim(index, early - self._range(index).start, 1)
            passed_over = tail  # the first free sample that is left to another worker
            while position < tail:
                record = self._positions[position & self._mask]
                if self._ticket(position) & STATE == FREE and int(record["position"]) == position:
                    index = int(record["batch"])
                    if self._may_claim(position, index, fresh) and (
                        max_run or not self._follows(position, index)
                    ):
                        break
                    passed_over = min(passed_over, position)
                position += 1
            self._header["head"] = min(position, passed_over)
            if position == tail:
                return None
            index = int(self._positions[position & self._mask]["batch"])
            end = self._range(index).stop
            claimed = range(position, min(position + max_run, end) if max_run else end)
            count = 0
            for other in claimed:
                ticket = self._ticket(other)
                if ticket & STATE != FREE or not self._may_claim(other, index, fresh):
                    break
                self._set_ticket(other, ticket & NUMBER | CLAIMED | self._number << 48)
                count += 1
            self._header["head"] = min(position + count, passed_over)
            return Claim(index, position - self._range(index).start, count)

    def offer(self, position: int) -> None:
        """Let any worker claim a sample that this one has claimed, and whose item it has stored."""
        with self._lock:
            self._set_ticket(position, FREE | OFFERED | self._ticket(position) & NUMBER)
            self._header["head"] = min(int(self._header["head"]), position)
        self._work.notify(1)

    def is_offered(self, position: int) -> bool:
        """Whether a sample that was offered still waits for a worker."""
        with self._lock:
            ticket, record = self._ticket(position), self._positions[position & self._mask]
            offered = ticket & STATE == FREE and ticket & OFFERED
            return bool(offered and record["position"] == position)

    def end(self, samples: int, busy_ns: int, idle_ns: int) -> None:
        """Note that the worker is between two leases, and add to its activity."""
        record = self._workers[self._number]
        record["position"] = 0
        for name, more in (("samples", samples), ("busy_ns", busy_ns), ("idle_ns", idle_ns)):
            record[name] = int(record[name]) + more  # NumPy 1 makes a float of uint64 + int

    @property
    def front(self) -> int:
        """How far claims in turn have come: all before this position are taken."""
        return int(self._header["head"])

    def reserve(
        self, position: int, count: int = 1, to_newest: bool = False
    ) -> tuple[int, int, int]:
        """Take places for finished samples: at most ``count``, from a position on.

        Args:
            to_newest: Take the newest open places, unless the consumer is waiting for a batch.

        Returns:
            ``(place, batch, taken)``: the first place, its batch, and how many of the samples got it and those after it
            in this batch; at least one.
        """
        with self._lock:
            place = self._reserve(position, to_newest)
            batch = int(self._positions[place & self._mask]["batch"])
            most, taken = min(count, self._range(batch).stop - place), 1
            # A sample whose place lies elsewhere keeps it, until it is reserved again.
            while taken < most and self._reserve(position + taken, to_newest) == place + taken:
                taken += 1
            return place, batch, taken

    def note_costs(self, position: int, costs: array[int] | memoryview, count: int) -> None:
        """Say what ``count`` samples from this position on have cost, in int64 memory of ns; before they are filled."""
        words = memoryview(costs)
        if words.nbytes < 8 * count:
            raise ValueError(f"{words.nbytes} bytes hold no {count} costs")
        with self._lock:
            for i in range(count):
                self._positions[(position + i) & self._mask]["cost_ns"] = words[i]

    def attach(self, place: int, blob: int, blob_nbytes: int) -> None:
        """Say what lies at a place besides the fields; before the place is filled.

        Args:
            blob: Arena offset, a multiple of 64, | one of the kinds SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB, END_BLOB.
        """
        with self._lock:
            there = self._positions[place & self._mask]
            there["blob"] = blob
            there["blob_nbytes"] = blob_nbytes

    def fill(self, position: int, place: int, count: int = 1) -> int:
        """Say that the results of samples lie at their places, which follow one another in one batch.

        Returns:
            MUST_COLLATE if this worker now has to collate the place's batch and call ``set_ready``; else PUBLISHED
            or NOT_COMPLETE. The batch may be gone afterwards.
        """
        with self._lock:
            for i in range(count):
                self._positions[(place + i) & self._mask]["place"] = FILLED | (position + i + 1)
                self._set_ticket(position + i, DONE | (place + i + 1))
            return self._publish_if_full(int(self._positions[place & self._mask]["batch"]))

    def fill_run(self, batch: int, k: int, count: int) -> int:
        """``fill`` for samples k … k+count-1 of a batch whose samples have their own places."""
        first = self._range(batch).start + k
        return self.fill(first, first, count)

    def skip(self, position: int) -> tuple[int, int]:
        """Say that a sample has no result; one without a place leaves it to another.

        Returns:
            ``(batch, answer)``: the batch that its place belongs to, or its own if it has none; and as for ``fill``.
        """
        with self._lock:
            place = self._ticket(position) & NUMBER
            if place:
                there = self._positions[(place - 1) & self._mask]
                batch = int(there["batch"])
                there["blob"] = SKIP_BLOB
                there["place"] = FILLED | (position + 1)
                self._set_ticket(position, DONE)
                return batch, self._publish_if_full(batch)
            self._set_ticket(position, DONE)
            batch = int(self._positions[position & self._mask]["batch"])
        self.notify_idle()  # it may have been what the consumer waits for
        return batch, NOT_COMPLETE

    def lacks_only(self, batch: int, k: int, count: int) -> bool:
        """Whether all places of a batch but those of samples k … k+count-1 are filled."""
        with self._lock:
            places = enumerate(self._range(batch))
            return all(
                k <= number < k + count or self._place(place) & STATE == FILLED
                for number, place in places
            )

    def set_result(self, batch: int, result: int, nbytes: int) -> None:
        """Say where the result of a whole batch lies, after everything else that is said of the batch.

        All samples whose places are not filled must be this worker's. From this store on the batch is complete: these
        places need no data, and if the worker dies, ``release`` fills them.
        """
        with self._lock:
            self._batches[batch]["result_nbytes"] = nbytes
            self._batches[batch]["result"] = result

    def set_ready(self, batch: int, result: int, nbytes: int) -> None:
        """Publish a batch after ``fill`` returned MUST_COLLATE; its result lies at arena offset ``result``."""
        with self._lock:
            self.set_result(batch, result, nbytes)
            self._set_state(batch, READY)
        self._ready.notify()

    def notify_idle(self) -> None:
        """Tell a waiting consumer that a worker finds nothing to do."""
        if self.waiting:
            self._ready.notify()

    def allocate(self, batch: int, nbytes: int) -> int:
        """Arena offset of ``nbytes`` fresh bytes in the batch's slot, aligned to 64.

        Raises:
            MemoryError: The slot's address range is too small.
        """
        with self._lock:
            record = self._batches[batch]
            rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
            offset, start, end = (int(record[name]) for name in ("cursor", "slot", "slot_end"))
            if offset + rounded > end:
                raise MemoryError(slot_overflow(end - start))
            record["cursor"] = offset + rounded
            return offset

    def reserve_fields(self, batch: int, nbytes: int) -> int:
        """Arena offset of ``nbytes`` for the batch's fields; 0: a layout is published already.

        Workers that begin a batch together get the same room, at the slot's start.

        Raises:
            MemoryError: The slot's address range is too small.
        """
        with self._lock:
            record = self._batches[batch]
            start, room = int(record["slot"]), -(-nbytes // ALIGNMENT) * ALIGNMENT | RESERVED
            if int(record["cursor"]) == start:
                offset = self.allocate(batch, nbytes)
                if not record["layout"]:
                    record["layout"] = room
                return offset
            if int(record["layout"]) == room:
                return start
            return 0 if _layout_of(record) else self.allocate(batch, nbytes)

    def publish_layout(self, batch: int, offset: int) -> int:
        """Offer a layout for the batch; returns the offset of the one that holds, the first offered."""
        with self._lock:
            if not _layout_of(self._batches[batch]):
                self._batches[batch]["layout"] = offset
            return int(self._batches[batch]["layout"])

    # ---- inner parts, called with the lock held ---------------------------------------------

    def _may_claim(self, position: int, batch: int, fresh: bool) -> bool:
        """Whether this worker may claim a free sample of a batch; ``fresh``: one that was not offered."""
        is_offered = bool(self._ticket(position) & OFFERED)
        is_mine = int(self._batches[batch]["owner"]) in (0, self._number + 1)
        return (is_mine or is_offered) and not (fresh and is_offered)

    def _follows(self, position: int, batch: int) -> bool:
        """Whether a worker that claims whole batches leaves a sample to the one that has, or will have, the first."""
        first = self._range(batch).start
        return position != first and self._ticket(first) & STATE != DONE

    def _claim_hinted(self, front: int) -> int | None:
        """Claim the hinted sample that should be started first, if one should by now; returns its position."""
        hints = self._header["hints"]
        while used := int(self._header["hints_used"]):
            least, chosen = front + 1, -1
            for i in range(used):
                word = int(hints[i])
                position = (word & NUMBER) - 1
                if word and position < front:
                    hints[i] = 0  # claims in order have reached it
                elif word and max(position - (word >> 48), 0) < least:
                    least, chosen = max(position - (word >> 48), 0), i
            if chosen < 0:
                return None
            position = (int(hints[chosen]) & NUMBER) - 1
            hints[chosen] = 0
            ticket = self._ticket(position)
            if (
                ticket & STATE == FREE
                and self._positions[position & self._mask]["position"] == position
            ):
                self._set_ticket(position, ticket & NUMBER | CLAIMED | self._number << 48)
                return position
        return None

    def _reserve(self, position: int, to_newest: bool) -> int:
        """The place of a finished sample, which takes one if it has none."""
        ticket = self._ticket(position)
        place = ticket & NUMBER
        if not place:
            take = self._take_newest if to_newest and not self.waiting else self._take_oldest
            place = take(self._epoch_slot_of(position), position)
            self._set_ticket(position, ticket | place)
        return place - 1

    def _publish_if_full(self, batch: int) -> int:
        """If the batch is full, win the right to publish it, and publish it if nothing is left to do."""
        record = self._batches[batch]
        # The last place is most often the last one to be filled.
        if int(record["state"]) & 15 != OPEN or any(
            self._place(position) & STATE != FILLED for position in reversed(self._range(batch))
        ):
            return NOT_COMPLETE
        # What to do follows from what lies at the places, so that nothing a dead worker said of itself outlives it.
        flags = 0
        for position in self._range(batch):
            flags |= 1 << (int(self._positions[position & self._mask]["blob"]) & KIND_MASK)
        record["flags"] = flags
        if (
            flags & (FAILED | ENDED)
            or record["result"]
            or (_layout_of(record) and not flags & (RAGGED | SKIPPED))
        ):
            self._set_state(batch, READY)
            self._ready.notify()
            return PUBLISHED
        self._set_state(batch, COLLATING, self._number)
        return MUST_COLLATE

    def _take_newest(self, epoch_slot: int, position: int) -> int:
        record = self._epoch_slots[epoch_slot]
        places = range(int(record["limit"]) - 1, int(record["cursor"]) - 1, -1)
        return self._take(places, epoch_slot, position) or self._take_oldest(epoch_slot, position)


@final
class ConsumerLedger(Ledger):
    """The end of the training process: it opens batches, takes what is ready, and recovers what dead workers leave.

    Args:
        buffer: Writable memory of ``Ledger.nbytes(...)`` zeros that every party maps, while the ledger lives. Only the
            pages that are used take memory.
        sizes: ``(num_workers, batch_capacity, position_capacity)``.
        lock_fd: Descriptor of the memory; only the pure backend locks it.

    Raises:
        ValueError: The memory is too small or was used, or the sizes make no sense.
    """

    def __init__(self, buffer: Memory, sizes: tuple[int, int, int], lock_fd: int = -1) -> None:
        super().__init__(buffer, sizes, lock_fd)
        # Records of the batches in flight, oldest first: their first positions.
        self._live: dict[int, int] = {}

    def worker(self, number: int) -> WorkerLedger:
        """The end of a worker that is a thread of this process, or in whose place this process acts."""
        end = WorkerLedger(self._buffer, number)
        end._lock = self._lock
        return end

    @property
    def slow_ns(self) -> int:
        """Nanoseconds above which a sample counts as slow; 0: nothing does."""
        return int(self._header["slow_ns"])

    @slow_ns.setter
    def slow_ns(self, value: int) -> None:
        self._header["slow_ns"] = value

    @property
    def waiting(self) -> bool:
        """Whether the consumer waits for a batch."""
        return bool(self._header["waiting"])

    @waiting.setter
    def waiting(self, value: bool) -> None:
        self._header["waiting"] = value

    def open_epoch(self, epoch_slot: int) -> None:
        """Start an epoch: its samples take places after the last opened one."""
        with self._lock:
            self._epoch_slots[epoch_slot] = (self._header["tail"], self._header["tail"])

    def has_room(self, count: int) -> bool:
        """Whether a batch of ``count`` samples can be opened now."""
        tail = int(self._header["tail"])
        base = next(iter(self._live.values()), tail)
        batches, positions = self.capacity
        return len(self._live) < batches and tail + count - base <= positions

    def open(
        self,
        indices: Sequence[int] | None,
        count: int,
        slot: tuple[int, int, int],
        epoch_slot: int,
        epoch: int,
        seed: int,
        bound: bool,
        *,
        indices_offset: int = 0,
        indices_nbytes: int = 0,
        wake: int = 2**31 - 1,
        owner: int = 0,
        occurrences: Sequence[int] | None = None,
    ) -> int:
        """Open a batch and offer its samples to the workers; ``has_room(count)`` must hold.

        Args:
            indices: One integer for each sample, ``NO_INTEGER`` for one that has none; None: no sample has one. Workers
                get what is pickled at ``indices_offset``, if something is.
            slot: ``(start, cursor, end)``: arena offsets of the batch's slot and of its first free byte.
            epoch_slot: Slot of the epoch in the ledger.
            epoch: Number of the epoch.
            seed: From which the randomness of the samples starts.
            bound: Whether each sample has its own place in this batch.
            indices_offset: Arena offset of pickled indices, in bytes.
            indices_nbytes: Their size.
            wake: How many sleeping workers to wake; 0: ``wake`` follows.
            owner: Number + 1 of the one worker that may claim these samples, if they are bound; 0: any may.
            occurrences: How often each index came before in the epoch; None: none did.

        Returns:
            The number of the batch's record, valid until ``retire``.

        Raises:
            ValueError: There is no room, or the number of indices is not ``count``.
        """
        with self._lock:
            self._check_open(count, indices, occurrences)
            states = self._batches["state"].tolist()
            index = next(i for i, state in enumerate(states) if state & 15 == VACANT)
            tail = int(self._header["tail"])
            self._open_positions(tail, count, index, bound, indices, occurrences)
            generation = (int(self._batches[index]["state"]) >> 16) + 1
            start, cursor, end = slot
            self._batches[index] = (
                generation << 16 | OPEN, tail, count, epoch_slot, start, cursor, 0, 0, 0, 0, 0,
                indices_offset, indices_nbytes, epoch, seed, bound, owner, end,
            )  # fmt: skip
            self._live[index] = tail
            self._epoch_slots[epoch_slot]["limit"] = tail + count
            self._header["tail"] = tail + count
        if wake:
            self._work.notify(wake)
        return index

    def _check_open(
        self, count: int, indices: Sequence[int] | None, occurrences: Sequence[int] | None
    ) -> None:
        if not self.has_room(count):
            raise ValueError(f"there is no room for a batch of {count} samples")
        for values in (indices, occurrences):
            if values is not None and len(values) != count:
                raise ValueError(
                    f"{len(values)} indices are not those of a batch of {count} samples"
                )

    def _open_positions(
        self,
        tail: int,
        count: int,
        batch: int,
        bound: bool,
        indices: Sequence[int] | None,
        occurrences: Sequence[int] | None,
    ) -> None:
        """Write the positions of a batch, which no worker sees before the tail has moved; with the lock held."""
        for k in range(count):
            position = tail + k
            own = position + 1
            self._positions[position & self._mask] = (
                FREE | own if bound else FREE, BOUND | own if bound else own, 0, 0,
                NO_INTEGER if indices is None else indices[k], 0, position, batch,
                0 if occurrences is None else occurrences[k],
            )  # fmt: skip

    def wake(self, most: int) -> None:
        """Wake up to ``most`` sleeping workers, after batches were opened without."""
        self._work.notify(most)

    def bind_late(self, old: int, new: int) -> None:
        """Give every unplaced sample of batch ``old`` a place: in batch ``new``, or else the oldest open one."""
        with self._lock:
            epoch_slot = int(self._batches[old]["epoch_slot"])
            for position in self._range(old):
                ticket = self._ticket(position)
                if ticket & STATE in (DONE, CANCELLED) or ticket & NUMBER:
                    continue
                place = (
                    self._held(position)
                    or self._take(self._range(new), epoch_slot, position)
                    or self._take_oldest(epoch_slot, position)
                )
                self._set_ticket(position, ticket | place)

    def start_early(self, position: int, ahead: int) -> bool:
        """Let an unbound sample start ``ahead`` samples early; return False if the table of hints is full."""
        with self._lock:
            free = np.flatnonzero(self._header["hints"] == 0)
            if not free.size:
                return False
            self._header["hints"][free[0]] = min(ahead, _MOST_AHEAD) << 48 | (position + 1)
            self._header["hints_used"] = max(int(self._header["hints_used"]), int(free[0]) + 1)
            return True

    def state(self, batch: int) -> int:
        """OPEN, COLLATING, READY or CLOSED (VACANT after ``retire``)."""
        with self._lock:
            return int(self._batches[batch]["state"]) & 15

    def settled(self, batch: int) -> bool:
        """Whether no worker runs, or will run, a sample of this batch.

        Where samples take places in other batches, a batch that is not full may still be written to until all batches
        of its epoch are settled.
        """
        with self._lock:
            return all(
                self._ticket(position) & STATE in (DONE, CANCELLED)
                for position in self._range(batch)
            )

    def fill_skipped(self, epoch_slot: int) -> None:
        """Fill the places that are left over when all samples of an epoch are settled and some of them are skipped."""
        with self._lock:
            for index in self._live:
                if int(self._batches[index]["epoch_slot"]) != epoch_slot:
                    continue
                for position in self._range(index):
                    if self._place(position) & STATE != FILLED:
                        there = self._positions[position & self._mask]
                        there["blob"], there["place"] = SKIP_BLOB, FILLED
            # The next claim looks for full batches without a collating worker.
            self._header["orphaned"] += 1
        self._work.notify()

    def skipped(self, batch: int) -> list[int]:
        """Positions of those samples of a settled batch that have no result."""
        with self._lock:
            return [position for position in self._range(batch) if self._ticket(position) == DONE]

    def costs(self, batch: int) -> list[tuple[int, int]]:
        """``(index, cost in ns)`` of the samples at the places of a full batch.

        Samples without an integer index or a known cost are left out, and those whose own batch is long gone.
        """
        with self._lock:
            found = []
            for place in self._range(batch):
                position = (self._place(place) & NUMBER) - 1
                sample = self._positions[position & self._mask]
                known = sample["position"] == position and sample["cost_ns"]
                if known and sample["index"] != NO_INTEGER:
                    found.append((int(sample["index"]), int(sample["cost_ns"])))
            return found

    def num_slow(self, batch: int) -> int:
        """How many of the samples at the places of a full batch have cost more than ``slow_ns``; 0 while that is 0."""
        with self._lock:
            slow_ns = int(self._header["slow_ns"])
            count = 0
            for place in self._range(batch) if slow_ns else ():
                position = (self._place(place) & NUMBER) - 1
                sample = self._positions[position & self._mask]
                count += bool(sample["position"] == position and sample["cost_ns"] > slow_ns)
            return count

    def cancel(self, batch: int) -> None:
        """Cancel the unclaimed samples of this batch."""
        with self._lock:
            for position in self._range(batch):
                if self._ticket(position) & STATE == FREE:
                    self._set_ticket(position, CANCELLED)

    def close(self, batch: int) -> bool:
        """Forbid that anybody collates or publishes this batch any more; its places can still be filled.

        Returns:
            False while a worker collates it: ask again later.
        """
        with self._lock:
            if self.state(batch) == OPEN:
                self._set_state(batch, CLOSED)
            return self.state(batch) != COLLATING

    def retire(self, batch: int, first: int = -1) -> None:
        """Free the record of a batch that is settled and delivered, or closed with its whole epoch settled.

        Args:
            first: Position of its sample 0. If the record is free, or that of another batch, this does nothing. -1: it
                is the record of a batch in flight.
        """
        with self._lock:
            if first < 0 or self._live.get(batch) == first:
                del self._live[batch]
                self._set_state(batch, VACANT)

    @property
    def live(self) -> list[int]:
        """The records of the batches in flight, the oldest first."""
        return list(self._live)

    @property
    def tail(self) -> int:
        """Position of the first sample of the batch that is opened next."""
        return int(self._header["tail"])

    def shut_down(self, drain: bool = False) -> None:
        """Make every worker leave: after its current lease, or, with ``drain``, when nothing is left to claim."""
        self._header["shutdown"] = DRAINING if drain else STOPPING
        self._work.notify()

    def release(self, worker: int) -> int:
        """Offer again what a dead worker had claimed and not finished; a batch whose result it has set is finished.

        Only for a worker that cannot run any more.

        Returns:
            How many samples go out again.
        """
        with self._lock:
            tail = int(self._header["tail"])
            base = next(iter(self._live.values()), tail)
            released = 0
            # Backwards, so that a worker that claims the first sample of a batch finds the others free.
            for position in reversed(range(base, tail)):
                ticket = self._ticket(position)
                if not self._is_claimed(position, worker):
                    # The worker may have died after it had offered a sample, and before it lowered the head.
                    if ticket & STATE == FREE and ticket & OFFERED:
                        self._header["head"] = min(int(self._header["head"]), position)
                    continue
                place = ticket & NUMBER
                if not place:
                    # A place that the worker had taken without having said so on the ticket is open again.
                    held = self._held(position)
                    if held:
                        self._give_back(held)
                else:
                    there = self._positions[(place - 1) & self._mask]
                    record = self._batches[int(self._positions[position & self._mask]["batch"])]
                    empty = self._place(place - 1) == BOUND | (position + 1)
                    if empty and record["bound"] and record["result"]:
                        # The result of the whole batch is there: the worker was about to fill its places.
                        there["place"] = FILLED | (position + 1)
                        empty = False
                    if not empty:
                        # Once filled, the place may long have been delivered and have come round the ring.
                        skipped = (
                            int(there["place"]) == FILLED | (position + 1)
                            and int(there["blob"]) & KIND_MASK == SKIP_BLOB
                        )
                        self._set_ticket(position, DONE if skipped else DONE | place)
                        continue
                    there["blob"] = 0
                # Only what was offered can have been claimed by another than the owner: it stays offered.
                index = int(self._positions[position & self._mask]["batch"])
                is_own = int(self._batches[index]["owner"]) in (0, worker + 1)
                self._set_ticket(position, FREE | place if is_own else FREE | OFFERED | place)
                self._header["head"] = min(int(self._header["head"]), position)
                released += 1
            for index in self._live:
                if self._is_collating(index, worker):
                    self._set_state(index, OPEN)
            self._workers[worker]["step"] = -1  # the next worker has not begun
            self._workers[worker]["position"] = 0
            # The next claim looks for full batches without a collating worker.
            self._header["orphaned"] += 1
        self._work.notify()
        return released

    def owns(self, worker: int) -> bool:
        """Whether a worker has claimed a sample or collates a batch: if it has ended, ``release`` is due."""
        with self._lock:
            tail = int(self._header["tail"])
            return any(
                self._is_claimed(position, worker)
                for position in range(next(iter(self._live.values()), tail), tail)
            ) or any(self._is_collating(index, worker) for index in self._live)

    def is_unfinished(self, worker: int, position: int) -> bool:
        """Whether a worker that has ended left it open what becomes of a sample.

        It has claimed the sample and its result is not there, or it was collating the batch that the sample lies in.
        """
        with self._lock:
            if int(self._positions[position & self._mask]["position"]) != position:
                return False
            place = (self._ticket(position) & NUMBER) - 1
            if place < 0:
                return self._is_claimed(position, worker)
            index = int(self._positions[place & self._mask]["batch"])
            if index not in self._live or place not in self._range(index):
                return False
            if not self._is_claimed(position, worker):
                return self._is_collating(index, worker)
            record = self._batches[index]
            return self._place(place) == BOUND | (position + 1) and not (
                record["bound"] and record["result"]
            )

    def lease(self, worker: int) -> LeaseState:
        """What a worker is on."""
        record = self._workers[worker]
        position = int(record["position"])
        return LeaseState(
            position - 1 if position else None,
            int(record["started_ns"]),
            int(record["step"]),
        )

    def activity(self, worker: int) -> Activity:
        """What a worker has done so far."""
        record = self._workers[worker]
        return Activity(*(int(record[name]) for name in Activity._fields))
