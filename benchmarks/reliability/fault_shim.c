/* Makes calls to the operating system fail, or the process die, at a place that is chosen beforehand.

   Loaded with LD_PRELOAD, below Python and HDF5 alike. What shall happen stands in a small file, named by
   VIRNUC_FAULTS, that all processes of a run share in memory (benchmarks/reliability/faults.py has its layout).
   Only calls on paths below `root` count. Every call that counts is written to the file `trace`, one line each:

       KIND<tab>PATH[<tab>NEW PATH]
*/

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ_OPEN = 1, OPEN = 2, WRITE = 4, FSYNC = 8, RENAME = 16, UNLINK = 32, MKDIR = 64 };
enum { PASS = 0, KILL = -1, KILL_HALFWAY = -2 };

struct faults {
    _Atomic int32_t armed;  /* 0: nothing is counted */
    int32_t kinds;          /* which calls count, a sum of the above */
    int32_t action;         /* an errno, or PASS, KILL, KILL_HALFWAY */
    int32_t lasting;        /* 1: every later call fails as well */
    int64_t at;             /* the call to hit, from 1 */
    _Atomic int64_t count;  /* calls so far */
    _Atomic int64_t hits;   /* calls that were hit */
    char root[1024];
    char trace[1024];
};

#define MAX_FILES 4096

static struct faults *faults;
static char *paths[MAX_FILES]; /* of the open files that count */

__attribute__((constructor)) static void attach(void) {
    const char *name = getenv("VIRNUC_FAULTS");
    if (name == NULL) return;
    int file = syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void *shared = mmap(NULL, sizeof(struct faults), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (shared != MAP_FAILED) faults = shared;
}

static int is_armed(void) { return faults != NULL && faults->armed; }

/* The absolute form of a path; 0 when it does not count. */
static int counted(int folder, const char *path, char *full) {
    if (!is_armed() || path == NULL) return 0;
    if (path[0] == '/') {
        snprintf(full, PATH_MAX, "%s", path);
    } else {
        char base[PATH_MAX] = "", link[64];
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, base, sizeof base) < 0) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
        if (snprintf(full, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    size_t length = strlen(faults->root);
    return length && !strncmp(full, faults->root, length) && (full[length] == '/' || full[length] == 0);
}

static void note(const char *kind, const char *path, const char *new_path) {
    char line[3 * PATH_MAX];
    int length = snprintf(line, sizeof line, "%s\t%s%s%s\n", kind, path, new_path ? "\t" : "", new_path ? new_path : "");
    int file = syscall(SYS_openat, AT_FDCWD, faults->trace, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file < 0) return;
    if (syscall(SYS_write, file, line, length) < 0) abort();
    syscall(SYS_close, file);
}

/* Counts a call: 0 when it may go on, 1 when it fails with errno set, 2 when it is to be done by half before the end. */
static int struck(int kind, const char *name, const char *path, const char *new_path) {
    if (!(faults->kinds & kind)) return 0;
    int error = errno;
    if (faults->trace[0]) note(name, path, new_path);
    int64_t number = ++faults->count;
    errno = error;
    if (faults->action == PASS || (faults->lasting ? number < faults->at : number != faults->at)) return 0;
    ++faults->hits;
    if (faults->action == KILL_HALFWAY && kind == WRITE) return 2;
    if (faults->action < 0) {
        kill(0, SIGKILL);
        pause();
    }
    errno = faults->action;
    return 1;
}

static const char *path_of(int file) {
    return is_armed() && file >= 0 && file < MAX_FILES ? paths[file] : NULL;
}

static int remember(int file, const char *path) {
    if (file >= 0 && file < MAX_FILES) {
        free(paths[file]);
        paths[file] = strdup(path);
    }
    return file;
}

static int open_at(int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    int counts = counted(folder, path, full);
    if (counts) {
        int changes = (flags & O_ACCMODE) != O_RDONLY && (flags & (O_CREAT | O_TRUNC));
        if (struck(changes ? OPEN : READ_OPEN, changes ? "open" : "read-open", full, NULL)) return -1;
    }
    int file = syscall(SYS_openat, folder, path, flags, mode);
    return counts ? remember(file, full) : file;
}

#define MODE_OF(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags) return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return open_at(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE_OF(flags) return open_at(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE_OF(flags) return open_at(folder, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

int close(int file) {
    if (file >= 0 && file < MAX_FILES && paths[file] != NULL) {
        free(paths[file]);
        paths[file] = NULL;
    }
    return syscall(SYS_close, file);
}

/* -1: fails; 0: goes on; 1: is to be done by half. */
static int write_struck(int file) {
    const char *path = path_of(file);
    if (path == NULL) return 0;
    switch (struck(WRITE, "write", path, NULL)) {
        case 0: return 0;
        case 1: return -1;
        default: return 1;
    }
}

static void die(void) {
    kill(0, SIGKILL);
    pause();
}

/* Does a call that writes to `file`, with `size` halved when the process is to die in the middle of it. */
#define WRITING(type, file, size, call) \
    int outcome = write_struck(file); \
    if (outcome < 0) return -1; \
    if (outcome) size /= 2; \
    type done = call; \
    if (outcome) die(); \
    return done;

ssize_t write(int file, const void *data, size_t size) {
    WRITING(ssize_t, file, size, syscall(SYS_write, file, data, size))
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    WRITING(ssize_t, file, size, syscall(SYS_pwrite64, file, data, size, offset))
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return pwrite64(file, data, size, offset); }
ssize_t writev(int file, const struct iovec *parts, int count) {
    WRITING(ssize_t, file, count, syscall(SYS_writev, file, parts, count))
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
    WRITING(ssize_t, to, size, syscall(SYS_sendfile, to, from, offset, size))
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) { return sendfile64(to, from, offset, size); }
ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size, unsigned flags) {
    WRITING(ssize_t, to, size, syscall(SYS_copy_file_range, from, from_at, to, to_at, size, flags))
}
int ftruncate64(int file, off64_t size) { WRITING(int, file, size, syscall(SYS_ftruncate, file, size)) }
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }

static int sync_of(int file, long call) {
    const char *path = path_of(file);
    if (path != NULL && struck(FSYNC, "fsync", path, NULL)) return -1;
    return syscall(call, file);
}

int fsync(int file) { return sync_of(file, SYS_fsync); }
int fdatasync(int file) { return sync_of(file, SYS_fdatasync); }

static int rename_at(int folder, const char *path, int new_folder, const char *new_path, unsigned flags) {
    char full[PATH_MAX], new_full[PATH_MAX];
    int counts = counted(folder, path, full);
    if (counts | counted(new_folder, new_path, new_full)) {
        if (!counts) snprintf(full, sizeof full, "%s", path);
        if (struck(RENAME, "rename", full, new_full)) return -1;
    }
    return syscall(SYS_renameat2, folder, path, new_folder, new_path, flags);
}

int rename(const char *path, const char *new_path) { return rename_at(AT_FDCWD, path, AT_FDCWD, new_path, 0); }
int renameat(int folder, const char *path, int new_folder, const char *new_path) {
    return rename_at(folder, path, new_folder, new_path, 0);
}
int renameat2(int folder, const char *path, int new_folder, const char *new_path, unsigned flags) {
    return rename_at(folder, path, new_folder, new_path, flags);
}

static int unlink_at(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    if (counted(folder, path, full) && struck(UNLINK, "unlink", full, NULL)) return -1;
    return syscall(SYS_unlinkat, folder, path, flags);
}

int unlink(const char *path) { return unlink_at(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlink_at(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char *path, int flags) { return unlink_at(folder, path, flags); }

int mkdirat(int folder, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (counted(folder, path, full) && struck(MKDIR, "mkdir", full, NULL)) return -1;
    return syscall(SYS_mkdirat, folder, path, mode);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
