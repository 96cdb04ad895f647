# SPDX-License-Identifier: Apache-2.0
"""Messages for invalid values, with a suggested fix.

Owns the translation of pydantic's errors into key paths and texts. Knows nothing of files and
lines; the loader adds those."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.config.names_elsewhere import (
    NameElsewhere,
    find_name,
    find_names_in,
    find_section,
    is_section_elsewhere,
)
from penstock.config.run import RunConfig
from penstock.options import Contradiction, KeyPath, Options, meanings, unknown_choice
from penstock.plugins import did_you_mean, quoted

_TYPES: Mapping[str, str] = {
    "int_type": "expected an integer",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "string_type": "expected text",
    "bool_type": "expected true or false",
    "tuple_type": "expected a list",
    "model_type": "expected a mapping of keys",
    "mapping_type": "expected a mapping of keys",
    "none_required": "expected null",
    "finite_number": "expected a finite number",
}

_SCHEMA_BRANCHES = ("[key]", "<word>", "<mapping>", "<command>")
"""Parts of a location that name a branch of the schema, not a key of the file."""

_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProblem:
    """One problem with the values, independent of their origin."""

    keys: tuple[KeyPath, ...]
    """The keys involved, the most likely culprit first; never empty."""
    text: str
    """What is wrong and how to fix it."""
    is_missing: bool = False
    """The key is missing, so the message points at its parent."""
    suggested_key: KeyPath | None = None
    """The key of the same section that was probably meant."""


def problems_of(error: ValidationError) -> list[ConfigProblem]:
    """Every problem that pydantic found; a mistyped key is not reported as missing too."""
    found = [problem for details in error.errors() for problem in _problems(details)]
    suggested_key = {problem.suggested_key for problem in found}
    return [
        problem
        for problem in found
        if not (problem.is_missing and problem.keys[0] in suggested_key)
    ]


def path_text(path: KeyPath) -> str:
    """A path in the syntax of overrides: `sources[0].task`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _problems(details: ErrorDetails) -> Iterator[ConfigProblem]:
    path = tuple(part for part in details["loc"] if part not in _SCHEMA_BRANCHES)
    kind, value, context = details["type"], cast(object, details["input"]), details.get("ctx", {})
    if kind == "contradictions":
        for found in cast(Sequence[Contradiction], context["problems"]):
            yield ConfigProblem(keys=tuple((*path, *key) for key in found.keys), text=found.text)
    elif kind == "nested":
        for inner in cast(ValidationError, context["error"]).errors():
            yield from _problems({**inner, "loc": (*path, *inner["loc"])})
    elif kind == "missing":
        yield ConfigProblem(keys=(path,), text=_missing(path), is_missing=True)
    elif kind == "extra_forbidden":
        yield from _unknown(path, value)
    else:
        yield ConfigProblem(keys=(path,), text=_value_problem(kind, value, context, details["msg"]))


def _value_problem(kind: str, value: object, context: Mapping[str, Any], message: str) -> str:
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return str(unknown_choice(value, re.findall(r"'([^']*)'", context["expected"])))
    if kind in _BOUNDS:
        relation, key = _BOUNDS[kind]
        return f"{quoted(value)} is out of range; must be {relation} {context[key]}"
    if kind in _TYPES:
        expected = _TYPES[kind]
        got = quoted(value) if value is None else f"{_type_name(value)} ({quoted(value)})"
        return f"{expected}, got {got}{_type_fix(kind, value)}"
    return f"{quoted(value)}: {message[:1].lower()}{message[1:]}"


def _type_fix(kind: str, value: object) -> str:
    """How to write the value that was probably meant."""
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        if value.replace(".", "", 1).isdigit() or value in ("true", "false"):
            return "; remove the quotes"
    elif kind == "tuple_type":
        return f"; write [{value}]" if isinstance(value, str) else "; write it like [a, b]"
    elif kind == "string_type" and isinstance(value, bool | int | float):
        return "; put quotes around it"
    return ""


def _type_name(value: object) -> str:
    kinds: Sequence[tuple[type, str]] = (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a number"),
        (str, "text"),
        (list, "a list"),
        (dict, "a mapping"),
    )
    return next((words for kind, words in kinds if isinstance(value, kind)), "another type")


def _missing(path: KeyPath) -> str:
    name = str(path[-1])
    found = [meanings(kind)[name] for kind in _sections_at(path[:-1]) if name in meanings(kind)]
    meaning = f" ({found[0].rstrip('.')})" if found else ""
    return f'missing required key "{name}"{meaning}; add it here'


def _unknown(path: KeyPath, value: object) -> Iterator[ConfigProblem]:
    """An unknown key; for a section of another framework, each of its keys."""
    here = [name for kind in _sections_at(path[:-1]) for name in kind.model_fields]
    word = str(path[-1])
    is_mistyped = did_you_mean(word, here) and not is_section_elsewhere(word)
    inside = [] if is_mistyped else list(find_names_in(path, value))
    for key, inner in inside:
        yield _named_elsewhere(key, inner, find_name(key)) or _unknown_inside(key, inner)
    if not inside:
        yield _named_elsewhere(path, value, find_name(path)) or _unknown_key(path, here)


def _named_elsewhere(
    path: KeyPath, value: object, row: NameElsewhere | None
) -> ConfigProblem | None:
    if row is None:
        return None
    policy = str(path[1]) if path[0] == "models" and len(path) > 2 else "policy"
    return ConfigProblem(
        keys=(path,),
        text=f"unknown key; {row.hint(value, policy)}",
        suggested_key=tuple(row.key.split(".")) if row.key else None,
    )


def _unknown_inside(path: KeyPath, value: object) -> ConfigProblem:
    """A key of another framework's section that is not in the table: a key of ours, or else what
    the section is called here."""
    if ours := _sections_by_key().get(str(path[-1])):
        return ConfigProblem(keys=(path,), text=f'unknown key; did you mean "{ours}"?')
    return _named_elsewhere(path, value, find_section(path)) or ConfigProblem(
        keys=(path,), text="unknown key; penstock has no such setting; remove it"
    )


def _unknown_key(path: KeyPath, here: Sequence[str]) -> ConfigProblem:
    word, sections_by_key = str(path[-1]), _sections_by_key()
    suggested_key: KeyPath | None = None
    if word in sections_by_key:  # the key of another section, not a misspelt one of this
        fix = f'did you mean "{sections_by_key[word]}"?'
    elif closest := did_you_mean(word, here):
        fix, suggested_key = f'did you mean "{closest}"?', (*path[:-1], closest)
    elif closest := did_you_mean(word, tuple(sections_by_key)):
        fix = f'did you mean "{sections_by_key[closest]}"?'
    else:
        fix = f"known here: {', '.join(here)}"
    return ConfigProblem(keys=(path,), text=f"unknown key; {fix}", suggested_key=suggested_key)


def _sections_at(path: KeyPath) -> list[type[Options]]:
    """The section, or each alternative section, at a path of the schema."""
    types: list[Any] = [RunConfig]
    for part in path:
        types = [child for above in types for child in _child_types(above, part)]
    return [kind for kind in types if _is_section(kind)]


def _child_types(kind: Any, part: str | int) -> list[Any]:
    if _is_section(kind):
        field = kind.model_fields.get(part)
        return _sections(field.annotation) if field else []
    return _sections(get_args(kind)[-1 if isinstance(part, str) else 0])


def _sections(kind: Any) -> list[Any]:
    """The sections, mappings and lists of sections inside an annotation."""
    if _is_section(kind):
        return [kind]
    inner = [found for argument in get_args(kind) for found in _sections(argument)]
    is_container = getattr(kind, "__origin__", None) in (tuple, Mapping)
    return [kind] if inner and is_container else inner


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


@cache
def _sections_by_key() -> Mapping[str, str]:
    """Each key of a top-level section, and its full path."""
    found: dict[str, str] = {}
    for name, field in RunConfig.model_fields.items():
        found[name] = name
        if _is_section(field.annotation):
            section = cast(type[BaseModel], field.annotation)
            found |= {key: f"{name}.{key}" for key in section.model_fields if key not in found}
    return found
