"""Who works on which sample, and where its result goes (pure Python).

The readable specification of the compiled ledger: the same records, each operation under one lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from minato._core._claims_py import Claims
from minato._core._records_py import (
    BOUND,
    CANCELLED,
    CLAIMED,
    DONE,
    DRAINING,
    FILLED,
    FREE,
    NUMBER,
    STATE,
    STOPPING,
)
from minato._core.codes import (
    CLOSED,
    COLLATING,
    KIND_MASK,
    NO_INTEGER,
    OPEN,
    SKIP_BLOB,
    VACANT,
    LeaseState,
)

__all__ = ["Ledger"]


class Ledger(Claims):
    """All scheduling state of one loader, in memory that its workers share.

    Every sample in flight owns a position with two words: its ticket (who works on it) and its place (whose
    result lies there). A transition is one atomic store or compare-and-swap, so a worker may be killed at any
    instruction: what it did not finish is still claimed by it, and ``release`` gives it out again.

    Args:
        buffer: Writable memory of ``Ledger.nbytes(...)`` that every party maps; it stays mapped for the ledger's life.
        sizes: ``(num_workers, batch_capacity, position_capacity)`` to create a ledger, None to attach to one.
        lock_fd: Descriptor of the memory; only the pure backend locks it.

    Raises:
        ValueError: The memory is too small, or the sizes make no sense.
        RuntimeError: The other side runs another implementation or version of minato.
    """

    def __init__(
        self, buffer: object, sizes: tuple[int, int, int] | None = None, lock_fd: int = -1
    ) -> None:
        super().__init__(buffer, sizes, lock_fd)
        self._live: dict[
            int, int
        ] = {}  # records of the batches in flight, oldest first: their first positions

    def open_epoch(self, epoch_slot: int) -> None:
        """Start an epoch: its samples take places after the last opened one."""
        with self._locked():
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
            wake: How many sleeping workers to wake.
            owner: Number + 1 of the one worker that may claim these samples, if they are bound; 0: any may.
            occurrences: How often each index came before in the epoch; None: none did.

        Returns:
            The number of the batch's record, valid until ``retire``.

        Raises:
            ValueError: There is no room, or the number of indices is not ``count``.
        """
        with self._locked():
            if not self.has_room(count):
                raise ValueError(f"there is no room for a batch of {count} samples")
            for values in (indices, occurrences):
                if values is not None and len(values) != count:
                    raise ValueError(
                        f"{len(values)} indices are not those of a batch of {count} samples"
                    )
            states = self._batches["state"].tolist()
            index = next(i for i, state in enumerate(states) if state & 15 == VACANT)
            tail = int(self._header["tail"])
            for k in range(count):
                position = tail + k
                own = position + 1
                self._positions[position & self._mask] = (
                    FREE | own if bound else FREE, BOUND | own if bound else own, 0, 0,
                    NO_INTEGER if indices is None else indices[k], 0, position, index,
                    0 if occurrences is None else occurrences[k],
                )  # fmt: skip
            generation = (int(self._batches[index]["state"]) >> 16) + 1
            start, cursor, end = slot
            self._batches[index] = (
                generation << 16 | OPEN, tail, count, epoch_slot, start, cursor, 0, 0, 0, 0, 0,
                indices_offset, indices_nbytes, epoch, seed, bound, owner, end,
            )  # fmt: skip
            self._live[index] = tail
            self._epoch_slots[epoch_slot]["limit"] = tail + count
            self._header["tail"] = tail + count
        self._work.notify(wake)
        return index

    def bind_late(self, old: int, new: int) -> None:
        """Give every unplaced sample of batch ``old`` a place: in batch ``new``, or else the oldest open one."""
        with self._locked():
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

    def state(self, batch: int) -> int:
        """OPEN, COLLATING, READY or CLOSED (VACANT after ``retire``)."""
        with self._locked():
            return int(self._batches[batch]["state"]) & 15

    def settled(self, batch: int) -> bool:
        """Whether no worker runs, or will run, a sample of this batch.

        Where samples take places in other batches, a batch that is not full may still be written to until all batches
        of its pass are settled.
        """
        with self._locked():
            return all(
                self._ticket(position) & STATE in (DONE, CANCELLED)
                for position in self._range(batch)
            )

    def fill_skipped(self, epoch_slot: int) -> None:
        """Fill the places that are left over when all samples of a pass are settled and some of them are skipped."""
        with self._locked():
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
        with self._locked():
            return [position for position in self._range(batch) if self._ticket(position) == DONE]

    def cancel(self, batch: int) -> None:
        """Cancel the unclaimed samples of this batch."""
        with self._locked():
            for position in self._range(batch):
                if self._ticket(position) & STATE == FREE:
                    self._set_ticket(position, CANCELLED)

    def close(self, batch: int) -> bool:
        """Forbid that anybody collates or publishes this batch any more; its places can still be filled.

        Returns:
            False while a worker collates it: ask again later.
        """
        with self._locked():
            if self.state(batch) == OPEN:
                self._set_state(batch, CLOSED)
            return self.state(batch) != COLLATING

    def retire(self, batch: int, first: int = -1) -> None:
        """Free the record of a batch that is settled and delivered, or closed with its whole epoch settled.

        Args:
            first: Position of its sample 0. If the record is free, or that of another batch, this does nothing. -1: it
                is the record of a batch in flight.
        """
        with self._locked():
            if first < 0 or self._live.get(batch) == first:
                del self._live[batch]
                self._set_state(batch, VACANT)

    def release(self, worker: int) -> int:
        """Offer again what a dead worker had claimed and not finished; a batch whose result it has set is finished.

        Only for a worker that cannot run any more.

        Returns:
            How many samples go out again.
        """
        with self._locked():
            tail = int(self._header["tail"])
            base = next(iter(self._live.values()), tail)
            released = 0
            # Backwards, so that a worker that claims the first sample of a batch finds the others free.
            for position in reversed(range(base, tail)):
                ticket = self._ticket(position)
                if not self._is_claimed(position, worker):
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
                self._set_ticket(position, FREE | place)
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
        with self._locked():
            tail = int(self._header["tail"])
            return any(
                self._is_claimed(position, worker)
                for position in range(next(iter(self._live.values()), tail), tail)
            ) or any(self._is_collating(index, worker) for index in self._live)

    def is_unfinished(self, worker: int, position: int) -> bool:
        """Whether a worker that has ended left it open what becomes of a sample.

        It has claimed the sample and its result is not there, or it was collating the batch that the sample lies in.
        """
        with self._locked():
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

    @property
    def live(self) -> list[int]:
        """The records of the batches in flight, the oldest first."""
        return list(self._live)

    @property
    def tail(self) -> int:
        """Position of the first sample of the batch that is opened next."""
        return int(self._header["tail"])

    def unclaimed(self) -> int:
        """Upper bound on the number of published, unclaimed samples."""
        return int(self._header["tail"]) - int(self._header["head"])

    def shut_down(self, drain: bool = False) -> None:
        """Make every worker leave: after its current lease, or, with ``drain``, when nothing is left to claim."""
        self._header["shutdown"] = DRAINING if drain else STOPPING
        self._work.notify()

    def lease(self, worker: int) -> LeaseState:
        """What a worker is on."""
        record = self._workers[worker]
        position = int(record["position"])
        return LeaseState(
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

    # ---- inner parts, called with the lock held ---------------------------------------------

    def _is_claimed(self, position: int, worker: int) -> bool:
        ticket = self._ticket(position)
        return ticket & STATE == CLAIMED and (ticket >> 48) & 0x3FFF == worker

    def _is_collating(self, batch: int, worker: int) -> bool:
        state = int(self._batches[batch]["state"])
        return state & 15 == COLLATING and (state >> 4) & 0xFFF == worker
