# SPDX-License-Identifier: Apache-2.0
"""The contract of a sandbox: its limits, its grants, and seven calls. Types only.

Every back end passes `tests/contract/test_sandbox.py`. A failure of the sandbox itself raises
SandboxError: it is an infrastructure failure, and never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol

WORK_DIR = "/work"
"""Where programs start inside. Without namespaces, the folder has another name: use relative paths,
and HOME, PENSTOCK_SECRETS and PENSTOCK_SOCKETS."""


class FileRefused(ValueError):
    """A file inside is missing, a link, not a regular file, too large, or has no room. Programs
    inside can cause it, so the sandbox itself has not failed."""


class CommandRefused(ValueError):
    """No program can be started with these words, such as text of a model with a NUL in it; the
    sandbox itself has not failed."""


class Level(IntEnum):
    """How strong the walls are; a run that demands more than it can get refuses to start."""

    NONE = 0
    LIMITS = 1
    """Resource limits, own process group and a clean environment."""
    NAMESPACES = 2
    """Own files, processes, users and network."""
    GVISOR = 3
    """Also an own kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    wall_s: float = 60.0
    cpu_s: float = 60.0
    memory_mb: int = 2048
    num_processes: int = 128
    disk_mb: int = 512
    output_bytes: int = 1 << 20
    """Of standard output and standard error together; the program is killed beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """What a program may reach beyond its own folder. Nothing by default."""

    hosts: tuple[str, ...] = ()
    """Host names that the egress proxy lets it call."""
    folders: tuple[Path, ...] = ()
    """Folders or files; read-only, at the same path inside."""
    hidden: tuple[Path, ...] = ()
    """Folders that look empty inside, where a granted folder contains them."""
    secrets: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Files by name; readable inside as /run/secrets/NAME ($PENSTOCK_SECRETS/NAME)."""
    sockets: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Unix sockets by name; inside as /run/sockets/NAME ($PENSTOCK_SOCKETS/NAME). Their mode is
    0666: keep others out by the mode of their folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    limits: Limits = Limits()
    grants: Grants = Grants()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """The whole environment, besides PATH, HOME, LANG, PENSTOCK_SECRETS and PENSTOCK_SOCKETS."""
    root: Path | None = None
    """Folder of a root file system instead of the host's programs; read-only. Bubblewrap only."""
    writable: tuple[str, ...] = ()
    """Folders directly below / that programs write beside WORK_DIR, by name. Where there are any,
    `put`, `get` and `snapshot` see these: their paths are `NAME/FILE`. Bubblewrap only."""


class ReadStream(Protocol):
    async def read(self, n: int = -1) -> bytes: ...
    async def readexactly(self, n: int) -> bytes: ...


class WriteStream(Protocol):
    def write(self, data: bytes) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


class SandboxProcess(Protocol):
    """A program inside. Its descendants end with it. Read its output, or it may block."""

    @property
    def stdin(self) -> WriteStream: ...
    @property
    def stdout(self) -> ReadStream: ...
    @property
    def stderr(self) -> ReadStream: ...

    async def wait(self) -> Exit:
        """Wait until it ends, or a limit ends it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    code: int
    """Negative: killed by this signal. A program that exits with 128 + N counts as killed by N."""
    limit: str = ""
    """The limit that ended it, as a field of Limits; empty if it ended by itself."""


class Sandbox(Protocol):
    """One isolated folder with processes in it."""

    async def start(self) -> None: ...

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] = {}) -> SandboxProcess:
        """Start a program in WORK_DIR. Programs of one sandbox share files and limits, and see no
        processes of each other. Raises CommandRefused."""
        ...

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file below WORK_DIR, never through a link. Raises FileRefused."""
        ...

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        """Read a regular file below WORK_DIR, never through a link. Raises FileRefused."""
        ...

    async def list_files(self, path: str) -> Sequence[str]:
        """Names in a folder below WORK_DIR, `.` for itself; of folders with a slash at the end.
        Raises FileRefused."""
        ...

    async def snapshot(self) -> bytes:
        """The files below WORK_DIR as a tar archive, without links. Raises FileRefused beyond the
        disk limit."""
        ...

    async def kill(self) -> None:
        """End every process and remove every file, mount and cgroup. May be repeated."""
        ...


class Backend(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str: ...
    @property
    def level(self) -> Level: ...

    def create(self, spec: SandboxSpec) -> Sandbox: ...
