# SPDX-License-Identifier: Apache-2.0
"""Runs the external programs of a workflow, each in a sandbox that ends with the attempt.

Owns the end of a program and its message; `isolation` says what the program may reach.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.errors import WorkflowError
from penstock.rollout.isolation import Opened
from penstock.rollout.proxied_sandbox import with_ports
from penstock.rollout.sandbox.types import CommandRefused, Exit, ReadStream, Sandbox, SandboxProcess
from penstock.rollout.user_errors import KEPT_ERROR_BYTES, last_words, shorten

MAX_OUTPUT_BYTES = 1 << 20


def inherited_env() -> dict[str, str]:
    """This process's environment without the node's own credentials, for engines."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}


async def run_program(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    ports: Mapping[int, str] | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    timeout_s: float | None = None,
) -> str:
    """Run a program in this sandbox, in this process's working directory, and return its standard
    output (the last MiB). The sandbox, which must show this interpreter, is started before and
    killed after.

    Raises WorkflowError if it cannot start, exceeds `timeout_s` or a limit, or exits with a code
    other than 0. The program and its descendants end when it ends, at the timeout, on cancellation,
    and when this node dies.

    ports: of 127.0.0.1 inside, each with the path of the unix socket that it leads to.
    """
    command = with_ports(ports or {}, argv, folder=os.getcwd())
    error = bytearray()
    limit = asyncio.timeout(timeout_s)
    try:
        async with Opened(sandbox), limit:
            process = await sandbox.exec(command, env=env or {})
            ended, printed = await _finish(process, stdin, error)
    except TimeoutError:
        if not limit.expired():
            raise
        why = f"was killed after {timeout_s:g} s"
        raise WorkflowError(shorten(f"`{shlex.join(argv)}` {why}: {last_words(error)}")) from None
    except CommandRefused as error:
        raise WorkflowError(f"`{shlex.join(argv)[:200]}` cannot start: {error}") from None
    if ended.code != 0 or ended.limit:
        raise WorkflowError(shorten(f"`{shlex.join(argv)}` {_how(ended)}: {last_words(error)}"))
    return _text(printed)


async def _finish(
    process: SandboxProcess, stdin: bytes, error: bytearray
) -> tuple[Exit, bytearray]:
    printed = bytearray()
    async with asyncio.TaskGroup() as streams:
        streams.create_task(_feed(process, stdin))
        streams.create_task(_keep_end(process.stdout, printed, MAX_OUTPUT_BYTES))
        streams.create_task(_keep_end(process.stderr, error, KEPT_ERROR_BYTES))
        ended = await process.wait()
    return ended, printed


async def _feed(process: SandboxProcess, data: bytes) -> None:
    with suppress(ConnectionError):  # it need not read its input
        process.stdin.write(data)
        await process.stdin.drain()
    process.stdin.close()


async def _keep_end(source: ReadStream, kept: bytearray, num_bytes: int) -> None:
    while chunk := await source.read(1 << 16):
        kept += chunk
        del kept[:-num_bytes]


def _how(ended: Exit) -> str:
    if ended.limit:
        return f"was ended at its limit {ended.limit} (sandbox.workflow.limits in the run file)"
    return f"exited with code {ended.code}"


def _text(data: bytearray) -> str:
    return data.decode(errors="replace").strip()
