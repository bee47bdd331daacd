from libc.stdint cimport uint32_t, uint64_t


cdef extern from "atomics.h" nogil:
    uint64_t mn_load_acquire_u64(const uint64_t *word)
    uint64_t mn_load_seq_cst_u64(const uint64_t *word)
    void mn_store_release_u64(uint64_t *word, uint64_t value)
    void mn_store_seq_cst_u64(uint64_t *word, uint64_t value)
    bint mn_cas_seq_cst_u64(uint64_t *word, uint64_t expected, uint64_t desired)
    uint32_t mn_load_acquire_u32(const uint32_t *word)
    bint mn_cas_seq_cst_u32(uint32_t *word, uint32_t expected, uint32_t desired)
    uint32_t mn_fetch_add_seq_cst_u32(uint32_t *word, uint32_t value)
    void mn_store_release_u32(uint32_t *word, uint32_t value)


cdef extern from "gate.h" nogil:
    ctypedef struct mn_gate:
        uint32_t events
        uint32_t sleepers

    uint32_t mn_gate_events(mn_gate *gate)
    void mn_gate_notify(mn_gate *gate, int sleepers)
    bint mn_gate_wait(mn_gate *gate, uint32_t seen, long long timeout_ns)
