# SPDX-License-Identifier: Apache-2.0
"""Calls functions of `solution.py`, as asked by frames on standard input. Runs in the solution's
sandbox, as a script of the standard library only.

Nothing here is trusted: a solution can replace all of it, and gains what it gains by a wrong
answer."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, BinaryIO

PREFIX_BYTES = 4


def take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the frames to other descriptors: what the solution prints goes to standard error."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def read_frame(source: BinaryIO) -> Any:
    """The next message; None at the end."""
    prefix = source.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return None
    return json.loads(source.read(int.from_bytes(prefix, "little")))


def write_frame(target: BinaryIO, text: str) -> None:
    body = text.encode()
    target.write(len(body).to_bytes(PREFIX_BYTES, "little") + body)
    target.flush()


def answer(call: Any) -> str:
    try:
        sys.path.insert(0, os.getcwd()) if os.getcwd() not in sys.path else None
        import solution  # pyright: ignore[reportMissingImports]

        value = getattr(solution, call["name"])(*call["args"])
        return json.dumps({"value": value}, allow_nan=False)
    except BaseException as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})


def main() -> None:
    requests, answers = take_channel()
    while (call := read_frame(requests)) is not None:
        write_frame(answers, answer(call))


if __name__ == "__main__":
    main()
