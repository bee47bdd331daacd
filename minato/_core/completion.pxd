"""When a batch is full, and who publishes it (compiled)."""

from libc.limits cimport INT_MAX
from libc.stdint cimport uint32_t, uint64_t

from minato._core._records_c cimport Records, worker_bits
from minato._core.atomics cimport (
    mn_cas_seq_cst_u32,
    mn_cas_seq_cst_u64,
    mn_gate_notify,
    mn_load_acquire_u32,
    mn_load_acquire_u64,
    mn_load_seq_cst_u64,
    mn_store_release_u64,
)
from minato._core.layout cimport (
    MN_CLAIMED,
    MN_COLLATING,
    MN_DONE,
    MN_ENDED,
    MN_FAILED,
    MN_FILLED,
    MN_KIND_MASK,
    MN_MUST_COLLATE,
    MN_NOT_COMPLETE,
    MN_OPEN,
    MN_PUBLISHED,
    MN_RAGGED,
    MN_READY,
    MN_SKIPPED,
    MN_STATE,
    mn_batch,
)


cdef inline void settle(Records ledger, uint32_t worker, uint64_t seq, uint64_t place) noexcept nogil:
    # Once its place is filled, a batch of bound samples can be delivered and its records come round the ring: the
    # ticket must still be this worker's.
    mn_cas_seq_cst_u64(
        &ledger.positions[seq & ledger.mask].ticket,
        MN_CLAIMED | worker_bits(worker) | (place + 1),
        MN_DONE | (place + 1),
    )


cdef inline bint all_filled(Records ledger, mn_batch *batch, uint64_t state) noexcept nogil:
    # The hint carries the generation of the record: one that a late worker wrote for an earlier batch is void.
    cdef uint64_t generation = state >> 16 << 32
    cdef uint64_t hint = mn_load_acquire_u64(&batch.hint)
    cdef uint64_t k = 0
    if hint >> 32 << 32 == generation:
        k = hint - generation
    while k < batch.count:
        # Of two workers that fill the last two places, at least one must see both.
        if (
            mn_load_seq_cst_u64(&ledger.positions[(batch.first + k) & ledger.mask].place) & MN_STATE
            != MN_FILLED
        ):
            mn_store_release_u64(&batch.hint, generation | k)
            return False
        k += 1
    return True


cdef inline int complete(Records ledger, uint32_t worker, uint32_t index) noexcept nogil:
    """If the batch is full, win the right to publish it, and publish it if nothing is left to do."""
    cdef mn_batch *batch = &ledger.batches[index]
    cdef uint64_t state = mn_load_acquire_u64(&batch.state)
    if state & 15 != MN_OPEN or not all_filled(ledger, batch, state):
        return MN_NOT_COMPLETE
    # The state holds the record's generation: a batch that was delivered meanwhile is not taken for this one.
    if not mn_cas_seq_cst_u64(
        &batch.state, state, state & ~<uint64_t>0xFFFF | worker << 4 | MN_COLLATING
    ):
        return MN_NOT_COMPLETE
    # What to do follows from what lies at the places, so that nothing a dead worker said of itself outlives it.
    cdef uint64_t seq, flags = 0
    for seq in range(batch.first, batch.first + batch.count):
        flags |= <uint64_t>1 << (ledger.positions[seq & ledger.mask].blob & MN_KIND_MASK)
    batch.flags = flags
    if flags & (MN_FAILED | MN_ENDED) or batch.result or (
        batch.layout and not flags & (MN_RAGGED | MN_SKIPPED)
    ):
        mn_store_release_u64(&batch.state, state & ~<uint64_t>0xFFFF | MN_READY)
        mn_gate_notify(&ledger.header.ready, INT_MAX)
        return MN_PUBLISHED
    return MN_MUST_COLLATE


cdef inline bint adopt(Records ledger, uint32_t worker, uint32_t *index) noexcept nogil:
    """Find a batch that is full and that nobody collates; True if this worker must."""
    cdef uint32_t seen = mn_load_acquire_u32(&ledger.header.stranded)
    cdef uint32_t adopted = mn_load_acquire_u32(&ledger.header.adopted)
    cdef uint32_t i
    for i in range(ledger.header.batch_capacity):
        if complete(ledger, worker, i) == MN_MUST_COLLATE:
            index[0] = i
            return True
    # What is stranded during the look raises the count: the next claim looks again.
    mn_cas_seq_cst_u32(&ledger.header.adopted, adopted, seen)
    return False
