/* Atomic words in memory shared between processes.
 *
 * The memory order stands in each name. In doubt, the sequentially consistent form is used: the cost is a
 * few nanoseconds, the alternative is a lost wake-up once a week.
 */
#ifndef MINATO_ATOMICS_H
#define MINATO_ATOMICS_H

#include <stdint.h>

#if !defined(__GNUC__) && !defined(__clang__)
#error "minato's compiled core needs the __atomic builtins of GCC or Clang"
#endif

_Static_assert(__atomic_always_lock_free(4, 0), "32-bit words must be lock-free");
_Static_assert(__atomic_always_lock_free(8, 0), "64-bit words must be lock-free");

static inline uint64_t mn_load_acquire_u64(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline uint64_t mn_load_seq_cst_u64(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static inline void mn_store_release_u64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline void mn_store_seq_cst_u64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

/* Returns 1 and stores `desired` if *word was `expected`, 0 otherwise. */
static inline int mn_cas_seq_cst_u64(uint64_t *word, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(word, &expected, desired, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

static inline uint32_t mn_load_acquire_u32(const uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline uint32_t mn_load_seq_cst_u32(const uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

static inline void mn_store_release_u32(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline int mn_cas_seq_cst_u32(uint32_t *word, uint32_t expected, uint32_t desired) {
    return __atomic_compare_exchange_n(word, &expected, desired, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

static inline uint32_t mn_fetch_add_seq_cst_u32(uint32_t *word, uint32_t value) {
    return __atomic_fetch_add(word, value, __ATOMIC_SEQ_CST);
}

#endif
