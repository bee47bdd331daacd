"""The protocol, which is written in C; ledger.h says which side calls each function."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from minato._core.layout cimport mn_batch, mn_header, mn_epoch_slot, mn_position, mn_worker


cdef extern from "ledger.h" nogil:
    ctypedef struct mn_ledger:
        mn_header *header
        mn_worker *workers
        mn_batch *batches
        mn_position *positions
        uint64_t mask

    ctypedef struct mn_batch_fields:
        uint32_t count, epoch_slot, owner
        bint bound
        uint64_t slot, cursor, slot_end, indices, indices_nbytes
        int64_t epoch, seed

    size_t mn_ledger_nbytes(uint64_t num_workers, uint64_t batches, uint64_t positions)
    void mn_ledger_map(mn_ledger *ledger, void *memory)
    mn_position *mn_at(const mn_ledger *ledger, uint64_t position)
    bint mn_is_claimed(uint64_t ticket, uint32_t worker)
    bint mn_is_collating(uint64_t state, uint32_t worker)
    bint mn_add_hint(const mn_ledger *ledger, uint64_t position, uint64_t ahead)

    void mn_notify_idle(const mn_ledger *ledger)
    bint mn_claim(
        const mn_ledger *ledger, uint32_t worker, uint32_t max_run, bint fresh, uint32_t *index, uint64_t *k,
        uint32_t *count
    )
    void mn_offer(const mn_ledger *ledger, uint64_t position)
    bint mn_is_offered(const mn_ledger *ledger, uint64_t position)
    void mn_end(
        const mn_ledger *ledger, uint32_t worker, uint64_t samples, uint64_t busy_ns, uint64_t idle_ns
    )
    uint64_t mn_reserve(const mn_ledger *ledger, uint64_t position, bint to_newest)
    void mn_attach(const mn_ledger *ledger, uint64_t place, uint64_t blob, uint64_t blob_nbytes)
    int mn_fill(const mn_ledger *ledger, uint32_t worker, uint64_t position, uint64_t place, uint32_t count)
    int mn_skip(const mn_ledger *ledger, uint32_t worker, uint64_t position, uint32_t *index)
    void mn_set_result(const mn_ledger *ledger, uint32_t index, uint64_t result, uint64_t nbytes)
    void mn_set_ready(const mn_ledger *ledger, uint32_t index, uint64_t result, uint64_t nbytes)
    uint64_t mn_allocate(const mn_ledger *ledger, uint32_t index, uint64_t nbytes)
    uint64_t mn_reserve_fields(const mn_ledger *ledger, uint32_t index, uint64_t nbytes)
    uint64_t mn_layout_of(mn_batch *batch)
    uint64_t mn_publish_layout(const mn_ledger *ledger, uint32_t index, uint64_t offset)

    uint64_t mn_tail(const mn_ledger *ledger)
    void mn_open_epoch(const mn_ledger *ledger, uint32_t epoch_slot)
    uint32_t mn_vacant(const mn_ledger *ledger)
    void mn_prepare(const mn_ledger *ledger, uint32_t index, const mn_batch_fields *fields)
    void mn_set_sample(
        const mn_ledger *ledger, uint32_t batch, uint64_t position, int64_t index, uint32_t occurrence, bint bound
    )
    void mn_open(const mn_ledger *ledger, uint32_t index, int wake)
    void mn_bind_late(const mn_ledger *ledger, uint32_t old_index, uint32_t new_index)
    bint mn_settled(const mn_ledger *ledger, uint32_t index)
    void mn_strand(const mn_ledger *ledger)
    void mn_fill_skipped(const mn_ledger *ledger, uint32_t index)
    void mn_cancel(const mn_ledger *ledger, uint32_t index)
    bint mn_close(const mn_ledger *ledger, uint32_t index)
    void mn_retire(const mn_ledger *ledger, uint32_t index)

    void mn_reopen_places(const mn_ledger *ledger, uint32_t worker, uint64_t base, uint64_t tail)
    uint64_t mn_reoffer(const mn_ledger *ledger, uint32_t worker, uint64_t base, uint64_t tail)
    void mn_uncollate(const mn_ledger *ledger, uint32_t worker, uint32_t index)
