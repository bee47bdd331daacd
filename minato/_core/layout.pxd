from libc.stdint cimport int64_t, uint32_t, uint64_t

from minato._core.atomics cimport mn_gate


cdef extern from "layout.h" nogil:
    uint64_t MN_MAGIC
    enum:
        MN_LAYOUT_VERSION
        MN_PASSES
        MN_HINTS
        MN_MOST_AHEAD
        MN_MAX_WORKERS
        MN_VACANT
        MN_OPEN
        MN_COLLATING
        MN_READY
        MN_CLOSED
        MN_NOT_COMPLETE
        MN_PUBLISHED
        MN_MUST_COLLATE
        MN_KIND_MASK
        MN_RAGGED
        MN_FAILED
        MN_ENDED
        MN_SKIPPED
        MN_SKIP_BLOB
        MN_STOPPING
        MN_DRAINING

    uint64_t MN_ALIGNMENT
    uint64_t MN_FREE
    uint64_t MN_CLAIMED
    uint64_t MN_DONE
    uint64_t MN_CANCELLED
    uint64_t MN_BOUND
    uint64_t MN_FILLED
    uint64_t MN_STATE
    uint64_t MN_NUMBER
    uint64_t MN_ONE_VERSION

    ctypedef struct mn_pass:
        uint64_t cursor
        uint64_t limit

    ctypedef struct mn_header:
        uint64_t magic
        uint32_t version
        uint32_t compiled
        uint32_t num_workers
        uint32_t batch_capacity
        uint64_t position_capacity
        uint64_t slow_ns
        uint32_t shutdown
        uint32_t stranded
        uint64_t waiting
        uint32_t adopted
        uint64_t head
        uint64_t tail
        mn_gate work
        mn_gate ready
        mn_pass passes[8]
        uint32_t hints_used
        uint64_t hints[256]

    ctypedef struct mn_position:
        uint64_t ticket
        uint64_t place
        uint64_t blob
        uint64_t blob_nbytes
        int64_t key
        uint64_t cost_ns
        uint64_t position
        uint32_t batch
        uint32_t occurrence

    ctypedef struct mn_batch:
        uint64_t state
        uint64_t first
        uint32_t count
        uint32_t pass_index
        uint64_t slot
        uint64_t slot_end
        uint64_t cursor
        uint64_t layout
        uint64_t flags
        uint64_t hint
        uint64_t result
        uint64_t result_nbytes
        uint64_t keys
        uint64_t keys_nbytes
        int64_t epoch
        int64_t seed
        uint32_t bound
        uint32_t owner

    ctypedef struct mn_worker:
        uint64_t position
        uint64_t started_ns
        int64_t step
        uint64_t samples
        uint64_t busy_ns
        uint64_t idle_ns

    size_t offset_work "offsetof(mn_header, work)"
    size_t offset_ready "offsetof(mn_header, ready)"
