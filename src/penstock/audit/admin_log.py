# SPDX-License-Identifier: Apache-2.0
"""Check of the log of operators: every line is there, as it was written.

Each line has the hash of the line before; `admin.head` and the ledger have the number and hash of a
line that must be there. Finds changed, removed and added lines, and a log that was cut or deleted,
unless log, head and ledger were all forged together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from penstock.audit.report import Check, Violations
from penstock.durable import open_regular, read_regular

MAX_HEAD_BYTES = 4096
MAX_LINE_BYTES = 1 << 20
MAX_BAD_LINES = 1000
"""After so many the rest is not read: the folder may belong to another user."""


def check_admin_log(run_dir: Path, anchor: str) -> Check:
    """`anchor`: number and hash of a line, as the ledger has them; empty for none."""
    violations = Violations("admin_log")
    expected = {"admin.head": _read_head(run_dir / "admin.head"), "the ledger": anchor}
    wanted = {number for number, _ in map(_split, expected.values())}
    found: dict[int, str] = {}
    num_lines = num_bad = 0
    previous = ""
    for line in _lines(run_dir / "admin.jsonl"):
        num_lines += 1
        problems = _problems(line, num_lines, previous)
        violations.extend(f"line {num_lines}", problems)
        num_bad += bool(problems)
        previous = blake3(line).hexdigest()
        if num_lines in wanted:
            found[num_lines] = previous
        if num_bad == MAX_BAD_LINES or len(line) > MAX_LINE_BYTES:
            violations.add(f"line {num_lines}", "the lines after it were not read")
            return violations.result(num_lines)
    for name, text in expected.items():
        if text and (why := _missing(text, num_lines, found)):
            violations.add(name, why)
    if num_lines and not expected["admin.head"]:
        violations.add("admin.head", "missing or empty, beside a log")
    return violations.result(num_lines)


def _problems(line: bytes, number: int, previous: str) -> list[str]:
    try:
        found: object = json.loads(line)
    except (ValueError, RecursionError):
        return ["not JSON: it was changed"]
    if not isinstance(found, dict):
        return ["not an object: it was changed"]
    entry = cast(dict[str, Any], found)
    problems: list[str] = []
    if entry.get("number") != number:
        problems.append(f"says that it is line {entry.get('number')!r:.40}: lines are missing")
    if entry.get("previous") != previous:
        problems.append("does not follow the line before it: one of both was changed or removed")
    return problems


def _split(expected: str) -> tuple[int, str]:
    """Number and hash of a line; 0 if it is none."""
    number, _, hash = expected.partition(" ")
    return (int(number) if number.isdecimal() and len(number) <= 12 else 0), hash


def _missing(expected: str, num_lines: int, found: dict[int, str]) -> str:
    number, hash = _split(expected)
    if not number and not expected.startswith("0 "):
        return f"not a line of the log: {expected[:80]!r}"
    if number > num_lines:
        return f"names line {number}, and the log has {num_lines}: the end was cut off"
    if number and found[number] != hash:
        return f"names another line {number} than the log has: it was changed"
    return ""


def _read_head(path: Path) -> str:
    try:
        return read_regular(path, MAX_HEAD_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _lines(path: Path) -> Iterator[bytes]:
    """Without their ends, and without half a line at the end of the log; a line that is too long is
    the last."""
    try:
        log = open_regular(path)
    except FileNotFoundError:
        return
    with log:
        while line := log.readline(MAX_LINE_BYTES + 1):
            if line.endswith(b"\n"):
                yield line[:-1]
            elif len(line) > MAX_LINE_BYTES:
                yield line
                return
