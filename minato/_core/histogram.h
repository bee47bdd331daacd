/* A log-linear histogram of durations in caller's memory: one writer, any number of readers.
 *
 * Values below 32 have a bucket each; above, every power of two is cut into 16 equal buckets.
 */
#ifndef MINATO_HISTOGRAM_H
#define MINATO_HISTOGRAM_H

#include <stddef.h>
#include <stdint.h>

#define MN_HISTOGRAM_TOP UINT64_C(0xffffffffffff) /* 2**48 - 1 ns, 78 hours */
#define MN_HISTOGRAM_BUCKETS 720

typedef struct {
    uint64_t count;
    uint64_t total;
    uint64_t max;
    uint64_t reserved[5]; /* keeps the buckets on a cache line of their own */
    uint64_t bucket[MN_HISTOGRAM_BUCKETS];
} mn_histogram;

_Static_assert(offsetof(mn_histogram, bucket) == 64, "the pure backend uses this offset");
_Static_assert(sizeof(mn_histogram) == 5824, "the pure backend uses this size");

static inline uint32_t mn_histogram_bucket(uint64_t value) {
    if (value < 32) return (uint32_t)value;
    int shift = 59 - __builtin_clzll(value); /* leaves five significant bits */
    return (uint32_t)(shift * 16 + (int)(value >> shift));
}

/* The middle of a bucket, rounded down. */
static inline uint64_t mn_histogram_middle(uint32_t bucket) {
    if (bucket < 32) return bucket;
    uint32_t shift = bucket / 16 - 1;
    uint64_t low = (uint64_t)(bucket - shift * 16) << shift;
    return low + ((UINT64_C(1) << shift) - 1) / 2;
}

/* Whole-word stores: a reader in another process sees the old value or the new one. */
static inline void mn_histogram_set(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

static inline uint64_t mn_histogram_get(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline void mn_histogram_record(mn_histogram *h, uint64_t value) {
    if (value > MN_HISTOGRAM_TOP) value = MN_HISTOGRAM_TOP;
    uint64_t *bucket = &h->bucket[mn_histogram_bucket(value)];
    mn_histogram_set(bucket, *bucket + 1);
    mn_histogram_set(&h->total, h->total + value);
    if (value > h->max) mn_histogram_set(&h->max, value);
    mn_histogram_set(&h->count, h->count + 1);
}

/* Add a histogram that has the buckets from `low` to `high - 1` only to one that has them all. */
static inline void mn_histogram_add(mn_histogram *to, const mn_histogram *from, uint32_t low, uint32_t high) {
    for (uint32_t i = low; i < high; i++)
        mn_histogram_set(&to->bucket[i], to->bucket[i] + mn_histogram_get(&from->bucket[i - low]));
    mn_histogram_set(&to->total, to->total + mn_histogram_get(&from->total));
    uint64_t max = mn_histogram_get(&from->max);
    if (max > to->max) mn_histogram_set(&to->max, max);
    mn_histogram_set(&to->count, to->count + mn_histogram_get(&from->count));
}

#endif
