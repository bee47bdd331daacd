"""The shared memory that a ledger lies in (compiled)."""

from cpython.buffer cimport PyBUF_WRITABLE, Py_buffer, PyBuffer_Release, PyObject_GetBuffer
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memset

from minato._core.atomics cimport (
    mn_load_acquire_u32,
    mn_load_acquire_u64,
    mn_load_relaxed_u32,
    mn_load_relaxed_u64,
    mn_store_relaxed_u64,
    mn_store_release_u64,
    mn_store_seq_cst_u64,
)
from minato._core.layout cimport (
    MN_DRAINING,
    MN_KIND_MASK,
    MN_LAYOUT_VERSION,
    MN_MAGIC,
    MN_MAX_WORKERS,
    MN_NUMBER,
    MN_RAGGED,
    MN_STOPPING,
    mn_batch,
    mn_header,
    mn_position,
    mn_worker,
    offset_ready,
    offset_work,
)
from minato._core.ledger cimport mn_add_hint, mn_at, mn_ledger_map, mn_ledger_nbytes

__all__ = ["Records"]


cdef class Records:
    """The ledger's memory: its header, and the records of workers, batches and samples.

    Args:
        buffer: Writable memory of ``Ledger.nbytes(...)`` that every party maps; it stays mapped for the ledger's life.
        sizes: ``(num_workers, batch_capacity, position_capacity)`` to create a ledger, None to attach to one.
        lock_fd: Descriptor of the memory; only the pure backend locks it.

    Raises:
        ValueError: The memory is too small, or the sizes make no sense.
        RuntimeError: The other side runs another implementation or version of minato.
    """

    @staticmethod
    def nbytes(num_workers, batch_capacity, position_capacity):
        """Bytes of a ledger with these capacities."""
        return mn_ledger_nbytes(num_workers, batch_capacity, position_capacity)

    def __cinit__(self, buffer, sizes=None, int lock_fd=-1):
        cdef mn_header *header
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE)
        header = self.ledger.header = <mn_header *>self.view.buf
        if sizes is not None:
            num_workers, batch_capacity, position_capacity = sizes
            if not 0 < num_workers <= MN_MAX_WORKERS:
                raise ValueError(f"num_workers {num_workers} is not between 1 and {MN_MAX_WORKERS}")
            if position_capacity & (position_capacity - 1) or position_capacity <= 0:
                raise ValueError(f"position_capacity {position_capacity} is not a power of two")
            if Records.nbytes(*sizes) > self.view.len:
                raise ValueError(
                    f"a ledger of {Records.nbytes(*sizes)} bytes does not fit {self.view.len}"
                )
            # The positions need no initial values: none is read before it is published.
            memset(self.view.buf, 0, Records.nbytes(num_workers, batch_capacity, 0))
            header.version = MN_LAYOUT_VERSION
            header.compiled = 1
            header.num_workers = num_workers
            header.batch_capacity = batch_capacity
            header.position_capacity = position_capacity
            mn_store_release_u64(&header.magic, MN_MAGIC)
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
        needed = Records.nbytes(header.num_workers, header.batch_capacity, header.position_capacity)
        if needed > self.view.len:
            raise ValueError(f"a ledger of {needed} bytes does not fit {self.view.len}")
        mn_ledger_map(&self.ledger, self.view.buf)

    def __dealloc__(self):
        if self.ledger.header != NULL:
            PyBuffer_Release(&self.view)

    cdef mn_batch *batch_at(self, uint32_t index) except NULL:
        if index >= self.ledger.header.batch_capacity:
            raise IndexError(f"batch {index} is not below {self.ledger.header.batch_capacity}")
        return &self.ledger.batches[index]

    cdef mn_worker *worker_at(self, uint32_t worker) except NULL:
        if worker >= self.ledger.header.num_workers:
            raise IndexError(f"worker {worker} is not below {self.ledger.header.num_workers}")
        return &self.ledger.workers[worker]

    @property
    def work_events_offset(self):
        """Where the gate lies that workers sleep on."""
        return offset_work

    @property
    def ready_events_offset(self):
        """Where the gate lies that the consumer sleeps on."""
        return offset_ready

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
        """Nanoseconds above which a sample counts as slow; 0: nothing does."""
        return mn_load_acquire_u64(&self.ledger.header.slow_ns)

    @slow_ns.setter
    def slow_ns(self, uint64_t value):
        mn_store_release_u64(&self.ledger.header.slow_ns, value)

    @property
    def waiting(self):
        """Whether the consumer waits for a batch; set by the consumer."""
        return mn_load_acquire_u64(&self.ledger.header.waiting) != 0

    @waiting.setter
    def waiting(self, bint value):
        mn_store_seq_cst_u64(&self.ledger.header.waiting, value)

    @property
    def front(self):
        """How far claims in turn have come: all before this position are taken."""
        return mn_load_acquire_u64(&self.ledger.header.head) & MN_NUMBER

    def begun(self):
        """Start times of the workers' current samples, in ns of ``now_ns``, oldest first."""
        cdef uint32_t worker
        cdef list found = []
        for worker in range(self.ledger.header.num_workers):
            if mn_load_acquire_u64(&self.ledger.workers[worker].position):
                found.append(mn_load_relaxed_u64(&self.ledger.workers[worker].started_ns))
        found.sort()
        return found

    def describe(self, uint32_t batch):
        """What a worker must know of a batch.

        Returns:
            ``(generation, first, count, bound, epoch, seed, indices_offset, indices_nbytes, epoch_slot)``; first is the
            position of its sample 0, and generation changes with each use of the record.
        """
        cdef mn_batch *record = self.batch_at(batch)
        return (
            mn_load_relaxed_u64(&record.state) >> 16,
            mn_load_relaxed_u64(&record.first),
            mn_load_relaxed_u32(&record.count),
            mn_load_relaxed_u32(&record.bound) != 0,
            <int64_t>mn_load_relaxed_u64(&record.epoch),
            <int64_t>mn_load_relaxed_u64(&record.seed),
            mn_load_relaxed_u64(&record.indices),
            mn_load_relaxed_u64(&record.indices_nbytes),
            mn_load_relaxed_u32(&record.epoch_slot),
        )

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

    def fields(self, uint32_t batch):
        """``(generation, layout, count)``: what a worker needs to find a place in the batch's fields."""
        cdef mn_batch *record = self.batch_at(batch)
        return (
            mn_load_relaxed_u64(&record.state) >> 16,
            mn_load_acquire_u64(&record.layout),
            mn_load_relaxed_u32(&record.count),
        )

    def contents(self, uint32_t batch):
        """``(flags, layout, result, result_nbytes, count, used_nbytes)`` of a full batch."""
        cdef mn_batch *record = self.batch_at(batch)
        return (
            mn_load_relaxed_u64(&record.flags),
            mn_load_acquire_u64(&record.layout),
            mn_load_acquire_u64(&record.result),
            mn_load_relaxed_u64(&record.result_nbytes),
            mn_load_relaxed_u32(&record.count),
            mn_load_relaxed_u64(&record.cursor) - mn_load_relaxed_u64(&record.slot),
        )

    def blobs(self, uint32_t batch):
        """``(kind, offset, nbytes)`` of each place of a full batch; kind 0: it has no blob."""
        cdef mn_batch *record = self.batch_at(batch)
        cdef mn_position *position
        cdef uint64_t seq, blob, first = mn_load_relaxed_u64(&record.first)
        found = []
        for seq in range(first, first + mn_load_relaxed_u32(&record.count)):
            position = mn_at(&self.ledger, seq)
            blob = mn_load_relaxed_u64(&position.blob)
            found.append(
                (blob & MN_KIND_MASK, blob & ~<uint64_t>MN_KIND_MASK, mn_load_relaxed_u64(&position.blob_nbytes))
            )
        return found

    def start_early(self, uint64_t position, uint64_t ahead):
        """Let an unbound sample start ``ahead`` samples early; return False if the table of hints is full."""
        return mn_add_hint(&self.ledger, position, ahead)

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

    def is_placed(self, uint64_t position):
        """Whether it is settled in which batch this sample will lie."""
        return mn_load_acquire_u64(&mn_at(&self.ledger, position).ticket) & MN_NUMBER != 0

    def samples(self, uint32_t batch):
        """``(position, index, cost in ns, bytes)`` of the samples at the places of a full batch.

        Samples without an integer index or a known cost are left out, and those whose own batch is long gone; bytes are
        0 for one that fits the layout.
        """
        cdef mn_batch *record = self.batch_at(batch)
        cdef mn_position *sample
        cdef mn_position *there
        cdef uint64_t place, seq, cost_ns, first = mn_load_relaxed_u64(&record.first)
        cdef bint ragged
        found = []
        for place in range(first, first + mn_load_relaxed_u32(&record.count)):
            there = mn_at(&self.ledger, place)
            seq = (mn_load_acquire_u64(&there.place) & MN_NUMBER) - 1
            sample = mn_at(&self.ledger, seq)
            cost_ns = mn_load_relaxed_u64(&sample.cost_ns)
            if (
                mn_load_relaxed_u64(&sample.position) == seq
                and cost_ns
                and <int64_t>mn_load_relaxed_u64(&sample.index) != INT64_MIN
            ):
                ragged = 1 << (mn_load_relaxed_u64(&there.blob) & MN_KIND_MASK) == MN_RAGGED
                found.append(
                    (
                        seq,
                        <int64_t>mn_load_relaxed_u64(&sample.index),
                        cost_ns,
                        mn_load_relaxed_u64(&there.blob_nbytes) if ragged else 0,
                    )
                )
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

    def occupants(self, uint32_t batch):
        """Position of the sample that lies at each place of a full batch; -1: none does."""
        cdef mn_batch *record = self.batch_at(batch)
        cdef uint64_t seq, first = mn_load_relaxed_u64(&record.first)
        return [
            <int64_t>(mn_load_acquire_u64(&mn_at(&self.ledger, seq).place) & MN_NUMBER) - 1
            for seq in range(first, first + mn_load_relaxed_u32(&record.count))
        ]
