# SPDX-License-Identifier: Apache-2.0
"""What a hostile program wants of this host, and what it could leave behind."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from penstock.rollout.sandbox.cgroups import find_parents
from penstock.rollout.sandbox.namespaces import FIRST_UID, NUM_UIDS
from penstock.rollout.sandbox.owners import prefix_of

SECRET = "canary-secret"


@dataclass(slots=True)
class Host:
    """A private file, a port and an abstract socket of the node."""

    canary: Path
    port: int
    abstract: str
    connections: list[object] = field(default_factory=list[object])

    @property
    def env(self) -> dict[str, str]:
        names = {"CANARY": self.canary, "PORT": self.port, "ABSTRACT": self.abstract}
        return {name: str(value) for name, value in {**names, "NODE": os.getpid()}.items()}

    def check(self) -> None:
        assert not self.connections, "a program connected to the host"
        assert self.canary.read_text() == SECRET, "a program changed a file of the host"


@asynccontextmanager
async def watched_host() -> AsyncGenerator[Host]:
    abstract = f"penstock-{os.getpid()}-{os.urandom(4).hex()}"
    with tempfile.TemporaryDirectory() as folder, _private_file(Path(folder)) as canary:
        host = Host(canary=canary, port=0, abstract=abstract)

        async def on_connect(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            host.connections.append(writer.get_extra_info("sockname"))
            writer.close()

        unix = socket.socket(socket.AF_UNIX)
        unix.bind(f"\0{abstract}")
        servers = [
            await asyncio.start_server(on_connect, "127.0.0.1", 0),
            await asyncio.start_unix_server(on_connect, sock=unix),
        ]
        host.port = servers[0].sockets[0].getsockname()[1]
        try:
            yield host
        finally:
            for server in servers:
                server.close()
                await server.wait_closed()


@contextmanager
def _private_file(folder: Path) -> Generator[Path]:
    canary = folder / "canary"
    canary.write_text(SECRET)
    canary.chmod(0o600)
    yield canary


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What sandboxes of one process have on this host."""

    processes: frozenset[int]
    mounts: int
    groups: frozenset[str]
    folders: frozenset[str]
    descriptors: int


def count_leftovers(node: int | None = None) -> Leftovers:
    """Of the process `node`, or of this one; processes of sandboxes of others do not count."""
    own = prefix_of(node or os.getpid())
    groups = frozenset(
        str(path) for parent in find_parents().folders.values() for path in parent.glob(f"{own}*")
    )
    folders = frozenset(path.name for path in Path(tempfile.gettempdir()).glob(f"{own}*"))
    mounts = sum(own in line for line in _lines("/proc/self/mountinfo"))
    return Leftovers(
        processes=frozenset(_processes_below(node or os.getpid())),
        mounts=mounts,
        groups=groups,
        folders=folders,
        descriptors=len(os.listdir("/proc/self/fd")),
    )


def processes_of(uid: int) -> list[int]:
    """Living processes of a sandbox's user."""
    assert FIRST_UID <= uid < FIRST_UID + NUM_UIDS
    found = list[int]()
    for path in Path("/proc").glob("[0-9]*"):
        status = dict(line.split(":\t", 1) for line in _lines(f"{path}/status") if ":\t" in line)
        if status.get("Uid", "").split()[:1] == [str(uid)] and not status["State"].startswith("Z"):
            found.append(int(path.name))
    return found


def _processes_below(pid: int) -> list[int]:
    children = " ".join(_lines(f"/proc/{pid}/task/{pid}/children")).split()
    return [one for child in children for one in (int(child), *_processes_below(int(child)))]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
