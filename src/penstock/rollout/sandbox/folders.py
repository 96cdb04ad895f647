# SPDX-License-Identifier: Apache-2.0
"""What the back ends without a file system of their own share: a plain folder on this host.

Owns the folder and its removal, also after a killed node. The disk limit holds per file only,
unless a back end mounts a file system of that size there.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SandboxError
from penstock.rollout.sandbox.cgroups import Group
from penstock.rollout.sandbox.cleanup import to_the_end
from penstock.rollout.sandbox.files import T, WorkFolder, at_folder
from penstock.rollout.sandbox.mounts import checked_name, read_secret
from penstock.rollout.sandbox.owners import PREFIX, is_stale, new_name
from penstock.rollout.sandbox.program import Program
from penstock.rollout.sandbox.types import SandboxSpec


def remove_stale_folders() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another node removes it
            if is_stale(path) and path.lstat().st_uid == os.geteuid():
                _remove(path)


@dataclass(slots=True, kw_only=True)
class FolderSandbox(ABC):
    spec: SandboxSpec
    owner: int = -1
    """The user of the programs, or -1 for our own."""
    path: Path = field(default_factory=lambda: Path(tempfile.gettempdir()).resolve() / new_name())
    _folder_fd: int = -1
    _group: Group = field(default_factory=Group)
    _programs: list[Program] = field(default_factory=list[Program])
    _more_folders: tuple[str, ...] = ()

    @abstractmethod
    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] = {}) -> Program: ...

    async def start(self) -> None:
        try:
            self._make_folders()
            self._folder_fd = os.open(self.path / "work", os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            await self.kill()
            raise SandboxError(
                f"cannot make the folder {self.path} of a sandbox: {error.strerror}; "
                "free space there, or set TMPDIR"
            ) from error

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._at_folder(lambda folder: folder.put(path, data, mode))

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await self._at_folder(lambda folder: folder.get(path, max_bytes))

    async def list_files(self, path: str) -> Sequence[str]:
        return await self._at_folder(lambda folder: folder.list_files(path))

    async def snapshot(self) -> bytes:
        max_bytes = self.spec.limits.disk_mb << 20
        return await self._at_folder(lambda folder: folder.snapshot(max_bytes))

    async def kill(self) -> None:
        await to_the_end(self._end())

    async def _end(self) -> None:
        programs, self._programs = self._programs, []
        await asyncio.gather(*(program.kill() for program in programs))
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
            self._folder_fd = -1
        await asyncio.to_thread(self._group.remove)
        await asyncio.to_thread(_remove, self.path)

    def _make_root(self) -> None:
        self.path.mkdir()

    async def _at_folder(self, action: Callable[[WorkFolder], T]) -> T:
        return await at_folder(self._folder_fd, self.owner, action)

    def _make_folders(self) -> None:
        self._make_root()
        self.path.chmod(0o711)  # whatever the umask
        for name in ("work", "secrets", "sockets", *self._more_folders):
            (self.path / name).mkdir(mode=0o700)
            os.chown(self.path / name, self.owner, self.owner)
        for name, source in self.spec.grants.secrets.items():
            copy = self.path / "secrets" / checked_name(name)
            copy.touch(mode=0o400)
            copy.write_bytes(read_secret(source))
            os.chown(copy, self.owner, self.owner)
        for name, source in self.spec.grants.sockets.items():
            (self.path / "sockets" / checked_name(name)).symlink_to(source)


def _remove(path: Path) -> None:
    """By `rm`: a program may have made folders deeper than Python can follow."""
    if path.is_mount():
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)
    if path.exists():
        if os.geteuid() != 0:
            subprocess.run(["chmod", "-R", "u+rwX", str(path)], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", "--one-file-system", str(path)], check=False)
