# SPDX-License-Identifier: Apache-2.0
"""An MCP client that knows nothing of penstock: `outside_client.py CALLS URL`, or `CALLS PROGRAM
ARG…`. Makes the calls of a JSON list in one session, and prints the answers as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client


async def main(calls: str, first: str, *rest: str) -> None:
    if first.startswith("http"):
        connecting = streamable_http_client(first)
    else:
        program = StdioServerParameters(command=first, args=list(rest), env=dict(os.environ))
        connecting = stdio_client(program)
    answers = list[object]()
    async with connecting as streams, ClientSession(*streams) as session:
        await session.initialize()
        names = [tool.name for tool in (await session.list_tools()).tools]
        for name, arguments in json.loads(calls):
            result = await session.call_tool(name, arguments)
            answers.append([bool(result.is_error), getattr(result.content[0], "text", None)])
    print(json.dumps({"names": names, "answers": answers}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
