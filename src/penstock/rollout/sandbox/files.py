# SPDX-License-Identifier: Apache-2.0
"""Files of a sandbox, read and written from outside while hostile programs may change them.

Owns the rule that no link is ever followed: each part of a path is opened relative to the one
before, and only regular files are read. Raises FileRefused for what a program may have caused.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import SandboxError
from penstock.rollout.sandbox.types import WORK_DIR, FileRefused

T = TypeVar("T")
MAX_DEPTH = 64
MAX_ENTRIES = 100_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFolder:
    """The folder of a sandbox, by an open descriptor."""

    fd: int
    owner: int = -1
    """Who owns what we put there; -1: we."""

    def put(self, path: str, data: bytes, mode: int) -> None:
        *folders, name = _parts(path)
        with _refusals(path), self._open_folders(folders, create=True) as folder:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(name, flags, 0o600, dir_fd=folder), "wb") as file:
                file.write(data)
                os.fchown(file.fileno(), self.owner, self.owner)
                os.fchmod(file.fileno(), mode & 0o777)

    def get(self, path: str, max_bytes: int) -> bytes:
        *folders, name = _parts(path)
        with _refusals(path), self._open_folders(folders, create=False) as folder:
            return _read(folder, name, path, max_bytes)

    def list_files(self, path: str) -> list[str]:
        """Names in a folder, in order; of folders with a slash at the end. `.` is this one."""
        folders = [] if path in (".", WORK_DIR) else _parts(path)
        opened = self._open_folders(folders, create=False)
        with _refusals(path), opened as folder, os.scandir(folder) as entries:
            return sorted(_listed(entry) for entry in itertools.islice(entries, MAX_ENTRIES))

    def snapshot(self, max_bytes: int) -> bytes:
        """Regular files and folders; links, sockets and pipes are left out."""
        archive, room = io.BytesIO(), max_bytes
        with _refusals("."), tarfile.open(fileobj=archive, mode="w") as tar:
            for count, (entry, data) in enumerate(_walk(self.fd, "", max_bytes)):
                room -= entry.size
                if room < 0 or count >= MAX_ENTRIES:
                    raise FileRefused(
                        f"the files of the sandbox exceed {max_bytes:,} bytes or {MAX_ENTRIES:,} "
                        "entries; delete what is not needed before the snapshot, or raise disk_mb"
                    )
                tar.addfile(entry, io.BytesIO(data))
        return archive.getvalue()

    def make(self, path: str) -> None:
        with _refusals(path), self._open_folders(_parts(path), create=True):
            pass

    def take(self, source: int, max_bytes: int, but: Container[str]) -> None:
        """Copy the files below another folder; its links as `is_inside` allows, its pipes and
        sockets not."""
        with _refusals("."):
            self._take(source, "", _Room(max_bytes, MAX_ENTRIES), but)

    def _take(self, source: int, prefix: str, room: _Room, but: Container[str]) -> None:
        for name in sorted(os.listdir(source)):
            path, found = prefix + name, os.stat(name, dir_fd=source, follow_symlinks=False)
            room.use(found.st_size if stat.S_ISREG(found.st_mode) else 0)
            if path in but:
                continue
            if stat.S_ISREG(found.st_mode):
                self._take_file(source, name, path, found)
            elif stat.S_ISLNK(found.st_mode):
                self._take_link(os.readlink(name, dir_fd=source), path)
            elif stat.S_ISDIR(found.st_mode):
                self.make(path)
                inner = os.open(name, _FOLDER, dir_fd=source)
                try:
                    self._take(inner, f"{path}/", room, but)
                finally:
                    os.close(inner)

    def _take_file(self, source: int, name: str, path: str, found: os.stat_result) -> None:
        *folders, last = path.split("/")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            open(os.open(name, _FILE, dir_fd=source), "rb") as old,
            self._open_folders(folders, create=True) as folder,
            open(os.open(last, flags, 0o600, dir_fd=folder), "wb") as new,
        ):
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.utime(new.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
            os.fchown(new.fileno(), self.owner, self.owner)
            os.fchmod(new.fileno(), found.st_mode & 0o777)

    def _take_link(self, target: str, path: str) -> None:
        *folders, last = path.split("/")
        if is_inside(target, path):
            with self._open_folders(folders, create=True) as folder:
                os.symlink(target, last, dir_fd=folder)
                os.chown(last, self.owner, self.owner, dir_fd=folder, follow_symlinks=False)

    @contextmanager
    def _open_folders(self, names: list[str], *, create: bool) -> Generator[int]:
        folder = os.dup(self.fd)
        try:
            for name in names:
                if create:
                    self._make_folder(name, folder)
                inner = os.open(name, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _make_folder(self, name: str, parent: int) -> None:
        with suppress(FileExistsError):
            make_folder(name, parent)
            os.chown(name, self.owner, self.owner, dir_fd=parent, follow_symlinks=False)


def _listed(entry: os.DirEntry[str]) -> str:
    return f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name


@dataclass(slots=True)
class _Room:
    """What may still be copied."""

    num_bytes: int
    num_entries: int

    def use(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self.num_entries -= 1
        if self.num_bytes < 0 or self.num_entries < 0:
            raise FileRefused(
                "the files of the sandbox are too many or too large to be copied; delete what is "
                "not needed, or raise disk_mb"
            )


def is_inside(target: str, path: str) -> bool:
    """Whether a link at `NAME/…` stays in the folder NAME: without `..` no chain of such links can
    go up."""
    parts = target.split("/")
    if ".." in parts:
        return False
    return not target.startswith("/") or parts[1] == path.split("/")[0]


def make_folder(name: str, parent: int) -> None:
    """A folder that every user may enter, whatever the umask of this process."""
    os.mkdir(name, 0o755, dir_fd=parent)
    os.chmod(name, 0o755, dir_fd=parent)


async def at_folder(fd: int, owner: int, action: Callable[[WorkFolder], T]) -> T:
    """Do something in a thread, with a descriptor that stays open meanwhile: were the sandbox to
    end first, the number could already mean another sandbox's folder."""
    if fd < 0:
        raise SandboxError("this sandbox is not running; call start() before, kill() after")
    folder = WorkFolder(fd=os.dup(fd), owner=owner)

    def act() -> T:
        try:
            return action(folder)
        finally:
            os.close(folder.fd)

    return await asyncio.to_thread(act)


def _parts(path: str) -> list[str]:
    inner = path.removeprefix(WORK_DIR + "/")
    parts = inner.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or len(parts) > MAX_DEPTH:
        raise FileRefused(
            f"{path!r} is not a path below {WORK_DIR}: write it as folder/file, without `..`, "
            f"at most {MAX_DEPTH} levels deep"
        )
    return parts


@contextmanager
def _refusals(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise FileRefused(f"{path!r} in the sandbox: {error.strerror or error}") from None


def _read(folder: int, name: str, path: str, max_bytes: int) -> bytes:
    with open(os.open(name, _FILE, dir_fd=folder), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileRefused(f"{path!r} in the sandbox is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise FileRefused(f"{path!r} in the sandbox has more than {max_bytes:,} bytes")
    return data


def _walk(folder: int, prefix: str, max_bytes: int) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    if prefix.count("/") > MAX_DEPTH:
        raise FileRefused(f"the folders of the sandbox are more than {MAX_DEPTH} levels deep")
    for name in sorted(os.listdir(folder)):
        path = prefix + name
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        entry = tarfile.TarInfo(path)
        entry.mode = mode & 0o777
        if stat.S_ISREG(mode):
            data = _read(folder, name, path, max_bytes)
            entry.size = len(data)
            yield entry, data
        elif stat.S_ISDIR(mode):
            entry.type = tarfile.DIRTYPE
            yield entry, b""
            inner = os.open(name, _FOLDER, dir_fd=folder)
            try:
                yield from _walk(inner, path + "/", max_bytes)
            finally:
                os.close(inner)
