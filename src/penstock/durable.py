# SPDX-License-Identifier: Apache-2.0
"""What is on disk, and stays there after a power failure; and what is really in a folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple

COPIED_BYTES = 1 << 20
"""At once."""


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


class FolderId(NamedTuple):
    """One folder, whatever its path leads to later."""

    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FolderId:
        return cls(status.st_dev, status.st_ino)


def open_own(
    path: Path,
    flags: int = os.O_RDONLY,
    mode: int = 0o600,
    *,
    within: FolderId | None = None,
) -> int:
    """Open a regular file of a run folder, which may belong to another user: neither the file nor
    the folder that it is in may be a link. It would lead to a key or a lock of who opens it, which
    is then used as this run's, at the addresses that this run names. OSError for a link, for what
    could block or never end, and if the folder above is not `within`: its owner can replace it by a
    link at any moment."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if within not in (None, FolderId.of(os.stat("..", dir_fd=folder))):
                what = "its run folder is another one than at the start of this; start it again"
                raise OSError(errno.ESTALE, what, str(path))
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            found = os.open(path.name, flags, mode, dir_fd=folder)
            owner = os.fstat(folder).st_uid
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _is_link(path) from None
        raise
    status = os.fstat(found)
    if not stat.S_ISREG(status.st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if status.st_nlink > 1 and status.st_uid != owner:
        os.close(found)
        raise _is_link(path)
    return found


def is_regular(path: Path) -> bool:
    """Whether it could be opened so: it is there, and no link, pipe or device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def regular_descriptor(
    path: Path, flags: int = os.O_RDONLY, mode: int = 0o600, *, follow_links: bool = False
) -> int:
    """Open a regular file: no pipe or device that could block, and no symbolic link unless links
    are followed."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_regular(path: Path, *, follow_links: bool = False) -> BinaryIO:
    return open(regular_descriptor(path, follow_links=follow_links), "rb", buffering=1 << 16)


def copy_regular(source: Path, target: Path, max_bytes: int | None = None) -> None:
    """Copy the beginning of such a file, whatever is added to it meanwhile; by default the length
    that it has now."""
    with open_regular(source) as file, target.open("wb") as out:
        left = os.fstat(file.fileno()).st_size if max_bytes is None else max_bytes
        while left > 0 and (piece := file.read(min(left, COPIED_BYTES))):
            out.write(piece)
            left -= len(piece)


def read_regular(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """The content of such a file; OSError if it is longer."""
    with open_regular(path, follow_links=follow_links) as file:
        return _read(file, max_bytes, path)


def _read(file: BinaryIO, max_bytes: int, path: Path) -> bytes:
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", str(path))
    return content


def read_own(path: Path, max_bytes: int, *, within: FolderId | None = None) -> bytes:
    """The content of such a file; OSError if it is longer."""
    with os.fdopen(open_own(path, within=within), "rb") as file:
        return _read(file, max_bytes, path)


def _is_link(path: Path) -> OSError:
    what = "it, or its folder, is a link, which may lead to a file of yours"
    return OSError(errno.ELOOP, what, str(path))
