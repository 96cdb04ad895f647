# SPDX-License-Identifier: Apache-2.0
"""One child process with pipes and an exact end: `wait_ended` returns once it is dead, whether or
not anyone reads its output (`asyncio.subprocess` waits for its pipes too).

Owns its descriptors. Knows nothing of sandboxes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO


@dataclass(slots=True, kw_only=True)
class Child:
    pid: int
    stdin: StreamWriter
    stdout: StreamReader
    stderr: StreamReader
    _popen: subprocess.Popen[bytes]
    _transports: list[asyncio.BaseTransport]
    _pidfd: int
    _ended: asyncio.Event

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def wait_ended(self) -> int:
        """The exit code; negative: the signal that killed it."""
        await self._ended.wait()
        return self._popen.wait()

    def close(self) -> None:
        """Close the pipes; the process must have ended."""
        for transport in self._transports:
            transport.close()


async def start_child(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str = "/",
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start a program in a new session. Raises OSError if there is no such program."""
    popen = subprocess.Popen(  # noqa: ASYNC220 - as asyncio does: it takes a millisecond
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,
        bufsize=0,
    )
    opened: list[asyncio.BaseTransport] = []
    try:
        return await _connect(popen, opened)
    except BaseException:  # cancelled, or no descriptor left
        popen.kill()
        popen.wait()
        for transport in opened:
            transport.close()
        for pipe in _pipes(popen)[len(opened) :]:
            with suppress(OSError):  # the loop may have closed the one it was opening
                pipe.close()
        raise


def _pipes(popen: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    assert popen.stdin is not None and popen.stdout is not None and popen.stderr is not None
    return popen.stdout, popen.stderr, popen.stdin


async def _connect(popen: subprocess.Popen[bytes], opened: list[asyncio.BaseTransport]) -> Child:
    """opened: gets the transports of `_pipes`, in their order."""
    loop = asyncio.get_running_loop()
    stdout, stderr, unused = (StreamReader(loop=loop) for _ in range(3))
    *outputs, stdin = _pipes(popen)
    for reader, pipe in zip((stdout, stderr), outputs, strict=True):
        opened.append(
            (await loop.connect_read_pipe(lambda to=reader: StreamReaderProtocol(to), pipe))[0]
        )
    writer, protocol = await loop.connect_write_pipe(lambda: StreamReaderProtocol(unused), stdin)
    opened.append(writer)
    pidfd, ended = os.pidfd_open(popen.pid), asyncio.Event()

    def on_end() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        popen.wait()
        ended.set()

    loop.add_reader(pidfd, on_end)
    return Child(
        pid=popen.pid,
        stdin=StreamWriter(writer, protocol, None, loop),
        stdout=stdout,
        stderr=stderr,
        _popen=popen,
        _transports=opened,
        _pidfd=pidfd,
        _ended=ended,
    )
