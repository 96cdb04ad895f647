# SPDX-License-Identifier: Apache-2.0
"""Strict options: the base class of every section and plug-in, and how a bad value is refused.

Owns the strictness and the wording of refusals. Knows no field, file or line; the config loader
adds those.

Declare the options of a plug-in once, next to its code:

    class Dedup(Rule):
        window: PositiveInt = 1000
        # window: number of admitted groups to remember

Types, bounds, defaults and docs are all there. A check over several options is the method
`_contradictions`, which yields one `Contradiction` per problem."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from penstock.plugins import quoted, suggest, unknown

KeyPath = tuple[str | int, ...]
"""Where a value is: mapping keys and list indices from the top of the file or section."""

OptionsT = TypeVar("OptionsT", bound="Options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """Settings that are valid one by one and cannot be used together."""

    text: str
    """What is wrong and how to fix it."""
    keys: tuple[KeyPath, ...]
    """The keys involved, relative to the section that checks; the most likely culprit first."""


class Options(BaseModel):
    """Base of all options: rejects unknown keys, wrong types and later changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    # No use_attribute_docstrings: reading the sources took a third of the import. See `meanings`.

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        raise_contradictions(self._contradictions())
        return self

    def _contradictions(self) -> Iterable[Contradiction]:
        """Problems between the values; override it where there can be any."""
        return ()


@cache
def meanings(kind: type[Options]) -> Mapping[str, str]:
    """What the source says below each field of a section, its bases included; fields of classes
    that were made without a source have none."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[: kind.__mro__.index(Options)]):
        with suppress(OSError, TypeError):
            source = textwrap.dedent(inspect.getsource(base))
            for statement, text in pairwise(cast(ast.ClassDef, ast.parse(source).body[0]).body):
                match statement, text:
                    case (
                        ast.AnnAssign(target=ast.Name(id=name)),
                        ast.Expr(value=ast.Constant(value=str(meaning))),
                    ):
                        found[name] = inspect.cleandoc(meaning)
                    case _:
                        pass
    return found


def raise_contradictions(found: Iterable[Contradiction]) -> None:
    """Raise one validation error that carries every contradiction; return if there are none."""
    problems = list(found)
    if problems:
        text = "; ".join(problem.text for problem in problems)
        raise PydanticCustomError("contradictions", "{text}", {"text": text, "problems": problems})


def nested_error(error: ValidationError) -> PydanticCustomError:
    """Wrap the errors of an inner model so that each keeps its own key."""
    return PydanticCustomError("nested", "{text}", {"text": str(error), "error": error})


def parse_options(kind: type[OptionsT], label: str, options: Mapping[str, Any]) -> OptionsT:
    """Validate the options of a plug-in inside a validator of the section that names it.

    Each problem is reported under its own key; `label` names the plug-in in messages."""
    known = tuple(kind.model_fields)
    raise_contradictions(
        Contradiction(
            text=unknown("option", option, known, of=label, none="remove it"), keys=((option,), ())
        )
        for option in options
        if option not in known
    )
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        raise nested_error(error) from None


def unknown_choice(value: object, supported: Sequence[str]) -> ValueError:
    """The error for a value outside a closed list."""
    choices = " | ".join(supported)
    fix = suggest(value, supported, f"use {choices}")
    return ValueError(f"{quoted(value)} is not one of {choices}; {fix}")


@dataclass(frozen=True, slots=True)
class _NonEmpty:
    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_has_entries, handler(source))

    def __get_pydantic_json_schema__(
        self, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core)
        return schema | {"minItems" if schema.get("type") == "array" else "minProperties": 1}


def _has_entries(value: object) -> object:
    if value in ([], (), {}):
        raise ValueError("is empty; give at least one entry")
    return value


def non_empty() -> Any:
    """Reject an empty list or mapping (pydantic's min_length also counts invalid items)."""
    return _NonEmpty()


@dataclass(frozen=True, slots=True)
class _AtMost:
    most: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, core: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core)
        is_list = schema.get("type") == "array"
        return schema | {"maxItems" if is_list else "maxProperties": self.most}

    def _check(self, value: object) -> object:
        if isinstance(value, list | tuple | Mapping):
            number = len(cast(Sized, value))
            if number > self.most:
                raise ValueError(f"has {number:,} entries; at most {self.most}")
        return cast(object, value)


def at_most(most: int) -> Any:
    """Reject a longer list or mapping unread: what is checked between entries, and with other
    sections, can cost the product of their numbers."""
    return _AtMost(most)
