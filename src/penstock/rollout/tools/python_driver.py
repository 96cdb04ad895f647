# SPDX-License-Identifier: Apache-2.0
"""Runs Python code as asked by frames on standard input, and answers with what it printed. Runs
inside a sandbox, as a script of the standard library only.

Variables stay from one request to the next; a bare last expression is printed, as in a notebook.
Nothing here is trusted: code can replace all of it, and gains what it gains by a wrong answer.
"""

from __future__ import annotations

import ast
import code
import json
import linecache
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from types import CodeType, FrameType, ModuleType
from typing import BinaryIO

PREFIX_BYTES = 4
CHUNK_BYTES = 1 << 16
KEPT_BYTES = 1 << 17
"""Of the beginning of an output, and of its end."""


class TimeLimit(BaseException):
    """Not an Exception: code that catches those is stopped too."""


class Output:
    """What the code and its children print, through a pipe that is always read."""

    def __init__(self) -> None:
        self._head, self._tail, self._num_bytes = bytearray(), bytearray(), 0
        self._is_done, self._lock = threading.Event(), threading.Lock()
        self._mark = os.urandom(16)
        read, self._write = os.pipe()
        for descriptor in (1, 2):
            os.dup2(self._write, descriptor)
        threading.Thread(target=self._read, args=(read,), daemon=True).start()

    def take(self) -> str:
        """What was printed since the last time."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the code may have replaced them
                stream.flush()
        self._is_done.clear()
        os.write(self._write, self._mark)  # what comes before it belongs to this request
        self._is_done.wait(10)
        with self._lock:
            head, tail, num_bytes = self._head, self._tail, self._num_bytes
            self._head, self._tail, self._num_bytes = bytearray(), bytearray(), 0
        cut = num_bytes - len(head) - len(tail)
        note = f"\n[… {cut:,} bytes cut …]\n".encode() if cut > 0 else b""
        return bytes(head + note + tail).decode(errors="replace")

    def _read(self, source: int) -> None:
        held = b""  # the end of a chunk may be the beginning of a mark
        while chunk := os.read(source, CHUNK_BYTES):
            before, mark, after = (held + chunk).partition(self._mark)
            data = before + after
            held = b"" if mark else data[1 - len(self._mark) :]
            with self._lock:
                self._keep(data[: len(data) - len(held)])
            if mark:
                self._is_done.set()

    def _keep(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        room = KEPT_BYTES - len(self._head)
        self._head += chunk[: max(room, 0)]
        self._tail += chunk[max(room, 0) :]
        del self._tail[:-KEPT_BYTES]


class Interpreter(code.InteractiveInterpreter):
    """Runs one request after another with the same variables."""

    def __init__(self) -> None:
        sys.modules["__main__"] = module = ModuleType("__main__")
        super().__init__(vars(module))
        self._num_requests = 0
        self.is_error = False

    def run(self, source: str) -> None:
        self._num_requests += 1
        self.is_error = False
        name = f"<call {self._num_requests}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        try:
            for part in compiled(source, name):
                self.runcode(part)
                if self.is_error:
                    break
        except SystemExit as error:
            print(f"SystemExit: {error.code}")
        except BaseException:  # while compiling
            self.showtraceback()

    def showtraceback(self) -> None:
        self.is_error = True
        kind, error, trace = sys.exc_info()
        assert kind is not None
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
            trace = trace.tb_next
        print("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)


def compiled(source: str, name: str) -> list[CodeType]:
    """The statements, and the last expression for printing."""
    tree = ast.parse(source, name)
    is_shown = bool(tree.body) and isinstance(tree.body[-1], ast.Expr)
    if not is_shown or source.rstrip().endswith(";"):
        return [compile(tree, name, "exec")]
    last = tree.body.pop()
    shown = ast.Interactive([last])
    return [compile(tree, name, "exec"), compile(shown, name, "single")]


def take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the frames to other descriptors."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def stop(number: int, frame: FrameType | None) -> None:
    raise TimeLimit("the code ran too long")


def main() -> None:
    requests, answers = take_channel()
    output, interpreter = Output(), Interpreter()
    sys.path.insert(0, os.getcwd())
    signal.signal(signal.SIGALRM, stop)
    while len(prefix := requests.read(PREFIX_BYTES)) == PREFIX_BYTES:
        request = json.loads(requests.read(int.from_bytes(prefix, "little")))
        try:
            signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
            interpreter.run(request["code"])
        except TimeLimit:  # between two lines of ours
            interpreter.is_error = True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        answer = {"text": output.take(), "is_error": interpreter.is_error}
        body = json.dumps(answer).encode()
        answers.write(len(body).to_bytes(PREFIX_BYTES, "little") + body)
        answers.flush()


if __name__ == "__main__":
    main()
