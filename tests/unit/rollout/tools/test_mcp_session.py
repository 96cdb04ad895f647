# SPDX-License-Identifier: Apache-2.0
"""A connection that several callers share: what each of them gets when it ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp.client._transport import TransportStreams

from penstock.errors import SandboxError
from penstock.rollout.isolation import Isolation
from penstock.rollout.tools.http import HttpServer
from penstock.rollout.tools.mcp_session import Ending, McpSession
from penstock.rollout.tools.stdio import StdioServer
from penstock.rollout.tools.types import ToolFailed

SERVER = str(Path(__file__).with_name("hostile_server.py"))


def session(kind: str) -> McpSession:
    argv = (sys.executable, "-S", SERVER, kind)
    return McpSession("x", StdioServer(isolation=Isolation(), argv=argv).connect)


async def test_the_end_of_a_server_is_an_error_for_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One attempt gives up a shared server that hangs; the others read an error, and go on."""
    monkeypatch.setattr("penstock.rollout.tools.mcp_session.PING_S", 0.2)
    shared = session("hang")
    await shared.list()
    waiting = [asyncio.create_task(shared.call("echo", {"text": "x"})) for _ in range(3)]
    await asyncio.wait(waiting, timeout=0.1)
    await shared.recover()
    for call in waiting:
        with pytest.raises(ToolFailed, match="not available"):
            await call
    assert len(await shared.list()) == 1, "it is started again"
    await shared.close()


async def test_callers_of_a_server_that_does_not_start_get_an_error_when_it_is_ended() -> None:
    silent = session("silent")
    waiting = [asyncio.create_task(silent.call("echo", {"text": "x"})) for _ in range(2)]
    await asyncio.wait(waiting, timeout=0.1)
    await silent.close()
    for call in waiting:
        with pytest.raises(ToolFailed, match="was stopped"):
            await call


async def test_a_sandbox_that_fails_is_not_an_answer_of_the_tool() -> None:
    @asynccontextmanager
    async def connect(ending: Ending) -> AsyncGenerator[TransportStreams]:
        raise SandboxError("no room for a sandbox")
        yield

    with pytest.raises(SandboxError, match="no room"):
        await McpSession("x", connect).call("echo", {})


async def test_a_url_that_accepts_and_never_answers_is_given_up() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    endpoint = HttpServer(url=f"http://{host}/mcp", hosts=(host,), timeout_s=60.0)
    async with server:
        with pytest.raises(ToolFailed, match="not available"):
            await McpSession("x", endpoint.connect, 0.5).call("echo", {})
