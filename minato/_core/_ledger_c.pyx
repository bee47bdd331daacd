"""Who works on which sample, and where its result goes (compiled)."""

cimport cython
from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uint32_t, uint64_t

from minato._core._claims_c cimport Claims
from minato._core.atomics cimport (
    mn_cas_seq_cst_u64,
    mn_fetch_add_seq_cst_u32,
    mn_gate_notify,
    mn_load_acquire_u64,
    mn_load_seq_cst_u64,
    mn_store_release_u32,
    mn_store_release_u64,
)
from minato._core.layout cimport (
    MN_BOUND,
    MN_CANCELLED,
    MN_CLOSED,
    MN_COLLATING,
    MN_DONE,
    MN_DRAINING,
    MN_FILLED,
    MN_FREE,
    MN_NUMBER,
    MN_ONE_VERSION,
    MN_OPEN,
    MN_SKIP_BLOB,
    MN_STATE,
    MN_STOPPING,
    MN_VACANT,
    mn_batch,
    mn_position,
    mn_worker,
)
from minato._core.places cimport give_back, take, try_oldest
from minato._core.recovery cimport is_claimed, is_collating, reoffer, reopen_places

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
        lock_fd: Descriptor of the memory; only the pure twin locks it.

    Raises:
        ValueError: The memory is too small, or the sizes make no sense.
        RuntimeError: The other side runs another implementation or version of minato.
    """

    cdef dict live  # records of the batches in flight, oldest first: their first positions

    def __cinit__(self, buffer, sizes=None, int lock_fd=-1):
        self.live = {}

    def open_pass(self, uint32_t pass_index):
        """Start a run over the sampler: its samples will take places after the last published one."""
        cdef uint64_t tail = self.header.tail
        cdef uint64_t version = (self.header.passes[pass_index].cursor & ~MN_NUMBER) + MN_ONE_VERSION
        mn_store_release_u64(&self.header.passes[pass_index].limit, tail)
        mn_store_release_u64(&self.header.passes[pass_index].cursor, version | tail)

    def has_room(self, uint64_t count):
        """Whether a batch of ``count`` samples can be published now."""
        cdef uint64_t base = next(iter(self.live.values())) if self.live else self.header.tail
        return (
            len(self.live) < self.header.batch_capacity
            and self.header.tail + count - base <= self.header.position_capacity
        )

    def publish(
        self,
        keys,
        uint32_t count,
        slot,
        uint32_t pass_index,
        int64_t epoch,
        int64_t seed,
        bint bound,
        uint64_t keys_offset=0,
        uint64_t keys_nbytes=0,
        int wake=INT_MAX,
        uint32_t owner=0,
        occurrences=None,
    ):
        """Open a batch and offer its samples to the workers; ``has_room(count)`` must hold.

        Args:
            keys: ``count`` integers, or None when the keys are pickled at ``keys_offset``.
            slot: ``(start, cursor, end)``: arena offsets of the batch's slot and of its first free byte.
            wake: How many sleeping workers to wake.
            owner: Number + 1 of the one worker that may claim these samples, if they are bound; 0: any may.
            occurrences: How often each key came before in the epoch; None: none did.

        Returns:
            The number of the batch's record, valid until ``retire``.

        Raises:
            ValueError: There is no room, or the number of keys is not ``count``.
        """
        cdef uint32_t index = 0
        cdef uint64_t seq, tail = self.header.tail
        cdef mn_position *position
        if not self.has_room(count):
            raise ValueError(f"there is no room for a batch of {count} samples")
        for values in (keys, occurrences):
            if values is not None and len(values) != count:
                raise ValueError(f"{len(values)} keys are not those of a batch of {count} samples")
        while self.batches[index].state & 15 != MN_VACANT:
            index += 1
        cdef mn_batch *batch = &self.batches[index]
        batch.first = tail
        batch.count = count
        batch.pass_index = pass_index
        batch.slot, batch.cursor, batch.slot_end = slot
        batch.layout = batch.flags = batch.hint = batch.result = batch.result_nbytes = 0
        batch.keys, batch.keys_nbytes = keys_offset, keys_nbytes
        batch.epoch, batch.seed, batch.bound, batch.owner = epoch, seed, bound, owner
        for seq in range(tail, tail + count):
            position = &self.positions[seq & self.mask]
            position.key = 0 if keys is None else keys[seq - tail]
            position.occurrence = 0 if occurrences is None else occurrences[seq - tail]
            position.position = seq
            position.batch = index
            position.blob = position.blob_nbytes = position.cost_ns = 0
            mn_store_release_u64(&position.place, MN_BOUND | (seq + 1) if bound else seq + 1)
        # A worker that looked at a record before it came round the ring can claim a ticket as soon as that is free, so
        # everything else stands before.
        mn_store_release_u64(&batch.state, ((batch.state >> 16) + 1) << 16 | MN_OPEN)
        self.live[index] = tail
        mn_store_release_u64(&self.header.passes[pass_index].limit, tail + count)
        for seq in range(tail, tail + count):
            position = &self.positions[seq & self.mask]
            mn_store_release_u64(&position.ticket, MN_FREE | (seq + 1) if bound else MN_FREE)
        mn_store_release_u64(&self.header.tail, tail + count)
        mn_gate_notify(&self.header.work, wake)
        return index

    def bind_late(self, uint32_t old, uint32_t new):
        """Give every unplaced sample of batch ``old`` a place: in batch ``new``, or else the oldest open one."""
        cdef mn_batch *batch = &self.batches[old]
        cdef mn_batch *target = &self.batches[new]
        cdef uint64_t seq, place, word, next_place = target.first
        cdef mn_position *position
        for seq in range(batch.first, batch.first + batch.count):
            position = &self.positions[seq & self.mask]
            place = 0
            while True:
                word = mn_load_acquire_u64(&position.ticket)
                if word & MN_STATE == MN_DONE or word & MN_STATE == MN_CANCELLED or word & MN_NUMBER:
                    break
                if place == 0:
                    place = take(
                        self, next_place, target.first + target.count, batch.pass_index, seq
                    ) or try_oldest(self, batch.pass_index, seq)
                    next_place = max(next_place, place)
                # None is left if the sample's worker has just taken the last one; its ticket will say so.
                if place and mn_cas_seq_cst_u64(&position.ticket, word, word | place):
                    break
            if place and mn_load_acquire_u64(&position.ticket) & MN_NUMBER != place:
                give_back(self, place, seq)

    def state(self, uint32_t batch):
        """OPEN, COLLATING, READY or CLOSED (VACANT after ``retire``)."""
        return mn_load_acquire_u64(&self.batches[batch].state) & 15

    def settled(self, uint32_t batch):
        """Whether nobody works on a sample of this batch or will.

        Where samples take places in other batches, a batch that is not full may still be written to until all batches
        of its pass are settled.
        """
        cdef mn_batch *record = &self.batches[batch]
        cdef uint64_t seq, word
        for seq in range(record.first, record.first + record.count):
            word = mn_load_acquire_u64(&self.positions[seq & self.mask].ticket)
            if word & MN_STATE != MN_DONE and word & MN_STATE != MN_CANCELLED:
                return False
        return True

    def fill_up(self, uint32_t pass_index):
        """Fill the places that are left over when all samples of a pass are settled and some of them are skipped."""
        cdef uint64_t seq
        cdef mn_batch *batch
        cdef mn_position *place
        for index in self.live:
            batch = &self.batches[index]
            if batch.pass_index != pass_index:
                continue
            for seq in range(batch.first, batch.first + batch.count):
                place = &self.positions[seq & self.mask]
                if mn_load_acquire_u64(&place.place) & MN_STATE != MN_FILLED:
                    place.blob = MN_SKIP_BLOB
                    mn_store_release_u64(&place.place, MN_FILLED)
        # Whoever claims next looks for batches that are full and that nobody collates.
        mn_fetch_add_seq_cst_u32(&self.header.stranded, 1)
        mn_gate_notify(&self.header.work, INT_MAX)

    def skipped(self, uint32_t batch):
        """Positions of those samples of a settled batch that have no result."""
        cdef mn_batch *record = &self.batches[batch]
        cdef uint64_t seq
        return [
            seq
            for seq in range(record.first, record.first + record.count)
            if mn_load_acquire_u64(&self.positions[seq & self.mask].ticket) == MN_DONE
        ]

    def cancel(self, uint32_t batch):
        """Take back the samples of this batch that nobody has claimed yet."""
        cdef mn_batch *record = &self.batches[batch]
        cdef mn_position *position
        cdef uint64_t seq, word
        for seq in range(record.first, record.first + record.count):
            position = &self.positions[seq & self.mask]
            word = mn_load_acquire_u64(&position.ticket)
            if word & MN_STATE == MN_FREE:
                mn_cas_seq_cst_u64(&position.ticket, word, MN_CANCELLED)

    def close(self, uint32_t batch):
        """Forbid that anybody collates or publishes this batch any more; its places can still be filled.

        Returns:
            False while a worker collates it: ask again later.
        """
        cdef mn_batch *record = &self.batches[batch]
        cdef uint64_t word = mn_load_acquire_u64(&record.state)
        if word & 15 == MN_OPEN:
            return mn_cas_seq_cst_u64(&record.state, word, word & ~<uint64_t>15 | MN_CLOSED)
        return word & 15 != MN_COLLATING

    def retire(self, uint32_t batch):
        """Free the record of a batch that is settled and delivered, or closed with its whole pass settled."""
        cdef mn_batch *record = &self.batches[batch]
        del self.live[batch]
        mn_store_release_u64(&record.state, record.state >> 16 << 16 | MN_VACANT)

    def release(self, uint32_t worker):
        """Offer again what a dead worker had claimed and not finished; a batch whose result it has set is finished.

        Only for a worker that cannot run any more.

        Returns:
            How many samples go out again.
        """
        cdef uint64_t word, released, tail = self.header.tail
        cdef uint64_t base = next(iter(self.live.values())) if self.live else tail
        reopen_places(self, worker, base, tail)
        released = reoffer(self, worker, base, tail)
        for index in self.live:
            word = mn_load_acquire_u64(&self.batches[index].state)
            if is_collating(word, worker):
                mn_store_release_u64(&self.batches[index].state, word & ~<uint64_t>0xFFFF | MN_OPEN)
        self.workers[worker].position = 0
        # Whoever claims next looks for batches that are full and that nobody collates.
        mn_fetch_add_seq_cst_u32(&self.header.stranded, 1)
        mn_gate_notify(&self.header.work, INT_MAX)
        return released

    def owns(self, uint32_t worker):
        """Whether a worker has claimed a sample or collates a batch: if it has ended, ``release`` is due."""
        cdef uint64_t seq, tail = self.header.tail
        cdef uint64_t base = next(iter(self.live.values())) if self.live else tail
        for seq in range(base, tail):
            if is_claimed(mn_load_acquire_u64(&self.positions[seq & self.mask].ticket), worker):
                return True
        for index in self.live:
            if is_collating(mn_load_acquire_u64(&self.batches[index].state), worker):
                return True
        return False

    def undecided(self, uint32_t worker, uint64_t position):
        """Whether a worker that has ended left it open what becomes of a sample.

        It has claimed the sample and its result is not there, or it was collating the batch that the sample lies in.
        """
        cdef mn_position *record = &self.positions[position & self.mask]
        cdef uint64_t word = mn_load_acquire_u64(&record.ticket)
        cdef uint64_t place = word & MN_NUMBER
        if record.position != position:
            return False
        if place == 0:
            return is_claimed(word, worker)
        place -= 1
        cdef mn_position *there = &self.positions[place & self.mask]
        cdef mn_batch *batch = &self.batches[there.batch]
        if there.batch not in self.live or not batch.first <= place < batch.first + batch.count:
            return False
        if not is_claimed(word, worker):
            return is_collating(mn_load_acquire_u64(&batch.state), worker)
        return mn_load_acquire_u64(&there.place) == MN_BOUND | (position + 1) and not (
            batch.bound and mn_load_acquire_u64(&batch.result)
        )

    def unclaimed(self):
        """How many published samples nobody has claimed yet (an upper bound)."""
        return self.header.tail - (mn_load_seq_cst_u64(&self.header.head) & MN_NUMBER)

    def shut_down(self, bint drain=False):
        """Tell every worker to leave: after the lease in hand, or when nothing is left to claim."""
        mn_store_release_u32(&self.header.shutdown, MN_DRAINING if drain else MN_STOPPING)
        mn_gate_notify(&self.header.work, INT_MAX)

    def lease(self, uint32_t worker):
        """``(position or None, started_ns, step)`` that a worker is on; step -1 is the dataset itself."""
        cdef mn_worker *record = &self.workers[worker]
        cdef uint64_t position = mn_load_acquire_u64(&record.position)
        return (position - 1 if position else None), record.started_ns, record.step

    def locate(self, uint64_t position):
        """``(batch, k)``: the position is that of sample k of the batch."""
        cdef uint32_t batch = self.positions[position & self.mask].batch
        return batch, position - self.batches[batch].first

    def activity(self, uint32_t worker):
        """``(samples, busy_ns, idle_ns)`` of a worker so far."""
        cdef mn_worker *record = &self.workers[worker]
        return record.samples, record.busy_ns, record.idle_ns
