# SPDX-License-Identifier: Apache-2.0
"""One model call as an agent makes it and sees it, in no dialect: what dialects read requests into,
and write answers from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.gateway.sampling import Overrides
from penstock.types import FinishReason, JsonObject, PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """The model asks its agent to call a function."""

    id: str
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What an agent may already see of an answer in the making."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    messages: Sequence[JsonObject]
    """In OpenAI's chat form, each content a string: role, content, and where they exist
    reasoning_content, tool_calls (arguments a JSON string), tool_call_id, name. Unknown fields
    stay: a template may read them."""
    policy: PolicyName | None = None
    """None: the session's first."""
    role: str = ""
    tools: Sequence[JsonObject] = ()
    """Function tools in OpenAI's form, {"type": "function", "function": {...}}."""
    thinking: bool | None = None
    """None leaves it to the template. Refused where the template cannot do as it is told."""
    overrides: Overrides | None = None
    on_chunk: Callable[[Delta], None] | None = None
    """Hears the answer as it grows: text and reasoning without special tokens, never a part of a
    tool call, never beyond a stop string. All deltas together are the beginning of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    """The whole context sent to the engine, reused or new."""
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an agent gets to see of a turn."""

    text: str
    """Without special tokens, reasoning and tool calls, cut before the first stop string. The turn
    keeps every token."""
    finish: FinishReason
    turn: int
    """Index among the session's turns."""
    usage: Usage
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
