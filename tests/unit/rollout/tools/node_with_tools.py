# SPDX-License-Identifier: Apache-2.0
"""A process that holds tools as a node does: a server of an attempt, a shared one, and Python.
It says `ready` when each has answered a call, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.unit.rollout.fake_dataflow import facts

from penstock.dataflow.service.nodes.messages import ToolServerInfo
from penstock.rollout.isolation import Isolation
from penstock.rollout.tools.servers import open_tools

COMMAND = (sys.executable, "-S", str(Path(__file__).with_name("hostile_server.py")), "good")
SERVERS = (
    ToolServerInfo(name="own", command=COMMAND),
    ToolServerInfo(name="shared", command=COMMAND, is_shared=True),
    ToolServerInfo(name="py", builtin="python"),
)
CALLS = (
    ("own_echo", {"text": "a"}),
    ("shared_echo", {"text": "b"}),
    ("python", {"code": "import subprocess; subprocess.Popen(['sleep', '10000']); 1"}),
)


class NoTurns:
    def turns(self) -> tuple[object, ...]:
        return ()


async def main() -> None:
    servers = await open_tools(facts(tools=SERVERS), Isolation())
    tools = servers.lease("source", "row", NoTurns())
    for name, arguments in CALLS:
        result = await tools.call({"function": {"name": name, "arguments": arguments}})
        assert not result.is_error, result.text
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
