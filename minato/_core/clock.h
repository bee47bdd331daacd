/* Monotonic and CPU clocks as plain C, so that loops without the GIL can read them. */
#ifndef MINATO_CLOCK_H
#define MINATO_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t mn_read_clock_ns(clockid_t clock) {
    struct timespec moment;
    clock_gettime(clock, &moment); /* fails only for an unknown clock */
    return (int64_t)moment.tv_sec * 1000000000 + moment.tv_nsec;
}

static inline int64_t mn_now_ns(void) { return mn_read_clock_ns(CLOCK_MONOTONIC); }

static inline int64_t mn_thread_cpu_ns(void) { return mn_read_clock_ns(CLOCK_THREAD_CPUTIME_ID); }

/* timeout_ns: 0 has always expired, a negative one never does. */
static inline int mn_expired(int64_t start_ns, int64_t timeout_ns) {
    if (timeout_ns <= 0) return timeout_ns == 0;
    return mn_now_ns() - start_ns >= timeout_ns;
}

#endif
