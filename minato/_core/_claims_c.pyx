"""The workers' side of a ledger (compiled)."""

from libc.limits cimport INT_MAX
from libc.stdint cimport uint32_t, uint64_t

from minato._core._records_c cimport Records, worker_bits
from minato._core.atomics cimport (
    mn_cas_seq_cst_u64,
    mn_gate_notify,
    mn_load_acquire_u64,
    mn_load_seq_cst_u64,
    mn_store_release_u64,
    mn_store_seq_cst_u64,
)
from minato._core.completion cimport adopt, complete, settle
from minato._core.hints cimport claim_hinted
from minato._core.layout cimport (
    MN_ALIGNMENT,
    MN_CLAIMED,
    MN_DONE,
    MN_FILLED,
    MN_FREE,
    MN_NOT_COMPLETE,
    MN_NUMBER,
    MN_READY,
    MN_SKIP_BLOB,
    MN_STATE,
    mn_batch,
    mn_position,
    mn_worker,
)
from minato._core.places cimport give_back, take_newest, take_oldest

from minato._core.limits import slot_overflow

__all__ = ["Claims"]


cdef class Claims(Records):
    """What workers do: they claim samples, fill places, and publish the batches that are full."""

    def claim(self, uint32_t worker, uint32_t max_run):
        """Claim the oldest free samples: up to ``max_run`` consecutive ones of a batch, or one that is to begin early.

        Returns:
            ``(batch, k, count)``: the samples k … k+count-1 of the batch; count 0: collate this batch, whose
            worker died. None if there is nothing to claim.
        """
        cdef uint64_t head, seq, tail, word, end, looked_at, passed_over
        cdef mn_position *position
        cdef mn_batch *batch
        cdef uint32_t index, owner, count = 1
        if self.header.stranded != self.header.adopted and adopt(self, worker, &index):
            return index, 0, 0
        while True:
            tail = mn_load_acquire_u64(&self.header.tail)
            head = mn_load_acquire_u64(&self.header.head)
            seq = head & MN_NUMBER
            if self.header.hints_used and claim_hinted(self, worker, seq, &seq):
                index = self.positions[seq & self.mask].batch
                return index, seq - self.batches[index].first, 1
            passed_over = MN_NUMBER  # the first free sample that is for another worker
            while seq < tail:
                position = &self.positions[seq & self.mask]
                word = mn_load_acquire_u64(&position.ticket)
                if word & MN_STATE == MN_FREE and position.position == seq:
                    owner = self.batches[position.batch].owner
                    if owner != 0 and owner != worker + 1:
                        passed_over = min(passed_over, seq)
                        seq += 1
                    elif mn_cas_seq_cst_u64(
                        &position.ticket, word, word | MN_CLAIMED | worker_bits(worker)
                    ):
                        break
                else:
                    seq += 1
            else:
                mn_cas_seq_cst_u64(&self.header.head, head, head & ~MN_NUMBER | min(seq, passed_over))
                return None
            # The record may have come round the ring between the look and the claim: it says itself which it is.
            looked_at = seq
            seq = position.position
            index = position.batch
            batch = &self.batches[index]
            end = batch.first + batch.count
            while count < max_run and seq + count < end:
                position = &self.positions[(seq + count) & self.mask]
                word = mn_load_acquire_u64(&position.ticket)
                if word & MN_STATE != MN_FREE or not mn_cas_seq_cst_u64(
                    &position.ticket, word, word | MN_CLAIMED | worker_bits(worker)
                ):
                    break
                count += 1
            if seq == looked_at:
                mn_cas_seq_cst_u64(
                    &self.header.head, head, head & ~MN_NUMBER | min(seq + count, passed_over)
                )
            return index, seq - batch.first, count

    def lease_words(self, uint32_t worker):
        """What ``lease`` reads, as int64 memory for ``run_samples``: position + 1, started_ns, step."""
        cdef Py_ssize_t start = <char *>&self.workers[worker] - <char *>self.view.buf
        return memoryview(<object>self.view.obj).cast("B")[start : start + 24].cast("q")

    def end(self, uint32_t worker, uint64_t samples, uint64_t busy_ns, uint64_t idle_ns):
        """Note that the worker is between two leases, and add to its activity."""
        cdef mn_worker *record = &self.workers[worker]
        mn_store_release_u64(&record.position, 0)
        record.samples += samples
        record.busy_ns += busy_ns
        record.idle_ns += idle_ns

    def reserve(self, uint32_t worker, uint64_t position, bint late=False):
        """Take a place for a finished sample.

        Args:
            late: Take the newest open place, unless the consumer is waiting for a batch.

        Returns:
            ``(place, batch, k)``: the place is number k of the batch.
        """
        cdef mn_position *record = &self.positions[position & self.mask]
        cdef uint32_t pass_index = self.batches[record.batch].pass_index
        cdef uint64_t word = mn_load_acquire_u64(&record.ticket)
        cdef uint64_t place = word & MN_NUMBER
        cdef uint64_t taken
        if place == 0:
            if late and not mn_load_acquire_u64(&self.header.waiting):
                taken = take_newest(self, pass_index, position)
            else:
                taken = take_oldest(self, pass_index, position)
            mn_cas_seq_cst_u64(&record.ticket, word, word | taken)
            place = mn_load_acquire_u64(&record.ticket) & MN_NUMBER
            if place != taken:
                # The consumer has meanwhile bound this overdue sample to a place.
                give_back(self, taken, position)
        place -= 1
        cdef uint32_t batch = self.positions[place & self.mask].batch
        return place, batch, place - self.batches[batch].first

    def attach(self, uint64_t place, uint64_t blob, uint64_t blob_nbytes):
        """Say what lies at a place besides the fields; before the place is filled.

        Args:
            blob: Arena offset, a multiple of 64, | one of the kinds SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB, END_BLOB.
        """
        cdef mn_position *there = &self.positions[place & self.mask]
        there.blob = blob
        there.blob_nbytes = blob_nbytes

    def fill(self, uint32_t worker, uint64_t position, uint64_t place):
        """Say that the sample's result lies at its place.

        Returns:
            MUST_COLLATE if this worker now has to collate the place's batch and call ``set_ready``; else PUBLISHED
            or NOT_COMPLETE. The batch may be gone afterwards.
        """
        cdef uint32_t batch = self.positions[place & self.mask].batch
        mn_store_seq_cst_u64(&self.positions[place & self.mask].place, MN_FILLED | (position + 1))
        settle(self, worker, position, place)
        return complete(self, worker, batch)

    def fill_run(self, uint32_t worker, uint32_t batch, uint32_t k, uint32_t count):
        """``fill`` for samples k … k+count-1 of a batch whose samples have their own places."""
        cdef uint64_t seq, first = self.batches[batch].first + k
        for seq in range(first, first + count):
            mn_store_seq_cst_u64(&self.positions[seq & self.mask].place, MN_FILLED | (seq + 1))
            settle(self, worker, seq, seq)
        return complete(self, worker, batch)

    def skip(self, uint32_t worker, uint64_t position):
        """Say that a sample has no result; one without a place leaves it to another.

        Returns:
            ``(batch, answer)``: the batch that its place belongs to, or its own if it has none; and as ``fill``.
        """
        cdef mn_position *record = &self.positions[position & self.mask]
        cdef mn_position *there
        cdef uint64_t word, place
        cdef uint32_t batch
        while True:
            word = mn_load_acquire_u64(&record.ticket)
            place = word & MN_NUMBER
            if place:
                there = &self.positions[(place - 1) & self.mask]
                batch = there.batch
                there.blob = MN_SKIP_BLOB
                mn_store_seq_cst_u64(&there.place, MN_FILLED | (position + 1))
                mn_cas_seq_cst_u64(&record.ticket, word, MN_DONE)
                return batch, complete(self, worker, batch)
            batch = record.batch
            if mn_cas_seq_cst_u64(&record.ticket, word, MN_DONE):
                self.hungry()  # it may have been what the consumer waits for
                return batch, MN_NOT_COMPLETE

    def set_result(self, uint32_t batch, uint64_t result, uint64_t nbytes):
        """Say where the result of a whole batch lies, after everything else that is said of the batch.

        All its samples must be this worker's. From this store on the batch is complete: its places need no data, and if
        the worker dies, ``release`` fills those that it has not.
        """
        self.batches[batch].result_nbytes = nbytes
        mn_store_release_u64(&self.batches[batch].result, result)

    def set_ready(self, uint32_t batch, uint64_t result, uint64_t nbytes):
        """Publish a batch that ``fill`` told this worker to collate, with its result at arena offset ``result``."""
        cdef mn_batch *record = &self.batches[batch]
        self.set_result(batch, result, nbytes)
        mn_store_release_u64(&record.state, record.state >> 16 << 16 | MN_READY)
        mn_gate_notify(&self.header.ready, INT_MAX)

    def hungry(self):
        """Tell a waiting consumer that a worker finds nothing to do."""
        if mn_load_seq_cst_u64(&self.header.waiting):
            mn_gate_notify(&self.header.ready, INT_MAX)

    def allocate(self, uint32_t batch, uint64_t nbytes):
        """Arena offset of ``nbytes`` fresh bytes in the batch's slot, aligned to 64.

        Raises:
            MemoryError: The slot's address range is too small.
        """
        cdef mn_batch *record = &self.batches[batch]
        cdef uint64_t rounded = (nbytes + MN_ALIGNMENT - 1) // MN_ALIGNMENT * MN_ALIGNMENT
        cdef uint64_t offset
        while True:
            offset = mn_load_acquire_u64(&record.cursor)
            if nbytes > record.slot_end or offset + rounded > record.slot_end:
                raise MemoryError(slot_overflow(record.slot_end - record.slot))
            if mn_cas_seq_cst_u64(&record.cursor, offset, offset + rounded):
                return offset

    def publish_layout(self, uint32_t batch, uint64_t offset):
        """Offer a layout for the batch; returns the offset of the one that holds, the first offered."""
        cdef mn_batch *record = &self.batches[batch]
        mn_cas_seq_cst_u64(&record.layout, 0, offset)
        return mn_load_acquire_u64(&record.layout)
