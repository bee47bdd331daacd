/* Python's time.monotonic_ns as plain C, so that loops without the GIL can read it. */
#ifndef MINATO_CLOCK_H
#define MINATO_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t mn_now_ns(void) {
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment); /* fails only for an unknown clock */
    return (int64_t)moment.tv_sec * 1000000000 + moment.tv_nsec;
}

/* A counter of some nanoseconds; unlike the clock, it does not wait for earlier accesses to memory. */
static inline uint64_t mn_ticks(void) {
#ifdef __x86_64__
    return __builtin_ia32_rdtsc();
#else
    return (uint64_t)mn_now_ns();
#endif
}

#endif
