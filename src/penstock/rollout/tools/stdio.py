# SPDX-License-Identifier: Apache-2.0
"""MCP over the standard streams of a program in a sandbox.

Owns the framing and its bounds: a message that is too long, or too many lines that are not
messages, end the program. Fails closed: without a sandbox there is no server.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from penstock.errors import BadRequest
from penstock.rollout.isolation import FOREVER_S, Isolation, Opened, Use
from penstock.rollout.proxied_sandbox import with_ports
from penstock.rollout.sandbox.lines import read_lines
from penstock.rollout.sandbox.types import ReadStream, Sandbox, SandboxProcess, WriteStream
from penstock.rollout.tools.mcp_session import Ending
from penstock.rollout.user_errors import KEPT_ERROR_BYTES, last_words
from penstock.rollout.visible_folders import program_folders, python_folders
from penstock.wire.json_parts import require_few_parts

MAX_MESSAGE_BYTES = 4 << 20
MAX_WRONG_LINES = 1000
"""Empty ones too, beyond one for each message."""
_CHUNK_BYTES = 1 << 16
Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioServer:
    """A program that speaks MCP."""

    isolation: Isolation
    argv: Sequence[str]
    row_id: str = ""
    is_shared: bool = False
    """By all attempts of a node: then only a message is bounded, not all of them together."""

    @asynccontextmanager
    async def connect(self, ending: Ending) -> AsyncGenerator[TransportStreams]:
        """The streams of a new process, which ends with the context."""
        box = await self._sandbox()
        to_session, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        error = bytearray()
        with to_session, incoming, outgoing, from_session:
            async with Opened(box, self.is_shared), anyio.create_task_group() as tasks:
                process = await box.exec(with_ports({}, self.argv, folder=os.getcwd()))
                tasks.start_soon(_read, process, to_session, ending, error)
                tasks.start_soon(_write, process.stdin, from_session)
                tasks.start_soon(_keep_end, process.stderr, error)
                try:
                    yield incoming, outgoing
                finally:
                    tasks.cancel_scope.cancel()

    async def _sandbox(self) -> Sandbox:
        passed = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        limits = self.isolation.settings_of(Use.SERVERS).limits
        if self.is_shared:
            limits = replace(limits, cpu_s=FOREVER_S, output_bytes=1 << 62)
        return await self.isolation.open(
            Use.SERVERS,
            folders=(*program_folders(self.argv), *python_folders()),
            env=passed,
            limits=limits,
            row_id=self.row_id,
        )


async def _read(
    process: SandboxProcess, session: Incoming, ending: Ending, error: bytearray
) -> None:
    """consumes: the program's output · produces: messages for the session
    waits for: the program, then for the session to take each message"""
    async with session:
        ending.why = await _read_lines(process.stdout, session)
        if not ending.why:
            ended = await process.wait()
            how = f"at its limit {ended.limit}" if ended.limit else f"with code {ended.code}"
            said = last_words(error)
            ending.why = f"its program ended {how}{': ' if said else ''}{said}"


async def _read_lines(source: ReadStream, session: Incoming) -> str:
    """Why it stopped before the end of the output; empty at the end."""
    num_wrong = 0
    try:
        async for line in read_lines(source, MAX_MESSAGE_BYTES):
            require_few_parts(line)
            message = _parse(line)
            num_wrong += 1 if message is None else -1
            if message is not None:
                await session.send(message)
            if num_wrong > MAX_WRONG_LINES:
                return f"it printed more than {MAX_WRONG_LINES:,} lines that are not MCP messages"
    except (BadRequest, ValueError) as error:
        return f"it sent {error}"
    return ""


def _parse(line: bytes) -> SessionMessage | None:
    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError:
        return None


async def _write(target: WriteStream, session: Outgoing) -> None:
    async with session:
        async for message in session:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                target.write(text.encode() + b"\n")
                await target.drain()
            except (OSError, RuntimeError):  # it ended; the reader says so
                return


async def _keep_end(source: ReadStream, kept: bytearray) -> None:
    while chunk := await source.read(_CHUNK_BYTES):
        kept += chunk
        del kept[:-KEPT_ERROR_BYTES]
