/* A clock that jumps and a disk that is full or fails, for the processes that load this library.
 *
 * LD_PRELOAD names it. CHAOS_FAULTS names a file of slots, one a kind of process; a process maps the
 * file and obeys the slot of its kind at once (tests/chaos/machine.py writes it). The wall clock is
 * off by `clock_ms`, the monotonic one never is, as on a real machine. While `error` is ENOSPC or
 * EIO, writes to regular files fail with it, and with ENOSPC the disk says that it has no room; with
 * EIO fsync fails too. Memory files (/dev/shm) are no disk.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NUM_SLOTS 16
#define FIRST_WALL_S 1000000000 /* later than any time since a boot, earlier than any date of today */

struct slot {
  char name[16];
  volatile int64_t clock_ms, error;
};

static struct slot none, *own = &none;
static dev_t memory_files;

static void find_kind(char *kind) {
  char line[4096];
  int file = open("/proc/self/cmdline", O_RDONLY);
  ssize_t size = file < 0 ? 0 : read(file, line, sizeof line - 1);
  if (file >= 0) close(file);
  for (ssize_t at = 0; at < size; at += strlen(line + at) + 1) {
    line[size] = 0;
    const char *word = line + at, *package = "dialoop_services.";
    if (strncmp(word, package, strlen(package)) == 0) {
      size_t length = strcspn(word + strlen(package), ".");
      if (length < 16) memcpy(kind, word + strlen(package), length), kind[length] = 0;
      return;
    }
    const char *name = strrchr(word, '/');
    if (at == 0 && strcmp(name ? name + 1 : word, "redis-server") == 0) {
      strcpy(kind, "redis");
      return;
    }
  }
}

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("CHAOS_FAULTS"), *inherited = getenv("CHAOS_KIND");
  char kind[16] = "";
  struct stat status;
  if (inherited) strncpy(kind, inherited, 15); /* children that are started in other ways */
  find_kind(kind);
  setenv("CHAOS_KIND", kind, 1);
  if (stat("/dev/shm", &status) == 0) memory_files = status.st_dev;
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  struct slot *slots =
      mmap(NULL, NUM_SLOTS * sizeof(struct slot), PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (slots == MAP_FAILED) return;
  for (int i = 0; i < NUM_SLOTS; i++)
    if (kind[0] && strncmp(slots[i].name, kind, 16) == 0) own = slots + i;
}

#define REAL(name)                                             \
  static __typeof__(name) *real;                               \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* ---- the clock ---- */

static void shift(struct timespec *when, int64_t ms) {
  int64_t ns = when->tv_nsec + ms % 1000 * 1000000;
  when->tv_sec += ms / 1000 + (ns < 0 ? -1 : ns / 1000000000);
  when->tv_nsec = (ns + 1000000000) % 1000000000;
}

int clock_gettime(clockid_t id, struct timespec *now) {
  REAL(clock_gettime);
  int failed = real(id, now);
  if (!failed && own->clock_ms && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
    shift(now, own->clock_ms);
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *where) {
  struct timespec exact;
  if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
  if (where) *where = exact.tv_sec;
  return exact.tv_sec;
}

/* A wait until a wall-clock time ends with the jump on a real machine: undo ours for the kernel. */
static const struct timespec *by_kernel(const struct timespec *until, struct timespec *own_until) {
  if (!until || !own->clock_ms || until->tv_sec < FIRST_WALL_S) return until;
  *own_until = *until;
  shift(own_until, -own->clock_ms);
  return own_until;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  struct timespec own_until;
  REAL(pthread_cond_timedwait);
  return real(cond, mutex, by_kernel(until, &own_until));
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
  struct timespec own_until;
  REAL(sem_timedwait);
  return real(sem, by_kernel(until, &own_until));
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex,
                            const struct timespec *restrict until) {
  struct timespec own_until;
  REAL(pthread_mutex_timedlock);
  return real(mutex, by_kernel(until, &own_until));
}

long syscall(long number, ...) {
  long words[6];
  struct timespec own_until;
  va_list rest;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) words[i] = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_futex && (words[1] & FUTEX_CLOCK_REALTIME))
    words[3] = (long)by_kernel((const struct timespec *)words[3], &own_until);
  REAL(syscall);
  return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

/* ---- the disk ---- */

static int fails(int fd, int is_sync) {
  struct stat status;
  int64_t error = own->error;
  if (!error || (is_sync && error == ENOSPC)) return 0;
  if (fstat(fd, &status) || !S_ISREG(status.st_mode) || status.st_dev == memory_files) return 0;
  errno = (int)error;
  return 1;
}

ssize_t write(int fd, const void *bytes, size_t size) {
  REAL(write);
  return fails(fd, 0) ? -1 : real(fd, bytes, size);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(writev);
  return fails(fd, 0) ? -1 : real(fd, parts, count);
}

#define WRITE_AT(name, offset)                                             \
  ssize_t name(int fd, const void *bytes, size_t size, offset at) {        \
    REAL(name);                                                            \
    return fails(fd, 0) ? -1 : real(fd, bytes, size, at);                  \
  }
WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)

ssize_t sendfile(int out, int in, off_t *at, size_t size) {
  static ssize_t (*real)(int, int, off_t *, size_t);
  if (!real) real = (ssize_t(*)(int, int, off_t *, size_t))dlsym(RTLD_NEXT, "sendfile");
  return fails(out, 0) ? -1 : real(out, in, at, size);
}

ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
  static ssize_t (*real)(int, int, off64_t *, size_t);
  if (!real) real = (ssize_t(*)(int, int, off64_t *, size_t))dlsym(RTLD_NEXT, "sendfile64");
  return fails(out, 0) ? -1 : real(out, in, at, size);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
  REAL(copy_file_range);
  return fails(out, 0) ? -1 : real(in, from, out, to, size, flags);
}

int fsync(int fd) {
  REAL(fsync);
  return fails(fd, 1) ? -1 : real(fd);
}

int fdatasync(int fd) {
  REAL(fdatasync);
  return fails(fd, 1) ? -1 : real(fd);
}

#define ROOM(name, type, where)                                \
  int name(type place, struct where *room) {                   \
    REAL(name);                                                \
    int failed = real(place, room);                            \
    if (!failed && own->error == ENOSPC) room->f_bavail = 0;   \
    return failed;                                             \
  }
ROOM(statvfs, const char *restrict, statvfs)
ROOM(fstatvfs, int, statvfs)
ROOM(statvfs64, const char *restrict, statvfs64)
ROOM(fstatvfs64, int, statvfs64)
