"""Who works on which sample, and where its result goes (compiled)."""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from minato._core.atomics cimport (
    mn_cas_seq_cst_u32,
    mn_cas_seq_cst_u64,
    mn_fetch_add_seq_cst_u32,
    mn_gate_notify,
    mn_load_acquire_u32,
    mn_load_acquire_u64,
    mn_load_seq_cst_u64,
    mn_store_release_u32,
    mn_store_release_u64,
    mn_store_seq_cst_u64,
)
from minato._core.layout cimport (
    MN_LAYOUT_VERSION,
    MN_MAGIC,
    MN_PASSES,
    mn_batch,
    mn_header,
    mn_pass,
    mn_position,
    mn_worker,
    offset_ready,
    offset_work,
)

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

NUM_PASSES = MN_PASSES

VACANT, OPEN, COLLATING, READY, CLOSED = range(5)
NOT_COMPLETE, PUBLISHED, MUST_COLLATE = range(3)
SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB, END_BLOB = 1, 2, 3, 4
KIND_MASK = 63
# A batch that holds a blob of a kind has the flag 1 << kind.
RAGGED, FAILED, TEXTS = 1 << SAMPLE_BLOB, 1 << ERROR_BLOB, 1 << TEXT_BLOB
ENDED = 1 << END_BLOB

cdef enum:
    # Codes of mn_batch.state
    VACANT_ = 0
    OPEN_ = 1
    COLLATING_ = 2
    READY_ = 3
    CLOSED_ = 4
    # Bits of mn_batch.flags
    RAGGED_ = 2
    FAILED_ = 4
    ENDED_ = 16
    # Values of mn_header.shutdown
    STOPPING = 1
    DRAINING = 2
    # Answers of fill
    NOT_COMPLETE_ = 0
    PUBLISHED_ = 1
    MUST_COLLATE_ = 2
    # Alignment of whatever is written to a slot, and the mask of a blob's kind below it
    ALIGNMENT = 64
    KIND_MASK_ = 63
    # As many as have a number in mn_batch.state
    MAX_WORKERS = 4096

# States of a ticket and of a place, in the upper two bits of their words.
cdef uint64_t FREE = 0
cdef uint64_t CLAIMED = <uint64_t>1 << 62
cdef uint64_t DONE = <uint64_t>2 << 62
cdef uint64_t CANCELLED = <uint64_t>3 << 62
cdef uint64_t BOUND = <uint64_t>1 << 62
cdef uint64_t FILLED = <uint64_t>2 << 62
cdef uint64_t STATE = <uint64_t>3 << 62
cdef uint64_t NUMBER = (<uint64_t>1 << 48) - 1
cdef uint64_t ONE_VERSION = <uint64_t>1 << 48


cdef inline uint64_t worker_bits(uint64_t worker) noexcept nogil:
    return worker << 48


cdef inline uint64_t worker_of(uint64_t ticket) noexcept nogil:
    return (ticket >> 48) & 0x3FFF


@cython.final
cdef class Ledger:
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

    cdef Py_buffer view
    cdef mn_header *header
    cdef mn_worker *workers
    cdef mn_batch *batches
    cdef mn_position *positions
    cdef uint64_t mask
    cdef dict live

    @staticmethod
    def nbytes(num_workers, batch_capacity, position_capacity):
        """Bytes of a ledger with these capacities."""
        return (
            sizeof(mn_header)
            + num_workers * sizeof(mn_worker)
            + batch_capacity * sizeof(mn_batch)
            + position_capacity * sizeof(mn_position)
        )

    def __cinit__(self, buffer, sizes=None, int lock_fd=-1):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        self.header = <mn_header *>self.view.buf
        self.live = {}
        if sizes is not None:
            num_workers, batch_capacity, position_capacity = sizes
            if not 0 < num_workers <= MAX_WORKERS:
                raise ValueError(f"num_workers {num_workers} is not between 1 and {MAX_WORKERS}")
            if position_capacity & (position_capacity - 1) or position_capacity <= 0:
                raise ValueError(f"position_capacity {position_capacity} is not a power of two")
            if Ledger.nbytes(*sizes) > self.view.len:
                raise ValueError(
                    f"a ledger of {Ledger.nbytes(*sizes)} bytes does not fit {self.view.len}"
                )
            # The positions need not be blank: nobody looks at one that was not published.
            memset(self.view.buf, 0, Ledger.nbytes(num_workers, batch_capacity, 0))
            self.header.version = MN_LAYOUT_VERSION
            self.header.compiled = 1
            self.header.num_workers = num_workers
            self.header.batch_capacity = batch_capacity
            self.header.position_capacity = position_capacity
            mn_store_release_u64(&self.header.magic, MN_MAGIC)
        if self.view.len < <Py_ssize_t>sizeof(mn_header):
            raise ValueError(f"{self.view.len} bytes are no ledger: its header alone is larger")
        if self.header.magic != MN_MAGIC or self.header.version != MN_LAYOUT_VERSION:
            raise RuntimeError(
                "this memory is no ledger of this version of minato: all processes of a loader must "
                "run the same installation"
            )
        if self.header.compiled != 1:
            raise RuntimeError(
                "the loader runs the pure implementation of minato and this process the compiled one: "
                "set MINATO_NO_EXTENSIONS alike for both"
            )
        needed = Ledger.nbytes(
            self.header.num_workers, self.header.batch_capacity, self.header.position_capacity
        )
        if needed > self.view.len:
            raise ValueError(f"a ledger of {needed} bytes does not fit {self.view.len}")
        self.mask = self.header.position_capacity - 1
        self.workers = <mn_worker *>(<char *>self.view.buf + sizeof(mn_header))
        self.batches = <mn_batch *>(self.workers + self.header.num_workers)
        self.positions = <mn_position *>(self.batches + self.header.batch_capacity)

    def __dealloc__(self):
        if self.header != NULL:
            PyBuffer_Release(&self.view)

    @property
    def work_gate_offset(self):
        """Where the gate lies that workers sleep on."""
        return offset_work

    @property
    def ready_gate_offset(self):
        """Where the gate lies that the consumer sleeps on."""
        return offset_ready

    @property
    def capacity(self):
        """``(batches, positions)`` that can be in flight."""
        return self.header.batch_capacity, self.header.position_capacity

    @property
    def stopping(self):
        """True once ``shut_down`` was called: workers leave after the lease in hand."""
        return mn_load_acquire_u32(&self.header.shutdown) == STOPPING

    @property
    def draining(self):
        """True once ``shut_down(drain=True)`` was called: workers leave when nothing is left to claim."""
        return mn_load_acquire_u32(&self.header.shutdown) == DRAINING

    @property
    def slow_ns(self):
        """Nanoseconds above which a sample counts as slow; 0: nothing does."""
        return mn_load_acquire_u64(&self.header.slow_ns)

    @slow_ns.setter
    def slow_ns(self, uint64_t value):
        mn_store_release_u64(&self.header.slow_ns, value)

    @property
    def waiting(self):
        """Whether the consumer waits for a batch; set by the consumer."""
        return mn_load_acquire_u64(&self.header.waiting) != 0

    @waiting.setter
    def waiting(self, bint value):
        mn_store_seq_cst_u64(&self.header.waiting, value)

    # ---- the consumer's side ----------------------------------------------------------------

    def open_pass(self, uint32_t pass_index):
        """Start a run over the sampler: its samples will take places after the last published one."""
        cdef uint64_t tail = self.header.tail
        cdef uint64_t version = (self.header.passes[pass_index].cursor & ~NUMBER) + ONE_VERSION
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
    ):
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
        cdef uint32_t index = 0
        cdef uint64_t seq, tail = self.header.tail
        cdef mn_position *position
        if not self.has_room(count):
            raise ValueError(f"there is no room for a batch of {count} samples")
        while self.batches[index].state & 15 != VACANT_:
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
            position.position = seq
            position.batch = index
            position.blob = position.blob_nbytes = position.cost_ns = 0
            mn_store_release_u64(&position.place, BOUND | (seq + 1) if bound else seq + 1)
        # A worker that looked at a record before it came round the ring can claim a ticket as soon as that is free, so
        # everything else stands before.
        mn_store_release_u64(&batch.state, ((batch.state >> 16) + 1) << 16 | OPEN_)
        self.live[index] = tail
        mn_store_release_u64(&self.header.passes[pass_index].limit, tail + count)
        for seq in range(tail, tail + count):
            position = &self.positions[seq & self.mask]
            mn_store_release_u64(&position.ticket, FREE | (seq + 1) if bound else FREE)
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
                if word & STATE == DONE or word & STATE == CANCELLED or word & NUMBER:
                    break
                if place == 0:
                    place = self._take(
                        next_place, target.first + target.count, batch.pass_index, seq
                    ) or self._try_oldest(batch.pass_index, seq)
                    next_place = max(next_place, place)
                # None is left if the sample's worker has just taken the last one; its ticket will say so.
                if place and mn_cas_seq_cst_u64(&position.ticket, word, word | place):
                    break
            if place and mn_load_acquire_u64(&position.ticket) & NUMBER != place:
                self._give_back(place, seq)

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
            if word & STATE != DONE and word & STATE != CANCELLED:
                return False
        return True

    def cancel(self, uint32_t batch):
        """Take back the samples of this batch that nobody has claimed yet."""
        cdef mn_batch *record = &self.batches[batch]
        cdef mn_position *position
        cdef uint64_t seq, word
        for seq in range(record.first, record.first + record.count):
            position = &self.positions[seq & self.mask]
            word = mn_load_acquire_u64(&position.ticket)
            if word & STATE == FREE:
                mn_cas_seq_cst_u64(&position.ticket, word, CANCELLED)

    def close(self, uint32_t batch):
        """Forbid that anybody collates or publishes this batch any more; its places can still be filled.

        Returns:
            False while a worker collates it: ask again later.
        """
        cdef mn_batch *record = &self.batches[batch]
        cdef uint64_t word = mn_load_acquire_u64(&record.state)
        if word & 15 == OPEN_:
            return mn_cas_seq_cst_u64(&record.state, word, word & ~<uint64_t>15 | CLOSED_)
        return word & 15 != COLLATING_

    def retire(self, uint32_t batch):
        """Free the record of a batch that is settled and delivered, or closed with its whole pass settled."""
        cdef mn_batch *record = &self.batches[batch]
        del self.live[batch]
        mn_store_release_u64(&record.state, record.state >> 16 << 16 | VACANT_)

    def release(self, uint32_t worker):
        """Offer again what a dead worker had claimed and not finished.

        Only for a worker that cannot run any more.

        Returns:
            How many samples go out again.
        """
        cdef uint64_t seq, word, place, tail = self.header.tail
        cdef uint64_t base = next(iter(self.live.values())) if self.live else tail
        cdef mn_batch *batch
        cdef mn_position *position
        cdef mn_position *there
        cdef uint64_t released = 0
        # A place that the worker had taken without having said so on the ticket is open again.
        for place in range(base, tail):
            word = mn_load_acquire_u64(&self.positions[place & self.mask].place)
            if word & STATE != BOUND:
                continue
            seq = (word & NUMBER) - 1
            position = &self.positions[seq & self.mask]
            word = mn_load_acquire_u64(&position.ticket)
            if (
                position.position == seq
                and word & STATE == CLAIMED
                and worker_of(word) == worker
                and word & NUMBER != place + 1
            ):
                self._give_back(place + 1, seq)
        for seq in range(base, tail):
            position = &self.positions[seq & self.mask]
            word = mn_load_acquire_u64(&position.ticket)
            if word & STATE != CLAIMED or worker_of(word) != worker:
                continue
            place = word & NUMBER
            if place:
                there = &self.positions[(place - 1) & self.mask]
                # Once filled, the place may long have been delivered and have come round the ring.
                if mn_load_acquire_u64(&there.place) != BOUND | (seq + 1):
                    mn_store_release_u64(&position.ticket, DONE | place)
                    continue
                there.blob = 0
            batch = &self.batches[position.batch]
            if batch.bound:
                batch.result = 0
            mn_store_seq_cst_u64(&position.ticket, FREE | place)
            self._lower(&self.header.head, seq)
            released += 1
        for index in self.live:
            word = mn_load_acquire_u64(&self.batches[index].state)
            if word & 15 == COLLATING_ and (word >> 4) & 0xFFF == worker:
                mn_store_release_u64(&self.batches[index].state, word & ~<uint64_t>0xFFFF | OPEN_)
        self.workers[worker].position = 0
        # Whoever claims next looks for batches that are full and that nobody collates.
        mn_fetch_add_seq_cst_u32(&self.header.stranded, 1)
        mn_gate_notify(&self.header.work, INT_MAX)
        return released

    def unclaimed(self):
        """How many published samples nobody has claimed yet (an upper bound)."""
        return self.header.tail - (mn_load_seq_cst_u64(&self.header.head) & NUMBER)

    def shut_down(self, bint drain=False):
        """Tell every worker to leave: after the lease in hand, or when nothing is left to claim."""
        mn_store_release_u32(&self.header.shutdown, DRAINING if drain else STOPPING)
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

    # ---- the workers' side ------------------------------------------------------------------

    def claim(self, uint32_t worker, uint32_t max_run):
        """Claim the oldest free samples: up to ``max_run`` consecutive ones of one batch.

        Returns:
            ``(batch, k, count)``: the samples k … k+count-1 of the batch; count 0: collate this batch, whose
            worker died. None if there is nothing to claim.
        """
        cdef uint64_t head, seq, tail, word, end, looked_at, passed_over
        cdef mn_position *position
        cdef mn_batch *batch
        cdef uint32_t index, owner, count = 1
        if self.header.stranded and self._adopt(worker, &index):
            return index, 0, 0
        while True:
            tail = mn_load_acquire_u64(&self.header.tail)
            head = mn_load_acquire_u64(&self.header.head)
            seq = head & NUMBER
            passed_over = NUMBER  # the first free sample that is for another worker
            while seq < tail:
                position = &self.positions[seq & self.mask]
                word = mn_load_acquire_u64(&position.ticket)
                if word & STATE == FREE and position.position == seq:
                    owner = self.batches[position.batch].owner
                    if owner != 0 and owner != worker + 1:
                        passed_over = min(passed_over, seq)
                        seq += 1
                    elif mn_cas_seq_cst_u64(
                        &position.ticket, word, word | CLAIMED | worker_bits(worker)
                    ):
                        break
                else:
                    seq += 1
            else:
                mn_cas_seq_cst_u64(&self.header.head, head, head & ~NUMBER | min(seq, passed_over))
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
                if word & STATE != FREE or not mn_cas_seq_cst_u64(
                    &position.ticket, word, word | CLAIMED | worker_bits(worker)
                ):
                    break
                count += 1
            if seq == looked_at:
                mn_cas_seq_cst_u64(
                    &self.header.head, head, head & ~NUMBER | min(seq + count, passed_over)
                )
            return index, seq - batch.first, count

    def describe(self, uint32_t batch):
        """What a worker must know of a batch.

        Returns:
            ``(generation, first, count, bound, epoch, seed, keys_offset, keys_nbytes, pass_index)``; first is the
            position of its sample 0, and generation tells one use of the record from the next.
        """
        cdef mn_batch *record = &self.batches[batch]
        return (
            record.state >> 16,
            record.first,
            record.count,
            record.bound != 0,
            record.epoch,
            record.seed,
            record.keys,
            record.keys_nbytes,
            record.pass_index,
        )

    def keys(self, uint32_t batch, uint32_t k, uint32_t count):
        """The integer keys of samples k … k+count-1."""
        cdef uint64_t seq, first = self.batches[batch].first + k
        return [self.positions[seq & self.mask].key for seq in range(first, first + count)]

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
        cdef uint64_t place = word & NUMBER
        cdef uint64_t taken
        if place == 0:
            if late and not mn_load_acquire_u64(&self.header.waiting):
                taken = self._take_newest(pass_index, position)
            else:
                taken = self._take_oldest(pass_index, position)
            mn_cas_seq_cst_u64(&record.ticket, word, word | taken)
            place = mn_load_acquire_u64(&record.ticket) & NUMBER
            if place != taken:
                # The consumer has meanwhile bound this overdue sample to a place.
                self._give_back(taken, position)
        place -= 1
        cdef uint32_t batch = self.positions[place & self.mask].batch
        return place, batch, place - self.batches[batch].first

    def attach(self, uint64_t place, uint64_t blob, uint64_t blob_nbytes):
        """Say what lies at a place besides the fields; before the place is filled.

        Args:
            blob: Arena offset, a multiple of 64, | SAMPLE_BLOB, ERROR_BLOB, TEXT_BLOB or END_BLOB.
        """
        cdef mn_position *there = &self.positions[place & self.mask]
        there.blob = blob
        there.blob_nbytes = blob_nbytes

    def fill(self, uint32_t worker, uint64_t position, uint64_t place, uint64_t cost_ns=0):
        """Say that the sample's result lies at its place.

        Returns:
            MUST_COLLATE if this worker now has to collate the place's batch and call ``set_ready``; else PUBLISHED
            or NOT_COMPLETE. The batch may be gone afterwards.
        """
        cdef uint32_t batch = self.positions[place & self.mask].batch
        self.positions[position & self.mask].cost_ns = cost_ns
        mn_store_seq_cst_u64(&self.positions[place & self.mask].place, FILLED | (position + 1))
        self._settle(worker, position, place)
        return self._complete(worker, batch)

    def fill_run(self, uint32_t worker, uint32_t batch, uint32_t k, uint32_t count, uint64_t cost_ns=0):
        """``fill`` for samples k … k+count-1 of a batch whose samples have their own places."""
        cdef uint64_t seq, first = self.batches[batch].first + k
        cdef mn_position *position
        for seq in range(first, first + count):
            position = &self.positions[seq & self.mask]
            position.cost_ns = cost_ns
            mn_store_seq_cst_u64(&position.place, FILLED | (seq + 1))
            self._settle(worker, seq, seq)
        return self._complete(worker, batch)

    def set_result(self, uint32_t batch, uint64_t result, uint64_t nbytes):
        """Say where the collated result of a batch lies whose last samples are about to be filled in."""
        self.batches[batch].result_nbytes = nbytes
        mn_store_release_u64(&self.batches[batch].result, result)

    def set_ready(self, uint32_t batch, uint64_t result, uint64_t nbytes):
        """Publish a batch that ``fill`` told this worker to collate, with its result at arena offset ``result``."""
        cdef mn_batch *record = &self.batches[batch]
        self.set_result(batch, result, nbytes)
        mn_store_release_u64(&record.state, record.state >> 16 << 16 | READY_)
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
        cdef uint64_t rounded = (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        cdef uint64_t offset
        while True:
            offset = mn_load_acquire_u64(&record.cursor)
            if nbytes > record.slot_end or offset + rounded > record.slot_end:
                raise MemoryError(
                    f"a batch needs more than the {record.slot_end - record.slot} bytes of address space of "
                    "its slot: use smaller batches, or raise the limit on address space (ulimit -v)"
                )
            if mn_cas_seq_cst_u64(&record.cursor, offset, offset + rounded):
                return offset

    def publish_layout(self, uint32_t batch, uint64_t offset):
        """Offer a layout for the batch; returns the offset of the one that holds, the first offered."""
        cdef mn_batch *record = &self.batches[batch]
        mn_cas_seq_cst_u64(&record.layout, 0, offset)
        return mn_load_acquire_u64(&record.layout)

    def fields(self, uint32_t batch):
        """``(generation, layout, count)``: what a worker needs to find a place in the batch's fields."""
        cdef mn_batch *record = &self.batches[batch]
        return record.state >> 16, mn_load_acquire_u64(&record.layout), record.count

    # ---- both sides -------------------------------------------------------------------------

    def contents(self, uint32_t batch):
        """``(flags, layout, result, result_nbytes, count, used_nbytes)`` of a full batch."""
        cdef mn_batch *record = &self.batches[batch]
        return (
            record.flags,
            record.layout,
            record.result,
            record.result_nbytes,
            record.count,
            record.cursor - record.slot,
        )

    def blobs(self, uint32_t batch):
        """``(kind, offset, nbytes)`` of each place of a full batch; kind 0: it has no blob."""
        cdef mn_batch *record = &self.batches[batch]
        cdef mn_position *position
        cdef uint64_t seq
        found = []
        for seq in range(record.first, record.first + record.count):
            position = &self.positions[seq & self.mask]
            found.append(
                (position.blob & KIND_MASK_, position.blob & ~<uint64_t>KIND_MASK_, position.blob_nbytes)
            )
        return found

    def occupants(self, uint32_t batch):
        """Position of the sample that lies at each place of a full batch."""
        cdef mn_batch *record = &self.batches[batch]
        cdef uint64_t seq, first = record.first
        return [
            (self.positions[seq & self.mask].place & NUMBER) - 1
            for seq in range(first, first + record.count)
        ]

    # ---- inner parts ------------------------------------------------------------------------

    cdef uint64_t _take(
        self, uint64_t start, uint64_t end, uint32_t pass_index, uint64_t seq
    ) noexcept nogil:
        """Bind the first open place of the pass in [start, end) to a sample; returns place + 1, 0 if there is none."""
        # An open place says its own number, so none is taken for one that has gone round the ring.
        cdef uint64_t place
        cdef mn_position *record
        for place in range(start, end):
            record = &self.positions[place & self.mask]
            if (
                mn_load_seq_cst_u64(&record.place) == place + 1
                and self._is_in_pass(record.batch, place, pass_index)
                and mn_cas_seq_cst_u64(&record.place, place + 1, BOUND | (seq + 1))
            ):
                return place + 1
        return 0

    cdef bint _is_in_pass(self, uint32_t index, uint64_t place, uint32_t pass_index) noexcept nogil:
        # A batch that was closed leaves its places behind; whoever has its record now, begins after them.
        cdef mn_batch *batch = &self.batches[index]
        return batch.pass_index == pass_index and batch.first <= place

    cdef uint64_t _try_oldest(self, uint32_t pass_index, uint64_t seq) noexcept nogil:
        """Bind the oldest place that can be had to a sample; returns place + 1, 0 if there is none."""
        cdef mn_pass *here = &self.header.passes[pass_index]
        cdef uint64_t cursor = mn_load_acquire_u64(&here.cursor)
        cdef uint64_t limit = mn_load_acquire_u64(&here.limit)
        cdef uint64_t place = self._take(cursor & NUMBER, limit, pass_index, seq)
        if place == 0:
            return self._take_spare(pass_index, seq)
        mn_cas_seq_cst_u64(&here.cursor, cursor, cursor & ~NUMBER | place)
        return place

    cdef uint64_t _take_oldest(self, uint32_t pass_index, uint64_t seq) noexcept nogil:
        # For a sample that has no place yet there is always one; others may be quicker a few times.
        cdef uint64_t place = 0
        while place == 0:
            place = self._try_oldest(pass_index, seq)
        return place

    cdef uint64_t _take_newest(self, uint32_t pass_index, uint64_t seq) noexcept nogil:
        cdef mn_pass *here = &self.header.passes[pass_index]
        cdef uint64_t place = mn_load_acquire_u64(&here.limit)
        cdef uint64_t cursor = mn_load_acquire_u64(&here.cursor) & NUMBER
        while place > cursor:
            if self._take(place - 1, place, pass_index, seq):
                return place
            place -= 1
        return self._take_oldest(pass_index, seq)

    cdef uint64_t _take_spare(self, uint32_t pass_index, uint64_t seq) noexcept nogil:
        """A place taken for this sample, or for one that lies elsewhere; returns place + 1, 0 if there is none.

        As many places are open or taken as samples are unplaced. So if none is open, one was taken twice for the same
        sample, by its worker and by the consumer, and whoever came second has not handed it back, or died before.
        """
        cdef uint64_t limit = mn_load_acquire_u64(&self.header.passes[pass_index].limit)
        cdef uint64_t place, word, holder, ticket
        cdef mn_position *record
        for place in range(limit - min(limit, self.mask + 1), limit):
            record = &self.positions[place & self.mask]
            word = mn_load_seq_cst_u64(&record.place)
            if (
                word & STATE != BOUND
                or record.position != place
                or not self._is_in_pass(record.batch, place, pass_index)
            ):
                continue
            holder = (word & NUMBER) - 1
            if holder == seq:
                return place + 1
            ticket = mn_load_seq_cst_u64(&self.positions[holder & self.mask].ticket)
            if (
                ticket & NUMBER
                and ticket & NUMBER != place + 1
                and self.positions[holder & self.mask].position == holder
                and mn_cas_seq_cst_u64(&record.place, word, BOUND | (seq + 1))
            ):
                return place + 1
        return 0

    cdef void _give_back(self, uint64_t place, uint64_t seq) noexcept nogil:
        """Open a place (given + 1) again that was taken for a sample, unless somebody made use of it."""
        cdef mn_position *record = &self.positions[(place - 1) & self.mask]
        cdef uint32_t pass_index = self.batches[record.batch].pass_index
        if mn_cas_seq_cst_u64(&record.place, BOUND | (seq + 1), place):
            self._lower(&self.header.passes[pass_index].cursor, place - 1)

    cdef void _settle(self, uint32_t worker, uint64_t seq, uint64_t place) noexcept nogil:
        # Once its place is filled, a batch of bound samples can be delivered and its records come round the ring: the
        # ticket must still be this worker's.
        mn_cas_seq_cst_u64(
            &self.positions[seq & self.mask].ticket,
            CLAIMED | worker_bits(worker) | (place + 1),
            DONE | (place + 1),
        )

    cdef void _lower(self, uint64_t *cursor, uint64_t position) noexcept nogil:
        """Move a cursor back; the new version defeats a worker that is just moving it on."""
        cdef uint64_t word
        while True:
            word = mn_load_acquire_u64(cursor)
            if mn_cas_seq_cst_u64(
                cursor, word, (word & ~NUMBER) + ONE_VERSION | min(word & NUMBER, position)
            ):
                return

    cdef bint _all_filled(self, mn_batch *batch, uint64_t state) noexcept nogil:
        # The hint carries the generation of the record: one that a late worker wrote for an earlier batch is void.
        cdef uint64_t generation = state >> 16 << 32
        cdef uint64_t hint = mn_load_acquire_u64(&batch.hint)
        cdef uint64_t k = 0
        if hint >> 32 << 32 == generation:
            k = hint - generation
        while k < batch.count:
            # Of two workers that fill the last two places, at least one must see both.
            if (
                mn_load_seq_cst_u64(&self.positions[(batch.first + k) & self.mask].place) & STATE
                != FILLED
            ):
                mn_store_release_u64(&batch.hint, generation | k)
                return False
            k += 1
        return True

    cdef int _complete(self, uint32_t worker, uint32_t index) noexcept nogil:
        """If the batch is full, win the right to publish it, and publish it if nothing is left to do."""
        cdef mn_batch *batch = &self.batches[index]
        cdef uint64_t state = mn_load_acquire_u64(&batch.state)
        if state & 15 != OPEN_ or not self._all_filled(batch, state):
            return NOT_COMPLETE_
        # The state holds the record's generation: a batch that was delivered meanwhile is not taken for this one.
        if not mn_cas_seq_cst_u64(
            &batch.state, state, state & ~<uint64_t>0xFFFF | worker << 4 | COLLATING_
        ):
            return NOT_COMPLETE_
        # What to do follows from what lies at the places, so that nothing a dead worker said of itself outlives it.
        cdef uint64_t seq, flags = 0
        for seq in range(batch.first, batch.first + batch.count):
            flags |= <uint64_t>1 << (self.positions[seq & self.mask].blob & KIND_MASK_)
        batch.flags = flags
        if flags & (FAILED_ | ENDED_) or batch.result or (batch.layout and not flags & RAGGED_):
            mn_store_release_u64(&batch.state, state & ~<uint64_t>0xFFFF | READY_)
            mn_gate_notify(&self.header.ready, INT_MAX)
            return PUBLISHED_
        return MUST_COLLATE_

    cdef bint _adopt(self, uint32_t worker, uint32_t *index) noexcept nogil:
        """Find a batch that is full and that nobody collates; True if this worker must."""
        cdef uint32_t seen = mn_load_acquire_u32(&self.header.stranded)
        cdef uint32_t i
        for i in range(self.header.batch_capacity):
            if self._complete(worker, i) == MUST_COLLATE_:
                index[0] = i
                return True
        mn_cas_seq_cst_u32(&self.header.stranded, seen, 0)
        return False
