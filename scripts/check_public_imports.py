# SPDX-License-Identifier: Apache-2.0
"""Fail when a recipe or a page imports from penstock what is not public.

Owns one rule: Python files of `recipes/`, and Python blocks of README.md, `recipes/` and `docs/`,
say `import penstock` or `from penstock import NAME`, with a NAME of `penstock.__all__`, and use
only such names as `penstock.NAME`. `recipes/foreign` does not import penstock at all. Works on the
syntax tree. Of a block that only shows a shape, and does not parse, the import lines are checked.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "penstock"
FOREIGN = "recipes/foreign/"
"""Programs that use the protocol only."""
INTERNAL = "docs/decisions/"
"""Pages for those who change penstock itself."""
IMPORT = re.compile(rf"\s*(import|from) {PACKAGE}\b")
BLOCK = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def public_names() -> frozenset[str]:
    """`penstock.__all__`, read without an import."""
    tree = ast.parse((ROOT / "src" / PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign)
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError("penstock/__init__.py has no __all__")


def problems(node: ast.AST, names: frozenset[str]) -> Iterator[str]:
    """What one node of the tree does with penstock that it may not do."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith(f"{PACKAGE}."):
                yield f"imports {alias.name}; import a public name from {PACKAGE}"
    elif isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        for alias in node.names:
            if module.startswith(f"{PACKAGE}."):
                yield f"imports {alias.name} from {module}; import a public name from {PACKAGE}"
            elif module == PACKAGE and alias.name not in names:
                yield f"imports {alias.name}, which is not public; see {PACKAGE}.__all__"
    elif isinstance(node, ast.Attribute) and is_other_attribute(node, names):
        yield f"uses {PACKAGE}.{node.attr}, which is not public; see {PACKAGE}.__all__"


def is_other_attribute(node: ast.Attribute, names: frozenset[str]) -> bool:
    owner = node.value
    return isinstance(owner, ast.Name) and owner.id == PACKAGE and node.attr not in names


def check(source: str, path: str, first_line: int, names: frozenset[str]) -> list[Finding]:
    """Everything in one piece of Python that may not stand there."""
    tree = ast.parse(source, filename=path)
    found = [
        Finding(path=path, line=first_line - 1 + getattr(node, "lineno", 1), message=message)
        for node in ast.walk(tree)
        for message in problems(node, names)
    ]
    if path.startswith(FOREIGN) and any(map(IMPORT.match, source.splitlines())):
        found.append(Finding(path=path, line=first_line, message=f"imports {PACKAGE}"))
    return sorted(found)


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page, each with its first line."""
    for match in BLOCK.finditer(page):
        code = textwrap.dedent(match["code"])
        try:
            ast.parse(code)
        except SyntaxError:
            lines = code.splitlines()
            code = "\n".join(line.strip() if IMPORT.match(line) else "" for line in lines)
        yield page.count("\n", 0, match.start("code")) + 1, code


def main() -> int:
    names = public_names()
    findings: list[Finding] = []
    pieces = 0
    files = [*(ROOT / "recipes").rglob("*.py"), *ROOT.glob("README.md")]
    files += [*(ROOT / "recipes").rglob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for file in sorted(files):
        path, text = file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")
        if path.startswith(INTERNAL):
            continue
        for line, code in [(1, text)] if file.suffix == ".py" else blocks(text):
            findings += check(code, path, line, names)
            pieces += 1
    for finding in findings:
        print(finding, file=sys.stderr)
    print(f"check_public_imports: {pieces} pieces of Python, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
