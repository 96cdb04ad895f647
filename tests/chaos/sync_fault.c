/* SPDX-License-Identifier: Apache-2.0
 * Preloaded into a service: while the file named by PENSTOCK_SYNC_FAULT exists, fsync and fdatasync
 * of files whose path contains its text fail with EIO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is_broken(int descriptor)
{
    const char *order = getenv("PENSTOCK_SYNC_FAULT");
    char needle[64], link[64], path[4096];
    int file = order ? open(order, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return 0;
    ssize_t length = read(file, needle, sizeof needle - 1);
    close(file);
    needle[length < 0 ? 0 : length] = 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return strstr(path, needle) != NULL;
}

static int sync_or_fail(int descriptor, const char *name)
{
    if (is_broken(descriptor)) {
        errno = EIO;
        return -1;
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(descriptor);
}

int fsync(int descriptor) { return sync_or_fail(descriptor, "fsync"); }
int fdatasync(int descriptor) { return sync_or_fail(descriptor, "fdatasync"); }
