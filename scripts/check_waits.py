# SPDX-License-Identifier: Apache-2.0
"""Fail when `src` contains a wait without a deadline: such a wait turns one dead peer into a run
that stands still.

Owns the list of calls that can block for ever. Each takes a deadline: a `timeout`, or a block of
`asyncio.timeout` or `asyncio.timeout_at` around it. A wait that is right without one, such as an
idle worker's wait for work, is in `waits.toml`, with who ends it. Works on the syntax tree of one
function at a time: a deadline in its caller is a reason for `waits.toml`.

Not found: `with lock:`, iteration over a pipe or a stream, a plain `await` of a task or a future,
and what a library does inside.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "scripts" / "waits.toml"

BARE_METHODS = frozenset({"get", "wait", "join", "acquire", "result", "select", "communicate"})
"""Methods of queues, events, threads, processes, locks, futures and selectors that wait for ever if
they get no argument. With one, `get` is a dictionary's and `join` is text's."""
METHODS = frozenset(
    {"recv", "recv_into", "recv_bytes", "accept", "readexactly", "readuntil", "readline"}
)
"""Methods of sockets, pipes and streams, which take no timeout themselves."""
FUNCTIONS = frozenset(
    {
        "asyncio.wait",
        "asyncio.open_connection",
        "concurrent.futures.wait",
        "concurrent.futures.as_completed",
        "http.client.HTTPConnection",
        "http.client.HTTPSConnection",
        "httpx2.AsyncClient",
        "httpx2.Client",
        "socket.create_connection",
        "subprocess.call",
        "subprocess.check_call",
        "subprocess.check_output",
        "subprocess.run",
        "urllib.request.urlopen",
    }
)
"""Functions that take `timeout` and wait for ever, or as long as a library likes, without it."""
DEADLINES = frozenset({"asyncio.timeout", "asyncio.timeout_at"})


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Wait:
    """A call that can block for ever."""

    path: str
    line: int
    call: str
    """Its source text, as `ast.unparse` writes it."""

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.call} can block for ever; give it a timeout, or a "
            "block of asyncio.timeout, or say in scripts/waits.toml who ends it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A wait that is right without a deadline."""

    path: str
    call: str
    times: int
    """How often this call stands in the file."""


def names(tree: ast.AST) -> dict[str, str]:
    """Map each name that an import binds to the dotted path it stands for."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                first = name.name.split(".")[0]
                bound[name.asname or first] = name.name if name.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return bound


def dotted(node: ast.expr, bound: Mapping[str, str]) -> str:
    """The path that an expression such as `subprocess.run` stands for; empty for others."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value, bound)):
        return f"{owner}.{node.attr}"
    return ""


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def has_timeout(call: ast.Call) -> bool:
    """It has the argument `timeout`, and does not set it to None."""
    return any(given.arg == "timeout" and not is_none(given.value) for given in call.keywords)


def can_block(call: ast.Call, bound: Mapping[str, str]) -> bool:
    if has_timeout(call):
        return False
    if dotted(call.func, bound) in FUNCTIONS:
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr in BARE_METHODS:
        does_not_wait = any(given.arg in ("blocking", "block") for given in call.keywords)
        return not call.args and not does_not_wait and not _is_query(call)
    return call.func.attr in METHODS


def _is_query(call: ast.Call) -> bool:
    """Keywords of a search, such as `entry_points.select(group=...)`."""
    return bool(call.keywords) and not any(given.arg == "timeout" for given in call.keywords)


def has_deadline(block: ast.AsyncWith, bound: Mapping[str, str]) -> bool:
    """It is a block of `asyncio.timeout(...)`, with a time."""
    return any(
        isinstance(item.context_expr, ast.Call)
        and dotted(item.context_expr.func, bound) in DEADLINES
        and not any(map(is_none, item.context_expr.args))
        for item in block.items
    )


def find_waits(source: str, path: str) -> list[Wait]:
    """Calls of one file that can block for ever, in the order of its lines."""
    tree = ast.parse(source, filename=path)
    bound = names(tree)

    def visit(node: ast.AST) -> Iterator[Wait]:
        if isinstance(node, ast.Call) and can_block(node, bound):
            yield Wait(path=path, line=node.lineno, call=ast.unparse(node))
        if isinstance(node, ast.AsyncWith) and has_deadline(node, bound):
            yield from nested(node)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    def nested(node: ast.AST) -> Iterator[Wait]:
        """Inside a deadline only functions that are defined there, and run later, count."""
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child) if is_function else nested(child)

    return sorted(visit(tree))


def unkept(waits: Sequence[Wait], kept: Sequence[Kept]) -> tuple[list[Wait], list[str]]:
    """Waits that nothing excuses, and entries that excuse nothing."""
    left = Counter({(one.path, one.call): one.times for one in kept})
    found: list[Wait] = []
    for wait in waits:
        if left[wait.path, wait.call] > 0:
            left[wait.path, wait.call] -= 1
        else:
            found.append(wait)
    stale = [f"{path}: {call} is no longer there" for (path, call), n in left.items() if n > 0]
    return found, stale


def read_kept(text: str) -> list[Kept]:
    """The entries of `waits.toml`; each says who ends the wait."""
    kept: list[Kept] = []
    for path, entries in tomllib.loads(text).items():
        for entry in entries:
            if len(str(entry["ended_by"]).split()) < 3:
                raise SystemExit(f"waits.toml: {path}: say who ends {entry['call']}, and when")
            kept.append(Kept(path=path, call=entry["call"], times=entry.get("times", 1)))
    return kept


def main() -> int:
    files = sorted((ROOT / "src").rglob("*.py"))
    waits = [
        wait
        for file in files
        for wait in find_waits(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix())
    ]
    kept = read_kept(KEPT.read_text(encoding="utf-8"))
    found, stale = unkept(waits, kept)
    for line in (*map(str, found), *(f"scripts/waits.toml: {text}" for text in stale)):
        print(line, file=sys.stderr)
    num = len(found) + len(stale)
    print(f"check_waits: {len(files)} files, {len(kept)} kept waits, {num} findings")
    return 1 if num else 0


if __name__ == "__main__":
    sys.exit(main())
