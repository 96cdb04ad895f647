# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, rendered in a separate process (`template_worker`), so that it can only
format messages: whatever the template does, the kernel bounds its memory and its processor time.

Owns the process: starts it at the first rendering, ends it with the program, starts another one
after a death. Refuses a template that does not compile, and for good one that has held its callers
up for MAX_DEATHS times MAX_RENDER_S: they wait at most so long, and what is free per rendering.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from penstock.errors import EngineError, WeightsError
from penstock.gateway.template_worker import LENGTH, MAX_ERROR_CHARS, REPLY, Status

MAX_RENDER_S = 5.0
"""Processor time of one rendering; a long conversation takes milliseconds."""
MAX_DEATHS = 3
"""Of the process, under the template; or the same time in renderings that are merely slow."""
FREE_S = 0.1
FREE_S_PER_BYTE = 1e-6
FREE_S_PER_PAIR = 1.2e-6
"""Processor time that a template may take: more than this is counted against it for good. Pairs of
messages count, because good templates look back from each; the most messages that a prompt may
have take what is allowed at all, so an agent that sends them gets no template refused."""
MEMORY_BYTES = 1 << 30
"""Of one rendering, beyond what an idle process has."""
MAX_TEXT_BYTES = 64 << 20
"""Of one rendering."""
WAIT_S = 60.0
"""For an answer, or a start, whatever the process is doing: only a very slow machine needs it."""
REAP_S = 10.0
"""For the kernel to end a process and take back its memory."""
KEPT = 8
"""Processes that stay, for the next renderer that has the same template."""
_PROGRAM = (
    "import sys; sys.path += sys.argv[1:]; "
    "from penstock.gateway.template_worker import main; main()"
)
_ENVIRONMENT = ("TZ", "TZDIR")
"""All that the process gets of the environment: templates write dates."""


class TemplateProcess:
    def __init__(
        self,
        source: str,
        *,
        max_s: float = MAX_RENDER_S,
        max_bytes: int = MAX_TEXT_BYTES,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._max_s = max_s
        self._max_bytes = max_bytes
        self._settings = _encode(
            {
                "source": source,
                "max_s": max_s,
                "max_bytes": max_bytes,
                "memory_bytes": memory_bytes,
            }
        )
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._held_s = 0.0

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return self._child.pid if self._child and self._child.lives() else None

    def render(self, **values: Any) -> str:
        """Raises TemplateError when the template fails, takes too long or makes too much."""
        try:
            request = _encode(values)
        except RecursionError:
            raise TemplateError("the messages are nested too deeply") from None
        with self._lock:
            if self._held_s >= MAX_DEATHS * self._max_s:
                raise TemplateError("the template held up its callers too often, it is refused")
            pairs_s = FREE_S_PER_PAIR * len(values.get("messages", ())) ** 2
            status, text = self._ask(request, pairs_s)
        if status is Status.RENDERED:
            return text
        if status is Status.INVALID:
            raise WeightsError(f"the snapshot's chat template does not compile: {text}")
        raise TemplateError(text)

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.end()

    def _ask(self, request: bytes, pairs_s: float) -> tuple[Status, str]:
        child = self._child
        if child is None or not child.lives():
            child = self._child = _Child(self._settings)
        try:
            status, cpu_s, text = child.ask(request, self._max_bytes)
        except (OSError, EOFError) as error:
            self._held_s += max(0.0, self._max_s - pairs_s)
            raise TemplateError(self._why(error, child.end(error))) from None
        self._held_s += max(0.0, cpu_s - FREE_S - FREE_S_PER_BYTE * len(request) - pairs_s)
        return status, text

    def _why(self, error: Exception, code: int | None) -> str:
        if code == -signal.SIGPROF:
            return f"the template ran for more than {self._max_s:g} s of processor time"
        if isinstance(error, TimeoutError):
            return f"the template gave no answer for {WAIT_S:g} s"
        return f"the process of the template ended with code {code}"


class _Child:
    """One process. Whatever ends its parent ends it: its input closes, at the latest MAX_RENDER_S
    of processor time later."""

    def __init__(self, settings: bytes) -> None:
        self._socket, its = socket.socketpair()
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
        self._finalize = weakref.finalize(self, _end, self._popen, self._socket)
        try:
            self._send(settings, time.monotonic() + WAIT_S)
            self._receive_header(time.monotonic() + WAIT_S)
        except (OSError, EOFError) as error:
            raise EngineError(
                f"the process that renders chat templates did not start: {sys.executable} "
                f"ended with code {self.end(error)}"
            ) from None

    def lives(self) -> bool:
        """And does not belong to the process that this one was forked from."""
        return self._owner == os.getpid() and self._popen.poll() is None

    def ask(self, request: bytes, max_bytes: int) -> tuple[Status, float, str]:
        deadline = time.monotonic() + WAIT_S
        self._send(request, deadline)
        status, cpu_s, length = self._receive_header(deadline)
        if length > max(max_bytes, 4 * MAX_ERROR_CHARS):
            raise OSError("the process breaks its protocol")
        text = self._receive(length, deadline).decode("utf-8", "surrogatepass")
        return Status(status), cpu_s, text

    def end(self, error: Exception | None = None) -> int | None:
        """Its exit code: its own, if the error says that it was ending anyway."""
        if isinstance(error, EOFError | ConnectionError):
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(REAP_S)
        self._finalize()
        return self._popen.returncode

    def _send(self, message: bytes, deadline: float) -> None:
        self._set_timeout(deadline)
        self._socket.sendall(LENGTH.pack(len(message)) + message)

    def _receive_header(self, deadline: float) -> tuple[int, float, int]:
        return REPLY.unpack(self._receive(REPLY.size, deadline))

    def _receive(self, length: int, deadline: float) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            self._set_timeout(deadline)
            num_bytes = self._socket.recv_into(view)
            if not num_bytes:
                raise EOFError
            view = view[num_bytes:]
        return data

    def _set_timeout(self, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))


def _end(popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    popen.kill()
    with suppress(subprocess.TimeoutExpired):
        popen.wait(REAP_S)


@lru_cache(maxsize=KEPT)
def shared_process(source: str, *, is_for_large: bool = False) -> TemplateProcess:
    """The one of all renderers of this template; large prompts have another, so that no
    small one waits for them."""
    return TemplateProcess(source)


def _encode(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
