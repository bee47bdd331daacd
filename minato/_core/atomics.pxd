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


cdef extern from "event_count.h" nogil:
    ctypedef struct mn_event_count:
        mn_u32 sleepers

    uint32_t mn_event_count_read(mn_event_count *event_count)
    void mn_event_count_notify(mn_event_count *event_count, int sleepers)
    bint mn_event_count_wait(mn_event_count *event_count, uint32_t seen, long long timeout_ns)
