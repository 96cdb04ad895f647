# SPDX-License-Identifier: Apache-2.0
"""Checks one row as a task: values that every service can encode, and a prompt that a model can
get.

Pure functions over plain values. Counts no tokens and reads no file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock.dataflow.sources.bad_rows import BadRow, BadRowKind
from penstock.plugins import quoted
from penstock.types import JsonObject

PROMPT = "prompt"
"""The key that workflow single_turn reads."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE = '{"role": "user", "content": "…"}'
_INTEGERS = range(-(2**63), 2**64)
"""What msgpack can carry."""

Problem = tuple[BadRowKind, str]


def check_values(payload: JsonObject, place: str) -> None:
    """Raise BadRow for the first value that a service could not encode."""
    for column, value in payload.items():
        if (problem := _value_problem(value)) is not None:
            kind, text = problem
            if kind is BadRowKind.UNSUPPORTED_TYPE:
                text = f"{text}, or drop the column with data.columns: {{{column}: null}}"
            raise BadRow(place, kind, text, column=column)


def _value_problem(value: object) -> Problem | None:
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return None if value.isascii() or _is_encodable(value) else _INVALID_TEXT
    if isinstance(value, int):
        return None if value in _INTEGERS else _HUGE_INTEGER
    if isinstance(value, float):
        return None if math.isfinite(value) else _not_finite(value)
    if isinstance(value, list | tuple):
        return _first_problem(cast(Sequence[object], value))
    if isinstance(value, dict):
        entries = cast(dict[object, object], value)
        return _first_problem([*entries, *entries.values()])
    kind = type(value).__name__
    return BadRowKind.UNSUPPORTED_TYPE, (
        f"a value of type {kind} is neither text, number, list nor object; convert it to text"
    )


def _first_problem(values: Sequence[object]) -> Problem | None:
    for value in values:
        if (problem := _value_problem(value)) is not None:
            return problem
    return None


_INVALID_TEXT = (
    BadRowKind.INVALID_TEXT,
    "half of a surrogate pair cannot be encoded as UTF-8; remove it",
)
_HUGE_INTEGER = (
    BadRowKind.HUGE_INTEGER,
    "an integer has more than 64 bits; write it as text",
)


def _not_finite(value: float) -> Problem:
    return (
        BadRowKind.NOT_FINITE,
        f"{value} is not a number that JSON can represent; write null or remove the row",
    )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_prompt(payload: JsonObject, place: str) -> None:
    """Raise BadRow unless the prompt is text or a list of messages."""
    if PROMPT not in payload:
        raise BadRow(place, BadRowKind.MISSING_COLUMN, missing_prompt(payload), column=PROMPT)
    if (problem := _prompt_problem(payload[PROMPT])) is not None:
        raise BadRow(place, *problem, column=PROMPT)


def missing_prompt(columns: Mapping[str, Any] | Sequence[str]) -> str:
    """What to do about rows without a prompt, given the columns there are."""
    found = ", ".join(columns) or "none"
    return (
        f"is missing; the columns are: {found}; name the one with the prompt in data.columns: "
        "{prompt: COLUMN}"
    )


def _prompt_problem(prompt: object) -> Problem | None:
    if prompt is None:
        return BadRowKind.NULL_PROMPT, f"is null; give text or a list of messages, {_MESSAGE}"
    if isinstance(prompt, str):
        is_empty = not prompt.strip()
        return (
            (BadRowKind.EMPTY_PROMPT, "has no text; write one or remove the row")
            if is_empty
            else None
        )
    if not isinstance(prompt, list):
        kind = type(prompt).__name__
        text = f"is of type {kind} ({quoted(prompt)}); give text or a list of messages, {_MESSAGE}"
        return BadRowKind.PROMPT_TYPE, text
    messages = cast(list[object], prompt)
    if not messages:
        return BadRowKind.EMPTY_PROMPT, "has no messages; write one or remove the row"
    for number, message in enumerate(messages, 1):
        if text := _message_problem(message):
            return BadRowKind.CHAT_SHAPE, f"message {number} {text}"
    return None


def _message_problem(message: object) -> str:
    """What is wrong with one message; empty if nothing."""
    if not isinstance(message, dict):
        return f"is of type {type(message).__name__}; write {_MESSAGE}"
    entries = cast(dict[str, object], message)
    role, content = entries.get("role"), entries.get("content")
    if role not in ROLES:
        if "role" not in entries:
            return f"has the keys {', '.join(map(str, entries)) or '(none)'}; write {_MESSAGE}"
        return f"has the role {quoted(role)}; use {' | '.join(ROLES)}"
    if isinstance(content, str) or (content is None and entries.get("tool_calls")):
        return ""
    return f"has no text under content, but {type(content).__name__}; write {_MESSAGE}"
