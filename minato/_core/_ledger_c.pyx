"""Who works on which sample, and where its result goes (compiled).

``_ledger_py`` says which arguments each function takes, what it returns, and what it raises.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.limits cimport INT_MAX
from libc.stdint cimport INT64_MIN, UINT64_MAX, int64_t, uint32_t, uint64_t

from minato._core.atomics cimport (
    mn_event_count_notify,
    mn_load_acquire_u32,
    mn_load_acquire_u64,
    mn_load_relaxed_u32,
    mn_load_relaxed_u64,
    mn_load_seq_cst_u64,
    mn_store_relaxed_u64,
    mn_store_release_u32,
    mn_store_release_u64,
    mn_store_seq_cst_u64,
)
from minato._core.layout cimport (
    MN_BOUND,
    MN_DONE,
    MN_DRAINING,
    MN_EPOCH_SLOTS,
    MN_FILLED,
    MN_KIND_MASK,
    MN_LAYOUT_VERSION,
    MN_MAGIC,
    MN_MAX_WORKERS,
    MN_NUMBER,
    MN_SKIP_BLOB,
    MN_STATE,
    MN_STOPPING,
    mn_batch,
    mn_header,
    mn_position,
    mn_worker,
    offset_ready,
    offset_work,
)
from minato._core.ledger cimport (
    mn_add_hint,
    mn_allocate,
    mn_at,
    mn_attach,
    mn_batch_fields,
    mn_bind_late,
    mn_cancel,
    mn_claim,
    mn_is_offered,
    mn_offer,
    mn_close,
    mn_end,
    mn_fill,
    mn_fill_skipped,
    mn_is_claimed,
    mn_is_collating,
    mn_layout_of,
    mn_ledger,
    mn_ledger_map,
    mn_ledger_nbytes,
    mn_notify_idle,
    mn_open,
    mn_open_epoch,
    mn_prepare,
    mn_publish_layout,
    mn_reoffer,
    mn_reopen_places,
    mn_reserve,
    mn_reserve_fields,
    mn_retire,
    mn_set_ready,
    mn_set_result,
    mn_set_sample,
    mn_settled,
    mn_skip,
    mn_strand,
    mn_tail,
    mn_uncollate,
    mn_vacant,
)

from minato._core._sample_loop_c import Lease
from minato._core.codes import Activity, LeaseState
from minato._core.limits import slot_overflow

__all__ = [
    "READY_EVENTS_OFFSET",
    "WORK_EVENTS_OFFSET",
    "BatchRecord",
    "Claim",
    "ConsumerLedger",
    "Ledger",
    "WorkerLedger",
]

WORK_EVENTS_OFFSET = offset_work
"""Where the event count of a ledger lies that workers sleep on."""
READY_EVENTS_OFFSET = offset_ready
"""Where the event count of a ledger lies that the consumer sleeps on."""


@cython.final
@cython.auto_pickle(False)
@cython.freelist(8)
cdef class Claim:
    """A run of samples that a worker has claimed: k … k+count-1 of the batch.

    With count 0, no samples: the worker is to collate this batch, whose worker died.
    """

    cdef readonly uint32_t batch
    cdef readonly uint32_t k
    cdef readonly uint32_t count


@cython.final
@cython.auto_pickle(False)
@cython.freelist(8)
cdef class BatchRecord:
    """A batch as it is now; what it says of its content holds once it is full."""

    cdef readonly uint64_t generation
    cdef readonly uint64_t first
    cdef readonly uint32_t count
    cdef readonly uint32_t epoch_slot
    cdef readonly bint bound
    cdef readonly int64_t epoch
    cdef readonly int64_t seed
    cdef readonly uint64_t indices_offset
    cdef readonly uint64_t indices_nbytes
    cdef readonly uint64_t layout
    cdef readonly uint64_t flags
    cdef readonly uint64_t result
    cdef readonly uint64_t result_nbytes
    cdef readonly uint64_t used_nbytes


cdef class Ledger:
    """All scheduling state of one loader, in memory that its workers share: what both of its ends may ask.

    Every sample in flight owns a position with two words: its ticket (who works on it) and its place (whose
    result lies there). A transition is one atomic store or compare-and-swap, so a worker may be killed at any
    instruction: what it did not finish is still claimed by it, and the consumer's ``release`` gives it out again.
    """

    cdef Py_buffer view
    cdef mn_ledger ledger

    def __cinit__(self, *arguments, **named):
        if type(self) is Ledger:
            raise TypeError("a ledger has two ends: ConsumerLedger and WorkerLedger")

    def __dealloc__(self):
        if self.ledger.header != NULL:
            PyBuffer_Release(&self.view)

    cdef int map(self, buffer, sizes) except -1:
        """Map the memory of a ledger; with sizes, create one there."""
        cdef mn_header *header
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        header = self.ledger.header = <mn_header *>self.view.buf
        if sizes is not None:
            num_workers, batch_capacity, position_capacity = sizes
            self.create(header, num_workers, batch_capacity, position_capacity)
        if self.view.len < <Py_ssize_t>sizeof(mn_header):
            raise ValueError(f"{self.view.len} bytes are no ledger: its header alone is larger")
        if mn_load_acquire_u64(&header.magic) != MN_MAGIC or header.version != MN_LAYOUT_VERSION:
            raise RuntimeError(
                "this memory is no ledger of this version of minato: all processes of a loader must "
                "run the same installation"
            )
        if header.compiled != 1:
            raise RuntimeError(
                "the loader runs the pure implementation of minato and this process the compiled one: "
                "set MINATO_NO_EXTENSIONS alike for both"
            )
        needed = Ledger.nbytes(header.num_workers, header.batch_capacity, header.position_capacity)
        if needed > self.view.len:
            raise ValueError(f"a ledger of {needed} bytes does not fit {self.view.len}")
        mn_ledger_map(&self.ledger, self.view.buf)
        return 0

    cdef int create(self, mn_header *header, num_workers, batch_capacity, position_capacity) except -1:
        if not 0 < num_workers <= MN_MAX_WORKERS:
            raise ValueError(f"num_workers {num_workers} is not between 1 and {MN_MAX_WORKERS}")
        if position_capacity & (position_capacity - 1) or position_capacity <= 0:
            raise ValueError(f"position_capacity {position_capacity} is not a power of two")
        needed = Ledger.nbytes(num_workers, batch_capacity, position_capacity)
        if needed > self.view.len:
            raise ValueError(f"a ledger of {needed} bytes does not fit {self.view.len}")
        if mn_load_acquire_u64(&header.magic):
            raise ValueError("a ledger is made in memory of zeros, and this one has been used")
        header.version = MN_LAYOUT_VERSION
        header.compiled = 1
        header.num_workers = num_workers
        header.batch_capacity = batch_capacity
        header.position_capacity = position_capacity
        mn_store_release_u64(&header.magic, MN_MAGIC)
        return 0

    cdef mn_batch *batch_at(self, uint32_t index) except NULL:
        if index >= self.ledger.header.batch_capacity:
            raise IndexError(f"batch {index} is not below {self.ledger.header.batch_capacity}")
        return &self.ledger.batches[index]

    cdef mn_worker *worker_at(self, uint32_t worker) except NULL:
        if worker >= self.ledger.header.num_workers:
            raise IndexError(f"worker {worker} is not below {self.ledger.header.num_workers}")
        return &self.ledger.workers[worker]

    @staticmethod
    def nbytes(num_workers, batch_capacity, position_capacity):
        """Bytes of a ledger with these capacities."""
        return mn_ledger_nbytes(num_workers, batch_capacity, position_capacity)

    @property
    def capacity(self):
        """``(batches, positions)`` that can be in flight."""
        return self.ledger.header.batch_capacity, self.ledger.header.position_capacity

    @property
    def stopping(self):
        """True once ``shut_down`` was called: workers leave after their current lease."""
        return mn_load_acquire_u32(&self.ledger.header.shutdown) == MN_STOPPING

    @property
    def draining(self):
        """True once ``shut_down(drain=True)`` was called: workers leave when nothing is left to claim."""
        return mn_load_acquire_u32(&self.ledger.header.shutdown) == MN_DRAINING

    @property
    def slow_ns(self):
        """Nanoseconds above which a sample counts as slow; 0: nothing does. The consumer sets it."""
        return mn_load_acquire_u64(&self.ledger.header.slow_ns)

    @property
    def waiting(self):
        """Whether the consumer waits for a batch. The consumer sets it."""
        return mn_load_acquire_u64(&self.ledger.header.waiting) != 0

    def unclaimed(self):
        """Upper bound on the number of published, unclaimed samples."""
        return mn_tail(&self.ledger) - (mn_load_seq_cst_u64(&self.ledger.header.head) & MN_NUMBER)

    def describe(self, uint32_t batch):
        """What the record of a batch says."""
        cdef mn_batch *record = self.batch_at(batch)
        cdef BatchRecord found = BatchRecord.__new__(BatchRecord)
        found.generation = mn_load_relaxed_u64(&record.state) >> 16
        found.first = mn_load_relaxed_u64(&record.first)
        found.count = mn_load_relaxed_u32(&record.count)
        found.bound = mn_load_relaxed_u32(&record.bound) != 0
        found.epoch = <int64_t>mn_load_relaxed_u64(&record.epoch)
        found.seed = <int64_t>mn_load_relaxed_u64(&record.seed)
        found.indices_offset = mn_load_relaxed_u64(&record.indices)
        found.indices_nbytes = mn_load_relaxed_u64(&record.indices_nbytes)
        found.epoch_slot = mn_load_relaxed_u32(&record.epoch_slot)
        found.flags = mn_load_relaxed_u64(&record.flags)
        found.layout = mn_layout_of(record)
        found.result = mn_load_acquire_u64(&record.result)
        found.result_nbytes = mn_load_relaxed_u64(&record.result_nbytes)
        found.used_nbytes = mn_load_relaxed_u64(&record.cursor) - mn_load_relaxed_u64(&record.slot)
        return found

    @staticmethod
    def can_hold(indices):
        """Whether a record can hold the indices: a list, not empty, of integers of 64 bits and no other type."""
        cdef int overflow = 0
        if type(indices) is not list:
            return False
        for index in <list>indices:
            if not PyLong_CheckExact(index):
                return False
            PyLong_AsLongLongAndOverflow(index, &overflow)
            if overflow:
                return False
        return len(<list>indices) > 0

    def indices(self, uint32_t batch, uint32_t k, uint32_t count):
        """The integer indices of samples k … k+count-1."""
        cdef uint64_t seq, first = mn_load_relaxed_u64(&self.batch_at(batch).first) + k
        return [
            <int64_t>mn_load_relaxed_u64(&mn_at(&self.ledger, seq).index)
            for seq in range(first, first + count)
        ]

    def occurrences(self, uint64_t position, uint64_t count):
        """How often the index of each of ``count`` samples from this position on came before; None: of none it did."""
        cdef uint64_t seq
        for seq in range(position, position + count):
            if mn_load_relaxed_u32(&mn_at(&self.ledger, seq).occurrence):
                break
        else:
            return None
        return [
            mn_load_relaxed_u32(&mn_at(&self.ledger, seq).occurrence)
            for seq in range(position, position + count)
        ]

    def locate(self, uint64_t position):
        """``(batch, k)``: the position is that of sample k of the batch."""
        cdef uint32_t batch = mn_load_relaxed_u32(&mn_at(&self.ledger, position).batch)
        return batch, position - mn_load_relaxed_u64(&self.batch_at(batch).first)

    def is_placed(self, uint64_t position):
        """Whether it is settled in which batch this sample will lie."""
        return mn_load_acquire_u64(&mn_at(&self.ledger, position).ticket) & MN_NUMBER != 0

    def occupants(self, uint32_t batch):
        """Position of the sample that lies at each place of a full batch; -1: none does, as it was skipped."""
        cdef mn_batch *record = self.batch_at(batch)
        cdef mn_position *there
        cdef uint64_t seq, place, first = mn_load_relaxed_u64(&record.first)
        cdef uint64_t end = first + mn_load_relaxed_u32(&record.count)
        for seq in range(first, end):
            there = mn_at(&self.ledger, seq)
            if (
                mn_load_acquire_u64(&there.place) & MN_NUMBER != seq + 1
                or mn_load_relaxed_u64(&there.blob) & MN_KIND_MASK == MN_SKIP_BLOB
            ):
                break
        else:
            return range(first, end)
        found = []
        for seq in range(first, end):
            there = mn_at(&self.ledger, seq)
            place = mn_load_acquire_u64(&there.place)
            if mn_load_relaxed_u64(&there.blob) & MN_KIND_MASK == MN_SKIP_BLOB:
                place = 0
            found.append(<int64_t>(place & MN_NUMBER) - 1)
        return found

    def blobs(self, uint32_t batch):
        """``(kind, offset, nbytes)`` of each place of a full batch that has a blob, by the place's number k."""
        cdef mn_batch *record = self.batch_at(batch)
        cdef mn_position *position
        cdef uint64_t blob, nbytes, first = mn_load_relaxed_u64(&record.first)
        cdef uint32_t k
        found = {}
        for k in range(mn_load_relaxed_u32(&record.count)):
            position = mn_at(&self.ledger, first + k)
            blob = mn_load_relaxed_u64(&position.blob)
            if blob:
                nbytes = mn_load_relaxed_u64(&position.blob_nbytes)
                found[k] = (blob & MN_KIND_MASK, blob & ~<uint64_t>MN_KIND_MASK, nbytes)
        return found


@cython.final
cdef class WorkerLedger(Ledger):
    """The end of one worker: it claims samples, fills places, and publishes the batches that are full."""

    cdef uint32_t me
    cdef object own_lease

    def __cinit__(self, buffer, uint32_t number, int lock_fd=-1):
        self.map(buffer, None)
        self.me = number
        self.own_lease = Lease(buffer, <char *>self.worker_at(number) - <char *>self.view.buf)

    @property
    def number(self):
        """The worker's, from 0 on."""
        return self.me

    @property
    def lease(self):
        """What the worker is on; nobody else writes it while the worker lives."""
        return self.own_lease

    def claim(self, uint32_t max_run, bint fresh=False):
        """Claim the oldest free samples: up to ``max_run`` consecutive ones of a batch, or one that begins early."""
        cdef uint32_t batch, count
        cdef uint64_t k
        cdef Claim found
        if not mn_claim(&self.ledger, self.me, max_run, fresh, &batch, &k, &count):
            return None
        found = Claim.__new__(Claim)
        found.batch, found.k, found.count = batch, k, count
        return found

    def offer(self, uint64_t position):
        """Let any worker claim a sample that this one has claimed, and whose item it has stored."""
        mn_offer(&self.ledger, position)

    def is_offered(self, uint64_t position):
        """Whether a sample that was offered still waits for a worker."""
        return mn_is_offered(&self.ledger, position)

    def end(self, uint64_t samples, uint64_t busy_ns, uint64_t idle_ns):
        """Note that the worker is between two leases, and add to its activity."""
        mn_end(&self.ledger, self.me, samples, busy_ns, idle_ns)

    @property
    def front(self):
        """How far claims in turn have come: all before this position are taken."""
        return mn_load_acquire_u64(&self.ledger.header.head) & MN_NUMBER

    def reserve(self, uint64_t position, uint32_t count=1, bint to_newest=False):
        """Take places for finished samples: at most ``count``, from a position on."""
        cdef uint64_t place, end
        cdef uint32_t batch, taken = 1
        place = mn_reserve(&self.ledger, position, to_newest)
        batch = mn_load_relaxed_u32(&mn_at(&self.ledger, place).batch)
        end = mn_load_relaxed_u64(&self.batch_at(batch).first) + mn_load_relaxed_u32(&self.batch_at(batch).count)
        # A sample whose place lies elsewhere keeps it, until it is reserved again.
        while (
            taken < count
            and place + taken < end
            and mn_reserve(&self.ledger, position + taken, to_newest) == place + taken
        ):
            taken += 1
        return place, batch, taken

    def note_costs(self, uint64_t position, costs, uint32_t count):
        """Say what ``count`` samples from this position on have cost, in int64 memory of ns; before they are filled."""
        cdef Py_buffer view
        cdef uint32_t i
        PyObject_GetBuffer(costs, &view, 0)
        try:
            if view.len < 8 * <Py_ssize_t>count:
                raise ValueError(f"{view.len} bytes hold no {count} costs")
            for i in range(count):
                mn_store_relaxed_u64(
                    &mn_at(&self.ledger, position + i).cost_ns, (<uint64_t *>view.buf)[i]
                )
        finally:
            PyBuffer_Release(&view)

    def attach(self, uint64_t place, uint64_t blob, uint64_t blob_nbytes):
        """Say what lies at a place besides the fields; before the place is filled."""
        mn_attach(&self.ledger, place, blob, blob_nbytes)

    def fill(self, uint64_t position, uint64_t place, uint32_t count=1):
        """Say that the results of samples lie at their places, which follow one another in one batch."""
        return mn_fill(&self.ledger, self.me, position, place, count)

    def fill_run(self, uint32_t batch, uint32_t k, uint32_t count):
        """``fill`` for samples k … k+count-1 of a batch whose samples have their own places."""
        cdef uint64_t first = mn_load_relaxed_u64(&self.batch_at(batch).first) + k
        if k + <uint64_t>count > mn_load_relaxed_u32(&self.batch_at(batch).count):
            raise IndexError(f"there is no sample {k + <uint64_t>count - 1} in batch {batch}")
        return mn_fill(&self.ledger, self.me, first, first, count)

    def skip(self, uint64_t position):
        """Say that a sample has no result; one without a place leaves it to another."""
        cdef uint32_t batch
        cdef int answer
        answer = mn_skip(&self.ledger, self.me, position, &batch)
        return batch, answer

    def lacks_only(self, uint32_t batch, uint32_t k, uint32_t count):
        """Whether all places of a batch but those of samples k … k+count-1 are filled."""
        cdef mn_batch *record = self.batch_at(batch)
        cdef uint64_t place, first = mn_load_relaxed_u64(&record.first)
        for place in range(mn_load_relaxed_u32(&record.count)):
            if k <= place < k + count:
                continue
            if mn_load_acquire_u64(&mn_at(&self.ledger, first + place).place) & MN_STATE != MN_FILLED:
                return False
        return True

    def set_result(self, uint32_t batch, uint64_t result, uint64_t nbytes):
        """Say where the result of a whole batch lies, after everything else that is said of the batch.

        All samples whose places are not filled must be this worker's. From this store on the batch is complete: these
        places need no data, and if the worker dies, ``release`` fills them.
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
        """Arena offset of ``nbytes`` fresh bytes in the batch's slot, aligned to 64."""
        self.batch_at(batch)
        return self.allocated(batch, mn_allocate(&self.ledger, batch, nbytes))

    def reserve_fields(self, uint32_t batch, uint64_t nbytes):
        """Arena offset of ``nbytes`` for the batch's fields; 0: a layout is published already."""
        self.batch_at(batch)
        return self.allocated(batch, mn_reserve_fields(&self.ledger, batch, nbytes))

    cdef uint64_t allocated(self, uint32_t batch, uint64_t offset) except? 0:
        cdef mn_batch *record = self.batch_at(batch)
        if offset == UINT64_MAX:
            raise MemoryError(
                slot_overflow(mn_load_relaxed_u64(&record.slot_end) - mn_load_relaxed_u64(&record.slot))
            )
        return offset

    def publish_layout(self, uint32_t batch, uint64_t offset):
        """Offer a layout for the batch; returns the offset of the one that holds, the first offered."""
        self.batch_at(batch)
        return mn_publish_layout(&self.ledger, batch, offset)


@cython.final
cdef class ConsumerLedger(Ledger):
    """The end of the training process: it opens batches, takes what is ready, and recovers what dead workers leave."""

    cdef dict in_flight  # records of the batches in flight, oldest first: their first positions

    def __cinit__(self, buffer, sizes, int lock_fd=-1):
        self.in_flight = {}
        self.map(buffer, sizes)

    def worker(self, uint32_t number):
        """The end of a worker that is a thread of this process, or in whose place this process acts."""
        return WorkerLedger(<object>self.view.obj, number)

    @property
    def slow_ns(self):
        """Nanoseconds above which a sample counts as slow; 0: nothing does."""
        return mn_load_acquire_u64(&self.ledger.header.slow_ns)

    @slow_ns.setter
    def slow_ns(self, uint64_t value):
        mn_store_release_u64(&self.ledger.header.slow_ns, value)

    @property
    def waiting(self):
        """Whether the consumer waits for a batch."""
        return mn_load_acquire_u64(&self.ledger.header.waiting) != 0

    @waiting.setter
    def waiting(self, bint value):
        mn_store_seq_cst_u64(&self.ledger.header.waiting, value)

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
        """Open a batch and offer its samples to the workers; ``has_room(count)`` must hold."""
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

    def wake(self, int most):
        """Wake up to ``most`` sleeping workers, after batches were opened without."""
        mn_event_count_notify(&self.ledger.header.work, most)

    def bind_late(self, uint32_t old, uint32_t new):
        """Give every unplaced sample of batch ``old`` a place: in batch ``new``, or else the oldest open one."""
        self.batch_at(old)
        self.batch_at(new)
        mn_bind_late(&self.ledger, old, new)

    def start_early(self, uint64_t position, uint64_t ahead):
        """Let an unbound sample start ``ahead`` samples early; return False if the table of hints is full."""
        return mn_add_hint(&self.ledger, position, ahead)

    def state(self, uint32_t batch):
        """OPEN, COLLATING, READY or CLOSED (VACANT after ``retire``)."""
        return mn_load_acquire_u64(&self.batch_at(batch).state) & 15

    def settled(self, uint32_t batch):
        """Whether no worker runs, or will run, a sample of this batch.

        Where samples take places in other batches, a batch that is not full may still be written to until all batches
        of its epoch are settled.
        """
        self.batch_at(batch)
        return mn_settled(&self.ledger, batch)

    def fill_skipped(self, uint32_t epoch_slot):
        """Fill the places that are left over when all samples of an epoch are settled and some of them are skipped."""
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

    def costs(self, uint32_t batch):
        """``(index, cost in ns)`` of the samples at the places of a full batch.

        Samples without an integer index or a known cost are left out, and those whose own batch is long gone.
        """
        cdef mn_batch *record = self.batch_at(batch)
        cdef mn_position *sample
        cdef uint64_t place, seq, cost_ns, first = mn_load_relaxed_u64(&record.first)
        cdef int64_t index
        found = []
        for place in range(first, first + mn_load_relaxed_u32(&record.count)):
            seq = (mn_load_acquire_u64(&mn_at(&self.ledger, place).place) & MN_NUMBER) - 1
            sample = mn_at(&self.ledger, seq)
            cost_ns = mn_load_relaxed_u64(&sample.cost_ns)
            index = <int64_t>mn_load_relaxed_u64(&sample.index)
            if mn_load_relaxed_u64(&sample.position) == seq and cost_ns and index != INT64_MIN:
                found.append((index, cost_ns))
        return found

    def num_slow(self, uint32_t batch):
        """How many of the samples at the places of a full batch have cost more than ``slow_ns``; 0 while that is 0."""
        cdef mn_batch *record = self.batch_at(batch)
        cdef mn_position *sample
        cdef uint64_t place, seq, slow_ns = mn_load_acquire_u64(&self.ledger.header.slow_ns)
        cdef uint64_t first = mn_load_relaxed_u64(&record.first)
        cdef int count = 0
        if slow_ns == 0:
            return 0
        for place in range(first, first + mn_load_relaxed_u32(&record.count)):
            seq = (mn_load_acquire_u64(&mn_at(&self.ledger, place).place) & MN_NUMBER) - 1
            sample = mn_at(&self.ledger, seq)
            count += (
                mn_load_relaxed_u64(&sample.position) == seq
                and mn_load_relaxed_u64(&sample.cost_ns) > slow_ns
            )
        return count

    def cancel(self, uint32_t batch):
        """Cancel the unclaimed samples of this batch."""
        self.batch_at(batch)
        mn_cancel(&self.ledger, batch)

    def close(self, uint32_t batch):
        """Forbid that anybody collates or publishes this batch any more; its places can still be filled."""
        self.batch_at(batch)
        return mn_close(&self.ledger, batch)

    def retire(self, uint32_t batch, int64_t first=-1):
        """Free the record of a batch that is settled and delivered, or closed with its whole epoch settled."""
        self.batch_at(batch)
        if first < 0 or self.in_flight.get(batch) == first:
            del self.in_flight[batch]
            mn_retire(&self.ledger, batch)

    @property
    def live(self):
        """The records of the batches in flight, the oldest first."""
        return list(self.in_flight)

    @property
    def tail(self):
        """Position of the first sample of the batch that is opened next."""
        return mn_tail(&self.ledger)

    def shut_down(self, bint drain=False):
        """Make every worker leave: after its current lease, or, with ``drain``, when nothing is left to claim."""
        mn_store_release_u32(&self.ledger.header.shutdown, MN_DRAINING if drain else MN_STOPPING)
        mn_event_count_notify(&self.ledger.header.work, INT_MAX)

    def release(self, uint32_t worker):
        """Offer again what a dead worker had claimed and not finished; a batch whose result it has set is finished."""
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

    def lease(self, uint32_t worker):
        """What a worker is on."""
        cdef mn_worker *record = self.worker_at(worker)
        cdef uint64_t position = mn_load_acquire_u64(&record.position)
        return LeaseState(
            (position - 1 if position else None),
            mn_load_relaxed_u64(&record.started_ns),
            <int64_t>mn_load_relaxed_u64(&record.step),
        )

    def activity(self, uint32_t worker):
        """What a worker has done so far."""
        cdef mn_worker *record = self.worker_at(worker)
        return Activity(
            mn_load_relaxed_u64(&record.samples),
            mn_load_relaxed_u64(&record.busy_ns),
            mn_load_relaxed_u64(&record.idle_ns),
        )
