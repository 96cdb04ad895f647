# SPDX-License-Identifier: Apache-2.0
"""One connection to an MCP server: opened when it is needed, opened again after it broke.

Owns the handshake, the pages of a list, and which failures end the connection. How bytes reach the
server is the transport's; what a call may cost is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import mcp_types
import structlog
from mcp.client._transport import TransportStreams
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError

from penstock.errors import SandboxError
from penstock.rollout.tools.types import ToolFailed, ToolResult, ToolSpec

START_S = 60.0
PING_S = 5.0
MAX_PAGES = 100
MAX_COST = 1e9
"""What a server says beyond it is not recorded; sums over a run stay finite."""
MAX_LISTED = 1000
"""Tools that are looked at; the catalog offers fewer."""
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Ending:
    """Why a transport ended, for messages."""

    why: str = ""


Connect = Callable[[Ending], AbstractAsyncContextManager[TransportStreams]]


@dataclass(slots=True)
class _Connection:
    """A task that holds the connection open: its context managers must end where they began."""

    serving: asyncio.Task[None]
    ready: asyncio.Future[ClientSession]
    stop: asyncio.Event
    ending: Ending


@dataclass(slots=True)
class McpSession:
    """A ToolSession."""

    _name: str
    """Of the server in the run file."""
    _connect: Connect
    _start_s: float = START_S
    _open: _Connection | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def list(self) -> Sequence[ToolSpec]:
        session = await self._session()
        found = list[ToolSpec]()
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            params = mcp_types.PaginatedRequestParams(cursor=cursor)
            page = await self._ask(session.list_tools(params=params))
            found += [_spec(tool) for tool in page.tools[: MAX_LISTED - len(found)]]
            cursor = page.next_cursor
            if cursor is None or len(found) >= MAX_LISTED:
                break
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        session = await self._session()
        params = mcp_types.CallToolRequestParams(name=name, arguments=dict(arguments))
        request = mcp_types.CallToolRequest(params=params)
        # Not `call_tool`: it checks results against a schema of the server, without bounds.
        result = await self._ask(session.send_request(request, mcp_types.CallToolResult))
        text = "\n".join(map(_text, result.content))
        if not text and result.structured_content is not None:
            text = str(result.structured_content)
        return ToolResult(text=text, is_error=bool(result.is_error), cost=_cost(result.meta))

    async def recover(self) -> None:
        """A server that still answers keeps its state."""
        if self._open is None:
            return
        try:
            async with asyncio.timeout(PING_S):
                session = await asyncio.shield(self._open.ready)
                request = mcp_types.PingRequest()
                await session.send_request(request, mcp_types.EmptyResult)
        except (TimeoutError, MCPError, ToolFailed, SandboxError):
            await self.close()

    async def close(self) -> None:
        open_, self._open = self._open, None
        if open_ is not None:
            open_.serving.cancel()
            await asyncio.wait([open_.serving])

    async def _session(self) -> ClientSession:
        """Raises ToolFailed if the server cannot be reached, SandboxError if its sandbox fails."""
        async with self._lock:
            if self._open is None or self._open.serving.done():
                self._open = self._start()
            ready = self._open.ready
        return await asyncio.shield(ready)

    def _start(self) -> _Connection:
        loop, ending = asyncio.get_running_loop(), Ending()
        ready: asyncio.Future[ClientSession] = loop.create_future()
        stop = asyncio.Event()
        serving = loop.create_task(self._serve(ready, stop, ending), name=f"tools {self._name}")
        return _Connection(serving, ready, stop, ending)

    async def _serve(
        self, ready: asyncio.Future[ClientSession], stop: asyncio.Event, ending: Ending
    ) -> None:
        """consumes: messages of the server · produces: a session for callers
        waits for: the end of this attempt or node, or of the server"""
        try:
            async with self._connect(ending) as streams, ClientSession(*streams) as session:
                async with asyncio.timeout(self._start_s):
                    await session.initialize()
                ready.set_result(session)
                await stop.wait()
        except Exception as error:  # of code of others: the transport's groups wrap anything
            _fail(ready, self._failure(error, ending))
        finally:
            _fail(ready, ToolFailed(f"the server {self._name} was stopped before it answered"))

    async def _ask(self, request: Any) -> Any:
        """The answer; raises ToolFailed, and ends a connection that broke."""
        open_ = self._open
        try:
            return await request
        except MCPError as error:
            if error.code not in (mcp_types.CONNECTION_CLOSED, mcp_types.REQUEST_TIMEOUT):
                raise ToolFailed(error.message) from None
            failure = self._failure(error, open_.ending if open_ else Ending())
        except (ValueError, TypeError, KeyError, RuntimeError) as error:  # its answer is not MCP
            failure = ToolFailed(f"the server {self._name} sent a wrong answer: {_first(error)}")
        if self._open is open_:
            await self.close()
        log.warning("tool server ended", server=self._name, reason=str(failure))
        raise failure from None

    def _failure(self, error: BaseException, ending: Ending) -> ToolFailed | SandboxError:
        cause = _cause(error)
        if isinstance(cause, SandboxError):
            return cause
        why = ending.why or _first(cause)
        return ToolFailed(f"the server {self._name} is not available: {why}")


def _fail(ready: asyncio.Future[ClientSession], failure: Exception) -> None:
    """Unless it is ready, or failed before. Nothing need wait for it."""
    if not ready.done():
        ready.set_exception(failure)
        ready.exception()


def _cause(error: BaseException) -> BaseException:
    if not isinstance(error, BaseExceptionGroup):
        return error
    return _cause(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])


def _first(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__


def _spec(tool: mcp_types.Tool) -> ToolSpec:
    description = tool.description or ""
    return ToolSpec(name=tool.name, description=description, parameters=tool.input_schema)


def _text(block: Any) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    if isinstance(block, mcp_types.EmbeddedResource):
        return getattr(block.resource, "text", f"[resource {block.resource.uri}]")
    return f"[{getattr(block, 'type', 'content')}: not text]"


def _cost(meta: Mapping[str, Any] | None) -> float:
    cost = (meta or {}).get("cost", 0.0)
    is_number = isinstance(cost, int | float) and not isinstance(cost, bool)
    return float(cost) if is_number and abs(cost) <= MAX_COST else 0.0
