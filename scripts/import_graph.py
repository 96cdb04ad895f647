# SPDX-License-Identifier: Apache-2.0
"""Imports between the modules of src/penstock, read from their syntax trees.

Every import counts: at the top, under `TYPE_CHECKING`, and inside functions. Used by
`check_cycles.py`, `draw_imports.py` and the tests. Imports nothing of the package itself."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
PACKAGE = "penstock"

Graph = Mapping[str, frozenset[str]]
"""Module to the modules it imports."""


def module_name(path: Path, source: Path = SOURCE) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_graph(source: Path = SOURCE) -> Graph:
    paths = {module_name(path, source): path for path in sorted((source / PACKAGE).rglob("*.py"))}
    return {name: frozenset(_imports(path, paths.keys())) - {name} for name, path in paths.items()}


def _imports(path: Path, known: Iterable[str]) -> Iterator[str]:
    modules = frozenset(known)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                yield name


def find_cycles(graph: Graph) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or through others (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[tuple[str, ...]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in sorted(graph[module]):
            if imported not in index:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            position = stack.index(module)
            members = tuple(sorted(stack[position:]))
            del stack[position:]
            if len(members) > 1:
                cycles.append(members)

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return sorted(cycles)


def parts_of(graph: Graph, container: str) -> dict[str, set[str]]:
    """Direct parts of a package and which other parts each of them imports."""
    depth = container.count(".") + 2

    def part(module: str) -> str | None:
        inside = module.startswith(f"{container}.")
        return ".".join(module.split(".")[:depth]) if inside else None

    edges: dict[str, set[str]] = {}
    for module, imported in graph.items():
        source = part(module)
        if source is None:
            continue
        targets = {target for name in imported if (target := part(name)) not in (None, source)}
        edges.setdefault(source, set()).update(targets)
    return edges
