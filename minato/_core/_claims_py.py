"""The workers' side of a ledger (pure Python)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from minato._core._records_py import (
    BOUND,
    CLAIMED,
    DONE,
    FILLED,
    FREE,
    NUMBER,
    STATE,
    Records,
)
from minato._core._sample_loop_py import Lease
from minato._core.codes import (
    COLLATING,
    ENDED,
    FAILED,
    KIND_MASK,
    MUST_COLLATE,
    NOT_COMPLETE,
    OPEN,
    PUBLISHED,
    RAGGED,
    READY,
    SKIP_BLOB,
    SKIPPED,
)
from minato._core.limits import slot_overflow

__all__ = ["Claims"]

ALIGNMENT = 64
"""Of whatever is written to a slot; the kind of a blob lies below it."""


class Claims(Records):
    """What workers do: they claim samples, fill places, and publish the batches that are full."""

    def claim(self, worker: int, max_run: int) -> tuple[int, int, int] | None:
        """Claim the oldest free samples: up to ``max_run`` consecutive ones of a batch, or one that is to begin early.

        Args:
            max_run: 0: a whole batch, or what is left of one whose first sample is done.

        Returns:
            ``(batch, k, count)``: the samples k … k+count-1 of the batch; count 0: collate this batch, whose
            worker died. None if there is nothing to claim.
        """
        with self._locked():
            if self._header["orphaned"] != self._header["orphans_checked"]:
                for index in range(len(self._batches)):
                    if self._complete(worker, index) == MUST_COLLATE:
                        return index, 0, 0
                self._header["orphans_checked"] = self._header["orphaned"]
            tail = int(self._header["tail"])
            position = int(self._header["head"])
            early = self._claim_hinted(worker, position) if max_run else None
            if early is not None:
                index = int(self._positions[early & self._mask]["batch"])
                return index, early - self._range(index).start, 1
            passed_over = tail  # the first free sample that is left to another worker
            while position < tail:
                record = self._positions[position & self._mask]
                if self._ticket(position) & STATE == FREE and int(record["position"]) == position:
                    index = int(record["batch"])
                    is_theirs = int(self._batches[index]["owner"]) not in (0, worker + 1)
                    if not is_theirs and (max_run or not self._follows(position, index)):
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
                if ticket & STATE != FREE:
                    break
                self._set_ticket(other, ticket | CLAIMED | worker << 48)
                count += 1
            self._header["head"] = min(position + count, passed_over)
            return index, position - self._range(index).start, count

    def own_lease(self, worker: int) -> Lease:
        """The worker's lease: only the worker writes it."""
        return Lease(self._workers[worker : worker + 1].view(np.uint8))

    def end(self, worker: int, samples: int, busy_ns: int, idle_ns: int) -> None:
        """Note that the worker is between two leases, and add to its activity."""
        record = self._workers[worker]
        record["position"] = 0
        for name, more in (("samples", samples), ("busy_ns", busy_ns), ("idle_ns", idle_ns)):
            record[name] = int(record[name]) + more  # NumPy 1 makes a float of uint64 + int

    def reserve(self, worker: int, position: int, slow: bool = False) -> tuple[int, int, int]:
        """Take a place for a finished sample.

        Args:
            slow: Take the newest open place, unless the consumer is waiting for a batch.

        Returns:
            ``(place, batch, k)``: the place is number k of the batch.
        """
        with self._locked():
            ticket = self._ticket(position)
            place = ticket & NUMBER
            if not place:
                take = self._take_newest if slow and not self.waiting else self._take_oldest
                place = take(self._epoch_slot_of(position), position)
                self._set_ticket(position, ticket | place)
            place -= 1
            batch = int(self._positions[place & self._mask]["batch"])
            return place, batch, place - self._range(batch).start

    def attach(self, place: int, blob: int, blob_nbytes: int) -> None:
        """Say what lies at a place besides the fields; before the place is filled.

        Args:
            blob: Arena offset, a multiple of 64, | one of the kinds SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB, END_BLOB.
        """
        with self._locked():
            there = self._positions[place & self._mask]
            there["blob"] = blob
            there["blob_nbytes"] = blob_nbytes

    def fill(self, worker: int, position: int, place: int) -> int:
        """Say that the sample's result lies at its place.

        Returns:
            MUST_COLLATE if this worker now has to collate the place's batch and call ``set_ready``; else PUBLISHED
            or NOT_COMPLETE. The batch may be gone afterwards.
        """
        with self._locked():
            self._fill_one(position, place)
            return self._complete(worker, int(self._positions[place & self._mask]["batch"]))

    def fill_run(self, worker: int, batch: int, k: int, count: int) -> int:
        """``fill`` for samples k … k+count-1 of a batch whose samples have their own places."""
        with self._locked():
            first = self._range(batch).start + k
            for position in range(first, first + count):
                self._fill_one(position, position)
            return self._complete(worker, batch)

    def skip(self, worker: int, position: int) -> tuple[int, int]:
        """Say that a sample has no result; one without a place leaves it to another.

        Returns:
            ``(batch, answer)``: the batch that its place belongs to, or its own if it has none; and as ``fill``.
        """
        with self._locked():
            place = self._ticket(position) & NUMBER
            if place:
                there = self._positions[(place - 1) & self._mask]
                batch = int(there["batch"])
                there["blob"] = SKIP_BLOB
                there["place"] = FILLED | (position + 1)
                self._set_ticket(position, DONE)
                return batch, self._complete(worker, batch)
            self._set_ticket(position, DONE)
            batch = int(self._positions[position & self._mask]["batch"])
        self.notify_idle()  # it may have been what the consumer waits for
        return batch, NOT_COMPLETE

    def set_result(self, batch: int, result: int, nbytes: int) -> None:
        """Say where the result of a whole batch lies, after everything else that is said of the batch.

        All its samples must be this worker's. From this store on the batch is complete: its places need no data, and if
        the worker dies, ``release`` fills those that it has not.
        """
        with self._locked():
            self._batches[batch]["result_nbytes"] = nbytes
            self._batches[batch]["result"] = result

    def set_ready(self, batch: int, result: int, nbytes: int) -> None:
        """Publish a batch after ``fill`` returned MUST_COLLATE; its result lies at arena offset ``result``."""
        with self._locked():
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
        with self._locked():
            record = self._batches[batch]
            rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
            offset, start, end = (int(record[name]) for name in ("cursor", "slot", "slot_end"))
            if offset + rounded > end:
                raise MemoryError(slot_overflow(end - start))
            record["cursor"] = offset + rounded
            return offset

    def publish_layout(self, batch: int, offset: int) -> int:
        """Offer a layout for the batch; returns the offset of the one that holds, the first offered."""
        with self._locked():
            if not self._batches[batch]["layout"]:
                self._batches[batch]["layout"] = offset
            return int(self._batches[batch]["layout"])

    # ---- inner parts, called with the lock held ---------------------------------------------

    def _follows(self, position: int, batch: int) -> bool:
        """Whether a worker that claims whole batches leaves a sample to the one that has, or will have, the first."""
        first = self._range(batch).start
        return position != first and self._ticket(first) & STATE != DONE

    def _claim_hinted(self, worker: int, front: int) -> int | None:
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
                self._set_ticket(position, ticket | CLAIMED | worker << 48)
                return position
        return None

    def _fill_one(self, position: int, place: int) -> None:
        self._positions[place & self._mask]["place"] = FILLED | (position + 1)
        self._set_ticket(position, DONE | (place + 1))

    def _complete(self, worker: int, batch: int) -> int:
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
            or (record["layout"] and not flags & (RAGGED | SKIPPED))
        ):
            self._set_state(batch, READY)
            self._ready.notify()
            return PUBLISHED
        self._set_state(batch, COLLATING, worker)
        return MUST_COLLATE

    def _take(self, places: Iterable[int], epoch_slot: int, position: int) -> int:
        """Bind the first open place of the pass among these to a sample; returns place + 1, 0 if there is none."""
        for place in places:
            # An open place says its own number, so none is taken for one that has gone round the ring.
            if self._place(place) == place + 1 and self._is_in_epoch_slot(place, epoch_slot):
                self._positions[place & self._mask]["place"] = BOUND | (position + 1)
                return place + 1
        return 0

    def _is_in_epoch_slot(self, place: int, epoch_slot: int) -> bool:
        # A closed batch leaves its places behind; the batch that reuses its record begins after them.
        batch = int(self._positions[place & self._mask]["batch"])
        return self._epoch_slot_of(place) == epoch_slot and place in self._range(batch)

    def _take_oldest(self, epoch_slot: int, position: int) -> int:
        record = self._epoch_slots[epoch_slot]
        place = self._take(range(int(record["cursor"]), int(record["limit"])), epoch_slot, position)
        if not place:
            raise AssertionError("as many places are open as samples are unplaced")
        record["cursor"] = place
        return place

    def _take_newest(self, epoch_slot: int, position: int) -> int:
        record = self._epoch_slots[epoch_slot]
        places = range(int(record["limit"]) - 1, int(record["cursor"]) - 1, -1)
        return self._take(places, epoch_slot, position) or self._take_oldest(epoch_slot, position)

    def _held(self, position: int) -> int:
        """The place (+ 1) that a worker took for this sample before it died, 0 if there is none."""
        held = np.flatnonzero(self._positions["place"] == BOUND | (position + 1))
        return int(self._positions["position"][held[0]]) + 1 if held.size else 0

    def _give_back(self, place: int) -> None:
        self._positions[(place - 1) & self._mask]["place"] = place
        record = self._epoch_slots[self._epoch_slot_of(place - 1)]
        record["cursor"] = min(int(record["cursor"]), place - 1)
