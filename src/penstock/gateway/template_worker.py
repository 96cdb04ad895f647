# SPDX-License-Identifier: Apache-2.0
"""Renders one chat template, in a separate process that `template_child` starts. A chat template
comes with a model, so it is a program of the model's author.

Owns the sandbox: the template reaches no attribute of Python objects and changes no value. The
process opens no file and starts no program; its memory is bounded, and a timer of processor time
kills it.
Ends when the socket on its standard input does. Imports jinja2 and the standard library alone.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import signal
import socket
import time
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import NoReturn, cast

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = Struct("!Q")
"""Before each message to this process: of its JSON."""
REPLY = Struct("!BQ")
"""Before each text from it: the status, its length."""
MAX_ERROR_CHARS = 2_000
_LATE_IMPORTS = "{{ 'x' | wordwrap(2) | striptags | pprint }}{{ 1 // 0 }}"
"""Makes jinja2 import what it imports late: a limited process opens no file."""


class Status(IntEnum):
    RENDERED = 0
    FAILED = 1
    """The text says why."""
    INVALID = 2
    """The template does not compile."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: meant for the program
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    time.tzset()  # reads a file
    connection = socket.socket(fileno=0)
    settings = json.loads(_receive(connection, _receive_length(connection)))
    TemplateWorker(_LATE_IMPORTS, max_bytes=0).answer(b"{}")
    worker = TemplateWorker(settings["source"], max_bytes=settings["max_bytes"])
    _limit_process(settings["memory_bytes"])
    connection.sendall(REPLY.pack(Status.RENDERED, 0))  # ready
    while True:
        length = _receive_length(connection)
        signal.setitimer(signal.ITIMER_PROF, settings["max_s"])
        status, text = worker.answer(_receive(connection, length))
        connection.sendall(REPLY.pack(status, len(text)) + text)
        signal.setitimer(signal.ITIMER_PROF, 0)


class TemplateWorker:
    def __init__(self, source: str, *, max_bytes: int) -> None:
        self._source = source
        self._max_bytes = max_bytes
        self._environment = make_environment()
        self._template: Template | None = None

    def answer(self, values: bytes) -> tuple[Status, bytes]:
        """The rendered text, or what went wrong. It is compiled under the limits, too."""
        try:
            if self._template is None:
                self._template = self._environment.from_string(self._source)
        except Exception as error:  # whatever a template can make jinja2 raise
            return Status.INVALID, _describe(error)
        try:
            text = _to_bytes(self._template.render(json.loads(values)))
        except MemoryError:
            return Status.FAILED, b"the template makes more than its memory holds"
        except Exception as error:
            return Status.FAILED, _describe(error)
        if len(text) > self._max_bytes:
            return Status.FAILED, b"the template makes more than %d bytes" % self._max_bytes
        return Status.RENDERED, text


def make_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own filter escapes HTML
    functions = cast(dict[str, object], environment.globals)
    functions.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    del functions["lipsum"]
    return environment


def _limit_process(memory_bytes: int) -> None:
    """What it has open stays open. The memory is beyond what it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes,
        **dict.fromkeys((resource.RLIMIT_CORE, resource.RLIMIT_FSIZE), 0),
        **dict.fromkeys((resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE), 0),
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _receive_length(connection: socket.socket) -> int:
    (length,) = LENGTH.unpack(_receive(connection, LENGTH.size))
    return length


def _receive(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        num_bytes = connection.recv_into(view)
        if not num_bytes:
            raise SystemExit
        view = view[num_bytes:]
    return bytes(data)


def _describe(error: Exception) -> bytes:
    text = str(error) or type(error).__name__
    return _to_bytes(text[:MAX_ERROR_CHARS])


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern[:100])


def _tojson(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
