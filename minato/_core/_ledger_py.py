"""Who works on which sample, and where its result goes (pure Python).

The readable specification of the compiled ledger: the same records, but every operation runs under one lock instead
of through atomic words. The lock is a POSIX record lock on the segment's descriptor, which the kernel releases when
its holder dies, so a killed worker wedges nobody here either.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minato._core._wait_py import Gate

try:
    import fcntl
except ImportError:  # Windows has threads only
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "CLOSED",
    "COLLATING",
    "ENDED",
    "END_BLOB",
    "ERROR_BLOB",
    "FAILED",
    "KIND_MASK",
    "MUST_COLLATE",
    "NOT_COMPLETE",
    "NUM_PASSES",
    "OPEN",
    "PUBLISHED",
    "RAGGED",
    "READY",
    "SAMPLE_BLOB",
    "TEXTS",
    "TEXT_BLOB",
    "VACANT",
    "Ledger",
]

NUM_PASSES = 8

VACANT, OPEN, COLLATING, READY, CLOSED = range(5)
NOT_COMPLETE, PUBLISHED, MUST_COLLATE = range(3)
SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB, END_BLOB = 1, 2, 3, 4
KIND_MASK = 63
# A batch that holds a blob of a kind has the flag 1 << kind.
RAGGED, FAILED, TEXTS = 1 << SAMPLE_BLOB, 1 << ERROR_BLOB, 1 << TEXT_BLOB
ENDED = 1 << END_BLOB

_MAGIC = 0x6F74616E696D
_VERSION = 1
_ALIGNMENT = 64
_STOPPING, _DRAINING = 1, 2
_MAX_WORKERS = 4096
"""As many as have a number in the state of a batch."""

# States of a ticket and of a place, in the upper two bits of their words.
_FREE, _CLAIMED, _DONE, _CANCELLED = (state << 62 for state in range(4))
_BOUND, _FILLED = 1 << 62, 2 << 62
_STATE = 3 << 62
_NUMBER = (1 << 48) - 1

_HEADER = np.dtype(
    {
        "names": [
            "magic", "version", "compiled", "num_workers", "batch_capacity", "position_capacity",
            "slow_ns", "shutdown", "stranded", "waiting", "head", "tail", "passes",
        ],
        "formats": [
            "u8", "u4", "u4", "u4", "u4", "u8",
            "u8", "u4", "u4", "u8", "u8", "u8", ([("cursor", "u8"), ("limit", "u8")], (NUM_PASSES,)),
        ],
        "offsets": [0, 8, 12, 16, 20, 24, 32, 40, 44, 48, 64, 128, 320],
        "itemsize": 448,
    }
)  # fmt: skip
_WORK_GATE, _READY_GATE = 192, 256
_WORKER = np.dtype(
    [
        ("position", "u8"), ("started_ns", "u8"), ("step", "i8"),
        ("samples", "u8"), ("busy_ns", "u8"), ("idle_ns", "u8"), ("pad", "u8", 2),
    ]
)  # fmt: skip
_BATCH = np.dtype(
    [
        ("state", "u8"), ("first", "u8"), ("count", "u4"), ("pass_index", "u4"), ("slot", "u8"),
        ("cursor", "u8"), ("layout", "u8"), ("flags", "u8"), ("hint", "u8"), ("result", "u8"),
        ("result_nbytes", "u8"), ("keys", "u8"), ("keys_nbytes", "u8"), ("epoch", "i8"), ("seed", "i8"),
        ("bound", "u4"), ("owner", "u4"), ("slot_end", "u8"),
    ]
)  # fmt: skip
_POSITION = np.dtype(
    [
        ("ticket", "u8"), ("place", "u8"), ("blob", "u8"), ("blob_nbytes", "u8"), ("key", "i8"),
        ("cost_ns", "u8"), ("position", "u8"), ("batch", "u4"), ("pad", "u4"),
    ]
)  # fmt: skip


class Ledger:
    """All scheduling state of one loader, in memory that its workers share.

    Every sample in flight owns a position with two words: its ticket (who works on it) and its place (whose
    result lies there). A transition is one atomic store or compare-and-swap, so a worker may be killed at any
    instruction: what it did not finish is still claimed by it, and ``release`` gives it out again.

    Args:
        buffer: Writable memory of ``Ledger.nbytes(...)`` that every party maps; it stays mapped for the ledger's life.
        sizes: ``(num_workers, batch_capacity, position_capacity)`` to create a ledger, None to attach to one.
        lock_fd: Descriptor of the memory; only the pure twin locks it.

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
            if Ledger.nbytes(*sizes) > size:
                raise ValueError(f"a ledger of {Ledger.nbytes(*sizes)} bytes does not fit {size}")
            # The positions need not be blank: nobody looks at one that was not published.
            blank = Ledger.nbytes(num_workers, batch_capacity, 0)
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
        needed = Ledger.nbytes(
            *(int(header[name]) for name in ("num_workers", "batch_capacity", "position_capacity"))
        )
        if needed > size:
            raise ValueError(f"a ledger of {needed} bytes does not fit {size}")
        self._header = header
        self._passes = header["passes"]
        self._mask = int(header["position_capacity"]) - 1
        offset = _HEADER.itemsize
        self._workers: Any = np.frombuffer(buffer, _WORKER, int(header["num_workers"]), offset)
        offset += self._workers.nbytes
        self._batches: Any = np.frombuffer(buffer, _BATCH, int(header["batch_capacity"]), offset)
        offset += self._batches.nbytes
        self._positions: Any = np.frombuffer(buffer, _POSITION, self._mask + 1, offset)
        self._work = Gate(buffer, _WORK_GATE)
        self._ready = Gate(buffer, _READY_GATE)
        self._live: dict[int, int] = {}
        self._lock_fd = lock_fd
        self._thread_lock = threading.RLock()
        self._depth = 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Record locks belong to the process, so threads need a lock of their own; both may be entered again.
        with self._thread_lock:
            self._depth += 1
            try:
                if self._depth == 1 and self._lock_fd >= 0 and fcntl is not None:
                    fcntl.lockf(self._lock_fd, fcntl.LOCK_EX)
                yield
            finally:
                if self._depth == 1 and self._lock_fd >= 0 and fcntl is not None:
                    fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)
                self._depth -= 1

    @property
    def work_gate_offset(self) -> int:
        """Where the gate lies that workers sleep on."""
        return _WORK_GATE

    @property
    def ready_gate_offset(self) -> int:
        """Where the gate lies that the consumer sleeps on."""
        return _READY_GATE

    @property
    def capacity(self) -> tuple[int, int]:
        """``(batches, positions)`` that can be in flight."""
        return int(self._header["batch_capacity"]), self._mask + 1

    @property
    def stopping(self) -> bool:
        """True once ``shut_down`` was called: workers leave after the lease in hand."""
        return bool(self._header["shutdown"] == _STOPPING)

    @property
    def draining(self) -> bool:
        """True once ``shut_down(drain=True)`` was called: workers leave when nothing is left to claim."""
        return bool(self._header["shutdown"] == _DRAINING)

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

    # ---- the consumer's side ----------------------------------------------------------------

    def open_pass(self, pass_index: int) -> None:
        """Start a run over the sampler: its samples will take places after the last published one."""
        with self._locked():
            self._passes[pass_index] = (self._header["tail"], self._header["tail"])

    def has_room(self, count: int) -> bool:
        """Whether a batch of ``count`` samples can be published now."""
        tail = int(self._header["tail"])
        base = next(iter(self._live.values()), tail)
        batches, positions = self.capacity
        return len(self._live) < batches and tail + count - base <= positions

    def publish(
        self,
        keys: Sequence[int] | None,
        count: int,
        slot: tuple[int, int, int],
        pass_index: int,
        epoch: int,
        seed: int,
        bound: bool,
        keys_offset: int = 0,
        keys_nbytes: int = 0,
        wake: int = 2**31 - 1,
        owner: int = 0,
    ) -> int:
        """Open a batch and offer its samples to the workers; ``has_room(count)`` must hold.

        Args:
            keys: ``count`` integers, or None when the keys are pickled at ``keys_offset``.
            slot: ``(start, cursor, end)``: arena offsets of the batch's slot and of its first free byte.
            wake: How many sleeping workers to wake.
            owner: Number + 1 of the one worker that may claim these samples, if they are bound; 0: any may.

        Returns:
            The number of the batch's record, valid until ``retire``.

        Raises:
            ValueError: There is no room.
        """
        with self._locked():
            if not self.has_room(count):
                raise ValueError(f"there is no room for a batch of {count} samples")
            index = next(i for i, word in enumerate(self._batches["state"]) if word & 15 == VACANT)
            tail = int(self._header["tail"])
            for k in range(count):
                seq = tail + k
                own = seq + 1
                self._positions[seq & self._mask] = (
                    _FREE | own if bound else _FREE, _BOUND | own if bound else own, 0, 0,
                    0 if keys is None else keys[k], 0, seq, index, 0,
                )  # fmt: skip
            generation = (int(self._batches[index]["state"]) >> 16) + 1
            start, cursor, end = slot
            self._batches[index] = (
                generation << 16 | OPEN, tail, count, pass_index, start, cursor, 0, 0, 0, 0, 0,
                keys_offset, keys_nbytes, epoch, seed, bound, owner, end,
            )  # fmt: skip
            self._live[index] = tail
            self._passes[pass_index]["limit"] = tail + count
            self._header["tail"] = tail + count
        self._work.notify(wake)
        return index

    def bind_late(self, old: int, new: int) -> None:
        """Give every unplaced sample of batch ``old`` a place: in batch ``new``, or else the oldest open one."""
        with self._locked():
            pass_index = int(self._batches[old]["pass_index"])
            for seq in self._range(old):
                ticket = self._ticket(seq)
                if ticket & _STATE in (_DONE, _CANCELLED) or ticket & _NUMBER:
                    continue
                place = (
                    self._held(seq)
                    or self._take(self._range(new), pass_index, seq)
                    or self._take_oldest(pass_index, seq)
                )
                self._set_ticket(seq, ticket | place)

    def state(self, batch: int) -> int:
        """OPEN, COLLATING, READY or CLOSED (VACANT after ``retire``)."""
        with self._locked():
            return int(self._batches[batch]["state"]) & 15

    def settled(self, batch: int) -> bool:
        """Whether nobody works on a sample of this batch or will.

        Where samples take places in other batches, a batch that is not full may still be written to until all batches
        of its pass are settled.
        """
        with self._locked():
            return all(
                self._ticket(seq) & _STATE in (_DONE, _CANCELLED) for seq in self._range(batch)
            )

    def cancel(self, batch: int) -> None:
        """Take back the samples of this batch that nobody has claimed yet."""
        with self._locked():
            for seq in self._range(batch):
                if self._ticket(seq) & _STATE == _FREE:
                    self._set_ticket(seq, _CANCELLED)

    def close(self, batch: int) -> bool:
        """Forbid that anybody collates or publishes this batch any more; its places can still be filled.

        Returns:
            False while a worker collates it: ask again later.
        """
        with self._locked():
            if self.state(batch) == OPEN:
                self._set_state(batch, CLOSED)
            return self.state(batch) != COLLATING

    def retire(self, batch: int) -> None:
        """Free the record of a batch that is settled and delivered, or closed with its whole pass settled."""
        with self._locked():
            del self._live[batch]
            self._set_state(batch, VACANT)

    def release(self, worker: int) -> int:
        """Offer again what a dead worker had claimed and not finished.

        Only for a worker that cannot run any more.

        Returns:
            How many samples go out again.
        """
        with self._locked():
            tail = int(self._header["tail"])
            base = next(iter(self._live.values()), tail)
            released = 0
            for seq in range(base, tail):
                ticket = self._ticket(seq)
                if ticket & _STATE != _CLAIMED or (ticket >> 48) & 0x3FFF != worker:
                    continue
                place = ticket & _NUMBER
                if not place:
                    # A place that the worker had taken without having said so on the ticket is open again.
                    held = self._held(seq)
                    if held:
                        self._give_back(held)
                elif self._place(place - 1) != _BOUND | (seq + 1):
                    # Once filled, the place may long have been delivered and have come round the ring.
                    self._set_ticket(seq, _DONE | place)
                    continue
                else:
                    self._positions[(place - 1) & self._mask]["blob"] = 0
                record = self._batches[int(self._positions[seq & self._mask]["batch"])]
                if record["bound"]:
                    record["result"] = 0
                self._set_ticket(seq, _FREE | place)
                self._header["head"] = min(int(self._header["head"]), seq)
                released += 1
            for index in self._live:
                state = int(self._batches[index]["state"])
                if state & 15 == COLLATING and (state >> 4) & 0xFFF == worker:
                    self._set_state(index, OPEN)
            self._workers[worker]["position"] = 0
            # Whoever claims next looks for batches that are full and that nobody collates.
            self._header["stranded"] += 1
        self._work.notify()
        return released

    def unclaimed(self) -> int:
        """How many published samples nobody has claimed yet (an upper bound)."""
        return int(self._header["tail"]) - int(self._header["head"])

    def shut_down(self, drain: bool = False) -> None:
        """Tell every worker to leave: after the lease in hand, or when nothing is left to claim."""
        self._header["shutdown"] = _DRAINING if drain else _STOPPING
        self._work.notify()

    def lease(self, worker: int) -> tuple[int | None, int, int]:
        """``(position or None, started_ns, step)`` that a worker is on; step -1 is the dataset itself."""
        record = self._workers[worker]
        position = int(record["position"])
        return (
            position - 1 if position else None,
            int(record["started_ns"]),
            int(record["step"]),
        )

    def locate(self, position: int) -> tuple[int, int]:
        """``(batch, k)``: the position is that of sample k of the batch."""
        with self._locked():
            batch = int(self._positions[position & self._mask]["batch"])
            return batch, position - self._range(batch).start

    def activity(self, worker: int) -> tuple[int, int, int]:
        """``(samples, busy_ns, idle_ns)`` of a worker so far."""
        record = self._workers[worker]
        return int(record["samples"]), int(record["busy_ns"]), int(record["idle_ns"])

    # ---- the workers' side ------------------------------------------------------------------

    def claim(self, worker: int, max_run: int) -> tuple[int, int, int] | None:
        """Claim the oldest free samples: up to ``max_run`` consecutive ones of one batch.

        Returns:
            ``(batch, k, count)``: the samples k … k+count-1 of the batch; count 0: collate this batch, whose
            worker died. None if there is nothing to claim.
        """
        with self._locked():
            if self._header["stranded"]:
                for index in range(len(self._batches)):
                    if self._complete(worker, index) == MUST_COLLATE:
                        return index, 0, 0
                self._header["stranded"] = 0
            tail = int(self._header["tail"])
            seq = int(self._header["head"])
            passed_over = tail  # the first free sample that is for another worker
            while seq < tail:
                position = self._positions[seq & self._mask]
                if self._ticket(seq) & _STATE == _FREE and int(position["position"]) == seq:
                    if int(self._batches[int(position["batch"])]["owner"]) in (0, worker + 1):
                        break
                    passed_over = min(passed_over, seq)
                seq += 1
            self._header["head"] = min(seq, passed_over)
            if seq == tail:
                return None
            index = int(self._positions[seq & self._mask]["batch"])
            claimed = range(seq, min(seq + max_run, self._range(index).stop))
            count = 0
            for other in claimed:
                ticket = self._ticket(other)
                if ticket & _STATE != _FREE:
                    break
                self._set_ticket(other, ticket | _CLAIMED | worker << 48)
                count += 1
            self._header["head"] = min(seq + count, passed_over)
            return index, seq - self._range(index).start, count

    def describe(self, batch: int) -> tuple[int, int, int, bool, int, int, int, int, int]:
        """What a worker must know of a batch.

        Returns:
            ``(generation, first, count, bound, epoch, seed, keys_offset, keys_nbytes, pass_index)``; first is the
            position of its sample 0, and generation tells one use of the record from the next.
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
                int(record["keys"]),
                int(record["keys_nbytes"]),
                int(record["pass_index"]),
            )

    def keys(self, batch: int, k: int, count: int) -> list[int]:
        """The integer keys of samples k … k+count-1."""
        with self._locked():
            first = self._range(batch).start + k
            return [
                int(self._positions[seq & self._mask]["key"]) for seq in range(first, first + count)
            ]

    def lease_words(self, worker: int) -> memoryview:
        """What ``lease`` reads, as int64 memory for ``run_samples``: position + 1, started_ns, step."""
        return memoryview(self._workers[worker : worker + 1]).cast("B")[:24].cast("q")

    def end(self, worker: int, samples: int, busy_ns: int, idle_ns: int) -> None:
        """Note that the worker is between two leases, and add to its activity."""
        record = self._workers[worker]
        record["position"] = 0
        record["samples"] += samples
        record["busy_ns"] += busy_ns
        record["idle_ns"] += idle_ns

    def reserve(self, worker: int, position: int, late: bool = False) -> tuple[int, int, int]:
        """Take a place for a finished sample.

        Args:
            late: Take the newest open place, unless the consumer is waiting for a batch.

        Returns:
            ``(place, batch, k)``: the place is number k of the batch.
        """
        with self._locked():
            ticket = self._ticket(position)
            place = ticket & _NUMBER
            if not place:
                take = self._take_newest if late and not self.waiting else self._take_oldest
                place = take(self._pass_of(position), position)
                self._set_ticket(position, ticket | place)
            place -= 1
            batch = int(self._positions[place & self._mask]["batch"])
            return place, batch, place - self._range(batch).start

    def attach(self, place: int, blob: int, blob_nbytes: int) -> None:
        """Say what lies at a place besides the fields; before the place is filled.

        Args:
            blob: Arena offset, a multiple of 64, | SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB or END_BLOB.
        """
        with self._locked():
            there = self._positions[place & self._mask]
            there["blob"] = blob
            there["blob_nbytes"] = blob_nbytes

    def fill(self, worker: int, position: int, place: int, cost_ns: int = 0) -> int:
        """Say that the sample's result lies at its place.

        Returns:
            MUST_COLLATE if this worker now has to collate the place's batch and call ``set_ready``; else PUBLISHED
            or NOT_COMPLETE. The batch may be gone afterwards.
        """
        with self._locked():
            self._fill_one(position, place, cost_ns)
            return self._complete(worker, int(self._positions[place & self._mask]["batch"]))

    def fill_run(self, worker: int, batch: int, k: int, count: int, cost_ns: int = 0) -> int:
        """``fill`` for samples k … k+count-1 of a batch whose samples have their own places."""
        with self._locked():
            first = self._range(batch).start + k
            for seq in range(first, first + count):
                self._fill_one(seq, seq, cost_ns)
            return self._complete(worker, batch)

    def set_result(self, batch: int, result: int, nbytes: int) -> None:
        """Say where the collated result of a batch lies whose last samples are about to be filled in."""
        with self._locked():
            self._batches[batch]["result_nbytes"] = nbytes
            self._batches[batch]["result"] = result

    def set_ready(self, batch: int, result: int, nbytes: int) -> None:
        """Publish a batch that ``fill`` told this worker to collate, with its result at arena offset ``result``."""
        with self._locked():
            self.set_result(batch, result, nbytes)
            self._set_state(batch, READY)
        self._ready.notify()

    def hungry(self) -> None:
        """Tell a waiting consumer that a worker finds nothing to do."""
        if self.waiting:
            self._ready.notify()

    def allocate(self, batch: int, nbytes: int) -> int:
        """Arena offset of ``nbytes`` fresh bytes in the batch's slot, aligned to 64.

        Raises:
            MemoryError: The slot's address range is too small.
        """
        with self._locked():
            record = self._batches[batch]
            rounded = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            offset, start, end = (int(record[name]) for name in ("cursor", "slot", "slot_end"))
            if offset + rounded > end:
                raise MemoryError(
                    f"a batch needs more than the {end - start} bytes of address space of its slot: "
                    "use smaller batches, or raise the limit on address space (ulimit -v)"
                )
            record["cursor"] = offset + rounded
            return offset

    def publish_layout(self, batch: int, offset: int) -> int:
        """Offer a layout for the batch; returns the offset of the one that holds, the first offered."""
        with self._locked():
            if not self._batches[batch]["layout"]:
                self._batches[batch]["layout"] = offset
            return int(self._batches[batch]["layout"])

    def fields(self, batch: int) -> tuple[int, int, int]:
        """``(generation, layout, count)``: what a worker needs to find a place in the batch's fields."""
        with self._locked():
            record = self._batches[batch]
            return int(record["state"]) >> 16, int(record["layout"]), int(record["count"])

    # ---- both sides -------------------------------------------------------------------------

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
            for seq in self._range(batch):
                record = self._positions[seq & self._mask]
                blob = int(record["blob"])
                found.append((blob & KIND_MASK, blob & ~KIND_MASK, int(record["blob_nbytes"])))
            return found

    def occupants(self, batch: int) -> list[int]:
        """Position of the sample that lies at each place of a full batch."""
        with self._locked():
            return [(self._place(seq) & _NUMBER) - 1 for seq in self._range(batch)]

    # ---- inner parts, called with the lock held ---------------------------------------------

    def _range(self, batch: int) -> range:
        record = self._batches[batch]
        first = int(record["first"])
        return range(first, first + int(record["count"]))

    def _ticket(self, seq: int) -> int:
        return int(self._positions[seq & self._mask]["ticket"])

    def _set_ticket(self, seq: int, word: int) -> None:
        self._positions[seq & self._mask]["ticket"] = word

    def _place(self, seq: int) -> int:
        return int(self._positions[seq & self._mask]["place"])

    def _set_state(self, batch: int, code: int, worker: int = 0) -> None:
        state = int(self._batches[batch]["state"])
        self._batches[batch]["state"] = state >> 16 << 16 | worker << 4 | code

    def _pass_of(self, seq: int) -> int:
        batch = int(self._positions[seq & self._mask]["batch"])
        return int(self._batches[batch]["pass_index"])

    def _take(self, places: Iterable[int], pass_index: int, seq: int) -> int:
        """Bind the first open place of the pass among these to a sample; returns place + 1, 0 if there is none."""
        for place in places:
            # An open place says its own number, so none is taken for one that has gone round the ring.
            if self._place(place) == place + 1 and self._is_in_pass(place, pass_index):
                self._positions[place & self._mask]["place"] = _BOUND | (seq + 1)
                return place + 1
        return 0

    def _is_in_pass(self, place: int, pass_index: int) -> bool:
        # A batch that was closed leaves its places behind; whoever has its record now, begins after them.
        batch = int(self._positions[place & self._mask]["batch"])
        return self._pass_of(place) == pass_index and place in self._range(batch)

    def _take_oldest(self, pass_index: int, seq: int) -> int:
        record = self._passes[pass_index]
        place = self._take(range(int(record["cursor"]), int(record["limit"])), pass_index, seq)
        if not place:
            raise AssertionError("as many places are open as samples are unplaced")
        record["cursor"] = place
        return place

    def _take_newest(self, pass_index: int, seq: int) -> int:
        record = self._passes[pass_index]
        places = range(int(record["limit"]) - 1, int(record["cursor"]) - 1, -1)
        return self._take(places, pass_index, seq) or self._take_oldest(pass_index, seq)

    def _held(self, seq: int) -> int:
        """The place (+ 1) that a worker took for this sample before it died, 0 if there is none."""
        held = np.flatnonzero(self._positions["place"] == _BOUND | (seq + 1))
        return int(self._positions["position"][held[0]]) + 1 if held.size else 0

    def _give_back(self, place: int) -> None:
        self._positions[(place - 1) & self._mask]["place"] = place
        record = self._passes[self._pass_of(place - 1)]
        record["cursor"] = min(int(record["cursor"]), place - 1)

    def _fill_one(self, position: int, place: int, cost_ns: int) -> None:
        self._positions[position & self._mask]["cost_ns"] = cost_ns
        self._positions[place & self._mask]["place"] = _FILLED | (position + 1)
        self._set_ticket(position, _DONE | (place + 1))

    def _complete(self, worker: int, batch: int) -> int:
        """If the batch is full, win the right to publish it, and publish it if nothing is left to do."""
        record = self._batches[batch]
        # The last place is most often the last one to be filled.
        if int(record["state"]) & 15 != OPEN or any(
            self._place(seq) & _STATE != _FILLED for seq in reversed(self._range(batch))
        ):
            return NOT_COMPLETE
        # What to do follows from what lies at the places, so that nothing a dead worker said of itself outlives it.
        flags = 0
        for seq in self._range(batch):
            flags |= 1 << (int(self._positions[seq & self._mask]["blob"]) & KIND_MASK)
        record["flags"] = flags
        if (
            flags & (FAILED | ENDED)
            or record["result"]
            or (record["layout"] and not flags & RAGGED)
        ):
            self._set_state(batch, READY)
            self._ready.notify()
            return PUBLISHED
        self._set_state(batch, COLLATING, worker)
        return MUST_COLLATE
