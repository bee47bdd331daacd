/* Runs the ledger's protocol in threads, for ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 * Workers claim samples, write their data into plain memory, and fill places; the consumer opens batches,
 * reads the data of those that are ready, and retires them. The data is not atomic: what orders it are the words
 * of the ledger alone, so a missing order is a race that ThreadSanitizer reports. Now and then a worker leaves
 * everything as it is, as if it were killed, and the consumer releases its samples.
 *
 * Usage: ledger_threads BATCHES SEED. Ends with status 0 if every sample arrived once, with its data.
 */
#include "ledger.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORKERS = 4, RECORDS = 8, RING = 64, COUNT = 8, RUN = 3, NBYTES = 1 << 16 };

static mn_ledger ledger;
static uint64_t data[RECORDS][COUNT]; /* of each place, the position of its sample */
static uint64_t collated[RECORDS];    /* of each batch, the sum of its samples, if it was collated */
static int collates;                  /* batches of this run are collated as a whole */
static mn_u32 dead[WORKERS];          /* 1: this worker has been "killed" and waits for its release */
static uint64_t seed;

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);         \
            abort();                                                                \
        }                                                                           \
    } while (0)

static uint64_t draw(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15ULL;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    return z ^ (z >> 31);
}

static int stopping(void) { return mn_load_acquire_u32(&ledger.header->shutdown) != 0; }

/* Stop here as if killed, now and then; returns after the consumer has released what this worker had. */
static int dies(uint32_t worker, uint64_t *state) {
    if (draw(state) % 97 != 0)
        return 0;
    mn_store_release_u32(&dead[worker], 1);
    mn_event_count_notify(&ledger.header->ready, INT_MAX);
    while (mn_load_acquire_u32(&dead[worker]))
        sched_yield();
    return 1;
}

static void collate(uint32_t index) {
    uint64_t sum = 0;
    for (int k = 0; k < COUNT; k++)
        sum += data[index][k];
    collated[index] = sum;
    mn_set_ready(&ledger, index, MN_ALIGNMENT, sizeof(sum));
}

/* Results of one lease; 0 if the worker "died" in it. */
static int run(uint32_t worker, uint32_t index, uint64_t k, uint32_t count, uint64_t *state) {
    mn_batch *batch = &ledger.batches[index];
    uint64_t first = mn_load_relaxed_u64(&batch->first) + k;
    int bound = mn_load_relaxed_u32(&batch->bound) != 0;
    uint64_t key = mn_load_relaxed_u64(&mn_at(&ledger, first)->index);
    CHECK(key == first);
    if (!collates)
        CHECK(mn_reserve_fields(&ledger, index, MN_ALIGNMENT) != UINT64_MAX);
    CHECK(mn_allocate(&ledger, index, 1) != UINT64_MAX);
    if (bound && collates) {
        CHECK(count == COUNT);
        uint64_t sum = 0;
        for (uint32_t i = 0; i < count; i++)
            sum += first + i;
        collated[index] = sum;
        if (dies(worker, state))
            return 0;
        mn_set_result(&ledger, index, MN_ALIGNMENT, sizeof(sum));
        if (dies(worker, state))
            return 0;
        if (mn_fill(&ledger, worker, first, first, count) == MN_MUST_COLLATE)
            collate(index);
        return 1;
    }
    if (!collates)
        mn_publish_layout(&ledger, index, 2 * MN_ALIGNMENT);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t position = first + i;
        uint64_t place = mn_reserve(&ledger, position, (int)(draw(state) % 2));
        uint32_t there = mn_load_relaxed_u32(&mn_at(&ledger, place)->batch);
        if (!collates)
            mn_publish_layout(&ledger, there, 2 * MN_ALIGNMENT);
        if (dies(worker, state))
            return 0;
        data[there][place - mn_load_relaxed_u64(&ledger.batches[there].first)] = position;
        if (dies(worker, state))
            return 0;
        if (mn_fill(&ledger, worker, position, place, 1) == MN_MUST_COLLATE) {
            if (dies(worker, state))
                return 0;
            collate(there);
        }
    }
    return 1;
}

static void *work(void *argument) {
    uint32_t worker = (uint32_t)(uintptr_t)argument;
    uint64_t state = seed + worker + 1;
    while (!stopping()) {
        uint32_t index, count, seen = mn_event_count_read(&ledger.header->work);
        uint64_t k;
        uint32_t most = collates ? 0 : 1 + (uint32_t)(draw(&state) % RUN);
        if (!mn_claim(&ledger, worker, most, 0, &index, &k, &count)) {
            mn_notify_idle(&ledger);
            mn_event_count_wait(&ledger.header->work, seen, 1000000);
            continue;
        }
        if (dies(worker, &state))
            continue;
        mn_store_relaxed_u64(&mn_worker_at(&ledger, worker)->started_ns, k);
        mn_store_release_u64(&mn_worker_at(&ledger, worker)->position, k + 1);
        if (count == 0)
            collate(index);
        else if (run(worker, index, k, count, &state))
            mn_end(&ledger, worker, count, 1, 1);
    }
    return NULL;
}

/* Open batches of one run over `batches` batches and check each that is delivered. */
static void consume(uint64_t batches, int bound) {
    uint32_t live[RECORDS], num_live = 0;
    uint64_t opened = 0, delivered = 0, sum = 0, start = mn_tail(&ledger);
    mn_open_epoch(&ledger, 0);
    while (delivered < batches) {
        uint32_t seen = mn_event_count_read(&ledger.header->ready);
        uint64_t base = num_live ? mn_load_relaxed_u64(&ledger.batches[live[0]].first) : mn_tail(&ledger);
        while (opened < batches && num_live < RECORDS && mn_tail(&ledger) + COUNT - base <= RING) {
            uint32_t index = mn_vacant(&ledger);
            mn_batch_fields fields = {.count = COUNT, .bound = bound, .slot = MN_ALIGNMENT,
                                      .cursor = MN_ALIGNMENT, .slot_end = NBYTES};
            mn_prepare(&ledger, index, &fields);
            for (uint64_t k = 0; k < COUNT; k++)
                mn_set_sample(&ledger, index, mn_tail(&ledger) + k, (int64_t)(mn_tail(&ledger) + k), 0, bound);
            if (opened % 5 == 4)
                mn_add_hint(&ledger, mn_tail(&ledger), 2 * COUNT);
            mn_open(&ledger, index, 1);
            live[num_live++] = index;
            opened++;
        }
        for (uint32_t worker = 0; worker < WORKERS; worker++) {
            if (!mn_load_acquire_u32(&dead[worker]))
                continue;
            base = num_live ? mn_load_relaxed_u64(&ledger.batches[live[0]].first) : mn_tail(&ledger);
            mn_reopen_places(&ledger, worker, base, mn_tail(&ledger));
            mn_reoffer(&ledger, worker, base, mn_tail(&ledger));
            for (uint32_t i = 0; i < num_live; i++)
                mn_uncollate(&ledger, worker, live[i]);
            mn_store_release_u64(&mn_worker_at(&ledger, worker)->position, 0);
            mn_strand(&ledger);
            mn_store_release_u32(&dead[worker], 0);
        }
        if (!bound && num_live == RECORDS) /* the oldest may wait for a place: as at the bound of max_lag */
            mn_bind_late(&ledger, live[0], live[0]);
        uint32_t kept = 0;
        for (uint32_t i = 0; i < num_live; i++) {
            uint32_t index = live[i];
            mn_batch *batch = &ledger.batches[index];
            if ((mn_load_acquire_u64(&batch->state) & 15) != MN_READY || !mn_settled(&ledger, index)) {
                live[kept++] = index;
                continue;
            }
            if (mn_load_acquire_u64(&batch->result)) {
                sum += collated[index];
            } else {
                for (int k = 0; k < COUNT; k++)
                    sum += data[index][k];
            }
            mn_retire(&ledger, index);
            delivered++;
        }
        if (kept == num_live) {
            mn_store_seq_cst_u64(&ledger.header->waiting, 1);
            mn_event_count_wait(&ledger.header->ready, seen, 1000000);
            mn_store_seq_cst_u64(&ledger.header->waiting, 0);
        }
        num_live = kept;
    }
    uint64_t count = batches * COUNT, expected = 0;
    for (uint64_t i = 0; i < count; i++)
        expected += start + i;
    CHECK(sum == expected);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    uint64_t batches = strtoull(argv[1], NULL, 10);
    seed = strtoull(argv[2], NULL, 10);
    for (int way = 0; way < 4; way++) {
        size_t nbytes = mn_ledger_nbytes(WORKERS, RECORDS, RING);
        void *memory = calloc(1, nbytes);
        CHECK(memory != NULL);
        mn_header *header = memory;
        header->num_workers = WORKERS;
        header->batch_capacity = RECORDS;
        header->position_capacity = RING;
        mn_ledger_map(&ledger, memory);
        memset(data, 0, sizeof(data));
        collates = way & 1;
        pthread_t threads[WORKERS];
        for (uintptr_t worker = 0; worker < WORKERS; worker++)
            CHECK(pthread_create(&threads[worker], NULL, work, (void *)worker) == 0);
        consume(batches, way & 2);
        mn_store_release_u32(&header->shutdown, MN_STOPPING);
        mn_event_count_notify(&header->work, INT_MAX);
        for (int worker = 0; worker < WORKERS; worker++) {
            while (mn_load_acquire_u32(&dead[worker]))
                mn_store_release_u32(&dead[worker], 0);
            CHECK(pthread_join(threads[worker], NULL) == 0);
        }
        free(memory);
    }
    printf("%llu batches in each of 4 ways\n", (unsigned long long)batches);
    return 0;
}
