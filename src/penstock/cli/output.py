# SPDX-License-Identifier: Apache-2.0
"""How commands print: JSON for programs; durations, sizes and tables for people. What others wrote
does not steer the terminal: commands print text by `print_text` and `print_note` only."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence

from penstock.redaction import printable as printable

_CONTROLS = re.compile(r"[\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters that JSON need not escape."""


def print_json(value: object) -> None:
    """Print one JSON object as the last line on stdout, for programs."""
    from penstock.wire.codec import encode_json

    text = encode_json(value).decode()
    sys.stdout.write(_CONTROLS.sub(lambda found: json.dumps(found[0])[1:-1], text) + "\n")
    sys.stdout.flush()


def print_text(text: str = "") -> None:
    """Print a result for people on stdout."""
    print(printable(text), flush=True)


def print_note(text: str) -> None:
    """Print a line for people on stderr; stdout is for results."""
    print(printable(text), file=sys.stderr, flush=True)


def pluralise(number: int, noun: str, plural: str = "") -> str:
    """`1 node`, `2,048 nodes`, `3 batches`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_clock(seconds: float) -> str:
    """`0:42`, `1:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_duration(seconds: float) -> str:
    """`0.4 s`, `42 s`, `5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def format_age(seconds: float) -> str:
    """`42 s`, `5 min`, `3 h`, `12 d`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def format_moment(at: float) -> str:
    """`2026-11-17 16:40:12 (5 min ago)`, in local time."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return f"{clock} ({format_age(time.time() - at)} ago)"


def format_bytes(num_bytes: int) -> str:
    """`512 B`, `8.4 kB`, `28 GB`."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 9.95 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, num_left_aligned: int = 1
) -> list[str]:
    """Lines of a table with aligned columns; the first `num_left_aligned` align left."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines: list[str] = []
    for row in (headers, *rows):
        cells = [
            text.ljust(width) if number < num_left_aligned else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
