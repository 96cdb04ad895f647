# SPDX-License-Identifier: Apache-2.0
"""Markdown of the generated pages: the note at their head, entries of definition lists, types."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    bytes: "bytes",
    type(None): "null",
    Any: "anything",
    object: "anything",
}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def head(title: str, *paragraphs: str) -> str:
    """Title and introduction. The comment goes first, for people who open the file."""
    note = "<!-- Written by scripts/reference.py from the code. Do not edit. -->"
    return "\n\n".join([note, f"# {title}", *paragraphs]) + "\n"


def entry(term: str, lines: Sequence[str]) -> str:
    """One entry of a definition list."""
    first, *rest = [line for line in lines if line] or ["–"]
    return "\n".join([term, f":   {first}", *(f"\n    {line}" for line in rest)]) + "\n"


def flat(text: str | None) -> str:
    """A docstring's first paragraph on one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def code(value: object) -> str:
    """A value as run.yaml writes it."""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, cast(Sequence[object], value)))}]`"
    if isinstance(value, Mapping):
        return f"`{dict(cast(Mapping[str, object], value))}`"
    return f"`{value}`" if value != "" else '`""`'


def bounds_of(metadata: Sequence[object]) -> str:
    """`≥ 0, ≤ 1`, from the constraints of a field."""
    found = [
        f"{sign} {getattr(item, name):,}".replace(",", " ")
        for item in metadata
        for name, sign in BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return " and ".join(found)


def type_text(annotation: Any) -> str:
    """A type in the words of a YAML user."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *metadata = arguments
        bounds = bounds_of(metadata)
        return type_text(inner) + (f" {bounds}" if bounds else "")
    if origin is Literal:
        choices = " | ".join(code(value) for value in arguments)
        return choices if len(arguments) > 1 else f"only {choices}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(argument) for argument in arguments))
    if origin is tuple or origin is list:
        return f"list of {_plural(type_text(arguments[0]))}" if arguments else "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = type_text(arguments[1])
        return "one mapping per name" if inner == "mapping" else f"mapping of names to {inner}"
    if annotation in WORDS:
        return WORDS[annotation]
    return "mapping" if isinstance(annotation, type) else str(annotation)


def _plural(word: str) -> str:
    return {"mapping": "mappings", "text": "texts", "integer": "integers"}.get(word, word)
