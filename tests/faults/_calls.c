/* Preloaded library that counts the system calls that write below a directory, and fails one; or
 * those that read.
 *
 * The file named by MEGACORE_FAULT_CONTROL is mapped into every process, so that the count runs
 * over all processes and threads. Its layout is `struct control`; tests/faults/sweep.py writes it.
 * Not seen: writes to mapped memory (only their msync and ftruncate are), the C library's own flush
 * of a buffer, raw system calls (`syscall`, io_uring), static programs, splice, chmod and utime. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, EIO_ONCE, ENOSPC_ONCE, FULL, DIES, QUOTA_ONCE, READ_ONLY, COUNT_READS, READ_EIO };

struct control {
    _Atomic int mode;
    _Atomic int injected; /* calls that were failed */
    _Atomic long count;   /* calls so far, the next has this number */
    long target;          /* number of the call to fail */
    char root[2048];      /* directory with a trailing slash */
    char skip[64];        /* part of the paths that are not counted, or empty */
    char log[2048];       /* file with a line for each call, or empty */
    char call[256];       /* name of the failed call */
    char path[PATH_MAX];  /* path of the failed call */
};

static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *name = getenv("MEGACORE_FAULT_CONTROL");
    int descriptor = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
    if (descriptor < 0) return;
    void *memory =
        mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (memory != MAP_FAILED) control = memory;
}

static void log_call(const char *call, const char *path, long number) {
    static int (*real_open)(const char *, int, ...);
    static ssize_t (*real_write)(int, const void *, size_t);
    if (!real_open) real_open = dlsym(RTLD_NEXT, "open");
    if (!real_write) real_write = dlsym(RTLD_NEXT, "write");
    int descriptor = real_open(control->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0) return;
    char line[PATH_MAX + 64];
    int size = snprintf(line, sizeof line, "%ld %s %s\n", number, call, path);
    if (real_write(descriptor, line, size) < 0) abort();
    close(descriptor);
}

/* Count a call on `path`; return the error number to fail with, or 0. */
static int decide(const char *call, const char *path) {
    size_t length = strlen(control->root);
    int same_root = length && !strncmp(path, control->root, length - 1) && !path[length - 1];
    if (!length || (strncmp(path, control->root, length) && !same_root)) return 0;
    if (control->skip[0] && strstr(path + length - 1, control->skip)) return 0;
    int mode = control->mode;
    int reads = !strcmp(call, "read") || !strcmp(call, "open to read");
    if (reads != (mode >= COUNT_READS)) return 0;
    long number = control->count++;
    if (control->log[0]) log_call(call, path, number);
    int full = mode == FULL && number > control->target && strncmp(call, "unlink", 6) &&
               strcmp(call, "rmdir") && !strstr(call, "truncate");
    full |= mode == READ_ONLY && number >= control->target;
    if (mode == COUNT || mode == COUNT_READS || (number != control->target && !full)) return 0;
    if (!control->injected++) {
        snprintf(control->call, sizeof control->call, "%s", call);
        snprintf(control->path, sizeof control->path, "%s", path);
    }
    if (mode == DIES) {
        kill(0, SIGKILL);
        pause();
    }
    if (mode == EIO_ONCE || mode == READ_EIO) return EIO;
    return mode == QUOTA_ONCE ? EDQUOT : mode == READ_ONLY ? EROFS : ENOSPC;
}

static int decide_at(const char *call, int directory, const char *path) {
    if (!control || control->mode == OFF || !path) return 0;
    int saved = errno;
    char full[PATH_MAX * 2] = "", link[64];
    if (path[0] != '/') {
        ssize_t size;
        if (directory == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        size = readlink(link, full, PATH_MAX - 1);
        if (size < 0) size = 0;
        full[size] = '/';
        full[size + 1] = 0;
    }
    strncat(full, path, PATH_MAX - 1);
    int code = decide(call, full);
    errno = saved;
    return code;
}

static int decide_fd(const char *call, int descriptor) {
    if (!control || control->mode == OFF) return 0;
    int saved = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    int code = 0;
    if (size > 0) {
        path[size] = 0;
        code = decide(call, path);
    }
    errno = saved;
    return code;
}

static int decide_memory(const char *call, void *address) {
    if (!control || control->mode == OFF) return 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[PATH_MAX + 128], path[PATH_MAX];
    int code = 0;
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %4095[^\n]", &start, &end, path) == 3 &&
            (unsigned long)address >= start && (unsigned long)address < end)
            code = decide(call, path);
    }
    if (maps) fclose(maps);
    return code;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = dlsym(RTLD_NEXT, #name);
#define FAIL(decision, value) \
    do { \
        int code = (decision); \
        if (code) { \
            errno = code; \
            return value; \
        } \
    } while (0)
#define WRITES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name) \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = va_arg(list, mode_t); \
        va_end(list); \
        if (!(flags & O_PATH)) \
            FAIL(decide_at(flags & WRITES ? "open" : "open to read", AT_FDCWD, path), -1); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int directory, const char *path, int flags, ...) { \
        REAL(name) \
        va_list list; \
        va_start(list, flags); \
        mode_t mode = va_arg(list, mode_t); \
        va_end(list); \
        if (!(flags & O_PATH)) \
            FAIL(decide_at(flags & WRITES ? "open" : "open to read", directory, path), -1); \
        return real(directory, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

/* Define a call that fails by -1, with what decides and the arguments. */
#define CALL(type, name, parameters, decision, arguments) \
    type name parameters { \
        REAL(name) \
        FAIL(decision, -1); \
        return real arguments; \
    }
CALL(int, creat, (const char *path, mode_t mode), decide_at("open", AT_FDCWD, path), (path, mode))
CALL(ssize_t, write, (int fd, const void *data, size_t size), decide_fd("write", fd),
     (fd, data, size))
CALL(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), decide_fd("write", fd),
     (fd, data, size, at))
CALL(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at),
     decide_fd("write", fd), (fd, data, size, at))
CALL(ssize_t, writev, (int fd, const struct iovec *parts, int count), decide_fd("write", fd),
     (fd, parts, count))
CALL(ssize_t, sendfile, (int to, int from, off_t *at, size_t size), decide_fd("write", to),
     (to, from, at, size))
CALL(ssize_t, sendfile64, (int to, int from, off64_t *at, size_t size), decide_fd("write", to),
     (to, from, at, size))
CALL(ssize_t, copy_file_range,
     (int from, off64_t *start, int to, off64_t *at, size_t size, unsigned flags),
     decide_fd("write", to), (from, start, to, at, size, flags))
CALL(int, fsync, (int fd), decide_fd("fsync", fd), (fd))
CALL(int, fdatasync, (int fd), decide_fd("fsync", fd), (fd))
CALL(int, msync, (void *address, size_t size, int flags), decide_memory("msync", address),
     (address, size, flags))
CALL(int, ftruncate, (int fd, off_t size), decide_fd("ftruncate", fd), (fd, size))
CALL(int, ftruncate64, (int fd, off64_t size), decide_fd("ftruncate", fd), (fd, size))
CALL(int, rename, (const char *from, const char *to), decide_at("rename", AT_FDCWD, to),
     (from, to))
CALL(int, renameat, (int from_at, const char *from, int to_at, const char *to),
     decide_at("rename", to_at, to), (from_at, from, to_at, to))
CALL(int, renameat2, (int from_at, const char *from, int to_at, const char *to, unsigned flags),
     decide_at("rename", to_at, to), (from_at, from, to_at, to, flags))
CALL(int, unlink, (const char *path), decide_at("unlink", AT_FDCWD, path), (path))
CALL(int, unlinkat, (int directory, const char *path, int flags),
     decide_at(flags & AT_REMOVEDIR ? "rmdir" : "unlink", directory, path),
     (directory, path, flags))
CALL(int, rmdir, (const char *path), decide_at("rmdir", AT_FDCWD, path), (path))
CALL(int, mkdir, (const char *path, mode_t mode), decide_at("mkdir", AT_FDCWD, path), (path, mode))
CALL(int, mkdirat, (int directory, const char *path, mode_t mode),
     decide_at("mkdir", directory, path), (directory, path, mode))
CALL(int, link, (const char *from, const char *to), decide_at("link", AT_FDCWD, to), (from, to))
CALL(int, linkat, (int from_at, const char *from, int to_at, const char *to, int flags),
     decide_at("link", to_at, to), (from_at, from, to_at, to, flags))
CALL(int, symlink, (const char *from, const char *to), decide_at("link", AT_FDCWD, to),
     (from, to))
CALL(int, symlinkat, (const char *from, int directory, const char *to),
     decide_at("link", directory, to), (from, directory, to))

CALL(ssize_t, pwritev, (int fd, const struct iovec *parts, int count, off_t at),
     decide_fd("write", fd), (fd, parts, count, at))
CALL(ssize_t, pwritev64, (int fd, const struct iovec *parts, int count, off64_t at),
     decide_fd("write", fd), (fd, parts, count, at))
CALL(ssize_t, pwritev2, (int fd, const struct iovec *parts, int count, off_t at, int flags),
     decide_fd("write", fd), (fd, parts, count, at, flags))
CALL(ssize_t, pwritev64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
     decide_fd("write", fd), (fd, parts, count, at, flags))
CALL(int, truncate, (const char *path, off_t size), decide_at("truncate", AT_FDCWD, path),
     (path, size))
CALL(int, truncate64, (const char *path, off64_t size), decide_at("truncate", AT_FDCWD, path),
     (path, size))
CALL(int, fallocate, (int fd, int mode, off_t at, off_t size), decide_fd("fallocate", fd),
     (fd, mode, at, size))
CALL(int, fallocate64, (int fd, int mode, off64_t at, off64_t size), decide_fd("fallocate", fd),
     (fd, mode, at, size))
CALL(int, mkstemp, (char *path), decide_at("open", AT_FDCWD, path), (path))
CALL(int, mkstemp64, (char *path), decide_at("open", AT_FDCWD, path), (path))
CALL(int, mkostemp, (char *path, int flags), decide_at("open", AT_FDCWD, path), (path, flags))
CALL(int, mkostemp64, (char *path, int flags), decide_at("open", AT_FDCWD, path), (path, flags))

/* These return the error number. */
#define POSIX_FALLOCATE(name, type) \
    int name(int fd, type at, type size) { \
        REAL(name) \
        int code = decide_fd("fallocate", fd); \
        return code ? code : real(fd, at, size); \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

char *mkdtemp(char *path) {
    REAL(mkdtemp)
    FAIL(decide_at("mkdir", AT_FDCWD, path), NULL);
    return real(path);
}

/* The C library's buffered files, with which C++ streams open theirs, do not pass `open` and
 * `write`. */
#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(name) \
        const char *call = strpbrk(mode, "wa+") ? "open" : "open to read"; \
        FAIL(decide_at(call, AT_FDCWD, path), NULL); \
        return real(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)

size_t fwrite(const void *data, size_t size, size_t count, FILE *stream) {
    REAL(fwrite)
    FAIL(decide_fd("write", fileno(stream)), 0);
    return real(data, size, count, stream);
}

size_t fread(void *data, size_t size, size_t count, FILE *stream) {
    REAL(fread)
    FAIL(decide_fd("read", fileno(stream)), 0);
    return real(data, size, count, stream);
}

CALL(ssize_t, read, (int fd, void *data, size_t size), decide_fd("read", fd), (fd, data, size))
CALL(ssize_t, pread, (int fd, void *data, size_t size, off_t at), decide_fd("read", fd),
     (fd, data, size, at))
CALL(ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), decide_fd("read", fd),
     (fd, data, size, at))
CALL(ssize_t, preadv, (int fd, const struct iovec *parts, int count, off_t at),
     decide_fd("read", fd), (fd, parts, count, at))
CALL(ssize_t, preadv64, (int fd, const struct iovec *parts, int count, off64_t at),
     decide_fd("read", fd), (fd, parts, count, at))
CALL(ssize_t, preadv2, (int fd, const struct iovec *parts, int count, off_t at, int flags),
     decide_fd("read", fd), (fd, parts, count, at, flags))
CALL(ssize_t, preadv64v2, (int fd, const struct iovec *parts, int count, off64_t at, int flags),
     decide_fd("read", fd), (fd, parts, count, at, flags))
CALL(ssize_t, readv, (int fd, const struct iovec *parts, int count), decide_fd("read", fd),
     (fd, parts, count))

/* Return the error with which closing a file that was open for writing fails, as over NFS. */
static int decide_close(int descriptor) {
    if (!control || control->mode == OFF) return 0;
    int flags = fcntl(descriptor, F_GETFL);
    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY || (flags & O_PATH)) return 0;
    return decide_fd("close", descriptor);
}

int close(int descriptor) {
    REAL(close)
    int failure = decide_close(descriptor), result = real(descriptor);
    FAIL(failure, -1);
    return result;
}

int fclose(FILE *stream) {
    REAL(fclose)
    int failure = decide_close(fileno(stream)), result = real(stream);
    FAIL(failure, EOF);
    return result;
}
