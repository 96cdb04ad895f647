# SPDX-License-Identifier: Apache-2.0
"""Offers the built-in tools as an MCP server, over standard streams or HTTP on this machine.

Owns one set of tools per MCP session, so that each client has its own variables; a client without a
session gets new ones with each call. Listens on loopback only: there are no credentials.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mcp_types
import uvicorn
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server

from penstock.addresses import is_loopback
from penstock.dataflow.service.nodes.messages import ToolServerInfo
from penstock.errors import ConfigError
from penstock.rollout.isolation import Isolation, Use
from penstock.rollout.tools.attempt_tools import Tools
from penstock.rollout.tools.catalog import make_catalog
from penstock.rollout.tools.file_tools import FileSession, HostFolder
from penstock.rollout.tools.python_tool import PYTHON
from penstock.rollout.tools.search_tool import SearchSession
from penstock.rollout.tools.servers import ToolServers
from penstock.rollout.tools.types import ToolFailed, ToolSession

MAX_SESSIONS = 64
"""Sets of tools; the one that was not used for longest ends."""
SESSION_HEADER = "mcp-session-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinTools:
    """Which built-in tools are offered."""

    python: bool = False
    search: Path | None = None
    files: Path | None = None
    timeout_s: float = 60.0
    max_result_chars: int = 8000

    def server(self, name: str, *, is_shared: bool) -> ToolServerInfo:
        return ToolServerInfo(
            name=name,
            builtin=name,
            is_shared=is_shared,
            timeout_s=self.timeout_s,
            max_result_chars=self.max_result_chars,
        )


async def open_builtin(offered: BuiltinTools, isolation: Isolation) -> ToolServers:
    """Raises SandboxError if python could not run here, ConfigError if a folder is not usable."""
    shared = dict[str, ToolSession]()
    if offered.search is not None:
        shared["search"] = SearchSession(_folder("--search", offered.search))
    if offered.files is not None:
        shared["files"] = FileSession(HostFolder(_folder("--files", offered.files)).opened)
    try:
        listed = {name: await session.list() for name, session in shared.items()}
    except ToolFailed as failure:
        raise ConfigError(f"--search: {failure}; name a folder with documents") from None
    servers = [offered.server(name, is_shared=True) for name in shared]
    if offered.python:
        await isolation.backend(Use.TOOLS)
        servers.insert(0, offered.server("python", is_shared=False))
        listed["python"] = (PYTHON,)
    catalog = make_catalog(servers, listed)
    return ToolServers(catalog, {one.name: one for one in servers}, {}, isolation, shared)


def _folder(option: str, path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"{option} {path} is not a folder; create it, or name another")
    return path.absolute()


@dataclass(slots=True)
class McpToolServer:
    """Answers MCP requests."""

    _servers: ToolServers
    _version: str
    """Of penstock, for clients."""
    _open: OrderedDict[str, Tools] = field(default_factory=OrderedDict[str, Tools])
    _closing: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    def server(self) -> Server[Any]:
        return Server(
            "penstock",
            version=self._version,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )

    async def serve_stdio(self) -> None:
        """Serve this process's standard streams until their end."""
        server = self.server()
        try:
            async with stdio_server() as streams:
                await server.run(*streams, server.create_initialization_options())
        finally:
            await self.close()

    async def serve_http(self, host: str, port: int, on_ready: Callable[[str], None]) -> None:
        """Serve http://HOST:PORT/mcp until a signal. `on_ready` gets the URL."""
        if not is_loopback(host):
            raise ConfigError(
                f"--host {host} is reachable from other machines, and this server asks for no "
                "credentials; use 127.0.0.1, and a tunnel from elsewhere"
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        app = self.server().streamable_http_app(host="localhost")
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        shown = f"[{host}]" if ":" in host else host
        on_ready(f"http://{shown}:{listener.getsockname()[1]}/mcp")
        try:
            await uvicorn.Server(config).serve(sockets=[listener])
        finally:
            await self.close()

    async def close(self) -> None:
        """End every interpreter."""
        open_, self._open = [*self._open.values()], OrderedDict()
        await asyncio.gather(*(tools.close() for tools in open_), *self._closing)

    async def _list(
        self, ctx: ServerRequestContext[Any], params: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        tools = [
            mcp_types.Tool(
                name=tool.name,
                description=tool.spec.description,
                input_schema=tool.spec.parameters,
            )
            for tool in self._servers.catalog.tools
        ]
        return mcp_types.ListToolsResult(tools=tools)

    async def _call(
        self, ctx: ServerRequestContext[Any], params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        session = _session_id(ctx)
        tools = self._lease() if session is None else self._tools_of(session)
        try:
            result = await tools.call({"name": params.name, "arguments": params.arguments or {}})
        finally:
            if session is None:
                await tools.close()
        content = mcp_types.TextContent(type="text", text=result.text)
        return mcp_types.CallToolResult(content=[content], is_error=result.is_error)

    def _tools_of(self, session: str) -> Tools:
        if session not in self._open:
            self._open[session] = self._lease()
        self._open.move_to_end(session)
        if len(self._open) > MAX_SESSIONS:
            _, oldest = self._open.popitem(last=False)
            closing = asyncio.get_running_loop().create_task(oldest.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return self._open[session]

    def _lease(self) -> Tools:
        return self._servers.lease("", "", _NoTurns())


class _NoTurns:
    def turns(self) -> tuple[object, ...]:
        return ()


def _session_id(ctx: ServerRequestContext[Any]) -> str | None:
    """Empty for the only client of standard streams; None for HTTP without a session."""
    return "" if ctx.request is None else ctx.request.headers.get(SESSION_HEADER)
