/* The ledger's records in shared memory: fixed widths, no pointers, one writer or one atomic word each. */
#ifndef MINATO_LAYOUT_H
#define MINATO_LAYOUT_H

#include "gate.h"
#include <stddef.h>

#define MN_MAGIC 0x6f74616e696dULL /* "minato" */
enum { MN_LAYOUT_VERSION = 4, MN_PASSES = 8, MN_HINTS = 256, MN_MOST_AHEAD = 65535 };
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

/* States of a ticket and of a place, in the upper two bits of their words. */
#define MN_FREE 0ULL
#define MN_CLAIMED (1ULL << 62)
#define MN_DONE (2ULL << 62)
#define MN_CANCELLED (3ULL << 62)
#define MN_BOUND (1ULL << 62)
#define MN_FILLED (2ULL << 62)
#define MN_STATE (3ULL << 62)
#define MN_NUMBER ((1ULL << 48) - 1)
#define MN_ONE_VERSION (1ULL << 48)

/* The pass (one run over the sampler) whose places a sample may take. */
typedef struct {
    uint64_t cursor; /* version << 48 | first position that may have an open place */
    uint64_t limit;  /* position after the pass's last one so far */
} mn_pass;

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t compiled; /* 1: written by the compiled twin */
    uint32_t num_workers;
    uint32_t batch_capacity;
    uint64_t position_capacity; /* a power of two */
    uint64_t slow_ns;           /* a sample that took longer is slow (`fast_first`) */
    uint32_t shutdown; /* 1: leave now, 2: leave when nothing is left to claim */
    uint32_t stranded; /* how often full batches may have been left that nobody publishes */
    uint64_t waiting; /* 1 while the consumer waits for a batch */
    uint32_t adopted; /* up to which of those times all batches have been looked at since */
    uint32_t reserved;
    uint64_t head; /* version << 48 | first position that may have a free ticket */
    uint64_t pad_head[7];
    uint64_t tail; /* position after the last published one */
    uint64_t pad_tail[7];
    mn_gate work; /* workers sleep here for tickets */
    uint64_t pad_work[7];
    mn_gate ready; /* the consumer sleeps here for a batch */
    uint64_t pad_ready[7];
    mn_pass passes[MN_PASSES];
    uint32_t hints_used; /* entries of the table from the start on that were ever written */
    uint32_t pad_hints[15];
    uint64_t hints[MN_HINTS]; /* samples to start early: by how many samples << 48 | position + 1; 0: none */
} mn_header;

/* One sample in flight. `ticket` and `place` are the only truth about it. */
typedef struct {
    uint64_t ticket; /* state << 62 | worker << 48 | place + 1 */
    uint64_t place;  /* state << 62 | ticket's position + 1; while open, its own position + 1 */
    uint64_t blob;   /* arena offset of what does not fit the layout, | kind in the low 6 bits */
    uint64_t blob_nbytes;
    int64_t key;      /* the dataset index, where keys are integers */
    uint64_t cost_ns; /* time the sample took */
    uint64_t position; /* its own number: the ring reuses records */
    uint32_t batch;   /* record of the batch that this position belongs to */
    uint32_t occurrence; /* how often its key came before in the epoch */
} mn_position;

typedef struct {
    uint64_t state; /* generation << 16 | worker << 4 | OPEN, COLLATING, READY or CLOSED */
    uint64_t first; /* its first position */
    uint32_t count;
    uint32_t pass_index;
    uint64_t slot;   /* arena offset of its slot */
    uint64_t cursor; /* next free byte in the slot */
    uint64_t layout; /* arena offset of the published layout, 0: none yet */
    uint64_t flags; /* 1 << kind for each kind of blob at its places, once it is full */
    uint64_t hint; /* generation << 32 | places before it are known to be filled */
    uint64_t result; /* arena offset of the collated batch | kind, 0: the fields are the result */
    uint64_t result_nbytes;
    uint64_t keys; /* arena offset of pickled keys, 0: the positions hold them */
    uint64_t keys_nbytes;
    int64_t epoch;
    int64_t seed;
    uint32_t bound; /* 1: every sample has its own place */
    uint32_t owner; /* worker + 1 that alone may claim its samples, 0: any */
    uint64_t slot_end;
} mn_batch;

/* Written by its worker alone, read by everybody. */
typedef struct {
    uint64_t position; /* position + 1 that it works on, 0: none */
    uint64_t started_ns;
    int64_t step; /* transform that is running, -1: the dataset itself */
    uint64_t samples;
    uint64_t busy_ns;
    uint64_t idle_ns;
    uint64_t pad[2];
} mn_worker;

_Static_assert(sizeof(mn_header) == 512 + 8 * MN_HINTS, "header");
_Static_assert(offsetof(mn_header, head) == 64, "head has its own cache line");
_Static_assert(offsetof(mn_header, tail) == 128, "tail has its own cache line");
_Static_assert(offsetof(mn_header, work) == 192, "work gate");
_Static_assert(offsetof(mn_header, ready) == 256, "ready gate");
_Static_assert(offsetof(mn_header, passes) == 320, "passes");
_Static_assert(offsetof(mn_header, hints_used) == 448, "hints have their own cache lines");
_Static_assert(sizeof(mn_position) == 64, "one cache line per sample");
_Static_assert(sizeof(mn_batch) == 128, "two cache lines per batch");
_Static_assert(sizeof(mn_worker) == 64, "one cache line per worker");

#endif
