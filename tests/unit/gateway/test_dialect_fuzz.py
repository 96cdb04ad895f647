# SPDX-License-Identifier: Apache-2.0
"""Fuzzed requests: a dialect accepts them or reports the error; it never crashes."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from penstock.errors import WireError
from penstock.gateway.dialects.dialect import Dialect
from penstock.gateway.server import DIALECTS

NUM_REQUESTS = int(os.environ.get("PENSTOCK_FUZZ_REQUESTS", "1500"))
WORDS = [
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "text",
    "input_text",
    "image_url",
    "function",
    "function_call",
    "function_call_output",
    "reasoning",
    "message",
    "tool_use",
    "tool_result",
    "thinking",
    "auto",
    "none",
    "required",
    "any",
    "enabled",
    "disabled",
    "json_schema",
    "json_object",
    "object",
    "high",
    "x",
]
KEYS = [
    "role",
    "content",
    "type",
    "text",
    "name",
    "arguments",
    "id",
    "call_id",
    "tool_calls",
    "function",
    "parameters",
    "input_schema",
    "input",
    "output",
    "summary",
    "thinking",
    "schema",
    "json_schema",
    "format",
    "pattern",
    "maxItems",
    "effort",
    "enable_thinking",
    "tool_use_id",
    "signature",
    "x",
]


def value(draw: random.Random, depth: int = 3) -> Any:
    kind = draw.randrange(9)
    if depth and kind < 2:
        return [value(draw, depth - 1) for _ in range(draw.randrange(3))]
    if depth and kind < 4:
        return item(draw, depth - 1)
    scalars: list[Any] = [None, True, draw.randrange(-2, 2**40), draw.random(), ""]
    return draw.choice(scalars) if kind == 4 else draw.choice(WORDS)


def item(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    return {draw.choice(KEYS): value(draw, depth) for _ in range(draw.randrange(6))}


def message(draw: random.Random) -> dict[str, Any]:
    """Nearly right, so that more than the first check is reached."""
    role = draw.choice(("user", "assistant", "tool", "system"))
    parts = [{"type": draw.choice(WORDS), "text": "x", **item(draw)} for _ in range(2)]
    return {"role": role, "content": draw.choice(("x", parts, value(draw))), **item(draw)}


def body(draw: random.Random, dialect: Dialect) -> dict[str, Any]:
    names = sorted(dialect.request.__dataclass_fields__)
    fields = {draw.choice(names): value(draw) for _ in range(draw.randrange(4))}
    conversation = [message(draw) for _ in range(draw.randrange(4))]
    tools = [
        {"type": "function", "name": "f", "function": {"name": "f", **item(draw)}, **item(draw)}
        for _ in range(draw.randrange(2))
    ]
    common = {"messages": conversation, "input": conversation, "prompt": value(draw)}
    return {"max_tokens": 9, "tools": tools, **common, **fields, "model": "policy"}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_a_request_is_read_or_refused(dialect: Dialect) -> None:
    num_read = 0
    for seed in range(NUM_REQUESTS):
        request = body(random.Random(seed), dialect)
        try:
            ask = dialect.read(request)
        except WireError as error:
            assert error.status in (400, 413)
            assert str(error)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {request}") from error
        else:
            assert 1 <= len(ask.calls) <= 64
            num_read += 1
    assert 0 < num_read < NUM_REQUESTS
