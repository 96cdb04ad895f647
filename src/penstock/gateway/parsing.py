# SPDX-License-Identifier: Apache-2.0
"""Splits an answer's text into reasoning, plain text and tool calls.

Owns the formats in which models write them, as shown by their templates. Anything that does not
parse stays text. Knows nothing of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from penstock.gateway.model_calls import ToolCall

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
STRUCTURAL_TAGS = frozenset({THINK, END_THINK, TOOL_CALL, END_TOOL_CALL})
"""Kept in an answer's text even if a tokenizer marks them as special."""
_BLOCK = re.compile(f"{TOOL_CALL}((?:(?!{TOOL_CALL}).)*?){END_TOOL_CALL}", re.DOTALL)
_BETWEEN = re.compile(r"[\s;]*")


class ToolFormat(StrEnum):
    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the answer; Qwen too."""
    LLAMA = "llama"
    """The complete answer is one or more `{"name": …, "parameters": {…}}` objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    has_thinking: bool = False
    """The template knows `<think>`; otherwise the tag is plain text."""
    is_thinking: bool = False
    """The prompt already ends with an open `<think>`."""
    tools: ToolFormat | None = None
    """None when no tools were offered."""


PLAIN = AnswerFormat()
"""The complete answer is plain text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class _RawToolCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def tool_format(template: str) -> ToolFormat | None:
    """The tool-call format a template shows its model; None if unknown."""
    if "<function=" in template:
        return None
    if TOOL_CALL in template:
        return ToolFormat.HERMES
    return ToolFormat.LLAMA if '"parameters"' in template and '"name"' in template else None


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Cut the text before the earliest stop string, as OpenAI does."""
    ends = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(ends)] if ends else text


def parse_answer(
    text: str, answer_format: AnswerFormat, make_id: Callable[[int], str]
) -> ParsedAnswer:
    """Parse a finished answer; `make_id(i)` returns the id of tool call `i`."""
    reasoning = ""
    stripped = text.lstrip()
    if answer_format.is_thinking or (answer_format.has_thinking and stripped.startswith(THINK)):
        thought, _, rest = stripped.removeprefix(THINK).partition(END_THINK)
        reasoning, text = thought.strip(), rest.lstrip()
    if answer_format.tools is None:
        return ParsedAnswer(text=text, reasoning=reasoning)
    find = _hermes_calls if answer_format.tools is ToolFormat.HERMES else _llama_calls
    rest, raw_calls = find(text)
    calls = tuple(
        ToolCall(id=make_id(at), name=name, arguments=arguments)
        for at, (name, arguments) in enumerate(raw_calls)
    )
    return ParsedAnswer(
        text=rest.rstrip() if calls else text, reasoning=reasoning, tool_calls=calls
    )


_TextAndCalls = tuple[str, list[tuple[str, str]]]
"""The text around the tool calls, and each call's name and arguments."""


def _hermes_calls(text: str) -> _TextAndCalls:
    calls: list[tuple[str, str]] = []

    def extract(block: re.Match[str]) -> str:
        call = _read_call(block[1])
        if call is None:
            return block[0]
        calls.append(call)
        return ""

    return _BLOCK.sub(extract, text), calls


def _llama_calls(text: str) -> _TextAndCalls:
    calls: list[tuple[str, str]] = []
    decoder = json.JSONDecoder()
    at, rest = 0, text.strip()
    while at < len(rest):
        try:
            _, end = decoder.raw_decode(rest, at)
        except (ValueError, RecursionError):
            return text, []
        call = _read_call(rest[at:end])
        if call is None:
            return text, []
        calls.append(call)
        between = _BETWEEN.match(rest, end)
        at = between.end() if between else end
    return ("", calls) if calls else (text, [])


def _read_call(text: str) -> tuple[str, str] | None:
    try:
        raw_call = msgspec.json.decode(text, type=_RawToolCall)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    raw = (bytes(raw_call.arguments) or bytes(raw_call.parameters)).strip()
    return (raw_call.name, raw.decode()) if raw.startswith(b"{") else None
