# SPDX-License-Identifier: Apache-2.0
"""Runs the external programs of a workflow, each in a separate process group that dies with the
attempt.

Input and output are files, not pipes, so a grandchild that keeps a pipe open cannot block us.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from penstock.errors import WorkflowError
from penstock.rollout.user_errors import shorten

DIE_WITH_PARENT = str(Path(__file__).with_name("exit_with_parent.py"))
MAX_OUTPUT_BYTES = 1 << 20


def inherited_env() -> dict[str, str]:
    """This process's environment without the node's own credentials."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}


async def run_program(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: bytes = b"",
    timeout_s: float | None = None,
) -> str:
    """Run a program and return its standard output (the last MiB).

    Raises WorkflowError if it cannot start, exceeds `timeout_s` or exits with a code other than 0.
    The program is killed when this node dies. Its process group is killed when the program ends, at
    the timeout and on cancellation.
    """
    with (
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        source.write(stdin)
        source.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", DIE_WITH_PARENT, str(os.getpid()), *argv),
            stdin=source,
            stdout=out,
            stderr=err,
            env=env,
            start_new_session=True,
        )
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                code = await process.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            raise WorkflowError(
                f"`{shlex.join(argv)}` was killed after {timeout_s:g} s: {_tail(err, 1500)}"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code != 0:
            raise WorkflowError(
                shorten(f"`{shlex.join(argv)}` exited with code {code}: {_tail(err, 1500)}")
            )
        return _tail(out, MAX_OUTPUT_BYTES)


def _tail(file: IO[bytes], num_bytes: int) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - num_bytes))
    return file.read().decode(errors="replace").strip()
