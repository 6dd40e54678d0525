/* The engine: collectives between the processes of one machine, through shared memory.
 *
 * All ranks map one piece of memory, the arena. It belongs to no file, so nothing is left of it
 * when the last process ends, however that ends.
 *
 *     arena   | header | member 0..N-1 | channel (from, to) | staging of 0..N-1 | heap of 0..N-1 |
 *               abort    step, bell,     mailbox of a pair    two slots a rank    what callers
 *               word     notices         of ranks                                 allocate
 *
 * ONE RULE carries every collective. Ranks go through numbered steps together; a rank arrives at
 * step k by storing k in its `step` word, and passes when all others have stored k too. Each has
 * two slots of staging, used by turns (k & 1):
 *
 *     What a rank writes into its slot k before it arrives at step k
 *     may be read by all others after they pass step k and before they arrive at step k+1.
 *
 *     rank 0   write slot k | step k | read slots k of others; write slot k+1 | step k+1 | ...
 *     rank 1   write slot k | step k | read slots k of others; write slot k+1 | step k+1 | ...
 *
 * Nobody writes slot k+2, the same memory as slot k, before passing step k+1, when all have done
 * reading. So one step per segment of a message suffices, and small messages take one step in all.
 *
 * A slot has an addressed half, cut in one place for each reader, and a public half that all read.
 * A source that lies in its rank's heap (`resident`) is not copied to a slot: others read it where
 * it is, and one more step at the end keeps its owner from changing it too early.
 *
 * With the first step of an operation every rank gives a notice of what it was called with; ranks
 * that disagree find out there, before any result is written.
 *
 * Waiting: yield the core for a moment, then sleep on the rank's own bell (a futex), which whoever
 * it waits for rings. Nobody spins: on a machine with other work a spinning rank holds the core
 * that the awaited one needs (2000 pauses before the first yield made 8 bytes 10 times slower
 * there, and gained nothing on an idle machine).
 *
 * Shared memory has no connection that breaks when a process ends. So sleepers wake up every SLICE
 * and look around: at the abort word, at everybody's pidfd, and at the awaited peer itself, which
 * may have left, be stopped, be late, or be about to die. The last matters on a busy machine: a
 * killed process must get a core, and give back its memory, before its pidfd says that it ended.
 * But the signal that ends it is to be seen in /proc at once. Whoever sees any of this writes the
 * abort word and rings all bells: the others need not find out for themselves.
 *
 * How long a peer has been late is counted in looks, of a few SLICE each, and not by the clock:
 * ranks that are suspended together (Ctrl-Z) and go on an hour later have not waited for an hour.
 *
 * What another rank wrote is never an address as it is. Offsets, counts and steps are checked when
 * they are read, each once: they must be what an operation on which all agree gives, in that rank's
 * own heap. So a rank whose memory was overwritten ends the group with a sentence, not a crash.
 *
 * What a failed all-reduce leaves: the input is intact where it fits one segment (some 2 MB on two
 * ranks), and may be half reduced where it is longer. To keep it intact at any length, results have
 * to wait in memory until all are there, and come back from it: that took 1.2 to 1.9 times the
 * processor time on two ranks at 16 and 64 MB. Operations whose result has another place than their
 * input never write the input.
 *
 * An Engine serves one operation at a time, on any one thread, of the process that opened it. A
 * forked child finds it wiped, by the kernel: it cannot act for its parent, nor take it out.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "engine_blocks.h"
#include "engine_crc.h"
#include "engine_reduce.h"

enum { RANKS = 64 }; /* the most; an arena is sized for as many as there are */
enum { SITE_BYTES = 512 };
enum { ALIGN = 64 }; /* a cache line */
#define HALF (1u << 20)  /* bytes of half a slot: smaller ones cost more steps, larger ones cache */
#define MAIL (256u << 10) /* bytes of one of the two chunks of a mailbox */
#define ONE_SHOT (32u << 10)   /* bytes up to which everybody reduces everything, in one step */
#define SLICE (10 * 1000000LL) /* ns a sleeper sleeps before it looks around */
#define LONGEST (4 * SLICE)    /* the most that one look adds to a wait, however late it comes */
#define YIELDS 200             /* some 50 us with nobody else on the core */

enum { /* must match KINDS in engine.py */
    ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER, BROADCAST, SCATTER, ALL_TO_ALL, BARRIER,
    SEND, RECEIVE, SIGNAL, WAIT
};
enum { /* why an operation failed; must match REASONS in engine.py */
    FINE = 0, DIED = -1, LEFT = -2, STOPPED = -3, LATE = -4, DISAGREE = -5, INTERRUPTED = -6,
    BUSY = -7, MISMATCH = -8, NO_MEMORY = -9, GAVE_UP = -10, GARBLED = -11, ELSEWHERE = -12
};

/* What the caller asks for. `counts` has one entry for each rank: elements of each rank's part;
   all_to_all sends `counts` and receives `received`. */
typedef struct {
    uint32_t kind, dtype, op, width; /* width: bytes of an element */
    int64_t peer;                    /* the root, or the other side */
    uint64_t count;                  /* elements of the whole */
    char *in, *out;
    const int64_t *counts, *received;
} Op;

/* -- the arena ------------------------------------------------------------------------------- */

/* What a rank says at the first step of an operation. The first part must be equal everywhere. */
typedef struct {
    uint64_t sequence;
    uint32_t kind, dtype, op;
    int32_t root;
    uint64_t count, counts_hash;
    uint64_t most;  /* elements of the largest part it puts: tells how many segments there are */
    uint64_t where; /* of its input: offset in the arena, or 0 for private memory */
    int64_t counts[RANKS], received[RANKS];
} Notice;

#define AGREED offsetof(Notice, most)

typedef struct {
    _Alignas(ALIGN) atomic_uint step; /* the last step it arrived at */
    atomic_uint left;                 /* 1 after it closed its engine */
    _Alignas(ALIGN) atomic_uint bell; /* a futex: changes when somebody wakes it */
    atomic_int sleeping;              /* 0, or 1 + the peer it waits for, or ANYBODY */
    _Alignas(ALIGN) atomic_uint told; /* 1 when `site` is written; only after a disagreement */
    char site[SITE_BYTES];
    Notice notices[2]; /* by step & 1, as slots are */
} Member;

enum { ANYBODY = RANKS + 1 };

typedef struct { /* what a chunk of a mailbox is */
    uint32_t dtype, kind;
    uint64_t count, where; /* elements of the whole message; where it is, if not in the chunk */
} Label;

typedef struct { /* from one rank to another */
    _Alignas(ALIGN) atomic_uint sent, signals; /* written by the sender */
    Label labels[2];
    _Alignas(ALIGN) atomic_uint taken; /* written by the receiver */
    _Alignas(ALIGN) char chunks[2][MAIL];
} Channel;

typedef struct {
    _Alignas(ALIGN) atomic_llong abort; /* 0, or a reason with who saw it and about whom */
} Header;

typedef struct {
    char *base; /* NULL in a forked child */
    Member *members;
    Channel *channels;
    char *staging, *heap;
    uint64_t heap_bytes; /* of each rank */
    int rank, size;
    int pids[RANKS];
    struct pollfd ended[RANKS]; /* pidfds: readable when the process is no more */
    int64_t deadline, stopped_for; /* ns that a peer may be late, and stopped */
    int (*pulse)(void); /* lets the caller's language handle its signals; not 0 gives up */
    uint32_t step;
    uint64_t sequence;
    uint32_t heard[RANKS]; /* signals waited for, by source */
    uint32_t mailed[RANKS], opened[RANKS]; /* chunks sent to and taken from each */
    atomic_flag busy;
    int about, by; /* whom the last failure is about, and who saw it */
} Engine;

static uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

static uint64_t heap_offset(int size) {
    return round_up(round_up(sizeof(Header), ALIGN) + size * sizeof(Member) +
                        (uint64_t)size * size * sizeof(Channel) + (uint64_t)size * 4 * HALF,
                    4096);
}

/* Bytes of an arena with `heap` bytes for each of `size` ranks; memory is taken when touched. */
uint64_t howdah_arena_bytes(int size, uint64_t heap) {
    return heap_offset(size) + size * round_up(heap, 4096);
}

uint64_t howdah_heap_offset(int size, uint64_t heap, int rank) {
    return heap_offset(size) + rank * round_up(heap, 4096);
}

static Header *header(const Engine *e) { return (Header *)e->base; }
static Member *me(const Engine *e) { return &e->members[e->rank]; }
static Channel *channel(const Engine *e, int from, int to) {
    return &e->channels[from * e->size + to];
}

/* The two halves of a rank's slot for a step. */
static char *public_half(const Engine *e, int rank, uint32_t step) {
    return e->staging + ((uint64_t)rank * 2 + (step & 1)) * 2 * HALF;
}
static char *addressed_half(const Engine *e, int rank, uint32_t step) {
    return public_half(e, rank, step) + HALF;
}

Engine *howdah_open(char *base, uint64_t heap, int rank, int size, const int *pids,
                    const int *pidfds, double deadline, double stopped_for, int (*pulse)(void)) {
    if (size < 1 || size > RANKS || rank < 0 || rank >= size) return NULL;
    Engine *e =
        mmap(NULL, sizeof *e, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (e == MAP_FAILED) return NULL;
    if (madvise(e, sizeof *e, MADV_WIPEONFORK)) return munmap(e, sizeof *e), NULL;
    e->base = base;
    e->members = (Member *)(base + round_up(sizeof(Header), ALIGN));
    e->channels = (Channel *)(e->members + size);
    e->staging = (char *)(e->channels + (size_t)size * size);
    e->heap = base + heap_offset(size);
    e->heap_bytes = round_up(heap, 4096);
    e->rank = rank, e->size = size;
    e->deadline = (int64_t)(deadline * 1e9), e->stopped_for = (int64_t)(stopped_for * 1e9);
    e->pulse = pulse;
    memcpy(e->pids, pids, size * sizeof *pids);
    for (int peer = 0; peer < size; peer++)
        e->ended[peer] = (struct pollfd){.fd = pidfds[peer], .events = POLLIN};
    atomic_flag_clear(&e->busy);
    memset(public_half(e, rank, 0), 0, 4 * HALF); /* touched now, not in the first operation */
    return e;
}

/* -- waiting --------------------------------------------------------------------------------- */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void ring(Member *m) {
    atomic_fetch_add(&m->bell, 1);
    syscall(SYS_futex, &m->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* After a store that somebody may sleep for. The fence pairs with the one in `rest`: either the
   sleeper sees the store, or this sees the sleeper. */
static void wake(Engine *e, int first, int last) {
    atomic_thread_fence(memory_order_seq_cst);
    for (int rank = first; rank <= last; rank++) {
        int waits = atomic_load_explicit(&e->members[rank].sleeping, memory_order_relaxed);
        if (waits == 1 + e->rank || waits == ANYBODY) ring(&e->members[rank]);
    }
}

/* Ends all waits of all ranks. Returns why: the reason that was given first stands. */
static int fail(Engine *e, int reason, int about) {
    long long none = 0, mine = (long long)-reason << 32 | e->rank << 16 | about;
    if (atomic_compare_exchange_strong(&header(e)->abort, &none, mine)) none = mine;
    for (int rank = 0; rank < e->size; rank++) ring(&e->members[rank]);
    int by = none >> 16 & 0xffff, whom = none & 0xffff;
    int sound = by < e->size && whom < e->size && none >> 32 > 0 && none >> 32 <= -GARBLED;
    e->by = sound ? by : e->rank, e->about = sound ? whom : e->rank;
    return sound ? -(int)(none >> 32) : GARBLED;
}

/* How long somebody has waited, and what it has found out about whom. */
typedef struct {
    int rounds, armed, about, suspect; /* `suspect`: 1 + who was seen to be stopped, or 0 */
    uint32_t bell;
    int64_t began, look_at, looked; /* when; `looked`: for the last time */
    int64_t waited, stopped;        /* ns, as looks count them; `stopped`: for the suspect */
} Patience;

enum { RUNS, IS_STOPPED, IS_DYING };

/* What /proc/PID/stat tells: "pid (name) state" and numbers. The 9th of the line holds the kernel's
   flags of the main thread; the 31st its signals, and SIGKILL is among them from the moment that
   any signal ends the process. */
static int condition(int pid) {
    enum { FLAGS = 9, SIGNALS = 31, KILLED_OR_EXITING = 0x404 };
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return RUNS;
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    text[length > 0 ? length : 0] = 0;
    const char *field = strrchr(text, ')'); /* the name before it may hold anything */
    int stopped = field && !strncmp(field, ") T", 3);
    for (int number = 3; field && number <= SIGNALS; number++) {
        field = strchr(field + 1, ' ');
        uint64_t bits = field ? strtoull(field, NULL, 10) : 0;
        if (number == FLAGS && bits & KILLED_OR_EXITING) return IS_DYING;
        if (number == SIGNALS && bits & 1u << (SIGKILL - 1)) return IS_DYING;
    }
    return stopped ? IS_STOPPED : RUNS;
}

/* What, if anything, is the matter with the peer that somebody waits for; or with another one, for
   a group that has lost a rank is of no use. One that left took its leave: others may go on. */
static int look(Engine *e, Patience *p, int peer) {
    int64_t time = now(), passed = time - p->looked < LONGEST ? time - p->looked : LONGEST;
    p->looked = time, p->look_at = time + SLICE, p->about = peer;
    p->waited += passed;
    if (p->suspect) p->stopped += passed;
    if (atomic_load(&e->members[peer].left)) return LEFT;
    int gone = poll(e->ended, (nfds_t)e->size, 0) > 0;
    for (int rank = 0; gone && rank < e->size; rank++)
        if (e->ended[rank].revents & POLLIN && !atomic_load(&e->members[rank].left))
            return p->about = rank, DIED;
    int found = condition(e->pids[peer]);
    if (found == IS_DYING) return DIED;
    if (e->pulse && e->pulse()) return INTERRUPTED;
    if (found == IS_STOPPED && !p->suspect) p->suspect = 1 + peer, p->stopped = 0;
    if (found != IS_STOPPED && p->suspect == 1 + peer) p->suspect = 0;
    if (!p->suspect) return p->waited < e->deadline ? FINE : LATE;
    p->about = p->suspect - 1;
    return p->stopped < e->stopped_for ? FINE : STOPPED;
}

/* One more moment of waiting, after which the caller looks again whether its turn has come. */
static int rest(Engine *e, Patience *p, int peer, int listen_to) {
    if (atomic_load_explicit(&header(e)->abort, memory_order_relaxed)) return DIED; /* or another */
    if (!p->began) p->began = p->looked = now(), p->look_at = p->began + SLICE;
    if (p->rounds < YIELDS && now() - p->began < SLICE / 5) {
        p->rounds++;
        sched_yield();
        return FINE;
    }
    if (!p->armed) { /* say so, and look once more before sleeping */
        p->armed = 1;
        p->bell = atomic_load(&me(e)->bell);
        atomic_store(&me(e)->sleeping, listen_to);
        atomic_thread_fence(memory_order_seq_cst);
        return FINE;
    }
    struct timespec until = {p->look_at / 1000000000LL, p->look_at % 1000000000LL};
    syscall(SYS_futex, &me(e)->bell, FUTEX_WAIT_BITSET, p->bell, &until, NULL,
            FUTEX_BITSET_MATCH_ANY);
    p->armed = 0;
    return now() < p->look_at ? FINE : look(e, p, peer);
}

static void rested(Engine *e, const Patience *p) {
    if (p->began) atomic_store_explicit(&me(e)->sleeping, 0, memory_order_relaxed);
}

static int reached(atomic_uint *word, uint32_t least) {
    return (int32_t)(atomic_load_explicit(word, memory_order_acquire) - least) >= 0;
}

/* Until a counter that `peer` raises is at least `least`. Counters wrap. */
static int wait_for(Engine *e, atomic_uint *word, uint32_t least, int peer) {
    Patience p = {0};
    while (!reached(word, least)) {
        int reason = rest(e, &p, peer, 1 + peer);
        if (reason && !reached(word, least)) return rested(e, &p), fail(e, reason, p.about);
    }
    return rested(e, &p), FINE;
}

/* -- steps ----------------------------------------------------------------------------------- */

/* Arrives at the next step, and passes when all have arrived. */
static int step(Engine *e) {
    uint32_t k = ++e->step;
    atomic_store_explicit(&me(e)->step, k, memory_order_release);
    wake(e, 0, e->size - 1);
    for (int hop = 1; hop < e->size; hop++) {
        int peer = (e->rank + hop) % e->size;
        atomic_uint *theirs = &e->members[peer].step;
        int reason = wait_for(e, theirs, k, peer);
        if (reason) return reason;
        if (atomic_load_explicit(theirs, memory_order_relaxed) - k > 1) /* k+2 takes all at k+1 */
            return fail(e, GARBLED, peer);
    }
    return FINE;
}

static Notice *notice(const Engine *e, int rank, uint32_t k) {
    return &e->members[rank].notices[k & 1];
}

/* Where in the arena the `bytes` at `x` are, if all are in this rank's heap; 0 if not. */
static uint64_t where(const Engine *e, const char *x, uint64_t bytes) {
    const char *heap = e->heap + e->rank * e->heap_bytes;
    return x >= heap && x + bytes <= heap + e->heap_bytes ? (uint64_t)(x - e->base) : 0;
}

/* Whether an offset that a rank gave is in that rank's heap, with all elements it stands for. */
static int in_heap_of(const Engine *e, int rank, uint64_t at, uint64_t elements, uint32_t width) {
    uint64_t start = (uint64_t)(e->heap - e->base) + rank * e->heap_bytes, bytes;
    return at >= start && at - start <= e->heap_bytes &&
           !__builtin_mul_overflow(elements, width, &bytes) &&
           bytes <= e->heap_bytes - (at - start);
}

static uint64_t hash(const int64_t *counts, int size) { /* FNV-1a, by words */
    uint64_t h = 14695981039346656037u;
    for (int i = 0; counts && i < size; i++) h = (h ^ (uint64_t)counts[i]) * 1099511628211u;
    return h;
}

/* Writes this rank's notice for the step that comes. Others will read `elements` at `input`, the
   largest part of which has `most`. Returns whether they can read them there. */
static int announce(Engine *e, const Op *o, const char *input, uint64_t elements, uint64_t most) {
    Notice *n = notice(e, e->rank, e->step + 1);
    int exchange = o->kind == ALL_TO_ALL; /* its counts differ from rank to rank */
    n->sequence = ++e->sequence;
    n->kind = o->kind, n->dtype = o->dtype, n->op = o->op, n->root = (int32_t)o->peer;
    n->count = exchange ? 0 : o->count;
    n->counts_hash = exchange ? 0 : hash(o->counts, e->size);
    n->most = most;
    n->where = elements ? where(e, input, elements * o->width) : 0;
    if (o->counts) memcpy(n->counts, o->counts, e->size * sizeof *o->counts);
    if (exchange) memcpy(n->received, o->received, e->size * sizeof *o->received);
    return n->where != 0;
}

/* The first step of an operation: all have announced the same. */
static int meet(Engine *e, const Op *o) {
    int reason = step(e);
    if (reason) return reason;
    const Notice *mine = notice(e, e->rank, e->step);
    for (int peer = 0; peer < e->size; peer++) {
        const Notice *theirs = notice(e, peer, e->step);
        if (memcmp(mine, theirs, AGREED)) return fail(e, DISAGREE, peer);
        if (o->kind == ALL_TO_ALL && (theirs->counts[e->rank] != o->received[peer] ||
                                      theirs->received[e->rank] != o->counts[peer]))
            return fail(e, DISAGREE, peer);
    }
    return FINE;
}

/* -- a collective in segments ---------------------------------------------------------------- */

typedef struct {
    uint64_t chunk, segments; /* a segment holds at most `chunk` elements of every part */
    uint64_t at[RANKS];       /* where in the arena each rank's input is, or 0 */
    uint64_t part[RANKS];     /* where in it, in elements, the part for this rank starts */
    int any, all;             /* of the sources are resident */
} Plan;

static uint64_t before(const int64_t *counts, int rank) { /* elements of the parts before `rank` */
    uint64_t sum = 0;
    for (int i = 0; i < rank; i++) sum += (uint64_t)counts[i];
    return sum;
}

static uint64_t largest(const int64_t *counts, int size) {
    uint64_t most = 0;
    for (int i = 0; i < size; i++) most = (uint64_t)counts[i] > most ? (uint64_t)counts[i] : most;
    return most;
}

/* Segments whose parts fit into `bytes` of staging; how many there are is known after `meet`. */
static Plan plan_for(const Op *o, uint64_t bytes) {
    return (Plan){.chunk = bytes / o->width / ALIGN * ALIGN, .segments = 1};
}

/* What a rank puts: elements in all, in its largest part, and before the part for this rank. */
typedef struct {
    uint64_t whole, most, part;
} Put;

/* In an exchange that differs from rank to rank. Returns whether it can be so. */
static int exchanged(const Engine *e, const Op *o, int rank, Put *put) {
    const Notice *n = notice(e, rank, e->step);
    *put = (Put){0};
    for (int to = 0; to < e->size; to++) {
        int64_t count = __atomic_load_n(&n->counts[to], __ATOMIC_RELAXED);
        if (to == e->rank) put->part = put->whole;
        if (count < 0 || __builtin_add_overflow(put->whole, (uint64_t)count, &put->whole)) return 0;
        if (to == e->rank && count != o->received[rank]) return 0; /* changed after `meet` */
        put->most = (uint64_t)count > put->most ? (uint64_t)count : put->most;
    }
    return 1;
}

/* After the first step: reads all notices while they stand. A rank is a source if it puts any
   elements. Where nothing has to be copied to staging, one segment holds everything. What a rank
   tells must be what the operation makes of it, on which all agreed, in that rank's heap. */
static int look_around(Engine *e, const Op *o, Plan *p) {
    const Put all = {o->count, o->counts ? largest(o->counts, e->size) : o->count,
                     o->counts ? before(o->counts, e->rank) : 0};
    uint64_t most = 0;
    p->all = 1;
    for (int rank = 0; rank < e->size; rank++) {
        const Notice *n = notice(e, rank, e->step);
        uint64_t at = __atomic_load_n(&n->where, __ATOMIC_RELAXED);
        Put put = all;
        if (o->kind == ALL_GATHER || o->kind == GATHER)
            put.whole = put.most = (uint64_t)o->counts[rank];
        if ((o->kind == BROADCAST || o->kind == SCATTER) && rank != o->peer) put = (Put){0};
        if (o->kind == ALL_TO_ALL && !exchanged(e, o, rank, &put)) return fail(e, GARBLED, rank);
        if (n->most != put.most || (at && !in_heap_of(e, rank, at, put.whole, o->width)))
            return fail(e, GARBLED, rank);
        most = put.most > most ? put.most : most;
        p->at[rank] = at;
        p->part[rank] = put.part;
        if (!put.most) continue;
        p->any |= at != 0;
        p->all &= at != 0;
    }
    if (p->all) p->chunk = most;
    p->segments = most > p->chunk ? (most + p->chunk - 1) / p->chunk : 1;
    return FINE;
}

/* Elements of segment `i` in a part of `count`. */
static uint64_t in_segment(const Plan *p, uint64_t count, uint64_t i) {
    uint64_t start = i * p->chunk;
    return start >= count ? 0 : count - start < p->chunk ? count - start : p->chunk;
}

/* Elements of `count` that a rank owns, as plan/flat_buffers.py shares them. */
static uint64_t share(const Engine *e, uint64_t count, int rank) {
    return count * (rank + 1) / e->size - count * rank / e->size;
}

static void copy(char *to, const char *from, uint64_t bytes) {
    if (to != from && bytes) memcpy(to, from, bytes);
}

static uint64_t cut(const Engine *e) { return HALF / e->size / ALIGN * ALIGN; }

/* Writes segment `i` of this rank's part for each reader to the place kept for that reader. */
static void put_parts(const Engine *e, const Op *o, const Plan *p, uint64_t i) {
    for (int to = 0; to < e->size; to++) {
        if (to == e->rank) continue; /* taken from where it is */
        const char *part = o->in + (before(o->counts, to) + i * p->chunk) * o->width;
        copy(addressed_half(e, e->rank, e->step + 1) + to * cut(e), part,
             in_segment(p, (uint64_t)o->counts[to], i) * o->width);
    }
}

/* Where this rank finds segment `i` of the part that `from` has for it. */
static const char *part_from(const Engine *e, const Op *o, const Plan *p, int from, uint64_t i) {
    if (from != e->rank && !p->at[from])
        return addressed_half(e, from, e->step) + e->rank * cut(e);
    const char *in = from == e->rank ? o->in : e->base + p->at[from];
    return in + (p->part[from] + i * p->chunk) * o->width;
}

/* Reduces segment `i` of this rank's part, over all ranks in their order, to `out`. */
static void reduce_part(const Engine *e, const Op *o, const Plan *p, uint64_t i, char *out) {
    const void *from[RANKS];
    for (int rank = 0; rank < e->size; rank++) from[rank] = part_from(e, o, p, rank, i);
    reducers[o->dtype](out, from, e->size, in_segment(p, (uint64_t)o->counts[e->rank], i), o->op);
}

/* reduce_scatter, all_to_all, scatter: parts with one reader each.
 *
 *     put 0 | step | put 1, take 0 | step | put 2, take 1 | ... | take last
 */
static int by_parts(Engine *e, const Op *o) {
    int only = o->kind == SCATTER ? (int)o->peer : -1, puts = only < 0 || only == e->rank;
    Plan p = plan_for(o, cut(e));
    int resident = announce(e, o, o->in, puts ? before(o->counts, e->size) : 0,
                            puts ? largest(o->counts, e->size) : 0);
    for (uint64_t i = 0; i <= p.segments; i++) {
        if (i < p.segments && puts && !resident) put_parts(e, o, &p, i);
        char *out = o->out + (i - 1) * p.chunk * o->width;
        if (i && o->kind == REDUCE_SCATTER) reduce_part(e, o, &p, i - 1, out);
        for (int from = 0; i && o->kind != REDUCE_SCATTER && from < e->size; from++) {
            if (only >= 0 && from != only) continue;
            uint64_t part = (uint64_t)(only >= 0 ? o->counts[e->rank] : o->received[from]);
            uint64_t start = only >= 0 ? 0 : before(o->received, from);
            copy(out + start * o->width, part_from(e, o, &p, from, i - 1),
                 in_segment(&p, part, i - 1) * o->width);
        }
        if (i == p.segments) break;
        int reason = i ? step(e) : meet(e, o);
        if (!i && !reason) reason = look_around(e, o, &p);
        if (reason) return reason;
    }
    return p.any ? step(e) : FINE; /* its owner may change it when all have read it */
}

/* all_gather, gather, broadcast: one part a rank, which all may read. */
static int in_public(Engine *e, const Op *o) {
    int only = o->kind == BROADCAST ? (int)o->peer : -1, puts = only < 0 || only == e->rank;
    int takes = o->kind != GATHER || o->peer == e->rank;
    uint64_t own = !puts ? 0 : only < 0 ? (uint64_t)o->counts[e->rank] : o->count;
    Plan p = plan_for(o, HALF);
    int resident = announce(e, o, o->in, own, own);
    for (uint64_t i = 0; i <= p.segments; i++) {
        if (i < p.segments && !resident)
            copy(public_half(e, e->rank, e->step + 1), o->in + i * p.chunk * o->width,
                 in_segment(&p, own, i) * o->width);
        for (int from = 0; i && takes && from < e->size; from++) {
            if (only >= 0 && (from != only || from == e->rank)) continue;
            uint64_t skip = (i - 1) * p.chunk * o->width;
            const char *part = from == e->rank ? o->in + skip
                               : p.at[from]    ? e->base + p.at[from] + skip
                                               : public_half(e, from, e->step);
            uint64_t start = only >= 0 ? 0 : before(o->counts, from);
            uint64_t count = only >= 0 ? o->count : (uint64_t)o->counts[from];
            copy(o->out + start * o->width + skip, part, in_segment(&p, count, i - 1) * o->width);
        }
        if (i == p.segments) break;
        int reason = i ? step(e) : meet(e, o);
        if (!i && !reason) reason = look_around(e, o, &p);
        if (reason) return reason;
    }
    return p.any ? step(e) : FINE;
}

/* -- all-reduce ------------------------------------------------------------------------------ */

/* Small: everybody reads everything and reduces it for itself. */
static int reduce_at_once(Engine *e, const Op *o, int wanted) {
    announce(e, o, NULL, 0, 0);
    copy(public_half(e, e->rank, e->step + 1), o->in, o->count * o->width);
    int reason = meet(e, o);
    if (reason || !wanted) return reason;
    const void *from[RANKS];
    for (int rank = 0; rank < e->size; rank++) from[rank] = public_half(e, rank, e->step);
    reducers[o->dtype](o->out, from, e->size, o->count, o->op);
    return FINE;
}

/* All inputs are in the arena: each rank reduces its share and writes it to all who want it. A
   share is read and written by its owner alone, so no step is needed in between. */
static void reduce_in_place(Engine *e, const Op *o, const Plan *p, int root) {
    uint64_t count = (uint64_t)o->counts[e->rank];
    const void *from[RANKS];
    for (uint64_t start = 0; start < count; start += 4 * BLOCK) {
        uint64_t width = count - start < 4 * BLOCK ? count - start : 4 * BLOCK;
        uint64_t skip = (p->part[e->rank] + start) * o->width;
        for (int rank = 0; rank < e->size; rank++) from[rank] = e->base + p->at[rank] + skip;
        char *out = (char *)from[root < 0 ? e->rank : root];
        reducers[o->dtype](out, from, e->size, width, o->op);
        for (int rank = 0; root < 0 && rank < e->size; rank++)
            copy((char *)from[rank], out, width * o->width);
    }
}

/* all_reduce, and reduce to a root: each rank reduces its share, and the others copy it.
 *
 *     put 0 | step | put 1, reduce 0 | step | put 2, reduce 1, copy 0 | ... | copy last
 *
 * Segment i of the result is copied over the input when segment i+1 is reduced: an input that
 * fits one segment is intact until nothing can fail any more.
 */
static int reduce_by_shares(Engine *e, const Op *whole, int root) {
    int wanted = root < 0 || root == e->rank;
    int64_t shares[RANKS];
    for (int rank = 0; rank < e->size; rank++) shares[rank] = (int64_t)share(e, whole->count, rank);
    Op cut_up = *whole, *o = &cut_up;
    o->counts = shares;
    Plan p = plan_for(o, cut(e));
    int resident = announce(e, o, o->in, o->count, largest(shares, e->size));
    for (uint64_t i = 0; i <= p.segments + 1; i++) {
        if (i < p.segments && !resident) put_parts(e, o, &p, i);
        if (i && i <= p.segments) {
            char *out = public_half(e, e->rank, e->step + 1);
            uint64_t skip = (p.part[e->rank] + (i - 1) * p.chunk) * o->width;
            reduce_part(e, o, &p, i - 1, out);
            if (wanted)
                copy(o->out + skip, out,
                     in_segment(&p, (uint64_t)shares[e->rank], i - 1) * o->width);
        }
        for (int from = 0; i > 1 && wanted && from < e->size; from++) {
            if (from == e->rank) continue;
            uint64_t skip = (before(shares, from) + (i - 2) * p.chunk) * o->width;
            copy(o->out + skip, public_half(e, from, e->step),
                 in_segment(&p, (uint64_t)shares[from], i - 2) * o->width);
        }
        if (i == p.segments + 1) break;
        int reason = i ? step(e) : meet(e, o);
        if (!i && !reason) reason = look_around(e, o, &p);
        if (reason) return reason;
        if (!i && p.all) return reduce_in_place(e, o, &p, root), step(e);
    }
    return FINE;
}

static int all_reduce(Engine *e, const Op *o) {
    int root = o->kind == REDUCE ? (int)o->peer : -1;
    if (o->count * o->width <= ONE_SHOT) return reduce_at_once(e, o, root < 0 || root == e->rank);
    return reduce_by_shares(e, o, root);
}

/* -- messages between two ranks -------------------------------------------------------------- */

/* A mailbox holds two chunks; `sent` and `taken` count them. A message that lies in the sender's
   heap is not copied there: its label says where it is, and it is sent once it is taken. */
typedef struct {
    uint64_t moved; /* bytes */
    int begun, finished;
} Progress;

static int send_some(Engine *e, const Op *o, Progress *g) {
    Channel *c = channel(e, e->rank, (int)o->peer);
    uint32_t *mailed = &e->mailed[o->peer];
    uint64_t bytes = o->count * o->width, at = where(e, o->in, bytes);
    if (at && g->begun) return g->finished = reached(&c->taken, *mailed);
    if (!reached(&c->taken, *mailed - 1)) return 0; /* both chunks are full */
    uint64_t part = at ? 0 : bytes - g->moved < MAIL ? bytes - g->moved : MAIL;
    copy(c->chunks[*mailed & 1], o->in + g->moved, part);
    c->labels[*mailed & 1] = (Label){o->dtype, o->kind, o->count, at};
    atomic_store_explicit(&c->sent, ++*mailed, memory_order_release);
    wake(e, (int)o->peer, (int)o->peer);
    g->moved += part, g->begun = 1;
    g->finished = !at && g->moved == bytes;
    return 1;
}

static int receive_some(Engine *e, const Op *o, Progress *g) {
    Channel *c = channel(e, (int)o->peer, e->rank);
    uint32_t *opened = &e->opened[o->peer];
    uint64_t bytes = o->count * o->width;
    if (!reached(&c->sent, *opened + 1)) return 0;
    const Label label = c->labels[*opened & 1];
    if (label.count != o->count || label.dtype != o->dtype)
        return fail(e, MISMATCH, (int)o->peer);
    if (label.where && !in_heap_of(e, (int)o->peer, label.where, o->count, o->width))
        return fail(e, GARBLED, (int)o->peer);
    uint64_t part = label.where ? bytes : bytes - g->moved < MAIL ? bytes - g->moved : MAIL;
    copy(o->out + g->moved, label.where ? e->base + label.where : c->chunks[*opened & 1], part);
    atomic_store_explicit(&c->taken, ++*opened, memory_order_release);
    wake(e, (int)o->peer, (int)o->peer);
    g->moved += part;
    g->finished = g->moved == bytes;
    return 1;
}

static int is_message(const Op *o) { return o->kind == SEND || o->kind == RECEIVE; }

/* Moves every message of a list a little in turn, so that ranks that all send first do not wait
   for each other. Messages between the same two ranks keep their order. */
static int pass_messages(Engine *e, const Op *ops, int count, Progress *progress) {
    Patience p = {0};
    int reason = FINE;
    for (int left = 1, turn = 0; left; turn++) {
        int moved = 0, awaited = -1;
        uint64_t sending = 0, receiving = 0; /* peers with an earlier message under way */
        left = 0;
        for (int i = 0; i < count; i++) {
            if (!is_message(&ops[i]) || progress[i].finished) continue;
            uint64_t bit = 1ull << ops[i].peer, *under_way =
                ops[i].kind == SEND ? &sending : &receiving;
            if (*under_way & bit) continue;
            int result = (ops[i].kind == SEND ? send_some : receive_some)(e, &ops[i], &progress[i]);
            if (result < 0) return rested(e, &p), result;
            moved |= result;
            if (progress[i].finished) { left = 1; continue; }
            *under_way |= bit;
            if (left++ <= turn % count) awaited = (int)ops[i].peer; /* another one each turn */
        }
        if (moved || awaited < 0) {
            rested(e, &p);
            p = (Patience){0}, reason = FINE;
        } else if (reason) { /* and nothing had come before it */
            return rested(e, &p), fail(e, reason, p.about);
        } else {
            reason = rest(e, &p, awaited, ANYBODY);
        }
    }
    return FINE;
}

/* -- the way in ------------------------------------------------------------------------------ */

static int signal_to(Engine *e, const Op *o) {
    atomic_fetch_add(&channel(e, e->rank, (int)o->peer)->signals, 1);
    wake(e, (int)o->peer, (int)o->peer);
    return FINE;
}

static int wait_signal(Engine *e, const Op *o) {
    int from = (int)o->peer;
    return wait_for(e, &channel(e, from, e->rank)->signals, ++e->heard[from], from);
}

static int barrier(Engine *e, const Op *o) {
    announce(e, o, NULL, 0, 0);
    return meet(e, o);
}

static int collective(Engine *e, const Op *o) {
    switch (o->kind) {
    case ALL_REDUCE: case REDUCE: return all_reduce(e, o);
    case REDUCE_SCATTER: case ALL_TO_ALL: case SCATTER: return by_parts(e, o);
    case ALL_GATHER: case GATHER: case BROADCAST: return in_public(e, o);
    case BARRIER: return barrier(e, o);
    case SIGNAL: return signal_to(e, o);
    default: return wait_signal(e, o);
    }
}

/* Bytes this rank sends when each talks to every other directly. */
uint64_t howdah_bytes_sent(const Engine *e, const Op *o) {
    if (!e->base) return 0; /* a forked child, where `howdah_run` refuses */
    uint64_t n = o->count, others = (uint64_t)e->size - 1;
    uint64_t own = o->counts ? (uint64_t)o->counts[e->rank] : share(e, n, e->rank);
    int root = o->peer == e->rank;
    switch (o->kind) {
    case ALL_REDUCE: return (n - own + others * own) * o->width;
    case REDUCE_SCATTER: case ALL_TO_ALL: return (n - own) * o->width;
    case ALL_GATHER: return others * own * o->width;
    case REDUCE: return root ? 0 : n * o->width;
    case GATHER: return root ? 0 : own * o->width;
    case BROADCAST: return root ? others * n * o->width : 0;
    case SCATTER: return root ? (n - own) * o->width : 0;
    case SEND: return n * o->width;
    default: return 0;
    }
}

/* Runs operations that were called together: messages first, all at once, then the rest in order.
   Returns the bytes sent, or why it failed; then the engine is of no use any more. */
int64_t howdah_run(Engine *e, const Op *ops, int count) {
    if (!e->base) return ELSEWHERE;
    if (atomic_flag_test_and_set(&e->busy)) return BUSY;
    int reason = atomic_load(&header(e)->abort) ? fail(e, DIED, 0) : FINE;
    int messages = 0;
    uint64_t sent = 0;
    for (int i = 0; i < count; i++) messages += is_message(&ops[i]);
    if (messages && !reason) {
        Progress *progress = calloc((size_t)count, sizeof *progress);
        reason = progress ? pass_messages(e, ops, count, progress) : NO_MEMORY;
        free(progress);
    }
    for (int i = 0; i < count && !reason; i++) {
        if (!is_message(&ops[i])) reason = collective(e, &ops[i]);
        sent += howdah_bytes_sent(e, &ops[i]);
    }
    atomic_flag_clear(&e->busy);
    return reason ? reason : (int64_t)sent;
}

/* -- after a failure ------------------------------------------------------------------------- */

/* Who saw it and about whom it was, the operation each of the two announced, and the label of a
   message between them that was not taken. */
void howdah_explain(const Engine *e, int *by_about, Notice *by, Notice *about, Label *label) {
    by_about[0] = e->by, by_about[1] = e->about;
    *by = *notice(e, e->by, e->step);
    *about = *notice(e, e->about, e->step);
    const Channel *c = channel(e, e->about, e->by);
    *label = c->labels[atomic_load(&c->taken) & 1];
}

/* Tells the others where this rank made its call. */
void howdah_tell(Engine *e, const char *site) {
    snprintf(me(e)->site, SITE_BYTES, "%s", site);
    atomic_store(&me(e)->told, 1);
}

/* Where `rank` made its call, into `site`; returns whether it has told. */
int howdah_told(const Engine *e, int rank, char *site) {
    if (!atomic_load(&e->members[rank].told)) return 0;
    memcpy(site, e->members[rank].site, SITE_BYTES);
    site[SITE_BYTES - 1] = 0;
    return 1;
}

/* This rank cannot go on: ends all waits of all ranks, those of its own threads too. */
void howdah_abort(Engine *e) {
    if (e->base) fail(e, GAVE_UP, e->rank);
}

/* This rank takes no more part; whoever waits for it will be told. A forked child was never one. */
void howdah_close(Engine *e) {
    if (e->base) atomic_store(&me(e)->left, 1);
    for (int rank = 0; e->base && rank < e->size; rank++) ring(&e->members[rank]);
    if (!atomic_flag_test_and_set(&e->busy)) munmap(e, sizeof *e); /* else a thread is in it */
}
