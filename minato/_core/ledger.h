/* The protocol of the ledger: who works on which sample, and where its result goes.
 *
 * Workers and the consumer (the training process) run these functions on the records of layout.h. Every
 * transition is one atomic store or compare-and-swap, so a worker may be killed at any instruction: what it
 * did not finish is still claimed by it, and mn_release offers it again.
 *
 * Two rules order everything else:
 *   - data first, then the one store that makes it count: a place that is filled has its data, or lies in a
 *     batch whose result is set;
 *   - open stores a record's tickets last: a worker that looked at the record before it came round the
 *     ring can claim a ticket as soon as that is free.
 *
 * Functions with a batch, a worker or an epoch slot take its number; callers check that it is in range.
 */
#ifndef MINATO_LEDGER_H
#define MINATO_LEDGER_H

#include "layout.h"

#ifdef MINATO_CHECKED
#include <stdio.h>
#include <stdlib.h>
#define MN_ASSERT(condition)                                                                        \
    do {                                                                                            \
        if (!(condition)) {                                                                         \
            fprintf(stderr, "minato: %s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);   \
            abort();                                                                                \
        }                                                                                           \
    } while (0)
#else
#define MN_ASSERT(condition) ((void)0)
#endif

/* A view of the records in memory of `mn_ledger_nbytes` bytes. */
typedef struct {
    mn_header *header;
    mn_worker *workers;
    mn_batch *batches;
    mn_position *positions;
    uint64_t mask; /* position & mask: its record */
} mn_ledger;

static inline size_t mn_ledger_nbytes(uint64_t num_workers, uint64_t batches, uint64_t positions) {
    return sizeof(mn_header) + num_workers * sizeof(mn_worker) + batches * sizeof(mn_batch) +
           positions * sizeof(mn_position);
}

/* Find the records in memory whose header is complete. */
static inline void mn_ledger_map(mn_ledger *ledger, void *memory) {
    ledger->header = (mn_header *)memory;
    ledger->mask = ledger->header->position_capacity - 1;
    ledger->workers = (mn_worker *)(ledger->header + 1);
    ledger->batches = (mn_batch *)(ledger->workers + ledger->header->num_workers);
    ledger->positions = (mn_position *)(ledger->batches + ledger->header->batch_capacity);
}

static inline mn_position *mn_at(const mn_ledger *ledger, uint64_t position) {
    return &ledger->positions[position & ledger->mask];
}

static inline mn_batch *mn_batch_at(const mn_ledger *ledger, uint32_t index) {
    MN_ASSERT(index < ledger->header->batch_capacity);
    return &ledger->batches[index];
}

static inline mn_worker *mn_worker_at(const mn_ledger *ledger, uint32_t worker) {
    MN_ASSERT(worker < ledger->header->num_workers);
    return &ledger->workers[worker];
}

static inline mn_epoch_slot *mn_epoch_slot_at(const mn_ledger *ledger, uint32_t epoch_slot) {
    MN_ASSERT(epoch_slot < MN_EPOCH_SLOTS);
    return &ledger->header->epoch_slots[epoch_slot];
}

static inline uint64_t mn_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t mn_max(uint64_t a, uint64_t b) { return a > b ? a : b; }

static inline uint64_t mn_worker_bits(uint64_t worker) { return worker << 48; }

static inline int mn_is_claimed(uint64_t ticket, uint32_t worker) {
    return (ticket & MN_STATE) == MN_CLAIMED && ((ticket >> 48) & 0x3FFF) == worker;
}

static inline int mn_is_collating(uint64_t state, uint32_t worker) {
    return (state & 15) == MN_COLLATING && ((state >> 4) & 0xFFF) == worker;
}

/* ---- When a batch is full, and who publishes it ------------------------------------------------------ */

static inline void mn_settle(const mn_ledger *ledger, uint32_t worker, uint64_t position, uint64_t place) {
    /* Once its place is filled, a batch of bound samples can be delivered and its records come round the
     * ring: the ticket must still be this worker's. */
    mn_cas_seq_cst_u64(&mn_at(ledger, position)->ticket, MN_CLAIMED | mn_worker_bits(worker) | (place + 1),
                       MN_DONE | (place + 1));
}

static inline int mn_all_filled(const mn_ledger *ledger, mn_batch *batch, uint64_t state) {
    /* The hint carries the generation of the record: one that a late worker wrote for an earlier batch is void. */
    uint64_t generation = state >> 16 << 32;
    uint64_t hint = mn_load_acquire_u64(&batch->hint);
    uint64_t first = mn_load_relaxed_u64(&batch->first);
    uint64_t count = mn_load_relaxed_u32(&batch->count);
    uint64_t k = hint >> 32 << 32 == generation ? hint - generation : 0;
    for (; k < count; k++) {
        /* Of two workers that fill the last two places, at least one must see both. */
        if ((mn_load_seq_cst_u64(&mn_at(ledger, first + k)->place) & MN_STATE) != MN_FILLED) {
            mn_store_release_u64(&batch->hint, generation | k);
            return 0;
        }
    }
    return 1;
}

/* Arena offset of the published layout, 0: none yet. */
static inline uint64_t mn_layout_of(mn_batch *batch) {
    uint64_t layout = mn_load_acquire_u64(&batch->layout);
    return layout & MN_RESERVED ? 0 : layout;
}

/* If the batch is full, win the right to publish it, and publish it if nothing is left to do. */
static inline int mn_publish_if_full(const mn_ledger *ledger, uint32_t worker, uint32_t index) {
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t state = mn_load_acquire_u64(&batch->state);
    if ((state & 15) != MN_OPEN || !mn_all_filled(ledger, batch, state))
        return MN_NOT_COMPLETE;
    /* The state holds the record's generation: a batch that was delivered meanwhile is not taken for this one. */
    if (!mn_cas_seq_cst_u64(&batch->state, state,
                            (state & ~(uint64_t)0xFFFF) | (uint64_t)worker << 4 | MN_COLLATING))
        return MN_NOT_COMPLETE;
    /* What to do follows from what lies at the places, so that nothing a dead worker said of itself outlives it. */
    uint64_t first = mn_load_relaxed_u64(&batch->first);
    uint64_t count = mn_load_relaxed_u32(&batch->count), flags = 0;
    for (uint64_t place = first; place < first + count; place++)
        flags |= (uint64_t)1 << (mn_load_relaxed_u64(&mn_at(ledger, place)->blob) & MN_KIND_MASK);
    mn_store_relaxed_u64(&batch->flags, flags);
    if (flags & (MN_FAILED | MN_ENDED) || mn_load_acquire_u64(&batch->result) ||
        (mn_layout_of(batch) && !(flags & (MN_RAGGED | MN_SKIPPED)))) {
        mn_store_release_u64(&batch->state, (state & ~(uint64_t)0xFFFF) | MN_READY);
        mn_event_count_notify(&ledger->header->ready, INT_MAX);
        return MN_PUBLISHED;
    }
    return MN_MUST_COLLATE;
}

/* Find a full batch without a collating worker; 1 if this worker must collate it. */
static inline int mn_adopt(const mn_ledger *ledger, uint32_t worker, uint32_t *index) {
    mn_header *header = ledger->header;
    uint32_t seen = mn_load_acquire_u32(&header->orphaned);
    uint32_t orphans_checked = mn_load_acquire_u32(&header->orphans_checked);
    for (uint32_t i = 0; i < header->batch_capacity; i++) {
        if (mn_publish_if_full(ledger, worker, i) == MN_MUST_COLLATE) {
            *index = i;
            return 1;
        }
    }
    /* What is orphaned during the look raises the count: the next claim looks again. */
    mn_cas_seq_cst_u32(&header->orphans_checked, orphans_checked, seen);
    return 0;
}

/* ---- Which place a sample takes ---------------------------------------------------------------------- */

static inline int mn_is_in_epoch_slot(const mn_ledger *ledger, uint32_t index, uint64_t place, uint32_t epoch_slot) {
    /* A closed batch leaves its places behind; the batch that reuses its record begins after them. */
    mn_batch *batch = mn_batch_at(ledger, index);
    return mn_load_relaxed_u32(&batch->epoch_slot) == epoch_slot && mn_load_relaxed_u64(&batch->first) <= place;
}

/* Bind the first open place of the epoch in [start, end) to a sample; returns place + 1, 0 if there is none. */
static inline uint64_t mn_take(const mn_ledger *ledger, uint64_t start, uint64_t end, uint32_t epoch_slot,
                               uint64_t position) {
    /* An open place says its own number, so none is taken for one that has gone round the ring. */
    for (uint64_t place = start; place < end; place++) {
        mn_position *record = mn_at(ledger, place);
        if (mn_load_seq_cst_u64(&record->place) == place + 1 &&
            mn_is_in_epoch_slot(ledger, mn_load_relaxed_u32(&record->batch), place, epoch_slot) &&
            mn_cas_seq_cst_u64(&record->place, place + 1, MN_BOUND | (position + 1)))
            return place + 1;
    }
    return 0;
}

/* A place taken for this sample, or for one that lies elsewhere; returns place + 1, 0 if there is none.
 *
 * As many places are open or taken as samples are unplaced. So if none is open, one was taken twice for the
 * same sample, by its worker and by the consumer, and the second one has not returned it, or has died before. */
static inline uint64_t mn_take_spare(const mn_ledger *ledger, uint32_t epoch_slot, uint64_t position) {
    uint64_t limit = mn_load_acquire_u64(&mn_epoch_slot_at(ledger, epoch_slot)->limit);
    for (uint64_t place = limit - mn_min(limit, ledger->mask + 1); place < limit; place++) {
        mn_position *record = mn_at(ledger, place);
        uint64_t word = mn_load_seq_cst_u64(&record->place);
        if ((word & MN_STATE) != MN_BOUND || mn_load_relaxed_u64(&record->position) != place ||
            !mn_is_in_epoch_slot(ledger, mn_load_relaxed_u32(&record->batch), place, epoch_slot))
            continue;
        uint64_t holder = (word & MN_NUMBER) - 1;
        if (holder == position)
            return place + 1;
        uint64_t ticket = mn_load_seq_cst_u64(&mn_at(ledger, holder)->ticket);
        if (ticket & MN_NUMBER && (ticket & MN_NUMBER) != place + 1 &&
            mn_load_relaxed_u64(&mn_at(ledger, holder)->position) == holder &&
            mn_cas_seq_cst_u64(&record->place, word, MN_BOUND | (position + 1)))
            return place + 1;
    }
    return 0;
}

/* Bind the oldest place that can be had to a sample; returns place + 1, 0 if there is none. */
static inline uint64_t mn_try_oldest(const mn_ledger *ledger, uint32_t epoch_slot, uint64_t position) {
    mn_epoch_slot *here = mn_epoch_slot_at(ledger, epoch_slot);
    uint64_t cursor = mn_load_acquire_u64(&here->cursor);
    uint64_t limit = mn_load_acquire_u64(&here->limit);
    uint64_t place = mn_take(ledger, cursor & MN_NUMBER, limit, epoch_slot, position);
    if (place == 0)
        return mn_take_spare(ledger, epoch_slot, position);
    mn_cas_seq_cst_u64(&here->cursor, cursor, (cursor & ~MN_NUMBER) | place);
    return place;
}

static inline uint64_t mn_take_oldest(const mn_ledger *ledger, uint32_t epoch_slot, uint64_t position) {
    /* For a sample that has no place yet there is always one; others may be quicker a few times. */
    uint64_t place = 0;
    while (place == 0)
        place = mn_try_oldest(ledger, epoch_slot, position);
    return place;
}

static inline uint64_t mn_take_newest(const mn_ledger *ledger, uint32_t epoch_slot, uint64_t position) {
    mn_epoch_slot *here = mn_epoch_slot_at(ledger, epoch_slot);
    uint64_t place = mn_load_acquire_u64(&here->limit);
    uint64_t cursor = mn_load_acquire_u64(&here->cursor) & MN_NUMBER;
    for (; place > cursor; place--) {
        if (mn_take(ledger, place - 1, place, epoch_slot, position))
            return place;
    }
    return mn_take_oldest(ledger, epoch_slot, position);
}

/* Move a cursor back; the new version defeats a worker that is just moving it on. */
static inline void mn_lower(mn_u64 *cursor, uint64_t position) {
    uint64_t word;
    do
        word = mn_load_acquire_u64(cursor);
    while (!mn_cas_seq_cst_u64(cursor, word,
                               ((word & ~MN_NUMBER) + MN_ONE_VERSION) | mn_min(word & MN_NUMBER, position)));
}

/* Open a place (given + 1) again that was taken for a sample, unless somebody made use of it. */
static inline void mn_give_back(const mn_ledger *ledger, uint64_t place, uint64_t position) {
    mn_position *record = mn_at(ledger, place - 1);
    uint32_t epoch_slot = mn_load_relaxed_u32(&mn_batch_at(ledger, mn_load_relaxed_u32(&record->batch))->epoch_slot);
    if (mn_cas_seq_cst_u64(&record->place, MN_BOUND | (position + 1), place))
        mn_lower(&mn_epoch_slot_at(ledger, epoch_slot)->cursor, place - 1);
}

/* ---- Samples that begin before their turn: a small table, each entry of which may be lost without harm --- */

/* Let a sample start `ahead` samples early; 0 if the table of hints is full. */
static inline int mn_add_hint(const mn_ledger *ledger, uint64_t position, uint64_t ahead) {
    mn_header *header = ledger->header;
    uint32_t used = mn_load_relaxed_u32(&header->hints_used);
    for (uint32_t i = 0; i < MN_HINTS; i++) {
        if (i >= used || mn_load_acquire_u64(&header->hints[i]) == 0) {
            mn_store_release_u64(&header->hints[i], mn_min(ahead, MN_MOST_AHEAD) << 48 | (position + 1));
            if (i >= used)
                mn_store_release_u32(&header->hints_used, i + 1);
            return 1;
        }
    }
    return 0;
}

/* Claim the hinted sample that should be started first, if one should by now; `front`: the first position that
 * may be free. */
static inline int mn_claim_hinted(const mn_ledger *ledger, uint32_t worker, uint64_t front, uint64_t *claimed) {
    mn_header *header = ledger->header;
    uint32_t used = mn_load_acquire_u32(&header->hints_used);
    while (used) {
        uint64_t least = front + 1, chosen_word = 0;
        uint32_t chosen = 0;
        for (uint32_t i = 0; i < used; i++) {
            uint64_t word = mn_load_acquire_u64(&header->hints[i]);
            if (word == 0)
                continue;
            uint64_t position = (word & MN_NUMBER) - 1, ahead = word >> 48;
            if (position < front) {
                mn_cas_seq_cst_u64(&header->hints[i], word, 0); /* claims in order have reached it */
                continue;
            }
            uint64_t due = position - mn_min(position, ahead);
            if (due < least) {
                least = due;
                chosen = i;
                chosen_word = word;
            }
        }
        if (least > front)
            return 0;
        if (!mn_cas_seq_cst_u64(&header->hints[chosen], chosen_word, 0))
            continue;
        uint64_t position = (chosen_word & MN_NUMBER) - 1;
        mn_position *record = mn_at(ledger, position);
        uint64_t word = mn_load_acquire_u64(&record->ticket);
        if ((word & MN_STATE) == MN_FREE && mn_load_relaxed_u64(&record->position) == position &&
            mn_cas_seq_cst_u64(&record->ticket, word, (word & MN_NUMBER) | MN_CLAIMED | mn_worker_bits(worker))) {
            *claimed = mn_load_relaxed_u64(&record->position);
            return 1;
        }
    }
    return 0;
}

/* ---- Workers ----------------------------------------------------------------------------------------- */

/* Tell a waiting consumer that a worker finds nothing to do. */
static inline void mn_notify_idle(const mn_ledger *ledger) {
    if (mn_load_seq_cst_u64(&ledger->header->waiting))
        mn_event_count_notify(&ledger->header->ready, INT_MAX);
}

/* Whether a worker may claim a free sample of a batch; `fresh`: one that its owner has not offered to others. */
static inline int mn_may_claim(mn_batch *batch, uint64_t word, uint32_t worker, int fresh) {
    uint32_t owner = mn_load_relaxed_u32(&batch->owner);
    int offered = (word & MN_OFFERED) != 0;
    return (owner == 0 || owner == worker + 1 || offered) && !(fresh && offered);
}

static inline uint64_t mn_claimed(uint64_t word, uint32_t worker) {
    return (word & MN_NUMBER) | MN_CLAIMED | mn_worker_bits(worker);
}

/* Whether a worker that claims whole batches leaves a free sample to the one that has, or will have, the first. */
static inline int mn_follows(const mn_ledger *ledger, uint64_t position, uint64_t first) {
    return position != first && (mn_load_acquire_u64(&mn_at(ledger, first)->ticket) & MN_STATE) != MN_DONE;
}

/* Claim samples `*k` ... `*k + *count - 1` of a batch; `*count` 0: collate the batch. Returns 0 if there is nothing.
 *
 * `max_run` 0: a whole batch, or what is left of one whose first sample is done. `fresh`: none that was offered. */
static inline int mn_claim(const mn_ledger *ledger, uint32_t worker, uint32_t max_run, int fresh, uint32_t *index,
                           uint64_t *k, uint32_t *count) {
    mn_header *header = ledger->header;
    *k = 0;
    *count = 0;
    if (mn_load_acquire_u32(&header->orphaned) != mn_load_acquire_u32(&header->orphans_checked) &&
        mn_adopt(ledger, worker, index))
        return 1;
    for (;;) {
        uint64_t tail = mn_load_acquire_u64(&header->tail);
        uint64_t head = mn_load_acquire_u64(&header->head);
        uint64_t position = head & MN_NUMBER;
        uint64_t passed_over = MN_NUMBER; /* the first free sample that is left to another worker */
        mn_position *record = NULL;
        if (max_run && mn_load_acquire_u32(&header->hints_used) && mn_claim_hinted(ledger, worker, position, &position)) {
            *index = mn_load_relaxed_u32(&mn_at(ledger, position)->batch);
            *k = position - mn_load_relaxed_u64(&mn_batch_at(ledger, *index)->first);
            *count = 1;
            return 1;
        }
        for (; position < tail;) {
            record = mn_at(ledger, position);
            uint64_t word = mn_load_acquire_u64(&record->ticket);
            if ((word & MN_STATE) != MN_FREE || mn_load_relaxed_u64(&record->position) != position) {
                position++;
                continue;
            }
            mn_batch *of = mn_batch_at(ledger, mn_load_relaxed_u32(&record->batch));
            if (!mn_may_claim(of, word, worker, fresh) ||
                (max_run == 0 && mn_follows(ledger, position, mn_load_relaxed_u64(&of->first)))) {
                passed_over = mn_min(passed_over, position);
                position++;
            } else if (mn_cas_seq_cst_u64(&record->ticket, word, mn_claimed(word, worker))) {
                break;
            }
        }
        if (position >= tail) {
            mn_cas_seq_cst_u64(&header->head, head, (head & ~MN_NUMBER) | mn_min(position, passed_over));
            return 0;
        }
        /* The record may have come round the ring between the look and the claim: it says itself which it is. */
        uint64_t looked_at = position;
        position = mn_load_relaxed_u64(&record->position);
        *index = mn_load_relaxed_u32(&record->batch);
        mn_batch *batch = mn_batch_at(ledger, *index);
        uint64_t first = mn_load_relaxed_u64(&batch->first);
        uint64_t end = first + mn_load_relaxed_u32(&batch->count);
        uint32_t claimed = 1;
        for (; (max_run == 0 || claimed < max_run) && position + claimed < end; claimed++) {
            mn_position *next = mn_at(ledger, position + claimed);
            uint64_t word = mn_load_acquire_u64(&next->ticket);
            if ((word & MN_STATE) != MN_FREE || !mn_may_claim(batch, word, worker, fresh) ||
                !mn_cas_seq_cst_u64(&next->ticket, word, mn_claimed(word, worker)))
                break;
        }
        if (position == looked_at)
            mn_cas_seq_cst_u64(&header->head, head,
                               (head & ~MN_NUMBER) | mn_min(position + claimed, passed_over));
        *k = position - first;
        *count = claimed;
        return 1;
    }
}

/* Let any worker claim a sample that this one has claimed, and whose item it has stored. */
static inline void mn_offer(const mn_ledger *ledger, uint64_t position) {
    mn_u64 *ticket = &mn_at(ledger, position)->ticket;
    uint64_t word;
    do
        word = mn_load_acquire_u64(ticket); /* the consumer may bind an overdue sample to a place */
    while (!mn_cas_seq_cst_u64(ticket, word, MN_FREE | MN_OFFERED | (word & MN_NUMBER)));
    mn_lower(&ledger->header->head, position);
    mn_event_count_notify(&ledger->header->work, 1);
}

/* Whether a sample that was offered still waits for a worker. */
static inline int mn_is_offered(const mn_ledger *ledger, uint64_t position) {
    mn_position *record = mn_at(ledger, position);
    uint64_t word = mn_load_acquire_u64(&record->ticket);
    return (word & MN_STATE) == MN_FREE && (word & MN_OFFERED) && mn_load_relaxed_u64(&record->position) == position;
}

/* Note that the worker is between two leases, and add to its activity. */
static inline void mn_end(const mn_ledger *ledger, uint32_t worker, uint64_t samples, uint64_t busy_ns,
                          uint64_t idle_ns) {
    mn_worker *record = mn_worker_at(ledger, worker);
    mn_store_release_u64(&record->position, 0);
    mn_store_relaxed_u64(&record->samples, mn_load_relaxed_u64(&record->samples) + samples);
    mn_store_relaxed_u64(&record->busy_ns, mn_load_relaxed_u64(&record->busy_ns) + busy_ns);
    mn_store_relaxed_u64(&record->idle_ns, mn_load_relaxed_u64(&record->idle_ns) + idle_ns);
}

/* Take a place for a finished sample; `to_newest`: the newest open one, unless the consumer is waiting. */
static inline uint64_t mn_reserve(const mn_ledger *ledger, uint64_t position, int to_newest) {
    mn_position *record = mn_at(ledger, position);
    uint32_t epoch_slot = mn_load_relaxed_u32(&mn_batch_at(ledger, mn_load_relaxed_u32(&record->batch))->epoch_slot);
    uint64_t word = mn_load_acquire_u64(&record->ticket);
    uint64_t place = word & MN_NUMBER;
    if (place == 0) {
        uint64_t taken = to_newest && !mn_load_acquire_u64(&ledger->header->waiting)
                             ? mn_take_newest(ledger, epoch_slot, position)
                             : mn_take_oldest(ledger, epoch_slot, position);
        mn_cas_seq_cst_u64(&record->ticket, word, word | taken);
        place = mn_load_acquire_u64(&record->ticket) & MN_NUMBER;
        if (place != taken) /* the consumer has meanwhile bound this overdue sample to a place */
            mn_give_back(ledger, taken, position);
    }
    return place - 1;
}

/* Say what lies at a place besides the fields; before the place is filled. */
static inline void mn_attach(const mn_ledger *ledger, uint64_t place, uint64_t blob, uint64_t blob_nbytes) {
    mn_position *there = mn_at(ledger, place);
    mn_store_relaxed_u64(&there->blob, blob);
    mn_store_relaxed_u64(&there->blob_nbytes, blob_nbytes);
}

/* Say that the results of `count` samples from `position` on lie at the places from `place` on, which are of one batch. */
static inline int mn_fill(const mn_ledger *ledger, uint32_t worker, uint64_t position, uint64_t place, uint32_t count) {
    uint32_t index = mn_load_relaxed_u32(&mn_at(ledger, place)->batch);
    for (uint64_t end = place + count; place < end; place++, position++) {
        mn_store_seq_cst_u64(&mn_at(ledger, place)->place, MN_FILLED | (position + 1));
        mn_settle(ledger, worker, position, place);
    }
    return mn_publish_if_full(ledger, worker, index);
}

/* Say that a sample has no result; one without a place leaves it to another. `*index`: the batch of its place, or
 * its own. */
static inline int mn_skip(const mn_ledger *ledger, uint32_t worker, uint64_t position, uint32_t *index) {
    mn_position *record = mn_at(ledger, position);
    for (;;) {
        uint64_t word = mn_load_acquire_u64(&record->ticket);
        uint64_t place = word & MN_NUMBER;
        if (place) {
            mn_position *there = mn_at(ledger, place - 1);
            *index = mn_load_relaxed_u32(&there->batch);
            mn_store_relaxed_u64(&there->blob, MN_SKIP_BLOB);
            mn_store_seq_cst_u64(&there->place, MN_FILLED | (position + 1));
            mn_cas_seq_cst_u64(&record->ticket, word, MN_DONE);
            return mn_publish_if_full(ledger, worker, *index);
        }
        *index = mn_load_relaxed_u32(&record->batch);
        if (mn_cas_seq_cst_u64(&record->ticket, word, MN_DONE)) {
            mn_notify_idle(ledger); /* it may have been what the consumer waits for */
            return MN_NOT_COMPLETE;
        }
    }
}

/* Say where the result of a whole batch lies. From this store on the batch is complete. */
static inline void mn_set_result(const mn_ledger *ledger, uint32_t index, uint64_t result, uint64_t nbytes) {
    mn_batch *batch = mn_batch_at(ledger, index);
    mn_store_relaxed_u64(&batch->result_nbytes, nbytes);
    mn_store_release_u64(&batch->result, result);
}

/* Publish a batch after mn_fill returned MN_MUST_COLLATE to this worker. */
static inline void mn_set_ready(const mn_ledger *ledger, uint32_t index, uint64_t result, uint64_t nbytes) {
    mn_batch *batch = mn_batch_at(ledger, index);
    mn_set_result(ledger, index, result, nbytes);
    mn_store_release_u64(&batch->state, mn_load_relaxed_u64(&batch->state) >> 16 << 16 | MN_READY);
    mn_event_count_notify(&ledger->header->ready, INT_MAX);
}

/* Arena offset of `nbytes` fresh bytes in the batch's slot, aligned; UINT64_MAX: the slot is too small. */
static inline uint64_t mn_allocate(const mn_ledger *ledger, uint32_t index, uint64_t nbytes) {
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t end = mn_load_relaxed_u64(&batch->slot_end);
    uint64_t rounded = (nbytes + MN_ALIGNMENT - 1) / MN_ALIGNMENT * MN_ALIGNMENT;
    for (;;) {
        uint64_t offset = mn_load_acquire_u64(&batch->cursor);
        if (nbytes > end || offset + rounded > end)
            return UINT64_MAX;
        if (mn_cas_seq_cst_u64(&batch->cursor, offset, offset + rounded))
            return offset;
    }
}

/* Arena offset of room for the batch's fields; 0: a layout is published already; UINT64_MAX: the slot is too small.
 *
 * Workers that begin a batch together get the same room, at the slot's start: each at its own would spread batches over
 * as many times their memory, in pages that earlier batches have not touched. */
static inline uint64_t mn_reserve_fields(const mn_ledger *ledger, uint32_t index, uint64_t nbytes) {
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t start = mn_load_relaxed_u64(&batch->slot);
    uint64_t size = mn_load_relaxed_u64(&batch->slot_end) - start;
    uint64_t rounded = (nbytes + MN_ALIGNMENT - 1) / MN_ALIGNMENT * MN_ALIGNMENT;
    if (nbytes <= size && rounded <= size && mn_cas_seq_cst_u64(&batch->cursor, start, start + rounded)) {
        mn_cas_seq_cst_u64(&batch->layout, 0, rounded | MN_RESERVED);
        return start;
    }
    uint64_t layout = mn_load_acquire_u64(&batch->layout);
    if (layout == (rounded | MN_RESERVED))
        return start;
    /* One that has yet to say what it has reserved, or died before, is not waited for. */
    return layout & MN_RESERVED || !layout ? mn_allocate(ledger, index, nbytes) : 0;
}

/* Offer a layout for the batch; returns the offset of the one that holds, the first offered. */
static inline uint64_t mn_publish_layout(const mn_ledger *ledger, uint32_t index, uint64_t offset) {
    mn_batch *batch = mn_batch_at(ledger, index);
    for (;;) {
        uint64_t seen = mn_load_acquire_u64(&batch->layout);
        if (seen && !(seen & MN_RESERVED))
            return seen;
        if (mn_cas_seq_cst_u64(&batch->layout, seen, offset))
            return offset;
    }
}

/* ---- The consumer ------------------------------------------------------------------------------------ */

static inline uint64_t mn_tail(const mn_ledger *ledger) {
    return mn_load_relaxed_u64(&ledger->header->tail); /* the consumer alone writes it */
}

/* Start an epoch: its samples take places after the last opened one. */
static inline void mn_open_epoch(const mn_ledger *ledger, uint32_t epoch_slot) {
    mn_epoch_slot *here = mn_epoch_slot_at(ledger, epoch_slot);
    uint64_t tail = mn_tail(ledger);
    uint64_t version = (mn_load_relaxed_u64(&here->cursor) & ~MN_NUMBER) + MN_ONE_VERSION;
    mn_store_release_u64(&here->limit, tail);
    mn_store_release_u64(&here->cursor, version | tail);
}

/* A record that is free; there must be one. */
static inline uint32_t mn_vacant(const mn_ledger *ledger) {
    uint32_t index = 0;
    while ((mn_load_relaxed_u64(&mn_batch_at(ledger, index)->state) & 15) != MN_VACANT)
        index++;
    return index;
}

typedef struct {
    uint32_t count, epoch_slot, owner;
    int bound;
    uint64_t slot, cursor, slot_end, indices, indices_nbytes;
    int64_t epoch, seed;
} mn_batch_fields;

/* Fill in a vacant record; the indices of its samples follow by mn_set_sample, then mn_open offers them. */
static inline void mn_prepare(const mn_ledger *ledger, uint32_t index, const mn_batch_fields *fields) {
    mn_batch *batch = mn_batch_at(ledger, index);
    mn_store_relaxed_u64(&batch->first, mn_tail(ledger));
    mn_store_relaxed_u32(&batch->count, fields->count);
    mn_store_relaxed_u32(&batch->epoch_slot, fields->epoch_slot);
    mn_store_relaxed_u64(&batch->slot, fields->slot);
    mn_store_relaxed_u64(&batch->cursor, fields->cursor);
    mn_store_relaxed_u64(&batch->slot_end, fields->slot_end);
    mn_store_relaxed_u64(&batch->layout, 0);
    mn_store_relaxed_u64(&batch->flags, 0);
    mn_store_relaxed_u64(&batch->hint, 0);
    mn_store_relaxed_u64(&batch->result, 0);
    mn_store_relaxed_u64(&batch->result_nbytes, 0);
    mn_store_relaxed_u64(&batch->indices, fields->indices);
    mn_store_relaxed_u64(&batch->indices_nbytes, fields->indices_nbytes);
    mn_store_relaxed_u64(&batch->epoch, (uint64_t)fields->epoch);
    mn_store_relaxed_u64(&batch->seed, (uint64_t)fields->seed);
    mn_store_relaxed_u32(&batch->bound, fields->bound != 0);
    mn_store_relaxed_u32(&batch->owner, fields->owner);
}

static inline void mn_set_sample(const mn_ledger *ledger, uint32_t batch, uint64_t position, int64_t index,
                                 uint32_t occurrence, int bound) {
    mn_position *record = mn_at(ledger, position);
    mn_store_relaxed_u64(&record->index, (uint64_t)index);
    mn_store_relaxed_u32(&record->occurrence, occurrence);
    mn_store_relaxed_u64(&record->position, position);
    mn_store_relaxed_u32(&record->batch, batch);
    mn_store_relaxed_u64(&record->blob, 0);
    mn_store_relaxed_u64(&record->blob_nbytes, 0);
    mn_store_relaxed_u64(&record->cost_ns, 0);
    mn_store_release_u64(&record->place, bound ? MN_BOUND | (position + 1) : position + 1);
}

/* Open a prepared batch: workers can claim its samples. `wake`: how many that sleep to wake; 0: none yet. */
static inline void mn_open(const mn_ledger *ledger, uint32_t index, int wake) {
    mn_header *header = ledger->header;
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t tail = mn_tail(ledger), end = tail + mn_load_relaxed_u32(&batch->count);
    int bound = mn_load_relaxed_u32(&batch->bound) != 0;
    /* A worker that looked at a record before it came round the ring can claim a ticket as soon as that is
     * free, so all other stores precede it. */
    mn_store_release_u64(&batch->state, ((mn_load_relaxed_u64(&batch->state) >> 16) + 1) << 16 | MN_OPEN);
    mn_store_release_u64(&mn_epoch_slot_at(ledger, mn_load_relaxed_u32(&batch->epoch_slot))->limit, end);
    for (uint64_t position = tail; position < end; position++)
        mn_store_release_u64(&mn_at(ledger, position)->ticket, bound ? MN_FREE | (position + 1) : MN_FREE);
    mn_store_release_u64(&header->tail, end);
    if (wake)
        mn_event_count_notify(&header->work, wake);
}

/* Give every unplaced sample of batch `old` a place: in batch `new`, or else the oldest open one. */
static inline void mn_bind_late(const mn_ledger *ledger, uint32_t old_index, uint32_t new_index) {
    mn_batch *batch = mn_batch_at(ledger, old_index);
    mn_batch *target = mn_batch_at(ledger, new_index);
    uint64_t first = mn_load_relaxed_u64(&batch->first), count = mn_load_relaxed_u32(&batch->count);
    uint64_t next_place = mn_load_relaxed_u64(&target->first);
    uint64_t end = next_place + mn_load_relaxed_u32(&target->count);
    uint32_t epoch_slot = mn_load_relaxed_u32(&batch->epoch_slot);
    for (uint64_t position = first; position < first + count; position++) {
        mn_position *record = mn_at(ledger, position);
        uint64_t place = 0;
        for (;;) {
            uint64_t word = mn_load_acquire_u64(&record->ticket);
            if ((word & MN_STATE) == MN_DONE || (word & MN_STATE) == MN_CANCELLED || word & MN_NUMBER)
                break;
            if (place == 0) {
                place = mn_take(ledger, next_place, end, epoch_slot, position);
                if (place == 0)
                    place = mn_try_oldest(ledger, epoch_slot, position);
                next_place = mn_max(next_place, place);
            }
            /* None is left if the sample's worker has just taken the last one; its ticket will say so. */
            if (place && mn_cas_seq_cst_u64(&record->ticket, word, word | place))
                break;
        }
        if (place && (mn_load_acquire_u64(&record->ticket) & MN_NUMBER) != place)
            mn_give_back(ledger, place, position);
    }
}

/* Whether no worker runs, or will run, a sample of this batch. */
static inline int mn_settled(const mn_ledger *ledger, uint32_t index) {
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t first = mn_load_relaxed_u64(&batch->first), count = mn_load_relaxed_u32(&batch->count);
    for (uint64_t position = first; position < first + count; position++) {
        uint64_t word = mn_load_acquire_u64(&mn_at(ledger, position)->ticket) & MN_STATE;
        if (word != MN_DONE && word != MN_CANCELLED)
            return 0;
    }
    return 1;
}

/* The next claim looks for full batches without a collating worker. */
static inline void mn_strand(const mn_ledger *ledger) {
    mn_fetch_add_seq_cst_u32(&ledger->header->orphaned, 1);
    mn_event_count_notify(&ledger->header->work, INT_MAX);
}

/* Fill the places of a batch that are left over when all samples of its epoch are settled and some are skipped. */
static inline void mn_fill_skipped(const mn_ledger *ledger, uint32_t index) {
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t first = mn_load_relaxed_u64(&batch->first), count = mn_load_relaxed_u32(&batch->count);
    for (uint64_t place = first; place < first + count; place++) {
        mn_position *there = mn_at(ledger, place);
        if ((mn_load_acquire_u64(&there->place) & MN_STATE) != MN_FILLED) {
            mn_store_relaxed_u64(&there->blob, MN_SKIP_BLOB);
            mn_store_release_u64(&there->place, MN_FILLED);
        }
    }
}

/* Cancel the unclaimed samples of a batch. */
static inline void mn_cancel(const mn_ledger *ledger, uint32_t index) {
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t first = mn_load_relaxed_u64(&batch->first), count = mn_load_relaxed_u32(&batch->count);
    for (uint64_t position = first; position < first + count; position++) {
        mn_u64 *ticket = &mn_at(ledger, position)->ticket;
        uint64_t word = mn_load_acquire_u64(ticket);
        if ((word & MN_STATE) == MN_FREE)
            mn_cas_seq_cst_u64(ticket, word, MN_CANCELLED);
    }
}

/* Forbid that anybody collates or publishes a batch any more; 0 while a worker collates it: ask again later. */
static inline int mn_close(const mn_ledger *ledger, uint32_t index) {
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t word = mn_load_acquire_u64(&batch->state);
    if ((word & 15) == MN_OPEN)
        return mn_cas_seq_cst_u64(&batch->state, word, (word & ~(uint64_t)15) | MN_CLOSED);
    return (word & 15) != MN_COLLATING;
}

/* Free the record of a batch that is settled and delivered, or closed with its whole epoch settled. */
static inline void mn_retire(const mn_ledger *ledger, uint32_t index) {
    mn_batch *batch = mn_batch_at(ledger, index);
    mn_store_release_u64(&batch->state, mn_load_relaxed_u64(&batch->state) >> 16 << 16 | MN_VACANT);
}

/* ---- Recovery: what becomes of the samples of a worker that cannot run any more ----------------------- */

/* Open the places in [base, tail) again that the worker had taken without having said so on the ticket. */
static inline void mn_reopen_places(const mn_ledger *ledger, uint32_t worker, uint64_t base, uint64_t tail) {
    for (uint64_t place = base; place < tail; place++) {
        uint64_t word = mn_load_acquire_u64(&mn_at(ledger, place)->place);
        if ((word & MN_STATE) != MN_BOUND)
            continue;
        uint64_t position = (word & MN_NUMBER) - 1;
        mn_position *record = mn_at(ledger, position);
        uint64_t ticket = mn_load_acquire_u64(&record->ticket);
        if (mn_load_relaxed_u64(&record->position) == position && mn_is_claimed(ticket, worker) &&
            (ticket & MN_NUMBER) != place + 1)
            mn_give_back(ledger, place + 1, position);
    }
}

static inline int mn_is_skipped(mn_position *there, uint64_t position) {
    return mn_load_acquire_u64(&there->place) == (MN_FILLED | (position + 1)) &&
           (mn_load_relaxed_u64(&there->blob) & MN_KIND_MASK) == MN_SKIP_BLOB;
}

/* Offer the samples in [base, tail) again that the worker had claimed and not finished; returns how many.
 *
 * A batch whose result it has set is finished. Backwards: the worker that claims the first sample of a batch finds the
 * others free. */
static inline uint64_t mn_reoffer(const mn_ledger *ledger, uint32_t worker, uint64_t base, uint64_t tail) {
    uint64_t released = 0;
    for (uint64_t position = tail; position-- > base;) {
        mn_position *record = mn_at(ledger, position);
        uint64_t word = mn_load_acquire_u64(&record->ticket);
        if (!mn_is_claimed(word, worker)) {
            /* The worker may have died after it had offered a sample, and before it lowered the head. */
            if ((word & MN_STATE) == MN_FREE && (word & MN_OFFERED))
                mn_lower(&ledger->header->head, position);
            continue;
        }
        uint64_t place = word & MN_NUMBER;
        if (place) {
            mn_position *there = mn_at(ledger, place - 1);
            mn_batch *batch = mn_batch_at(ledger, mn_load_relaxed_u32(&record->batch));
            int empty = mn_load_acquire_u64(&there->place) == (MN_BOUND | (position + 1));
            if (empty && mn_load_relaxed_u32(&batch->bound) && mn_load_acquire_u64(&batch->result)) {
                /* The result of the whole batch is there: the worker was about to fill its places. */
                mn_store_seq_cst_u64(&there->place, MN_FILLED | (position + 1));
                empty = 0;
            }
            if (!empty) {
                /* Once filled, the place may long have been delivered and have come round the ring. */
                if (mn_is_skipped(there, position))
                    place = 0;
                mn_store_release_u64(&record->ticket, MN_DONE | place);
                continue;
            }
            mn_store_relaxed_u64(&there->blob, 0);
        }
        /* Only what was offered can have been claimed by another than the owner: it stays offered. */
        uint32_t owner = mn_load_relaxed_u32(&mn_batch_at(ledger, mn_load_relaxed_u32(&record->batch))->owner);
        uint64_t offered = owner == 0 || owner == worker + 1 ? 0 : MN_OFFERED;
        mn_store_seq_cst_u64(&record->ticket, MN_FREE | offered | place);
        mn_lower(&ledger->header->head, position);
        released++;
    }
    return released;
}

/* Let another worker collate a batch that this one was collating. */
static inline void mn_uncollate(const mn_ledger *ledger, uint32_t worker, uint32_t index) {
    mn_batch *batch = mn_batch_at(ledger, index);
    uint64_t word = mn_load_acquire_u64(&batch->state);
    if (mn_is_collating(word, worker))
        mn_store_release_u64(&batch->state, (word & ~(uint64_t)0xFFFF) | MN_OPEN);
}

#endif
