# SPDX-License-Identifier: Apache-2.0
"""How commands print: one JSON object as the last line, durations and numbers as people read
them."""

from __future__ import annotations

import sys


def print_json(value: object) -> None:
    """The last line on stdout, for programs."""
    from penstock.wire.codec import encode_json

    sys.stdout.write(encode_json(value).decode() + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for people; stdout stays for results."""
    print(text, file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """`1 node`, `2,048 nodes`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def clock(seconds: float) -> str:
    """`0:42`, `1:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def span(seconds: float) -> str:
    """`0.4 s`, `42 s`, `5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
