# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of `tests.py` and reports each with the nonce. Runs in the tests' sandbox, as a
script of the standard library only, in an isolated interpreter.

Knows the solution only as JSON values that the node passes on. Never imports it, and has no folder
of the solution in its path."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import traceback
from typing import Any, BinaryIO, cast

PREFIX_BYTES = 4
MAX_WHY_CHARS = 500
MAX_QUESTION_BYTES = 4 << 20
"""The node reads no longer message."""


class SolutionError(Exception):
    """The solution raised, ended, took too long, or returned no JSON value."""


class Channel:
    """Frames to and from the node, on descriptors that tests do not print to."""

    def __init__(self) -> None:
        self._source: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._target: BinaryIO = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)

    def read(self) -> Any:
        prefix = self._source.read(PREFIX_BYTES)
        return json.loads(self._source.read(int.from_bytes(prefix, "little")))

    def write(self, message: Any) -> None:
        body = json.dumps(message, allow_nan=False).encode()
        self._target.write(len(body).to_bytes(PREFIX_BYTES, "little") + body)
        self._target.flush()


class AnswerWork:
    """CPU time of tests after the solution answered them, bounded for all tests together. What it
    returned may be costly on purpose: then the tests fail, before this sandbox ends without a
    verdict."""

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = self._left_s = cpu_s
        signal.signal(signal.SIGPROF, self._stop)

    def begin(self) -> None:
        """The solution answered; what follows counts until the end of the test."""
        if not self._left_s:
            self._stop()
        if not signal.getitimer(signal.ITIMER_PROF)[0]:
            signal.setitimer(signal.ITIMER_PROF, self._left_s)

    def end(self) -> None:
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        self._left_s = left_s or self._left_s

    def _stop(self, *_: object) -> None:
        self._left_s = 0.0
        raise SolutionError(f"work on what it returned took more than {self._cpu_s:g} s of CPU")


class Solution:
    """What a test gets: the solution at arm's length."""

    def __init__(self, channel: Channel, work: AnswerWork) -> None:
        self._channel = channel
        self._work = work

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the solution; the result is a plain JSON value."""
        return self._ask({"call": name, "args": args})

    def run(self, stdin: str = "", *args: str) -> str:
        """Run the solution as a program and return its standard output."""
        return self._ask({"run": stdin, "args": args})

    def read(self, path: str) -> str:
        """The text of a file that the solution wrote."""
        return self._ask({"read": path, "args": ()})

    def expect(self, actual: Any, expected: Any) -> None:
        """Raise unless both are equal and of the same types, all the way down."""
        if not same(actual, expected):
            raise AssertionError(f"got {actual!r}, expected {expected!r}"[:MAX_WHY_CHARS])

    def _ask(self, question: dict[str, Any]) -> Any:
        num_bytes = len(json.dumps(question, allow_nan=False))
        if num_bytes > MAX_QUESTION_BYTES:
            raise SolutionError(f"a call with {num_bytes} bytes; at most {MAX_QUESTION_BYTES}")
        self._channel.write(question)
        answer = self._channel.read()
        self._work.begin()
        if "error" in answer:
            raise SolutionError(answer["error"])
        return answer["value"]


def same(actual: Any, expected: Any) -> bool:
    if type(actual) is not type(expected):
        return False
    if type(actual) is dict:
        return actual.keys() == expected.keys() and all(
            same(actual[key], expected[key]) for key in expected
        )
    if isinstance(expected, list):
        pairs = zip(actual, cast("list[Any]", expected), strict=False)
        return len(actual) == len(cast("list[Any]", expected)) and all(same(*two) for two in pairs)
    return actual == expected


def run_test(tests: Any, id: str, solution: Solution, work: AnswerWork) -> str:
    """Why the test failed; empty if it passed."""
    try:
        try:
            getattr(tests, id)(solution)
        finally:
            work.end()
    except BaseException as error:
        return "".join(traceback.format_exception_only(error)).strip()[-MAX_WHY_CHARS:] or "failed"
    return ""


def main() -> None:
    channel = Channel()
    head = channel.read()
    spec = importlib.util.spec_from_file_location("hidden_tests", "tests.py")
    assert spec is not None and spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    work = AnswerWork(head["cpu_s"])
    solution = Solution(channel, work)
    for id in head["ids"]:
        why = run_test(tests, id, solution, work)
        report = {"nonce": head["nonce"], "id": id, "passed": not why, "why": why}
        channel.write({"report": report})
    channel.write({"done": head["nonce"]})


if __name__ == "__main__":
    main()
