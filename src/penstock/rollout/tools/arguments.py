# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of a call against the JSON schema of its tool.

The schema comes from a server, so it may be hostile: references outside of it are never fetched,
regular expressions and unique items are left to the server, and the work is bounded. Where the
bound is reached, the server decides alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from penstock.types import JsonObject

MAX_REFERENCES = 2000
"""How many references one check follows."""
MAX_PROBLEM_CHARS = 500
_UNBOUNDED = ("pattern", "patternProperties", "uniqueItems", "format")
"""Keywords whose work may grow without bound."""


class _TooMuchWork(Exception):
    pass


class ArgumentCheck:
    """What is wrong with arguments, for the model; empty if nothing is."""

    def __init__(self, schema: JsonObject) -> None:
        """Raises ValueError if the schema is not valid."""
        from jsonschema import Draft202012Validator, SchemaError, validators
        from referencing import Registry

        try:
            Draft202012Validator.check_schema(schema)
        except (SchemaError, RecursionError) as error:
            raise ValueError(str(error).partition("\n")[0][:MAX_PROBLEM_CHARS]) from None
        self._num_followed = 0
        known = cast(dict[str, Any], Draft202012Validator.VALIDATORS)
        counted = {name: self._counted(known[name]) for name in ("$ref", "$dynamicRef")}
        checks: dict[str, Any] = {**dict.fromkeys(_UNBOUNDED, _no_check), **counted}
        validator = cast(Any, validators).extend(Draft202012Validator, checks)
        self._validator: Any = validator(schema, registry=cast(Any, Registry)())

    def __call__(self, arguments: JsonObject) -> str:
        from jsonschema import exceptions
        from referencing.exceptions import Unresolvable

        self._num_followed = 0
        try:
            errors = self._validator.iter_errors(arguments)
            error = cast(Any, exceptions).best_match(errors)
        except (_TooMuchWork, RecursionError, Unresolvable):
            return ""
        if error is None:
            return ""
        where = ".".join(map(str, error.absolute_path)) or "the arguments"
        return f"wrong arguments: {where}: {error.message}"[:MAX_PROBLEM_CHARS]

    def _counted(self, follow: Any) -> Any:
        def check(validator: Any, reference: Any, instance: Any, schema: Any) -> Iterator[Any]:
            self._num_followed += 1
            if self._num_followed > MAX_REFERENCES:
                raise _TooMuchWork
            yield from follow(validator, reference, instance, schema) or ()

        return check


def _no_check(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    return None
