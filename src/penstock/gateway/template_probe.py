# SPDX-License-Identifier: Apache-2.0
"""What a chat template does to a conversation that grows, found out by rendering a few.

A template that appends keeps every earlier turn of a session in place, so each call extends the
one before. One that strips reasoning or trims text rewrites what the model has said: such a call
starts a branch, and its tokens are trained in the context in which they were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import BadRequest
from penstock.gateway.parsing import ToolFormat
from penstock.gateway.renderer import Renderer
from penstock.types import JsonObject

ASK: JsonObject = {"role": "user", "content": "Is it raining?"}
ASK_AGAIN: JsonObject = {"role": "user", "content": "And tomorrow?"}
PLAIN = "No."
SPACED = "\n No.\n\n"
THOUGHT = "<think>\nIs it?\n</think>\n\nNo."
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "look_outside",
        "description": "What the weather is.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


class HistoryMode(StrEnum):
    """What a template does to answers that are history by now."""

    APPEND_ONLY = "append-only"
    """Leaves them as they were: a session is one line of turns."""
    STRIPS_THINKING = "strips-thinking"
    """Takes their reasoning out: a call after an answer with reasoning starts a branch."""
    REWRITES = "rewrites"
    """Changes their text, such as white space at its ends: a call after an answer that it changes
    starts a branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    prefix: HistoryMode
    can_switch_thinking: bool
    """The prompt differs between thinking on and off."""
    shows_tools: bool
    """The prompt differs between tools and none."""
    tool_format: ToolFormat | None

    def facts(self) -> dict[str, object]:
        """For one line of a log."""
        branches = {
            HistoryMode.APPEND_ONLY: "only where the agent rewrites its history",
            HistoryMode.STRIPS_THINKING: "after each answer with reasoning",
            HistoryMode.REWRITES: "after each answer that the template changes",
        }[self.prefix]
        return {
            "template": self.prefix.value,
            "branches": branches,
            "thinking_switch": self.can_switch_thinking,
            "tools": "none" if not self.shows_tools else self.tool_format or "unknown form",
        }

    def check(self, *, wants_tools: bool, wants_thinking: bool) -> None:
        """Refuse what the template would silently ignore."""
        if wants_thinking and not self.can_switch_thinking:
            raise BadRequest(
                "thinking cannot be switched: this model's chat template renders the same prompt "
                "either way; leave the switch out"
            )
        if wants_tools and not self.shows_tools:
            raise BadRequest(
                "tools: this model's chat template does not show them to the model; leave them out "
                "or describe them in a message"
            )
        if wants_tools and self.tool_format is None:
            raise BadRequest(
                "tools: this model's chat template writes tool calls in a form that the gateway "
                "cannot read; describe them in a message"
            )


def probe(renderer: Renderer) -> TemplateTraits:
    plain = _try(renderer, ASK)
    return TemplateTraits(
        prefix=_prefix(renderer, plain),
        can_switch_thinking=_differ(
            _try(renderer, ASK, thinking=True), _try(renderer, ASK, thinking=False)
        ),
        shows_tools=_differ(plain, _try(renderer, ASK, tools=(TOOL,))),
        tool_format=renderer.tool_format,
    )


def _prefix(renderer: Renderer, prompt: str | None) -> HistoryMode:
    if not _preserves_prefix(renderer, prompt, THOUGHT) and _preserves_prefix(
        renderer, prompt, PLAIN
    ):
        return HistoryMode.STRIPS_THINKING
    if _preserves_prefix(renderer, prompt, PLAIN) and _preserves_prefix(renderer, prompt, SPACED):
        return HistoryMode.APPEND_ONLY
    return HistoryMode.REWRITES


def _preserves_prefix(renderer: Renderer, prompt: str | None, answer: str) -> bool:
    """Whether the prompt of the next call continues prompt and answer of this one."""
    said = {"role": "assistant", "content": answer}
    longer = _try(renderer, ASK, said, ASK_AGAIN)
    return prompt is not None and longer is not None and longer.startswith(prompt + answer)


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _try(
    renderer: Renderer,
    *messages: JsonObject,
    tools: tuple[JsonObject, ...] = (),
    thinking: bool | None = None,
) -> str | None:
    """None where the template refuses."""
    try:
        return renderer.render(messages, tools=tools, thinking=thinking)
    except BadRequest:
        return None
