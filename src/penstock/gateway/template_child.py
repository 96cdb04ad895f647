# SPDX-License-Identifier: Apache-2.0
"""The process that renders one chat template (`template_worker`), and the socket to it.

Owns its start, its settings and its end. Whatever ends this process ends it: its input closes, at
the latest `max_s` of processor time later. Knows nothing of what is asked, or of who waits.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass

from penstock.errors import EngineError
from penstock.gateway.template_worker import LENGTH, MAX_ERROR_CHARS, REPLY, Status

WAIT_S = 60.0
"""For an answer, or a start, whatever the process is doing: only a very slow machine needs it."""
REAP_S = 10.0
"""For the kernel to end a process and take back its memory."""
_PROGRAM = (
    "import sys; sys.path += sys.argv[1:]; "
    "from penstock.gateway.template_worker import main; main()"
)
_ENVIRONMENT = ("TZ", "TZDIR")
"""All that the process gets of the environment: templates write dates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSettings:
    """What the process gets before all else."""

    source: str
    max_s: float
    """Processor time of one rendering."""
    max_bytes: int
    """Of one text."""
    memory_bytes: int
    """Of one rendering, beyond what the idle process has."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: Status
    text: str


class ChildDied(Exception):
    """While it rendered; `code` is what it ended with."""

    def __init__(self, error: Exception, code: int | None) -> None:
        super().__init__(error)
        self.has_timed_out = isinstance(error, TimeoutError)
        self.code = code


class TemplateChild:
    def __init__(self, settings: TemplateSettings) -> None:
        self.socket, its = socket.socketpair()
        self._max_bytes = max(settings.max_bytes, 4 * MAX_ERROR_CHARS)
        words = [sys.executable, "-I", "-S", "-c", _PROGRAM, *filter(os.path.isabs, sys.path)]
        with its:
            self._popen = subprocess.Popen(
                words,
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                cwd="/",
            )
        self._owner = os.getpid()
        self.pid = self._popen.pid
        self._finalize = weakref.finalize(self, _end, self._popen, self.socket)
        with suppress(OSError):  # it has ended already: reading comes to that
            self.send(encode(asdict(settings)), time.monotonic() + WAIT_S)

    def lives(self) -> bool:
        """And does not belong to the process that this one was forked from."""
        return self._owner == os.getpid() and self._popen.poll() is None

    def send(self, message: bytes, deadline: float) -> None:
        self._set_timeout(deadline)
        self.socket.sendall(frame(message))

    def receive(self, deadline: float) -> Reply:
        """The next reply; the first one says that the process is ready."""
        status, length = self.read_header(self._receive(REPLY.size, deadline))
        return Reply(status, to_text(self._receive(length, deadline)))

    def read_header(self, header: bytes | bytearray) -> tuple[Status, int]:
        """The status, and the length of the text that follows."""
        status, length = REPLY.unpack(header)
        if length > self._max_bytes:
            raise OSError("the process breaks its protocol")
        return Status(status), length

    def end(self, error: Exception | None = None) -> int | None:
        """Its exit code: its own, if the error says that it was ending anyway."""
        if isinstance(error, EOFError | ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(REAP_S)
        self._finalize()
        return self._popen.returncode

    def _receive(self, length: int, deadline: float) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            self._set_timeout(deadline)
            num_bytes = self.socket.recv_into(view)
            if not num_bytes:
                raise EOFError
            view = view[num_bytes:]
        return data

    def _set_timeout(self, deadline: float) -> None:
        self.socket.settimeout(max(0.001, deadline - time.monotonic()))


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def to_text(data: bytes | bytearray) -> str:
    return data.decode("utf-8", "surrogatepass")


def did_not_start(code: int | None) -> EngineError:
    return EngineError(
        f"the process that renders chat templates did not start: {sys.executable} "
        f"ended with code {code}"
    )


def _end(popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    popen.kill()
    with suppress(subprocess.TimeoutExpired):
        popen.wait(REAP_S)


def encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
