/* A clock of the day that is AHEAD: what a host whose clock is wrong sees, to be preloaded. */
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define AHEAD (5 * 3600)

int clock_gettime(clockid_t which, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, which, now);
  if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += AHEAD;
  return failed;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}
