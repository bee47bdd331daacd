from libc.stdint cimport uint32_t, uint64_t


cdef extern from "atomics.h" nogil:
    ctypedef struct mn_u32:
        pass  # only the functions below read and write it

    ctypedef struct mn_u64:
        pass

    uint64_t mn_load_relaxed_u64(const mn_u64 *word)
    uint64_t mn_load_acquire_u64(const mn_u64 *word)
    uint64_t mn_load_seq_cst_u64(const mn_u64 *word)
    void mn_store_relaxed_u64(mn_u64 *word, uint64_t value)
    void mn_store_release_u64(mn_u64 *word, uint64_t value)
    void mn_store_seq_cst_u64(mn_u64 *word, uint64_t value)
    uint32_t mn_load_relaxed_u32(const mn_u32 *word)
    uint32_t mn_load_acquire_u32(const mn_u32 *word)
    void mn_store_release_u32(mn_u32 *word, uint32_t value)


cdef extern from "gate.h" nogil:
    ctypedef struct mn_gate:
        mn_u32 sleepers

    uint32_t mn_gate_events(mn_gate *gate)
    void mn_gate_notify(mn_gate *gate, int sleepers)
    bint mn_gate_wait(mn_gate *gate, uint32_t seen, long long timeout_ns)
