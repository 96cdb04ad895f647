# SPDX-License-Identifier: Apache-2.0
"""The public names of `penstock`, from `__all__` and docstrings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import penstock

from scripts.reference_pages.markdown import entry, head


def names() -> list[str]:
    return [name for name in penstock.__all__ if not name.startswith("_")]


def _signature(value: Any) -> str:
    """Parameters as written; short module paths."""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "()"
    return text.replace("penstock.types.", "").replace("collections.abc.", "").replace("'", "")


def _docstring(value: Any) -> str:
    return inspect.cleandoc(getattr(value, "__doc__", "") or "")


def _fields(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Annotated attributes of a class, with the docstring that follows each."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = str(after.value.value) if is_text else ""  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            if not node.target.id.startswith("_"):
                line = f"{node.target.id}: {ast.unparse(node.annotation)}"
                yield line, " ".join(text.split())


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
            parts.append(entry(f"`{method}`", [_docstring(value.fget) or "–"]))
        else:
            function = getattr(value, "__func__", value)
            text = _docstring(function).replace("\n\n", "\n\n    ") or "–"
            parts.append(entry(f"`{method}{_signature(function)}`", [text]))
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
