# SPDX-License-Identifier: Apache-2.0
"""What is on disk, and stays there after a power failure; and what is really in a folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the content of this file, or the names in this folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """On disk when this returns, and never half a file under this name."""
    temporary = path.with_name(f".new-{path.name}")
    temporary.unlink(missing_ok=True)
    # Never through a link: the folder may belong to another user.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with os.fdopen(descriptor, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(descriptor)
    temporary.rename(path)
    sync(path.parent)


def open_own(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a file of a run folder, which may belong to another user: neither the file nor the
    folder that it is in may be a link. It would lead to a key or a lock of who opens it, which is
    then used as this run's, at the addresses that this run names. OSError for a link."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
            owner = os.fstat(folder).st_uid
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _is_link(path) from None
        raise
    status = os.fstat(found)
    if status.st_nlink > 1 and status.st_uid != owner:
        os.close(found)
        raise _is_link(path)
    return found


def _is_link(path: Path) -> OSError:
    what = "it, or its folder, is a link, which may lead to a file of yours"
    return OSError(errno.ELOOP, what, str(path))
