/* Keys of samples, and counter-based words grown from a key.
 *
 * Integer arithmetic alone, so that every machine and the pure backend agree bit for bit.
 */
#ifndef MINATO_SEEDING_H
#define MINATO_SEEDING_H

#include <stdint.h>

/* Steele, Lea and Flood's SplitMix64: a bijection in which each input bit flips half the output. */
#define MN_GOLDEN UINT64_C(0x9e3779b97f4a7c15)

static inline uint64_t mn_avalanche(uint64_t z) {
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static inline uint64_t mn_spread(uint64_t seed) { return mn_avalanche(seed + MN_GOLDEN); }

/* The key of a sample, from a seed that is spread: it depends on the xor of both with the epoch. */
static inline uint64_t mn_sample_key(uint64_t spread, uint64_t epoch, uint64_t index) {
    uint64_t key = mn_avalanche((spread ^ epoch) + MN_GOLDEN);
    return mn_avalanche((key ^ index) + MN_GOLDEN);
}

typedef struct {
    uint32_t start, step, first, second;
} mn_stream;

static inline mn_stream mn_open_stream(uint64_t key, uint64_t stream) {
    uint64_t low = mn_avalanche(key + (stream + 1) * MN_GOLDEN);
    uint64_t high = mn_avalanche(low + MN_GOLDEN);
    mn_stream opened = {(uint32_t)low, (uint32_t)high | 1u, (uint32_t)(low >> 32),
                        (uint32_t)(high >> 32)};
    return opened;
}

/* Word i: two rounds of a 32-bit multiply-xorshift hash, with key material between the rounds. */
#define MN_FILL_BODY(WORD)                                        \
    uint32_t counter = s.start;                                   \
    for (uint32_t i = 0; i < words; i++, counter += s.step) {     \
        uint32_t x = counter;                                     \
        x = (x ^ (x >> 16)) * UINT32_C(0x21f0aaad) ^ s.first;     \
        x = (x ^ (x >> 15)) * UINT32_C(0xd35a2d97) ^ s.second;    \
        to[i] = (WORD)(x ^ (x >> 15));                            \
    }                                                             \
    if (words) to[0] |= UINT32_C(0x80000000); /* an all-zero Mersenne Twister stays zero */

static inline void mn_fill_u32(uint32_t *restrict to, uint32_t words, mn_stream s) {
    MN_FILL_BODY(uint32_t)
}

static inline void mn_fill_u64(uint64_t *restrict to, uint32_t words, mn_stream s) {
    MN_FILL_BODY(uint64_t)
}

/* Plain x86-64 has no 32-bit vector multiply: 665 ns instead of 90 ns for 624 words. */
#if defined(__x86_64__) && defined(__GNUC__)

__attribute__((target("avx2"))) static void mn_fill_u32_avx2(uint32_t *restrict to,
                                                             uint32_t words, mn_stream s) {
    MN_FILL_BODY(uint32_t)
}

__attribute__((target("avx2"))) static void mn_fill_u64_avx2(uint64_t *restrict to,
                                                             uint32_t words, mn_stream s) {
    MN_FILL_BODY(uint64_t)
}

static int mn_cpu_has_avx2(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}
#else
#define mn_fill_u32_avx2 mn_fill_u32
#define mn_fill_u64_avx2 mn_fill_u64
static int mn_cpu_has_avx2(void) { return 0; }
#endif

static inline void mn_fill(void *to, uint32_t words, uint64_t key, uint64_t stream, int width,
                           int wide_vectors) {
    mn_stream opened = mn_open_stream(key, stream);
    if (width == 4) {
        if (wide_vectors) mn_fill_u32_avx2((uint32_t *)to, words, opened);
        else mn_fill_u32((uint32_t *)to, words, opened);
    } else {
        if (wide_vectors) mn_fill_u64_avx2((uint64_t *)to, words, opened);
        else mn_fill_u64((uint64_t *)to, words, opened);
    }
}

#endif
