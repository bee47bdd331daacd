/* Atomic words in memory shared between processes.
 *
 * A word has a type of its own, so that the compiler refuses to read or write it in any other way than by
 * these functions. Each name states the memory order. In doubt, the sequentially consistent form is used:
 * the cost is a few nanoseconds, the alternative is a lost wake-up once a week.
 */
#ifndef MINATO_ATOMICS_H
#define MINATO_ATOMICS_H

#include <stdint.h>

#if !defined(__GNUC__) && !defined(__clang__)
#error "minato's compiled core needs the __atomic builtins of GCC or Clang"
#endif

_Static_assert(__atomic_always_lock_free(4, 0), "32-bit words must be lock-free");
_Static_assert(__atomic_always_lock_free(8, 0), "64-bit words must be lock-free");

typedef struct {
    uint32_t bits;
} mn_u32;

typedef struct {
    uint64_t bits;
} mn_u64;

/* Relaxed: the word is whole, and nothing else is said. For words with one writer, and for words that another
 * word's acquire or compare-and-swap orders. */
static inline uint64_t mn_load_relaxed_u64(const mn_u64 *word) {
    return __atomic_load_n(&word->bits, __ATOMIC_RELAXED);
}

static inline uint64_t mn_load_acquire_u64(const mn_u64 *word) {
    return __atomic_load_n(&word->bits, __ATOMIC_ACQUIRE);
}

static inline uint64_t mn_load_seq_cst_u64(const mn_u64 *word) {
    return __atomic_load_n(&word->bits, __ATOMIC_SEQ_CST);
}

static inline void mn_store_relaxed_u64(mn_u64 *word, uint64_t value) {
    __atomic_store_n(&word->bits, value, __ATOMIC_RELAXED);
}

static inline void mn_store_release_u64(mn_u64 *word, uint64_t value) {
    __atomic_store_n(&word->bits, value, __ATOMIC_RELEASE);
}

static inline void mn_store_seq_cst_u64(mn_u64 *word, uint64_t value) {
    __atomic_store_n(&word->bits, value, __ATOMIC_SEQ_CST);
}

/* Returns 1 and stores `desired` if *word was `expected`, 0 otherwise. */
static inline int mn_cas_seq_cst_u64(mn_u64 *word, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(&word->bits, &expected, desired, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

static inline uint32_t mn_load_relaxed_u32(const mn_u32 *word) {
    return __atomic_load_n(&word->bits, __ATOMIC_RELAXED);
}

static inline uint32_t mn_load_acquire_u32(const mn_u32 *word) {
    return __atomic_load_n(&word->bits, __ATOMIC_ACQUIRE);
}

static inline uint32_t mn_load_seq_cst_u32(const mn_u32 *word) {
    return __atomic_load_n(&word->bits, __ATOMIC_SEQ_CST);
}

static inline void mn_store_relaxed_u32(mn_u32 *word, uint32_t value) {
    __atomic_store_n(&word->bits, value, __ATOMIC_RELAXED);
}

static inline void mn_store_release_u32(mn_u32 *word, uint32_t value) {
    __atomic_store_n(&word->bits, value, __ATOMIC_RELEASE);
}

static inline int mn_cas_seq_cst_u32(mn_u32 *word, uint32_t expected, uint32_t desired) {
    return __atomic_compare_exchange_n(&word->bits, &expected, desired, 0, __ATOMIC_SEQ_CST,
                                       __ATOMIC_SEQ_CST);
}

static inline uint32_t mn_fetch_add_seq_cst_u32(mn_u32 *word, uint32_t value) {
    return __atomic_fetch_add(&word->bits, value, __ATOMIC_SEQ_CST);
}

#endif
