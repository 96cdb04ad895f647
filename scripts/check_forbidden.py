# SPDX-License-Identifier: Apache-2.0
"""Fail when the source could run somebody else's bytes, or lacks its licence line.

Owns two rules. In `src`: nothing that deserialises into code (pickle and its relatives,
`torch.load`, `yaml.load`, `np.load` with pickles allowed) and no `eval(` or `exec(` call.
Everywhere: each Python file names its licence. Works on the syntax tree, so comments, strings and
`model.eval()` are fine, and an import alias does not hide a breach.

There is no way to silence a finding: a use that is really needed is discussed here, in this file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPDX = "# SPDX-License-Identifier: Apache-2.0"
LICENSED = ("src", "tests", "scripts", "recipes", "benchmarks", "docs")
"""Folders whose Python files carry the licence line; those not there yet are passed over."""

MODULES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"})
BUILTINS = frozenset({"eval", "exec"})
NAMES = {
    "torch.load": "read tensors with safetensors",
    **dict.fromkeys(
        ("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.safe_load"),
        "use penstock.config.yaml_positions.read_values",
    ),
}
"""Functions that may not be named at all, called or not, with the cure."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def aliases(tree: ast.AST) -> dict[str, str]:
    """Map each name an import binds to the dotted path it stands for."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                first = name.name.split(".")[0]
                bound[name.asname or first] = name.name if name.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                bound[name.asname or name.name] = f"{node.module}.{name.name}"
    return bound


def dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    """The path an expression such as `np.load` stands for, or None when it is not a plain one."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, bound)
        return f"{owner}.{node.attr}" if owner else None
    return None


def imported(node: ast.AST, bound: dict[str, str]) -> Iterator[str]:
    """Modules an import statement, or a call that imports by name, brings in."""
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
    elif isinstance(node, ast.Call) and node.args:
        first = node.args[0]
        by_name = dotted(node.func, bound) in {"__import__", "importlib.import_module"}
        if by_name and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def allows_pickle(call: ast.Call) -> bool:
    """True for `np.load` calls that do not leave `allow_pickle` at its safe default, False."""
    given = [k.value for k in call.keywords if k.arg == "allow_pickle"] + call.args[2:3]
    return any(not (isinstance(v, ast.Constant) and v.value is False) for v in given)


def check_node(node: ast.AST, bound: dict[str, str]) -> Iterator[str]:
    """The complaints about one node of the tree."""
    for module in imported(node, bound):
        if module.split(".")[0] in MODULES:
            yield f"imports {module}; no pickle on any wire or store"
    if isinstance(node, ast.Call):
        called = (dotted(node.func, bound) or "").removeprefix("builtins.")
        if called in BUILTINS:
            yield f"calls {called}()"
        if called == "numpy.load" and allows_pickle(node):
            yield "calls np.load with allow_pickle; leave it at False"
    if isinstance(node, ast.Attribute) and (path := dotted(node, bound)) in NAMES:
        yield f"uses {path}; {NAMES[path]}"
    if isinstance(node, ast.ImportFrom):
        for name in node.names:
            if (path := f"{node.module}.{name.name}") in NAMES:
                yield f"uses {path}; {NAMES[path]}"


def find_forbidden(source: str, path: str) -> list[Finding]:
    """Everything in one file of `src` that may not stand there."""
    tree = ast.parse(source, filename=path)
    bound = aliases(tree)
    return sorted(
        Finding(path=path, line=getattr(node, "lineno", 1), message=message)
        for node in ast.walk(tree)
        for message in check_node(node, bound)
    )


def find_unlicensed(source: str, path: str) -> list[Finding]:
    """One finding when neither of the first two lines (a `#!` may be first) names the licence."""
    if SPDX in source.splitlines()[:2]:
        return []
    return [Finding(path=path, line=1, message=f"lacks the line `{SPDX}`")]


def main() -> int:
    findings: list[Finding] = []
    num_files = 0
    for folder in LICENSED:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            source = file.read_text(encoding="utf-8")
            findings += find_unlicensed(source, path)
            if folder == "src":
                findings += find_forbidden(source, path)
            num_files += 1
    for finding in findings:
        print(finding, file=sys.stderr)
    print(f"check_forbidden: {num_files} files, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
