"""Which samples are started early: a small table of hints, each of which may be lost without harm (compiled)."""

from libc.stdint cimport uint32_t, uint64_t

from minato._core._records_c cimport Records, worker_bits
from minato._core.atomics cimport (
    mn_cas_seq_cst_u64,
    mn_load_acquire_u32,
    mn_load_acquire_u64,
    mn_store_release_u32,
    mn_store_release_u64,
)
from minato._core.layout cimport (
    MN_CLAIMED,
    MN_FREE,
    MN_HINTS,
    MN_MOST_AHEAD,
    MN_NUMBER,
    MN_STATE,
    mn_position,
)


cdef inline bint add_hint(Records ledger, uint64_t seq, uint64_t ahead) noexcept nogil:
    """Note that a sample should be started by ``ahead`` samples before its turn; False if the table is full."""
    cdef uint32_t i, used = ledger.header.hints_used
    for i in range(MN_HINTS):
        if i >= used or mn_load_acquire_u64(&ledger.header.hints[i]) == 0:
            mn_store_release_u64(
                &ledger.header.hints[i], min(ahead, <uint64_t>MN_MOST_AHEAD) << 48 | (seq + 1)
            )
            if i >= used:
                mn_store_release_u32(&ledger.header.hints_used, i + 1)
            return True
    return False


cdef inline bint claim_hinted(
    Records ledger, uint32_t worker, uint64_t front, uint64_t *claimed
) noexcept nogil:
    """Claim the hinted sample that should be started first, if one should by now.

    Args:
        front: The first position that may be free: how far claims have come.
    """
    cdef uint32_t i, chosen = 0, used = mn_load_acquire_u32(&ledger.header.hints_used)
    cdef uint64_t word, seq, ahead, due, least, chosen_word = 0
    cdef mn_position *position
    while used:
        least = front + 1
        for i in range(used):
            word = mn_load_acquire_u64(&ledger.header.hints[i])
            if word == 0:
                continue
            seq, ahead = (word & MN_NUMBER) - 1, word >> 48
            if seq < front:
                mn_cas_seq_cst_u64(&ledger.header.hints[i], word, 0)  # its turn has come anyway
                continue
            due = seq - min(seq, ahead)
            if due < least:
                least, chosen, chosen_word = due, i, word
        if least > front:
            return False
        if not mn_cas_seq_cst_u64(&ledger.header.hints[chosen], chosen_word, 0):
            continue
        seq = (chosen_word & MN_NUMBER) - 1
        position = &ledger.positions[seq & ledger.mask]
        word = mn_load_acquire_u64(&position.ticket)
        if (
            word & MN_STATE == MN_FREE
            and position.position == seq
            and mn_cas_seq_cst_u64(&position.ticket, word, word | MN_CLAIMED | worker_bits(worker))
        ):
            claimed[0] = position.position
            return True
    return False
