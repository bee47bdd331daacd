from libc.stdint cimport uint32_t, uint64_t

from minato._core.atomics cimport mn_event_count, mn_u32, mn_u64


cdef extern from "layout.h" nogil:
    uint64_t MN_MAGIC
    enum:
        MN_LAYOUT_VERSION
        MN_EPOCH_SLOTS
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

    ctypedef struct mn_epoch_slot:
        mn_u64 cursor
        mn_u64 limit

    ctypedef struct mn_header:
        mn_u64 magic
        uint32_t version
        uint32_t compiled
        uint32_t num_workers
        uint32_t batch_capacity
        uint64_t position_capacity
        mn_u64 slow_ns
        mn_u32 shutdown
        mn_u32 orphaned
        mn_u64 waiting
        mn_u32 orphans_checked
        mn_u64 head
        mn_u64 tail
        mn_event_count work
        mn_event_count ready
        mn_epoch_slot epoch_slots[8]
        mn_u32 hints_used
        mn_u64 hints[256]

    ctypedef struct mn_position:
        mn_u64 ticket
        mn_u64 place
        mn_u64 blob
        mn_u64 blob_nbytes
        mn_u64 index
        mn_u64 cost_ns
        mn_u64 position
        mn_u32 batch
        mn_u32 occurrence

    ctypedef struct mn_batch:
        mn_u64 state
        mn_u64 first
        mn_u32 count
        mn_u32 epoch_slot
        mn_u64 slot
        mn_u64 cursor
        mn_u64 layout
        mn_u64 flags
        mn_u64 hint
        mn_u64 result
        mn_u64 result_nbytes
        mn_u64 indices
        mn_u64 indices_nbytes
        mn_u64 epoch
        mn_u64 seed
        mn_u32 bound
        mn_u32 owner
        mn_u64 slot_end

    ctypedef struct mn_worker:
        mn_u64 position
        mn_u64 started_ns
        mn_u64 step
        mn_u64 samples
        mn_u64 busy_ns
        mn_u64 idle_ns

    size_t offset_work "offsetof(mn_header, work)"
    size_t offset_ready "offsetof(mn_header, ready)"
