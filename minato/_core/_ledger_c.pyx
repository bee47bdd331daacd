"""Who works on which sample, and where its result goes (compiled)."""

cimport cython
from libc.limits cimport INT_MAX
from libc.stdint cimport INT64_MIN, int64_t, uint32_t, uint64_t

from minato._core._claims_c cimport Claims
from minato._core.atomics cimport (
    mn_event_count_notify,
    mn_load_acquire_u64,
    mn_load_relaxed_u32,
    mn_load_relaxed_u64,
    mn_load_seq_cst_u64,
    mn_store_relaxed_u64,
    mn_store_release_u32,
    mn_store_release_u64,
)
from minato._core.layout cimport (
    MN_BOUND,
    MN_DONE,
    MN_DRAINING,
    MN_NUMBER,
    MN_EPOCH_SLOTS,
    MN_STOPPING,
    mn_batch,
    mn_position,
    mn_worker,
)
from minato._core.ledger cimport (
    mn_at,
    mn_batch_fields,
    mn_bind_late,
    mn_cancel,
    mn_close,
    mn_fill_skipped,
    mn_is_claimed,
    mn_is_collating,
    mn_open_epoch,
    mn_prepare,
    mn_open,
    mn_reoffer,
    mn_reopen_places,
    mn_retire,
    mn_set_sample,
    mn_settled,
    mn_strand,
    mn_tail,
    mn_uncollate,
    mn_vacant,
)

from minato._core.codes import LeaseState

__all__ = ["Ledger"]


@cython.final
cdef class Ledger(Claims):
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

    cdef dict in_flight  # records of the batches in flight, oldest first: their first positions

    def __cinit__(self, buffer, sizes=None, int lock_fd=-1):
        self.in_flight = {}

    def open_epoch(self, uint32_t epoch_slot):
        """Start an epoch: its samples take places after the last opened one."""
        if epoch_slot >= MN_EPOCH_SLOTS:
            raise IndexError(f"epoch slot {epoch_slot} is not below {MN_EPOCH_SLOTS}")
        mn_open_epoch(&self.ledger, epoch_slot)

    def has_room(self, uint64_t count):
        """Whether a batch of ``count`` samples can be opened now."""
        cdef uint64_t tail = mn_tail(&self.ledger)
        cdef uint64_t base = next(iter(self.in_flight.values())) if self.in_flight else tail
        return (
            len(self.in_flight) < self.ledger.header.batch_capacity
            and tail + count - base <= self.ledger.header.position_capacity
        )

    def open(
        self,
        indices,
        uint32_t count,
        slot,
        uint32_t epoch_slot,
        int64_t epoch,
        int64_t seed,
        bint bound,
        *,
        uint64_t indices_offset=0,
        uint64_t indices_nbytes=0,
        int wake=INT_MAX,
        uint32_t owner=0,
        occurrences=None,
    ):
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
        cdef mn_batch_fields fields
        cdef uint32_t index, i
        cdef uint64_t tail = mn_tail(&self.ledger)
        if epoch_slot >= MN_EPOCH_SLOTS:
            raise IndexError(f"epoch slot {epoch_slot} is not below {MN_EPOCH_SLOTS}")
        if not self.has_room(count):
            raise ValueError(f"there is no room for a batch of {count} samples")
        for values in (indices, occurrences):
            if values is not None and len(values) != count:
                raise ValueError(f"{len(values)} indices are not those of a batch of {count} samples")
        fields.count, fields.epoch_slot, fields.owner, fields.bound = count, epoch_slot, owner, bound
        fields.slot, fields.cursor, fields.slot_end = slot
        fields.indices, fields.indices_nbytes = indices_offset, indices_nbytes
        fields.epoch, fields.seed = epoch, seed
        index = mn_vacant(&self.ledger)
        mn_prepare(&self.ledger, index, &fields)
        for i in range(count):
            mn_set_sample(
                &self.ledger,
                index,
                tail + i,
                INT64_MIN if indices is None else indices[i],
                0 if occurrences is None else occurrences[i],
                bound,
            )
        self.in_flight[index] = tail
        mn_open(&self.ledger, index, wake)
        return index

    def bind_late(self, uint32_t old, uint32_t new):
        """Give every unplaced sample of batch ``old`` a place: in batch ``new``, or else the oldest open one."""
        self.batch_at(old)
        self.batch_at(new)
        mn_bind_late(&self.ledger, old, new)

    def state(self, uint32_t batch):
        """OPEN, COLLATING, READY or CLOSED (VACANT after ``retire``)."""
        return mn_load_acquire_u64(&self.batch_at(batch).state) & 15

    def settled(self, uint32_t batch):
        """Whether no worker runs, or will run, a sample of this batch.

        Where samples take places in other batches, a batch that is not full may still be written to until all batches
        of its pass are settled.
        """
        self.batch_at(batch)
        return mn_settled(&self.ledger, batch)

    def fill_skipped(self, uint32_t epoch_slot):
        """Fill the places that are left over when all samples of a pass are settled and some of them are skipped."""
        for index in self.in_flight:
            if mn_load_relaxed_u32(&self.batch_at(index).epoch_slot) == epoch_slot:
                mn_fill_skipped(&self.ledger, index)
        mn_strand(&self.ledger)

    def skipped(self, uint32_t batch):
        """Positions of those samples of a settled batch that have no result."""
        cdef mn_batch *record = self.batch_at(batch)
        cdef uint64_t seq, first = mn_load_relaxed_u64(&record.first)
        return [
            seq
            for seq in range(first, first + mn_load_relaxed_u32(&record.count))
            if mn_load_acquire_u64(&mn_at(&self.ledger, seq).ticket) == MN_DONE
        ]

    def cancel(self, uint32_t batch):
        """Cancel the unclaimed samples of this batch."""
        self.batch_at(batch)
        mn_cancel(&self.ledger, batch)

    def close(self, uint32_t batch):
        """Forbid that anybody collates or publishes this batch any more; its places can still be filled.

        Returns:
            False while a worker collates it: ask again later.
        """
        self.batch_at(batch)
        return mn_close(&self.ledger, batch)

    def retire(self, uint32_t batch, int64_t first=-1):
        """Free the record of a batch that is settled and delivered, or closed with its whole epoch settled.

        Args:
            first: Position of its sample 0. If the record is free, or that of another batch, this does nothing. -1: it
                is the record of a batch in flight.
        """
        self.batch_at(batch)
        if first < 0 or self.in_flight.get(batch) == first:
            del self.in_flight[batch]
            mn_retire(&self.ledger, batch)

    def release(self, uint32_t worker):
        """Offer again what a dead worker had claimed and not finished; a batch whose result it has set is finished.

        Only for a worker that cannot run any more.

        Returns:
            How many samples go out again.
        """
        cdef uint64_t released, tail = mn_tail(&self.ledger)
        cdef uint64_t base = next(iter(self.in_flight.values())) if self.in_flight else tail
        cdef mn_worker *record = self.worker_at(worker)
        mn_reopen_places(&self.ledger, worker, base, tail)
        released = mn_reoffer(&self.ledger, worker, base, tail)
        for index in self.in_flight:
            mn_uncollate(&self.ledger, worker, index)
        mn_store_relaxed_u64(&record.step, <uint64_t>-1)  # the next worker has not begun
        mn_store_release_u64(&record.position, 0)
        mn_strand(&self.ledger)
        return released

    def owns(self, uint32_t worker):
        """Whether a worker has claimed a sample or collates a batch: if it has ended, ``release`` is due."""
        cdef uint64_t seq, tail = mn_tail(&self.ledger)
        cdef uint64_t base = next(iter(self.in_flight.values())) if self.in_flight else tail
        self.worker_at(worker)
        for seq in range(base, tail):
            if mn_is_claimed(mn_load_acquire_u64(&mn_at(&self.ledger, seq).ticket), worker):
                return True
        for index in self.in_flight:
            if mn_is_collating(mn_load_acquire_u64(&self.batch_at(index).state), worker):
                return True
        return False

    def is_unfinished(self, uint32_t worker, uint64_t position):
        """Whether a worker that has ended left it open what becomes of a sample.

        It has claimed the sample and its result is not there, or it was collating the batch that the sample lies in.
        """
        cdef mn_position *record = mn_at(&self.ledger, position)
        cdef mn_position *there
        cdef mn_batch *batch
        cdef uint64_t first, word = mn_load_acquire_u64(&record.ticket)
        cdef uint64_t place = word & MN_NUMBER
        self.worker_at(worker)
        if mn_load_relaxed_u64(&record.position) != position:
            return False
        if place == 0:
            return mn_is_claimed(word, worker)
        place -= 1
        there = mn_at(&self.ledger, place)
        if mn_load_relaxed_u32(&there.batch) not in self.in_flight:
            return False
        batch = self.batch_at(mn_load_relaxed_u32(&there.batch))
        first = mn_load_relaxed_u64(&batch.first)
        if not first <= place < first + mn_load_relaxed_u32(&batch.count):
            return False
        if not mn_is_claimed(word, worker):
            return mn_is_collating(mn_load_acquire_u64(&batch.state), worker)
        return mn_load_acquire_u64(&there.place) == MN_BOUND | (position + 1) and not (
            mn_load_relaxed_u32(&batch.bound) and mn_load_acquire_u64(&batch.result)
        )

    @property
    def live(self):
        """The records of the batches in flight, the oldest first."""
        return list(self.in_flight)

    @property
    def tail(self):
        """Position of the first sample of the batch that is opened next."""
        return mn_tail(&self.ledger)

    def unclaimed(self):
        """Upper bound on the number of published, unclaimed samples."""
        return mn_tail(&self.ledger) - (mn_load_seq_cst_u64(&self.ledger.header.head) & MN_NUMBER)

    def shut_down(self, bint drain=False):
        """Make every worker leave: after its current lease, or, with ``drain``, when nothing is left to claim."""
        mn_store_release_u32(&self.ledger.header.shutdown, MN_DRAINING if drain else MN_STOPPING)
        mn_event_count_notify(&self.ledger.header.work, INT_MAX)

    def lease(self, uint32_t worker):
        """What a worker is on."""
        cdef mn_worker *record = self.worker_at(worker)
        cdef uint64_t position = mn_load_acquire_u64(&record.position)
        return LeaseState(
            (position - 1 if position else None),
            mn_load_relaxed_u64(&record.started_ns),
            <int64_t>mn_load_relaxed_u64(&record.step),
        )

    def locate(self, uint64_t position):
        """``(batch, k)``: the position is that of sample k of the batch."""
        cdef uint32_t batch = mn_load_relaxed_u32(&mn_at(&self.ledger, position).batch)
        return batch, position - mn_load_relaxed_u64(&self.batch_at(batch).first)

    def activity(self, uint32_t worker):
        """``(samples, busy_ns, idle_ns)`` of a worker so far."""
        cdef mn_worker *record = self.worker_at(worker)
        return (
            mn_load_relaxed_u64(&record.samples),
            mn_load_relaxed_u64(&record.busy_ns),
            mn_load_relaxed_u64(&record.idle_ns),
        )
