# SPDX-License-Identifier: Apache-2.0
"""What the back ends with namespaces share: one file system and one control group per sandbox, and
walls around each program.

A back end gives the command that builds the walls. The walls of the first program open with the
sandbox, so that a pooled one needs only the command.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.errors import SandboxError
from penstock.rollout.sandbox.cgroups import Group, Parents
from penstock.rollout.sandbox.cleanup import to_the_end
from penstock.rollout.sandbox.files import T, WorkFolder, at_folder
from penstock.rollout.sandbox.mounts import Mounts
from penstock.rollout.sandbox.program import Program
from penstock.rollout.sandbox.types import SandboxSpec
from penstock.rollout.sandbox.walls import INNER_ENV, START_S, Walls, command_line

FIRST_UID, NUM_UIDS = 1 << 30, 1 << 29
"""User ids of sandboxes: drawn, so that nodes of one host need not agree on them."""


def draw_uid() -> int:
    """A separate user for a sandbox, as root; else -1: our own."""
    return FIRST_UID + secrets.randbelow(NUM_UIDS) if os.geteuid() == 0 else -1


@contextmanager
def _host_errors() -> Generator[None]:
    try:
        yield
    except OSError as error:
        why = str(error) or f"it was not ready after {START_S:g} s"
        raise SandboxError(
            f"cannot start a sandbox: {why}; install the program it names, or free processes and "
            "memory on this host"
        ) from error


@dataclass(slots=True, kw_only=True)
class NamespaceSandbox(ABC):
    spec: SandboxSpec
    parents: Parents
    own_processes: int = 4
    """Processes and threads of the walls, beside the programs."""
    _mounts: Mounts = field(init=False)
    _group: Group = field(default_factory=Group)
    _waiting: Walls | None = None
    _programs: list[Program] = field(default_factory=list[Program])

    def __post_init__(self) -> None:
        self._mounts = Mounts(spec=self.spec, owner=draw_uid())

    @property
    def uid(self) -> int:
        """The user of its programs on this host; -1: our own."""
        return self._mounts.owner

    @abstractmethod
    async def _open_walls(self) -> Walls: ...

    async def start(self) -> None:
        try:
            with _host_errors():
                self._group = self.parents.create(self.spec.limits, self.own_processes)
                await self._mounts.open()
                self._waiting = await self._open_walls()
        except BaseException:
            await self.kill()
            raise

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] = {}) -> Program:
        line = command_line(argv, {**INNER_ENV, **self.spec.env, **env})
        walls, self._waiting = self._waiting, None
        with _host_errors():
            walls = walls or await self._open_walls()
        walls.child.stdin.write(line)
        program = Program(
            _child=walls.child,
            _limits=self.spec.limits,
            _group=self._group,
            _kill=walls.kill,
            _wait_gone=walls.wait_gone,
        )
        self._programs.append(program)
        return program

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._at_folder(lambda folder: folder.put(path, data, mode))

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await self._at_folder(lambda folder: folder.get(path, max_bytes))

    async def list_files(self, path: str) -> Sequence[str]:
        return await self._at_folder(lambda folder: folder.list_files(path))

    async def snapshot(self) -> bytes:
        max_bytes = self.spec.limits.disk_mb << 20
        return await self._at_folder(lambda folder: folder.snapshot(max_bytes))

    async def make_folder(self, path: str) -> None:
        """A folder of the programs' user, with those above it. Raises FileRefused."""
        await self._at_folder(lambda folder: folder.make(path))

    async def take_files(self, other: NamespaceSandbox, *, but: Container[str] = ()) -> None:
        """Copy the files of another sandbox, which no program may use meanwhile, except the folders
        `but`. Of links only those stay that cannot leave their folder. Raises FileRefused."""
        max_bytes = self.spec.limits.disk_mb << 20
        source = other._mounts.folder_fd
        await self._at_folder(lambda folder: folder.take(source, max_bytes, but))

    async def kill(self) -> None:
        await to_the_end(self._end())

    async def _end(self) -> None:
        walls, self._waiting = self._waiting, None
        if walls is not None:
            await walls.close()
        programs, self._programs = self._programs, []
        await asyncio.gather(*(program.kill() for program in programs))
        await self._mounts.close()
        await asyncio.to_thread(self._group.remove)

    async def _at_folder(self, action: Callable[[WorkFolder], T]) -> T:
        return await at_folder(self._mounts.folder_fd, self._mounts.owner, action)
