# SPDX-License-Identifier: Apache-2.0
"""The public names of `penstock`, from `__all__` and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

from scripts.reference_pages.markdown import entry, head

import penstock


def names() -> list[str]:
    return [name for name in penstock.__all__ if not name.startswith("_")]


def _signature(value: Any) -> str:
    """Parameters as written; short module paths."""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "()"
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    text = text.replace("penstock.types.", "").replace("collections.abc.", "")
    return re.sub(r"^\((self|cls)(, )?", "(", text)


def _docstring(value: Any) -> str:
    """The docstring, its arguments as a list."""
    text = inspect.cleandoc(getattr(value, "__doc__", "") or "")
    before, found, after = text.partition("\nArgs:\n")
    if not found:
        return text
    arguments, gap, rest = after.partition("\n\n")
    lines = re.sub(r"\n {8,}", " ", arguments).splitlines()
    items = [re.sub(r"^\s*(\w+): ", r"- `\1`: ", line) for line in lines]
    return "\n".join([before, "", *items]) + gap + inspect.cleandoc(rest)


def _fields(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Annotated attributes of a class, with the docstring that follows each."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.Assign) and issubclass(kind, Enum):
            yield ast.unparse(node), _text(after)
        if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            yield f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}", _text(after)


def _text(node: ast.stmt) -> str:
    """The text of a docstring on one line; empty if this is something else."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _methods(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        function = value.fget if isinstance(value, property) else value
        function = getattr(function, "__func__", function)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, value


def _class(name: str, kind: type[Any]) -> str:
    parts = [f"## {name} {{ #{name} }}\n", f"{_docstring(kind)}\n"]
    parts += [entry(f"`{line}`", [text or "–"]) for line, text in _fields(kind)]
    for method, value in _methods(kind):
        if isinstance(value, property):
            text = _docstring(value.fget).replace("\n", "\n    ") or "–"
            parts.append(entry(f"`{method}`", [text]))
        else:
            function = getattr(value, "__func__", value)
            start = "async " if inspect.iscoroutinefunction(function) else ""
            text = _docstring(function).replace("\n", "\n    ") or "–"
            parts.append(entry(f"`{start}{method}{_signature(function)}`", [text]))
    return "\n".join(parts)


def _section(name: str) -> str:
    value = getattr(penstock, name)
    if inspect.isclass(value):
        return _class(name, value)
    call = f"```text\n{name}{_signature(value)}\n```\n" if callable(value) else ""
    return f"## {name} {{ #{name} }}\n\n{call}\n{_docstring(value)}\n"


def page() -> str:
    text = head(
        "Python API",
        "Everything here can be imported from `penstock`, without torch. "
        "[Stability](stability.md) says what may change."
        if names()
        else "The package has no public names yet.",
    )
    return "\n".join([text, *map(_section, names())])
