# SPDX-License-Identifier: Apache-2.0
"""Size limits of a request, and the checks that enforce them."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
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
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_VALUES = frozenset(("const", "default", "enum", "examples"))
"""Keys that hold any JSON, not schemas."""
_REPEAT = re.compile(r"\{(\d*),?(\d*)\}")
_parse_pattern: Callable[[str], object] = importlib.import_module("re._parser").parse
"""The first half of `re.compile`. The other takes up to 10 ms for each set of characters, and a
schema has room for ten thousand of them."""
_LOOK_BEHIND = re.compile(r"\(\?<[=!]")


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
    """Reject what could stall or end an engine's grammar compiler, or make it call a server:
    unknown types, patterns that are no regular expression, large counts, remote references."""
    todo: list[Any] = [schema]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(cast(list[Any], item))
        elif isinstance(item, dict):
            fields = cast(JsonObject, item)
            todo.extend(value for name, value in fields.items() if name not in _VALUES)
            _check_keywords(fields, where)


def _check_keywords(fields: JsonObject, where: str) -> None:
    """Check one object of a schema. It may be an object of properties, which may have these names:
    an object or a boolean is then the schema of one."""
    words = {name: value for name, value in fields.items() if not isinstance(value, dict | bool)}
    if "pattern" in words:
        _check_pattern(words["pattern"], where)
    patterns = fields.get("patternProperties")
    for pattern in cast(JsonObject, patterns) if isinstance(patterns, dict) else ():
        _check_pattern(pattern, where)
    if "type" in words:
        named: object = words["type"]
        types = cast(list[object], named) if isinstance(named, list) else [named]
        if not all(isinstance(one, str) and one in _TYPES for one in types):
            raise BadRequest(f"{where}: type must be one of {', '.join(sorted(_TYPES))}")
    for name in _COUNTS & words.keys():
        if not isinstance(words[name], int) or not 0 <= words[name] <= MAX_REPEATS:
            raise BadRequest(f"{where}: {name} must be an integer from 0 to {MAX_REPEATS}")
    if "$ref" in words and not str(words["$ref"]).startswith("#"):
        raise BadRequest(f"{where}: $ref must point into the same schema and start with #")


def _check_pattern(pattern: object, where: str) -> None:
    if not isinstance(pattern, str):
        raise BadRequest(f"{where}: a pattern must be a string")
    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadRequest(f"{where}: a pattern is longer than {MAX_PATTERN_CHARS} characters")
    counts = [count for match in _REPEAT.findall(pattern) for count in match if count]
    if math.prod(max(1, int(count[:9])) for count in counts) > MAX_REPEATS:
        raise BadRequest(f"{where}: a pattern repeats more than {MAX_REPEATS} times")
    if _LOOK_BEHIND.search(pattern):
        raise BadRequest(f"{where}: a pattern looks behind, which grammars cannot")
    try:
        _parse_pattern(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadRequest(f"{where}: a pattern is not a regular expression: {error}") from None
