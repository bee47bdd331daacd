"""Which place a sample takes: the inner part of the compiled ledger that both sides share."""

from libc.stdint cimport uint32_t, uint64_t

from minato._core._records_c cimport Records
from minato._core.atomics cimport mn_cas_seq_cst_u64, mn_load_acquire_u64, mn_load_seq_cst_u64
from minato._core.layout cimport (
    MN_BOUND,
    MN_NUMBER,
    MN_ONE_VERSION,
    MN_STATE,
    mn_batch,
    mn_pass,
    mn_position,
)


cdef inline uint64_t take(
    Records ledger, uint64_t start, uint64_t end, uint32_t pass_index, uint64_t seq
) noexcept nogil:
    """Bind the first open place of the pass in [start, end) to a sample; returns place + 1, 0 if there is none."""
    # An open place says its own number, so none is taken for one that has gone round the ring.
    cdef uint64_t place
    cdef mn_position *record
    for place in range(start, end):
        record = &ledger.positions[place & ledger.mask]
        if (
            mn_load_seq_cst_u64(&record.place) == place + 1
            and is_in_pass(ledger, record.batch, place, pass_index)
            and mn_cas_seq_cst_u64(&record.place, place + 1, MN_BOUND | (seq + 1))
        ):
            return place + 1
    return 0


cdef inline bint is_in_pass(
    Records ledger, uint32_t index, uint64_t place, uint32_t pass_index
) noexcept nogil:
    # A batch that was closed leaves its places behind; whoever has its record now, begins after them.
    cdef mn_batch *batch = &ledger.batches[index]
    return batch.pass_index == pass_index and batch.first <= place


cdef inline uint64_t try_oldest(Records ledger, uint32_t pass_index, uint64_t seq) noexcept nogil:
    """Bind the oldest place that can be had to a sample; returns place + 1, 0 if there is none."""
    cdef mn_pass *here = &ledger.header.passes[pass_index]
    cdef uint64_t cursor = mn_load_acquire_u64(&here.cursor)
    cdef uint64_t limit = mn_load_acquire_u64(&here.limit)
    cdef uint64_t place = take(ledger, cursor & MN_NUMBER, limit, pass_index, seq)
    if place == 0:
        return take_spare(ledger, pass_index, seq)
    mn_cas_seq_cst_u64(&here.cursor, cursor, cursor & ~MN_NUMBER | place)
    return place


cdef inline uint64_t take_oldest(Records ledger, uint32_t pass_index, uint64_t seq) noexcept nogil:
    # For a sample that has no place yet there is always one; others may be quicker a few times.
    cdef uint64_t place = 0
    while place == 0:
        place = try_oldest(ledger, pass_index, seq)
    return place


cdef inline uint64_t take_newest(Records ledger, uint32_t pass_index, uint64_t seq) noexcept nogil:
    cdef mn_pass *here = &ledger.header.passes[pass_index]
    cdef uint64_t place = mn_load_acquire_u64(&here.limit)
    cdef uint64_t cursor = mn_load_acquire_u64(&here.cursor) & MN_NUMBER
    while place > cursor:
        if take(ledger, place - 1, place, pass_index, seq):
            return place
        place -= 1
    return take_oldest(ledger, pass_index, seq)


cdef inline uint64_t take_spare(Records ledger, uint32_t pass_index, uint64_t seq) noexcept nogil:
    """A place taken for this sample, or for one that lies elsewhere; returns place + 1, 0 if there is none.

    As many places are open or taken as samples are unplaced. So if none is open, one was taken twice for the same
    sample, by its worker and by the consumer, and whoever came second has not handed it back, or died before.
    """
    cdef uint64_t limit = mn_load_acquire_u64(&ledger.header.passes[pass_index].limit)
    cdef uint64_t place, word, holder, ticket
    cdef mn_position *record
    for place in range(limit - min(limit, ledger.mask + 1), limit):
        record = &ledger.positions[place & ledger.mask]
        word = mn_load_seq_cst_u64(&record.place)
        if (
            word & MN_STATE != MN_BOUND
            or record.position != place
            or not is_in_pass(ledger, record.batch, place, pass_index)
        ):
            continue
        holder = (word & MN_NUMBER) - 1
        if holder == seq:
            return place + 1
        ticket = mn_load_seq_cst_u64(&ledger.positions[holder & ledger.mask].ticket)
        if (
            ticket & MN_NUMBER
            and ticket & MN_NUMBER != place + 1
            and ledger.positions[holder & ledger.mask].position == holder
            and mn_cas_seq_cst_u64(&record.place, word, MN_BOUND | (seq + 1))
        ):
            return place + 1
    return 0


cdef inline void give_back(Records ledger, uint64_t place, uint64_t seq) noexcept nogil:
    """Open a place (given + 1) again that was taken for a sample, unless somebody made use of it."""
    cdef mn_position *record = &ledger.positions[(place - 1) & ledger.mask]
    cdef uint32_t pass_index = ledger.batches[record.batch].pass_index
    if mn_cas_seq_cst_u64(&record.place, MN_BOUND | (seq + 1), place):
        lower(&ledger.header.passes[pass_index].cursor, place - 1)


cdef inline void lower(uint64_t *cursor, uint64_t position) noexcept nogil:
    """Move a cursor back; the new version defeats a worker that is just moving it on."""
    cdef uint64_t word
    while True:
        word = mn_load_acquire_u64(cursor)
        if mn_cas_seq_cst_u64(
            cursor, word, (word & ~MN_NUMBER) + MN_ONE_VERSION | min(word & MN_NUMBER, position)
        ):
            return
