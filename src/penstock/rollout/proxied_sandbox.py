# SPDX-License-Identifier: Apache-2.0
"""A sandbox whose programs reach granted hosts, and no others, through an egress proxy of the node.

Owns the proxy, as long as the sandbox lives, and the command that makes unix sockets look like
ports inside. The rules are the proxy's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.rollout.egress.proxy import EgressProxy
from penstock.rollout.sandbox.types import Sandbox, SandboxProcess

PROXY = "proxy"
PORT = 18001
_URL = f"http://127.0.0.1:{PORT}"
PROXY_ENV = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _URL),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}
INTERPRETER = str(Path(sys.executable).resolve())
"""Must be visible inside; see `interpreter_folders`."""


def with_ports(ports: Mapping[int, str], argv: Sequence[str], *, folder: str = ".") -> list[str]:
    """The command that runs a program in this folder, with ports of 127.0.0.1 inside that lead to
    these unix sockets."""
    script = resources.files("penstock.rollout").joinpath("port_forwarder.py").read_text()
    forwards = [f"{port}={path}" for port, path in ports.items()]
    return [INTERPRETER, "-I", "-S", "-c", script, folder, *forwards, "--", *argv]


@dataclass(slots=True, kw_only=True)
class ProxiedSandbox:
    """A Sandbox."""

    make: Callable[[Path], Sandbox]
    """Makes the sandbox, given the proxy's socket."""
    hosts: tuple[str, ...]
    row_id: str
    """What requests are recorded with."""
    is_of_one_attempt: bool = True
    _box: Sandbox | None = None
    _folder: TemporaryDirectory[str] | None = None
    _proxy: EgressProxy | None = field(default=None)

    async def start(self) -> None:
        self._folder = TemporaryDirectory(prefix="penstock-egress-")
        path = Path(self._folder.name) / PROXY
        self._proxy = EgressProxy(
            path=path,
            hosts=self.hosts,
            row_id=self.row_id,
            is_of_one_attempt=self.is_of_one_attempt,
        )
        await self._proxy.__aenter__()
        self._box = self.make(path)
        await self._box.start()

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] = {}) -> SandboxProcess:
        command = with_ports({PORT: f"/run/sockets/{PROXY}"}, argv)
        return await self._started.exec(command, env=env)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._started.put(path, data, mode=mode)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await self._started.get(path, max_bytes=max_bytes)

    async def list_files(self, path: str) -> Sequence[str]:
        return await self._started.list_files(path)

    async def snapshot(self) -> bytes:
        return await self._started.snapshot()

    async def kill(self) -> None:
        box, proxy, folder = self._box, self._proxy, self._folder
        self._box = self._proxy = self._folder = None
        if box is not None:
            await box.kill()
        if proxy is not None:
            await proxy.__aexit__()
        if folder is not None:
            folder.cleanup()

    @property
    def inner(self) -> Sandbox:
        """The sandbox itself, once it has started."""
        return self._started

    @property
    def _started(self) -> Sandbox:
        assert self._box is not None, "start() comes first"
        return self._box
