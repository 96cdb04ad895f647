# SPDX-License-Identifier: Apache-2.0
"""One model call and its answer, independent of the API dialect. Dialects parse requests into
`Call` and format responses from `Answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.sampling import Overrides
from penstock.gateway.shared import Shared
from penstock.types import FinishReason, JsonObject, PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """A JSON object, as the model wrote it."""

    @property
    def body(self) -> JsonObject:
        """In OpenAI's chat format."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Text and reasoning added since the last chunk."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    messages: Sequence[JsonObject]
    """In OpenAI's chat format with string contents: role, content and, where present,
    reasoning_content, tool_calls (arguments as a JSON string), tool_call_id, name. Unknown fields
    are kept: a template may read them."""
    policy: PolicyName | None = None
    """A role or a policy of the run; None selects the role of the session, or its first policy."""
    role: str = ""
    """Labels the turn; empty: the role that `policy` names, if it names one."""
    tools: Sequence[JsonObject] = ()
    """Function tools in OpenAI's format, {"type": "function", "function": {...}}."""
    thinking: bool | None = None
    """None leaves it to the template. Rejected if the template has no such switch."""
    overrides: Overrides | None = None
    shared_prompt: Shared[Any] | None = None
    """The same for all choices of a request: their prompt is rendered and tokenized once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPrompt:
    """A call that continues a raw prompt, without a chat template."""

    prompt: str | Sequence[int]
    policy: PolicyName | None = None
    """As in `Call`."""
    role: str = ""
    """As in `Call`."""
    overrides: Overrides | None = None
    shared_prompt: Shared[Any] | None = None
    """As in `Call`."""


DeltaCallback = Callable[[Delta], None]
"""Called with each new delta while the answer is generated: text and reasoning without special
tokens, never part of a tool call, never beyond a stop string. The concatenated deltas are a prefix
of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    """The full context sent to the engine, reused and new tokens."""
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A turn as the agent sees it."""

    text: str
    """Without special tokens, reasoning and tool calls, cut before the first stop string. The turn
    keeps every token."""
    finish: FinishReason
    """Why it ended: stop, length or abort."""
    turn: int
    """Index among the session's turns."""
    usage: Usage
    """Tokens of prompt and answer."""
    reasoning: str = ""
    """The model's reasoning, without its markers; empty if it has none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that the model asks for, in order; `name`, and `arguments` as JSON text."""

    @property
    def message(self) -> JsonObject:
        """The answer as an assistant message in OpenAI's chat format. Append it to `messages`
        unchanged, so that the next call continues from the sampled tokens."""
        message: JsonObject = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.body for call in self.tool_calls]
        return message
