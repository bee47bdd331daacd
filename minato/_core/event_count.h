/* A gate: a word that counts events and a word that counts sleepers, 8 bytes in shared memory.
 *
 * A sleeper registers, then looks at the event count again, then sleeps; a notifier raises the event
 * count, then looks at the sleepers. Both sides are sequentially consistent, so one of them always sees
 * the other: no wake-up is lost, and a notifier without sleepers pays no system call. A sleeper that is
 * killed stays registered forever; that costs a needless system call per event, never a hang.
 */
#ifndef MINATO_EVENT_COUNT_H
#define MINATO_EVENT_COUNT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "atomics.h"
#include <limits.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

typedef struct {
    mn_u32 events;
    mn_u32 sleepers;
} mn_event_count;

_Static_assert(sizeof(mn_event_count) == 8, "a gate is two 32-bit words");

enum {
    MN_SPINS = 64,                /* about 2 us: longer than a hand-over, shorter than a sleep */
    MN_FALLBACK_SLEEP_NS = 500000 /* where there is no futex */
};

static inline void mn_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline uint32_t mn_event_count_read(mn_event_count *gate) {
    return mn_load_seq_cst_u32(&gate->events);
}

static inline void mn_event_count_notify(mn_event_count *gate, int sleepers) {
    mn_fetch_add_seq_cst_u32(&gate->events, 1);
    if (mn_load_seq_cst_u32(&gate->sleepers) != 0) {
#if defined(__linux__)
        syscall(SYS_futex, &gate->events.bits, FUTEX_WAKE, sleepers, NULL, NULL, 0);
#endif
    }
}

/* Returns 1 if the event count differs from `seen`, 0 after the time-out or a signal. */
static inline int mn_event_count_wait(mn_event_count *gate, uint32_t seen, int64_t timeout_ns) {
    for (int i = 0; i < MN_SPINS; i++) {
        if (mn_load_acquire_u32(&gate->events) != seen)
            return 1;
        mn_pause();
    }
    struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    mn_fetch_add_seq_cst_u32(&gate->sleepers, 1);
    if (mn_load_seq_cst_u32(&gate->events) == seen) {
#if defined(__linux__)
        /* Not the private kind: the word is shared between processes. */
        syscall(SYS_futex, &gate->events.bits, FUTEX_WAIT, seen, &timeout, NULL, 0);
#else
        struct timespec nap = {0, MN_FALLBACK_SLEEP_NS};
        for (int64_t slept = 0; slept < timeout_ns; slept += MN_FALLBACK_SLEEP_NS) {
            if (mn_load_seq_cst_u32(&gate->events) != seen || nanosleep(&nap, NULL) != 0)
                break;
        }
        (void)timeout;
#endif
    }
    mn_fetch_add_seq_cst_u32(&gate->sleepers, (uint32_t)-1);
    return mn_load_acquire_u32(&gate->events) != seen;
}

#endif
