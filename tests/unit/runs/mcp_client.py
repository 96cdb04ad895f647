# SPDX-License-Identifier: Apache-2.0
"""A client of `penstock mcp` with a token, as an agent is one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import mcp_types
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client


@asynccontextmanager
async def client(url: str, token: str) -> AsyncGenerator[ClientSession]:
    http = httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}, timeout=60.0)
    async with (
        http,
        streamable_http_client(url, http_client=http) as streams,
        ClientSession(*streams) as session,
    ):
        await session.initialize()
        yield session


async def call(session: ClientSession, name: str, /, **arguments: Any) -> tuple[bool, str]:
    result = await session.call_tool(name, arguments)
    [content] = result.content
    assert isinstance(content, mcp_types.TextContent)
    return bool(result.is_error), content.text
