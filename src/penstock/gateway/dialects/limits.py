# SPDX-License-Identifier: Apache-2.0
"""Size limits of a request, and the checks that enforce them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, cast

from penstock.errors import BadRequest, TooLarge
from penstock.types import JsonObject
from penstock.wire.codec import encode_json

MAX_CHOICES = 64
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10
MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 32
MAX_NAME_CHARS = 128
MAX_PATTERN_CHARS = 256
MAX_REPEATS = 10_000
"""Maximum repeat count in a grammar: engines unroll repeats."""

_COUNTS = frozenset(
    ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
)
_REPEAT = re.compile(r"\{(\d*),?(\d*)\}")


def check_choices(num_choices: int) -> None:
    if not 1 <= num_choices <= MAX_CHOICES:
        raise BadRequest(f"n {num_choices} must be between 1 and {MAX_CHOICES}")


def check_tools(tools: Sequence[JsonObject]) -> None:
    """Check number, depth and size. Tool schemas only go into the prompt; they are not compiled to
    grammars."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"got {len(tools)} tools; send at most {MAX_TOOLS}")
    for at, tool in enumerate(tools):
        if _exceeds_depth(tool, MAX_SCHEMA_DEPTH):
            raise BadRequest(f"tools[{at}] nests deeper than {MAX_SCHEMA_DEPTH} levels")
    if len(tools) and len(encode_json(tools)) > MAX_TOOLS_BYTES:
        raise TooLarge(
            f"the tools exceed the limit of {MAX_TOOLS_BYTES} bytes; send fewer or shorter ones"
        )


def check_name(name: object, where: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise BadRequest(f"{where} must be a string of 1 to {MAX_NAME_CHARS} characters")
    return name


def checked_schema(schema: object, where: str) -> str:
    """Check a schema that an engine will compile to a grammar; returns its JSON."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{where} must be a JSON schema object")
    fields = cast(JsonObject, schema)
    if _exceeds_depth(fields, MAX_SCHEMA_DEPTH):
        raise BadRequest(f"{where} nests deeper than {MAX_SCHEMA_DEPTH} levels")
    text = encode_json(fields)
    if len(text) > MAX_SCHEMA_BYTES:
        raise TooLarge(f"{where} has {len(text)} bytes; the limit is {MAX_SCHEMA_BYTES}")
    _check_grammar(fields, where)
    return text.decode()


def _exceeds_depth(value: object, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(cast(JsonObject, item).values())
            elif isinstance(item, list):
                below.extend(cast(list[Any], item))
        if not below:
            return False
        level = below
    return True


def _check_grammar(schema: JsonObject, where: str) -> None:
    """Reject patterns and counts that could stall an engine's grammar compiler."""
    todo: list[Any] = [schema]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(cast(list[Any], item))
        elif isinstance(item, dict):
            fields = cast(JsonObject, item)
            todo.extend(fields.values())
            _check_pattern(fields.get("pattern"), where)
            patterns = fields.get("patternProperties")
            for pattern in cast(JsonObject, patterns) if isinstance(patterns, dict) else ():
                _check_pattern(pattern, where)
            for name in _COUNTS & fields.keys():
                if isinstance(fields[name], int | float) and fields[name] > MAX_REPEATS:
                    raise BadRequest(f"{where}: {name} exceeds {MAX_REPEATS}")


def _check_pattern(pattern: object, where: str) -> None:
    if not isinstance(pattern, str):
        return
    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadRequest(f"{where}: a pattern is longer than {MAX_PATTERN_CHARS} characters")
    counts = [count for match in _REPEAT.findall(pattern) for count in match if count]
    if math.prod(max(1, int(count[:9])) for count in counts) > MAX_REPEATS:
        raise BadRequest(f"{where}: a pattern repeats more than {MAX_REPEATS} times")
