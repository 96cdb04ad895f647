# SPDX-License-Identifier: Apache-2.0
"""Check of the log of operators: every line is there, as it was written.

Each line has the hash of the line before; `admin.head` and the ledger have the number and hash of a
line that must be there. Finds changed, removed and added lines, and a log that was cut or deleted,
unless log, head and ledger were all forged together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from penstock.audit.report import Check, Violations
from penstock.durable import read_regular

MAX_LOG_BYTES = 1 << 30


def check_admin_log(run_dir: Path, anchor: str) -> Check:
    """`anchor`: number and hash of a line, as the ledger has them; empty for none."""
    violations = Violations("admin_log")
    head = _read(run_dir / "admin.head").decode(errors="replace").strip()  # first: the log grows
    complete, _, _ = _read(run_dir / "admin.jsonl").rpartition(b"\n")  # without half a line
    lines = complete.split(b"\n") if complete else []
    hashes = [blake3(line).hexdigest() for line in lines]
    for at, line in enumerate(lines):
        violations.extend(f"line {at + 1}", _problems(line, at + 1, hashes[at - 1] if at else ""))
    for name, expected in (("admin.head", head), ("the ledger", anchor)):
        if expected and (why := _missing(expected, hashes)):
            violations.add(name, why)
    if lines and not head:
        violations.add("admin.head", "missing or empty, beside a log")
    return violations.result(len(lines))


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


def _missing(expected: str, hashes: list[str]) -> str:
    number, _, hash = expected.partition(" ")
    if not number.isdecimal() or len(number) > 12:
        return f"not a line of the log: {expected[:80]!r}"
    if int(number) > len(hashes):
        return f"names line {number}, and the log has {len(hashes)}: the end was cut off"
    if int(number) and hashes[int(number) - 1] != hash:
        return f"names another line {number} than the log has: it was changed"
    return ""


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_LOG_BYTES)
    except FileNotFoundError:
        return b""
