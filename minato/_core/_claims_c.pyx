"""The workers' side of a ledger (compiled)."""

from libc.stdint cimport UINT64_MAX, uint32_t, uint64_t

from minato._core._records_c cimport Records
from minato._core.atomics cimport mn_load_relaxed_u32, mn_load_relaxed_u64
from minato._core.layout cimport mn_batch
from minato._core.ledger cimport (
    mn_allocate,
    mn_at,
    mn_attach,
    mn_claim,
    mn_end,
    mn_fill,
    mn_fill_run,
    mn_notify_idle,
    mn_publish_layout,
    mn_reserve,
    mn_set_ready,
    mn_set_result,
    mn_skip,
)

from minato._core._sample_loop_c import Lease
from minato._core.limits import slot_overflow

__all__ = ["Claims"]


cdef class Claims(Records):
    """What workers do: they claim samples, fill places, and publish the batches that are full."""

    def claim(self, uint32_t worker, uint32_t max_run):
        """Claim the oldest free samples: up to ``max_run`` consecutive ones of a batch, or one that is to begin early.

        Args:
            max_run: 0: a whole batch, or what is left of one whose first sample is done.

        Returns:
            ``(batch, k, count)``: the samples k … k+count-1 of the batch; count 0: collate this batch, whose
            worker died. None if there is nothing to claim.
        """
        cdef uint32_t index, count
        cdef uint64_t k
        self.worker_at(worker)
        if not mn_claim(&self.ledger, worker, max_run, &index, &k, &count):
            return None
        return index, k, count

    def own_lease(self, uint32_t worker):
        """The worker's lease: only the worker writes it."""
        cdef Py_ssize_t start = <char *>self.worker_at(worker) - <char *>self.view.buf
        return Lease(<object>self.view.obj, start)

    def end(self, uint32_t worker, uint64_t samples, uint64_t busy_ns, uint64_t idle_ns):
        """Note that the worker is between two leases, and add to its activity."""
        self.worker_at(worker)
        mn_end(&self.ledger, worker, samples, busy_ns, idle_ns)

    def reserve(self, uint32_t worker, uint64_t position, bint slow=False):
        """Take a place for a finished sample.

        Args:
            slow: Take the newest open place, unless the consumer is waiting for a batch.

        Returns:
            ``(place, batch, k)``: the place is number k of the batch.
        """
        cdef uint64_t place
        cdef uint32_t batch
        self.worker_at(worker)
        place = mn_reserve(&self.ledger, position, slow)
        batch = mn_load_relaxed_u32(&mn_at(&self.ledger, place).batch)
        return place, batch, place - mn_load_relaxed_u64(&self.batch_at(batch).first)

    def attach(self, uint64_t place, uint64_t blob, uint64_t blob_nbytes):
        """Say what lies at a place besides the fields; before the place is filled.

        Args:
            blob: Arena offset, a multiple of 64, | one of the kinds SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB, END_BLOB.
        """
        mn_attach(&self.ledger, place, blob, blob_nbytes)

    def fill(self, uint32_t worker, uint64_t position, uint64_t place):
        """Say that the sample's result lies at its place.

        Returns:
            MUST_COLLATE if this worker now has to collate the place's batch and call ``set_ready``; else PUBLISHED
            or NOT_COMPLETE. The batch may be gone afterwards.
        """
        self.worker_at(worker)
        return mn_fill(&self.ledger, worker, position, place)

    def fill_run(self, uint32_t worker, uint32_t batch, uint32_t k, uint32_t count):
        """``fill`` for samples k … k+count-1 of a batch whose samples have their own places."""
        self.worker_at(worker)
        if k + <uint64_t>count > mn_load_relaxed_u32(&self.batch_at(batch).count):
            raise IndexError(f"there is no sample {k + <uint64_t>count - 1} in batch {batch}")
        return mn_fill_run(&self.ledger, worker, batch, k, count)

    def skip(self, uint32_t worker, uint64_t position):
        """Say that a sample has no result; one without a place leaves it to another.

        Returns:
            ``(batch, answer)``: the batch that its place belongs to, or its own if it has none; and as ``fill``.
        """
        cdef uint32_t batch
        cdef int answer
        self.worker_at(worker)
        answer = mn_skip(&self.ledger, worker, position, &batch)
        return batch, answer

    def set_result(self, uint32_t batch, uint64_t result, uint64_t nbytes):
        """Say where the result of a whole batch lies, after everything else that is said of the batch.

        All its samples must be this worker's. From this store on the batch is complete: its places need no data, and if
        the worker dies, ``release`` fills those that it has not.
        """
        self.batch_at(batch)
        mn_set_result(&self.ledger, batch, result, nbytes)

    def set_ready(self, uint32_t batch, uint64_t result, uint64_t nbytes):
        """Publish a batch after ``fill`` returned MUST_COLLATE; its result lies at arena offset ``result``."""
        self.batch_at(batch)
        mn_set_ready(&self.ledger, batch, result, nbytes)

    def notify_idle(self):
        """Tell a waiting consumer that a worker finds nothing to do."""
        mn_notify_idle(&self.ledger)

    def allocate(self, uint32_t batch, uint64_t nbytes):
        """Arena offset of ``nbytes`` fresh bytes in the batch's slot, aligned to 64.

        Raises:
            MemoryError: The slot's address range is too small.
        """
        cdef mn_batch *record = self.batch_at(batch)
        cdef uint64_t offset = mn_allocate(&self.ledger, batch, nbytes)
        if offset == UINT64_MAX:
            raise MemoryError(
                slot_overflow(mn_load_relaxed_u64(&record.slot_end) - mn_load_relaxed_u64(&record.slot))
            )
        return offset

    def publish_layout(self, uint32_t batch, uint64_t offset):
        """Offer a layout for the batch; returns the offset of the one that holds, the first offered."""
        self.batch_at(batch)
        return mn_publish_layout(&self.ledger, batch, offset)
