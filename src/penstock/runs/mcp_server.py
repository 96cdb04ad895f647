# SPDX-License-Identifier: Apache-2.0
"""Serves the tools of an operator over MCP, on standard streams or HTTP.

Owns the protocol and the credentials: over HTTP each request carries a token of the run, on
standard streams one token is given at the start, or none, which only reads. A token is checked at
every call, so that one that was revoked or has expired is refused. Decides nothing about tools.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mcp_types
import msgspec
import structlog
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.server.transport_security import (
    DEFAULT_MAX_REQUEST_BODY_SIZE,
    TransportSecuritySettings,
)
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock import __version__
from penstock.errors import Forbidden, PenstockError, WireError
from penstock.fleet.run_folder import RunFolder
from penstock.observe.admin_log import local_user
from penstock.redaction import excerpt
from penstock.runs.operator_tools import READERS, TOOLS, Caller, call_tool
from penstock.wire.auth import Role, Verifier
from penstock.wire.call_budget import CALL_BYTES, CallBudget, Share
from penstock.wire.codec import encode_json
from penstock.wire.doors import admit
from penstock.wire.held_token import HeldToken
from penstock.wire.routes import bearer_token
from penstock.wire.server import error_response
from penstock.wire.serving import Tls, server

CALLER = "penstock.caller"
"""Where the caller of a request stands in its scope."""
SKILL = Path(__file__).parent / "skills" / "maintain-run" / "SKILL.md"
"""What every client gets at the start."""
log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class OperatorServer:
    """Answers MCP requests about one run."""

    folder: RunFolder
    verifier: Verifier
    token: HeldToken | None = None
    """Of the client on standard streams; None: it only reads."""

    async def serve_stdio(self) -> None:
        """Serve this process's standard streams until their end."""
        served = self._server()
        async with stdio_server() as streams:
            await served.run(*streams, served.create_initialization_options())

    async def serve_http(
        self, host: str, port: int, tls: Tls | None, on_ready: Callable[[str], None]
    ) -> None:
        """Serve HOST:PORT/mcp until a signal; off loopback only with TLS. `on_ready` gets the
        URL."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Every request needs a token, which a page in a browser does not have.
        security = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        app = self._server().streamable_http_app(
            stateless_http=True, json_response=True, transport_security=security
        )
        app.add_middleware(_TokenCheck, caller_of=self._caller_of)
        guarded = server(app, host, port, tls)
        with socket.create_server((host, port), family=family) as listener:
            shown = f"[{host}]" if ":" in host else host
            scheme = "http" if tls is None else "https"
            on_ready(f"{scheme}://{shown}:{listener.getsockname()[1]}/mcp")
            await guarded.serve(sockets=[listener])

    def _server(self) -> Server[Any]:
        return Server(
            "penstock",
            version=__version__,
            instructions=SKILL.read_text(),
            on_list_tools=self._list,
            on_call_tool=self._call,
        )

    def _caller_of(self, token: str) -> Caller:
        """Raises Unauthorized, or Forbidden for a token that is for something else."""
        credential = self.verifier.verify(token)
        if credential.role not in READERS:
            raise Forbidden(
                f"role {credential.role} may not operate a run; use one of "
                f"{', '.join(sorted(READERS))}: `penstock token RUN --role ROLE`"
            )
        return Caller(name=credential.subject, role=credential.role)

    def _caller(self, ctx: ServerRequestContext[Any]) -> Caller:
        if ctx.request is not None:
            return ctx.request.scope[CALLER]
        if self.token is None:
            return Caller(name=local_user(), role=Role.READER)
        return self._caller_of(self.token.value())

    async def _list(
        self, ctx: ServerRequestContext[Any], params: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        """Those that the caller may use."""
        role = self._caller(ctx).role
        tools = [
            mcp_types.Tool(name=tool.name, description=tool.description, input_schema=tool.schema)
            for tool in TOOLS.values()
            if role in tool.roles
        ]
        return mcp_types.ListToolsResult(tools=tools)

    async def _call(
        self, ctx: ServerRequestContext[Any], params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        try:
            caller = self._caller(ctx)
            answer = await asyncio.to_thread(
                call_tool, self.folder, caller, params.name, params.arguments or {}
            )
            text, is_error = encode_json(answer).decode(), False
        except (PenstockError, msgspec.ValidationError) as error:
            text, is_error = excerpt(str(error)), True
        log.info("tool called", tool=params.name, is_error=is_error)
        content = mcp_types.TextContent(type="text", text=text)
        return mcp_types.CallToolResult(content=[content], is_error=is_error)


class _TokenCheck:
    """Refuses requests without a token of the run that may at least read."""

    def __init__(self, app: ASGIApp, caller_of: Callable[[str], Caller]) -> None:
        self._app = app
        self._caller_of = caller_of
        self._budget = CallBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            try:
                caller = self._caller_of(bearer_token(headers))
            except WireError as error:
                await error_response(error)(scope, receive, send)
                return
            admit(scope, caller.who)
            scope[CALLER] = caller
            share = Share(self._budget)
            await share.take((caller.who, "tools"), CALL_BYTES + DEFAULT_MAX_REQUEST_BODY_SIZE)
            try:
                await self._app(scope, receive, send)
            finally:
                share.give_back()
            return
        await self._app(scope, receive, send)
