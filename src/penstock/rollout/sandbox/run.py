# SPDX-License-Identifier: Apache-2.0
"""Run one program in a sandbox to its end, with its input and the end of its output in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.rollout.sandbox.types import Exit, ReadStream, Sandbox, SandboxProcess

MAX_KEPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    exit: Exit
    stdout: bytes
    stderr: bytes


async def run(
    sandbox: Sandbox, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] = {}
) -> Finished:
    """The limits of the sandbox bound how long it takes and how much it prints. The last MiB of
    each stream is kept: many attempts at once would fill the node's memory."""
    process = await sandbox.exec(argv, env=env)
    _, stdout, stderr, ended = await asyncio.gather(
        _feed(process, stdin), _end(process.stdout), _end(process.stderr), process.wait()
    )
    return Finished(exit=ended, stdout=stdout, stderr=stderr)


async def _end(source: ReadStream) -> bytes:
    kept = bytearray()
    while chunk := await source.read(1 << 16):
        kept += chunk
        del kept[:-MAX_KEPT_BYTES]
    return bytes(kept)


async def _feed(process: SandboxProcess, data: bytes) -> None:
    with suppress(ConnectionError):  # it need not read its input
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()
