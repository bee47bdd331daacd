/* The ledger's records in shared memory: fixed widths, no pointers.
 *
 * The comment of a word ends with who writes it: T, the training process; W, workers. Several writers of one word compare
 * and swap, or hold what says that it is theirs. */
#ifndef MINATO_LAYOUT_H
#define MINATO_LAYOUT_H

#include "event_count.h"
#include <stddef.h>

#define MN_MAGIC 0x6f74616e696dULL /* "minato" */
enum { MN_LAYOUT_VERSION = 5, MN_EPOCH_SLOTS = 8, MN_HINTS = 256, MN_MOST_AHEAD = 65535 };
enum { MN_MAX_WORKERS = 4096 }; /* as many as have a number in mn_batch.state */

/* The lower 4 bits of mn_batch.state */
enum { MN_VACANT, MN_OPEN, MN_COLLATING, MN_READY, MN_CLOSED };
/* Answers of fill */
enum { MN_NOT_COMPLETE, MN_PUBLISHED, MN_MUST_COLLATE };
/* The kind of a blob, and bits of mn_batch.flags: 1 << kind */
enum { MN_KIND_MASK = 63, MN_SKIP_BLOB = 5 };
enum { MN_RAGGED = 1 << 1, MN_FAILED = 1 << 2, MN_ENDED = 1 << 4, MN_SKIPPED = 1 << MN_SKIP_BLOB };
/* mn_header.shutdown */
enum { MN_STOPPING = 1, MN_DRAINING = 2 };

/* Of whatever is written to a slot; the kind of a blob lies below it. */
#define MN_ALIGNMENT 64ULL

/* Bit of mn_batch.layout: no layout is published. */
#define MN_RESERVED 1ULL

/* States of a ticket and of a place, in the upper two bits of their words. */
#define MN_FREE 0ULL
#define MN_OFFERED (0x3FFFULL << 48) /* of a free ticket: not only the owner of its batch may claim it */
#define MN_CLAIMED (1ULL << 62)
#define MN_DONE (2ULL << 62)
#define MN_CANCELLED (3ULL << 62)
#define MN_BOUND (1ULL << 62)
#define MN_FILLED (2ULL << 62)
#define MN_STATE (3ULL << 62)
#define MN_NUMBER ((1ULL << 48) - 1)
#define MN_ONE_VERSION (1ULL << 48)

/* An epoch in flight: a sample takes a place of its own epoch. */
typedef struct {
    mn_u64 cursor; /* version << 48 | first position that may have an open place; T, W */
    mn_u64 limit;  /* position after the epoch's last one so far; T */
} mn_epoch_slot;

typedef struct {
    mn_u64 magic; /* this and the next five: T, once */
    uint32_t version;
    uint32_t compiled; /* 1: written by the compiled backend */
    uint32_t num_workers;
    uint32_t batch_capacity;
    uint64_t position_capacity; /* a power of two */
    mn_u64 slow_ns;  /* a sample that took longer is slow; T */
    mn_u32 shutdown; /* 1: leave now, 2: leave when nothing is left to claim; T */
    mn_u32 orphaned; /* events after which a full batch may have no worker that publishes it; T */
    mn_u64 waiting;  /* 1 while the consumer waits for a batch; T */
    mn_u32 orphans_checked; /* events up to which all batches have been checked; W */
    uint32_t reserved;
    mn_u64 head; /* version << 48 | first position that may have a free ticket; W, and T for what it offers again */
    uint64_t pad_head[7];
    mn_u64 tail; /* position after the last opened one; T */
    uint64_t pad_tail[7];
    mn_event_count work; /* workers sleep here for tickets; T, W */
    uint64_t pad_work[7];
    mn_event_count ready; /* the consumer sleeps here for a batch; T, W */
    uint64_t pad_ready[7];
    mn_epoch_slot epoch_slots[MN_EPOCH_SLOTS];
    mn_u32 hints_used; /* entries of the table from the start on that were ever written; T */
    uint32_t pad_hints[15];
    mn_u64 hints[MN_HINTS]; /* samples to start early: by how many << 48 | position + 1; 0: none; T, W clear them */
} mn_header;

/* One sample in flight. `ticket` and `place` are the only truth about it; T, W. T writes the other words before it frees
 * the ticket. Then `cost_ns` belongs to the worker that holds the ticket, `blob` and `blob_nbytes` to the one that holds
 * the place, until that is filled; what a dead worker held, and places that nobody fills, to T. */
typedef struct {
    mn_u64 ticket; /* state << 62 | worker << 48 | place + 1 */
    mn_u64 place;  /* state << 62 | ticket's position + 1; while open, its own position + 1 */
    mn_u64 blob;   /* arena offset of what does not fit the layout, | kind in the low 6 bits */
    mn_u64 blob_nbytes;
    mn_u64 index;      /* the dataset index, where indices are integers */
    mn_u64 cost_ns; /* time the sample took */
    mn_u64 position; /* its own number: the ring reuses records */
    mn_u32 batch;   /* record of the batch that this position belongs to */
    mn_u32 occurrence; /* how often its index came before in the epoch */
} mn_position;

/* T writes all words before it opens the batch. */
typedef struct {
    mn_u64 state; /* generation << 16 | worker << 4 | OPEN, COLLATING, READY or CLOSED; T, W */
    mn_u64 first; /* its first position */
    mn_u32 count;
    mn_u32 epoch_slot;
    mn_u64 slot;   /* arena offset of its slot */
    mn_u64 cursor; /* next free byte in the slot; W */
    mn_u64 layout; /* arena offset of the published layout; before: bytes of the room at the slot's start | RESERVED; W */
    mn_u64 flags; /* 1 << kind for each kind of blob at its places; W that finds it full */
    mn_u64 hint; /* generation << 32 | places before it are known to be filled; W */
    mn_u64 result; /* arena offset of the collated batch | kind, 0: the fields are the result; W that collates */
    mn_u64 result_nbytes; /* W, with the result */
    mn_u64 indices; /* arena offset of pickled indices, 0: the positions hold them */
    mn_u64 indices_nbytes;
    mn_u64 epoch;
    mn_u64 seed;
    mn_u32 bound; /* 1: every sample has its own place */
    mn_u32 owner; /* worker + 1 that alone may claim its samples, 0: any */
    mn_u64 slot_end;
} mn_batch;

/* Written by its worker alone while that lives, by the training process once it is dead; read by everybody.
 * The first three words are the lease: what the worker is on. */
typedef struct {
    mn_u64 position; /* position + 1 that it works on, 0: none */
    mn_u64 started_ns;
    mn_u64 step; /* transform that is running, -1: the dataset itself */
    mn_u64 samples;
    mn_u64 busy_ns;
    mn_u64 idle_ns;
    uint64_t pad[2];
} mn_worker;

_Static_assert(sizeof(mn_header) == 512 + 8 * MN_HINTS, "header");
_Static_assert(offsetof(mn_header, head) == 64, "head has its own cache line");
_Static_assert(offsetof(mn_header, tail) == 128, "tail has its own cache line");
_Static_assert(offsetof(mn_header, work) == 192, "work events");
_Static_assert(offsetof(mn_header, ready) == 256, "ready events");
_Static_assert(offsetof(mn_header, epoch_slots) == 320, "epoch_slots");
_Static_assert(offsetof(mn_header, hints_used) == 448, "hints have their own cache lines");
_Static_assert(sizeof(mn_position) == 64, "one cache line per sample");
_Static_assert(sizeof(mn_batch) == 128, "two cache lines per batch");
_Static_assert(sizeof(mn_worker) == 64, "one cache line per worker");

#endif
