# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of a call against the JSON schema of its tool.

The schema comes from a server, so it may be hostile. Only a copy of it is used, with the keywords
whose work is known: no regular expression, no other dialect, no reference that leads out of the
copied parts. The work of a check is counted. What is left out, and what is beyond the bound, the
server decides alone: a check never refuses what the whole schema allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from penstock.types import JsonObject

MAX_WORK = 10_000
"""Of one check: keywords, their parts and items."""
MAX_PROBLEM_CHARS = 500
_CHARS_PER_WORK = 500
"""A problem shows the value, so a long one costs more."""
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_REFERENCE = re.compile(r"#(/(\$defs|definitions|properties)/[^/%]+)*")
"""To copied parts. Others, such as `#/const`, would lead to what was not looked at."""
_OVER_ITEMS = ("items", "prefixItems", "additionalProperties")
"""Keywords that look at each part of the value."""


class _TooMuchWork(Exception):
    pass


class ArgumentCheck:
    """What is wrong with arguments, for the model; empty if nothing is."""

    def __init__(self, schema: JsonObject) -> None:
        """Raises ValueError if the schema is not valid."""
        from jsonschema import Draft202012Validator, validators
        from referencing import Registry

        self._work_left = 0
        self._work_of_a_problem = 0
        known = cast(dict[str, Any], Draft202012Validator.VALIDATORS)
        # With keywords left out, more than one of `oneOf` may fit.
        checks = {name: known[name] for name in _READ if name in known} | {"oneOf": known["anyOf"]}
        counted = {name: self._counted(name, check) for name, check in checks.items()}
        create = cast(Any, validators).create
        validator = create(cast(Any, Draft202012Validator).META_SCHEMA, counted)
        self._validator: Any = validator(_copied(schema), registry=cast(Any, Registry)())

    def __call__(self, arguments: JsonObject) -> str:
        from jsonschema import exceptions
        from referencing.exceptions import Unresolvable

        self._work_left = MAX_WORK
        self._work_of_a_problem = 1 + len(str(arguments)) // _CHARS_PER_WORK
        try:
            errors = self._validator.iter_errors(arguments)
            error = cast(Any, exceptions).best_match(errors)
        except (_TooMuchWork, RecursionError, Unresolvable):
            return ""
        if error is None:
            return ""
        where = ".".join(map(str, error.absolute_path)) or "the arguments"
        return f"wrong arguments: {where}: {error.message}"[:MAX_PROBLEM_CHARS]

    def _counted(self, name: str, check: Any) -> Any:
        def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            parts = _length(instance) if name in _OVER_ITEMS else 0
            self._spend(1 + _length(value) + parts)
            for problem in check(validator, value, instance, schema) or ():
                self._spend(self._work_of_a_problem)
                yield problem

        return counted

    def _spend(self, work: int) -> None:
        self._work_left -= work
        if self._work_left < 0:
            raise _TooMuchWork


def _length(value: object) -> int:
    return len(cast(Any, value)) if isinstance(value, dict | list) else 0


# --- the copy -------------------------------------------------------------------------------------

_LEFT_OUT = object()


def _copied(schema: Any) -> JsonObject:
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise ValueError(f"{str(cast(object, schema))[:80]!r} is not a schema")
    given = cast(JsonObject, schema)
    found = {name: _READ[name](name, value) for name, value in given.items() if name in _READ}
    kept = {name: value for name, value in found.items() if value is not _LEFT_OUT}
    if "patternProperties" in given:  # what is additional depends on regular expressions
        kept.pop("additionalProperties", None)
    return kept


def _require(name: str, is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"{name} must be {what}")


def _part(name: str, value: Any) -> Any:
    return False if value is False else _copied(value)


def _parts(name: str, value: Any) -> Any:
    _require(name, isinstance(value, list), "a list of schemas")
    return [_copied(part) for part in cast("list[Any]", value)]


def _named_parts(name: str, value: Any) -> Any:
    _require(name, isinstance(value, dict), "an object of schemas")
    return {key: _copied(part) for key, part in cast(JsonObject, value).items()}


def _names(name: str, value: Any) -> Any:
    _require(name, isinstance(value, list), "a list of names")
    given = cast("list[Any]", value)
    _require(name, all(isinstance(one, str) for one in given), "a list of names")
    return given


def _types(name: str, value: Any) -> Any:
    given = cast("list[Any]", value if isinstance(value, list) else [value])
    _require(name, all(one in _TYPES for one in given), f"one of {', '.join(_TYPES)}")
    return given


def _number(name: str, value: Any) -> Any:
    is_right = isinstance(value, int | float) and not isinstance(value, bool)
    _require(name, is_right, "a number")
    return value


def _count(name: str, value: Any) -> Any:
    _require(name, _number(name, value) >= 0, "0 or more")
    return value


def _values(name: str, value: Any) -> Any:
    """Plain ones: comparing long lists and objects costs too much."""
    _require(name, isinstance(value, list), "a list")
    return _LEFT_OUT if any(isinstance(one, dict | list) for one in value) else value


def _value(name: str, value: Any) -> Any:
    return _LEFT_OUT if isinstance(value, dict | list) else value


def _reference(name: str, value: Any) -> Any:
    _require(name, isinstance(value, str), "a text")
    return value if _REFERENCE.fullmatch(value) else _LEFT_OUT


_READ: dict[str, Callable[[str, Any], Any]] = {
    "$ref": _reference,
    "const": _value,
    "enum": _values,
    "required": _names,
    "type": _types,
    **dict.fromkeys(("items", "additionalProperties"), _part),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _parts),
    **dict.fromkeys(("properties", "$defs", "definitions"), _named_parts),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _number),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count
    ),
}
"""The keywords that are copied, and how each is read."""
