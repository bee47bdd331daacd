"""What becomes of the samples of a dead worker: the inner part of the compiled ledger's ``release``."""

from libc.stdint cimport uint32_t, uint64_t

from minato._core._records_c cimport Records, worker_of
from minato._core.atomics cimport (
    mn_load_acquire_u64,
    mn_store_release_u64,
    mn_store_seq_cst_u64,
)
from minato._core.layout cimport (
    MN_BOUND,
    MN_CLAIMED,
    MN_COLLATING,
    MN_DONE,
    MN_FILLED,
    MN_FREE,
    MN_KIND_MASK,
    MN_NUMBER,
    MN_SKIP_BLOB,
    MN_STATE,
    mn_batch,
    mn_position,
)
from minato._core.places cimport give_back, lower


cdef inline void reopen_places(
    Records ledger, uint32_t worker, uint64_t base, uint64_t tail
) noexcept nogil:
    """Open the places again that the worker had taken without having said so on the ticket."""
    cdef uint64_t place, seq, word
    cdef mn_position *position
    for place in range(base, tail):
        word = mn_load_acquire_u64(&ledger.positions[place & ledger.mask].place)
        if word & MN_STATE != MN_BOUND:
            continue
        seq = (word & MN_NUMBER) - 1
        position = &ledger.positions[seq & ledger.mask]
        word = mn_load_acquire_u64(&position.ticket)
        if (
            position.position == seq
            and is_claimed(word, worker)
            and word & MN_NUMBER != place + 1
        ):
            give_back(ledger, place + 1, seq)


cdef inline uint64_t reoffer(
    Records ledger, uint32_t worker, uint64_t base, uint64_t tail
) noexcept nogil:
    """Offer the samples again that the worker had claimed and not finished; returns how many.

    A batch whose result it has set is finished.
    """
    cdef uint64_t seq, word, place, released = 0
    cdef bint empty
    cdef mn_position *position
    cdef mn_position *there
    cdef mn_batch *batch
    for seq in range(base, tail):
        position = &ledger.positions[seq & ledger.mask]
        word = mn_load_acquire_u64(&position.ticket)
        if not is_claimed(word, worker):
            continue
        place = word & MN_NUMBER
        if place:
            there = &ledger.positions[(place - 1) & ledger.mask]
            batch = &ledger.batches[position.batch]
            empty = mn_load_acquire_u64(&there.place) == MN_BOUND | (seq + 1)
            if empty and batch.bound and mn_load_acquire_u64(&batch.result):
                # The result of the whole batch is there: the worker was about to fill its places.
                mn_store_seq_cst_u64(&there.place, MN_FILLED | (seq + 1))
                empty = False
            if not empty:
                # Once filled, the place may long have been delivered and have come round the ring.
                if is_skipped(there, seq):
                    place = 0
                mn_store_release_u64(&position.ticket, MN_DONE | place)
                continue
            there.blob = 0
        mn_store_seq_cst_u64(&position.ticket, MN_FREE | place)
        lower(&ledger.header.head, seq)
        released += 1
    return released


cdef inline bint is_claimed(uint64_t ticket, uint32_t worker) noexcept nogil:
    return ticket & MN_STATE == MN_CLAIMED and worker_of(ticket) == worker


cdef inline bint is_collating(uint64_t state, uint32_t worker) noexcept nogil:
    return state & 15 == MN_COLLATING and (state >> 4) & 0xFFF == worker


cdef inline bint is_skipped(mn_position *there, uint64_t seq) noexcept nogil:
    return (
        mn_load_acquire_u64(&there.place) == MN_FILLED | (seq + 1)
        and there.blob & MN_KIND_MASK == MN_SKIP_BLOB
    )
