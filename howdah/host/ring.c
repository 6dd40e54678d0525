/* A ring: reads and writes of files that the kernel makes while this thread does something else
 * (io_uring). `ring.py` says what for; it is compiled into one library with the engine.
 *
 *     howdah_ring_start   one more read or write; the kernel begins with it before this returns
 *     howdah_ring_wait    those that have ended: which, and how many bytes were moved or why not
 *
 * Two queues lie in memory that is shared with the kernel. Each has a head and a tail, which only
 * grow; one side moves each. An entry is written before the tail that shows it is stored (release),
 * and read behind the tail that shows it was loaded (acquire):
 *
 *     requests   | head: the kernel's | tail: ours         |
 *     ended      | head: ours         | tail: the kernel's |
 *
 * A ring serves one thread. The system calls are made as such, so nothing but the C library is
 * needed; headers or a kernel from before Linux 5.6 are an error like any other.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_setup)

#define TRIES 10000 /* of a kernel without memory, a millisecond apart */

typedef struct {
    int file;
    uint32_t depth;
    char *queues; /* both: IORING_FEAT_SINGLE_MMAP */
    size_t queues_bytes;
    struct io_uring_sqe *requests;
    size_t requests_bytes;
    struct io_uring_params told; /* where all of it lies */
} Ring;

static uint32_t *word(Ring *ring, uint32_t offset) {
    return (uint32_t *)(ring->queues + offset);
}

void howdah_ring_close(Ring *ring) {
    if (ring->requests && ring->requests != MAP_FAILED)
        munmap(ring->requests, ring->requests_bytes);
    if (ring->queues && ring->queues != MAP_FAILED)
        munmap(ring->queues, ring->queues_bytes);
    if (ring->file >= 0)
        close(ring->file);
    free(ring);
}

static void *map(Ring *ring, size_t bytes, off_t which) {
    int how = MAP_SHARED | MAP_POPULATE;
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, how, ring->file, which);
}

/* A ring for so many requests at a time; NULL, and an errno in `error`, if there is none. */
Ring *howdah_ring_open(uint32_t depth, int *error) {
    Ring *ring = calloc(1, sizeof *ring);
    if (!ring) {
        *error = ENOMEM;
        return NULL;
    }
    struct io_uring_params *told = &ring->told;
    ring->file = (int)syscall(__NR_io_uring_setup, depth, told);
    *error = ring->file < 0 ? errno : 0;
    if (!*error && !(told->features & IORING_FEAT_RW_CUR_POS)) /* which came with reads, in 5.6 */
        *error = ENOSYS;
    if (!*error) {
        size_t sent = told->sq_off.array + told->sq_entries * sizeof(uint32_t);
        size_t ended = told->cq_off.cqes + told->cq_entries * sizeof(struct io_uring_cqe);
        ring->queues_bytes = sent > ended ? sent : ended;
        ring->requests_bytes = told->sq_entries * sizeof *ring->requests;
        ring->queues = map(ring, ring->queues_bytes, IORING_OFF_SQ_RING);
        ring->requests = map(ring, ring->requests_bytes, IORING_OFF_SQES);
        if (ring->queues == MAP_FAILED || (void *)ring->requests == MAP_FAILED)
            *error = errno;
    }
    if (!*error)
        return ring;
    howdah_ring_close(ring);
    return NULL;
}

/* Has the kernel take so many requests, or wait until so many have ended. It may be interrupted, or
 * have no memory for a request while others are under way: it is then asked again, and ends those
 * that it can. Returns 0, or an errno.
 */
static int enter(Ring *ring, uint32_t requests, uint32_t ended) {
    const struct timespec pause = {0, 1000000};
    uint32_t how = ended ? IORING_ENTER_GETEVENTS : 0;
    for (int tries = 0;;) {
        long taken = syscall(__NR_io_uring_enter, ring->file, requests, ended, how, NULL, 0);
        if (taken == (long)requests)
            return 0;
        if (taken < 0 && (errno == EAGAIN || errno == EBUSY)) {
            if (++tries == TRIES)
                return EAGAIN;
            how = IORING_ENTER_GETEVENTS;
            nanosleep(&pause, NULL);
        } else if (taken < 0 && errno != EINTR) {
            return errno;
        }
    }
}

/* Starts a request: to write to a file or to read from it, at a position that files without one (an
 * eventfd) ignore. Returns 0, or an errno, and then there is no such request. The memory must stay
 * as it is until the request has ended, and fewer than `depth` may be under way.
 */
int howdah_ring_start(Ring *ring, int write, int file, void *memory, uint32_t bytes, uint64_t at,
                      uint64_t tag) {
    uint32_t *tail = word(ring, ring->told.sq_off.tail);
    uint32_t slot = *tail & *word(ring, ring->told.sq_off.ring_mask);
    struct io_uring_sqe *request = &ring->requests[slot];
    memset(request, 0, sizeof *request);
    request->opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    request->fd = file;
    request->addr = (uintptr_t)memory;
    request->len = bytes;
    request->off = at;
    request->user_data = tag;
    word(ring, ring->told.sq_off.array)[slot] = slot;
    __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    int error = enter(ring, 1, 0);
    if (error) /* else the next start would give it to the kernel, too */
        __atomic_store_n(tail, *tail - 1, __ATOMIC_RELEASE);
    return error;
}

/* Waits until a request has ended. Writes the tag of each that has, and the bytes that it moved or
 * a negative errno, at most so many of them. Returns how many; or a negative errno.
 */
int howdah_ring_wait(Ring *ring, uint64_t *tags, int32_t *moved, uint32_t most) {
    uint32_t *head = word(ring, ring->told.cq_off.head), *tail = word(ring, ring->told.cq_off.tail);
    uint32_t mask = *word(ring, ring->told.cq_off.ring_mask), count = 0;
    struct io_uring_cqe *ended = (void *)(ring->queues + ring->told.cq_off.cqes);
    while (__atomic_load_n(tail, __ATOMIC_ACQUIRE) == *head) {
        int error = enter(ring, 0, 1);
        if (error)
            return -error;
    }
    uint32_t there = __atomic_load_n(tail, __ATOMIC_ACQUIRE), at = *head;
    for (; at != there && count < most; at++, count++) {
        tags[count] = ended[at & mask].user_data;
        moved[count] = ended[at & mask].res;
    }
    __atomic_store_n(head, at, __ATOMIC_RELEASE);
    return (int)count;
}

#else /* headers of an old kernel */

void *howdah_ring_open(uint32_t depth, int *error) { return *error = ENOSYS, NULL; }
int howdah_ring_start() { return ENOSYS; }
int howdah_ring_wait() { return -ENOSYS; }
void howdah_ring_close() {}

#endif
