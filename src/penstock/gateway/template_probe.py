# SPDX-License-Identifier: Apache-2.0
"""Probes how a chat template treats a growing conversation, by rendering a few.

An append-only template keeps every earlier turn in place, so each call extends the previous one. A
template that strips reasoning or trims text rewrites the model's answers: the next call starts a
branch, and its tokens are trained in the context in which they were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from weakref import WeakKeyDictionary

from penstock.errors import BadRequest
from penstock.gateway.parsing import ToolFormat
from penstock.gateway.renderer import Renderer
from penstock.types import JsonObject

QUESTION: JsonObject = {"role": "user", "content": "Is it raining?"}
NEXT_QUESTION: JsonObject = {"role": "user", "content": "And tomorrow?"}
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
    """How a template renders earlier answers."""

    APPEND_ONLY = "append-only"
    """Leaves them unchanged: a session is one chain of turns."""
    STRIPS_THINKING = "strips-thinking"
    """Removes their reasoning: a call after an answer with reasoning starts a branch."""
    REWRITES = "rewrites"
    """Changes their text, such as leading or trailing white space: a call after a changed answer
    starts a branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    prefix: HistoryMode
    can_switch_thinking: bool
    """The prompt differs between thinking on and off."""
    shows_tools: bool
    """The prompt differs with and without tools."""
    tool_format: ToolFormat | None

    def log_fields(self) -> dict[str, object]:
        """Fields for one log line."""
        branches = {
            HistoryMode.APPEND_ONLY: "only if the agent rewrites its history",
            HistoryMode.STRIPS_THINKING: "after each answer with reasoning",
            HistoryMode.REWRITES: "after each answer that the template changes",
        }[self.prefix]
        return {
            "template": self.prefix.value,
            "branches": branches,
            "thinking_switch": self.can_switch_thinking,
            "tools": "none" if not self.shows_tools else self.tool_format or "unknown format",
        }

    def check(self, *, wants_tools: bool, wants_thinking: bool) -> None:
        """Reject options the template would silently ignore."""
        if wants_thinking and not self.can_switch_thinking:
            raise BadRequest(
                "thinking cannot be switched: this model's chat template renders the same prompt "
                "either way; omit the switch"
            )
        if wants_tools and not self.shows_tools:
            raise BadRequest(
                "tools: this model's chat template does not show them to the model; omit them or "
                "describe them in a message"
            )
        if wants_tools and self.tool_format is None:
            raise BadRequest(
                "tools: this model's chat template uses a tool-call format that the gateway cannot "
                "parse; describe the tools in a message"
            )


_PROBED: WeakKeyDictionary[Renderer, TemplateTraits] = WeakKeyDictionary()


def load_probed(folder: Path) -> Renderer:
    """For a thread: a template may take its time."""
    renderer = Renderer.load(folder)
    probe(renderer)
    return renderer


def probe(renderer: Renderer) -> TemplateTraits:
    """Of its template; rendered once."""
    if renderer not in _PROBED:
        _PROBED[renderer] = _probe(renderer)
    return _PROBED[renderer]


def _probe(renderer: Renderer) -> TemplateTraits:
    plain = _try(renderer, QUESTION)
    return TemplateTraits(
        prefix=_prefix(renderer, plain),
        can_switch_thinking=_differ(
            _try(renderer, QUESTION, thinking=True), _try(renderer, QUESTION, thinking=False)
        ),
        shows_tools=_differ(plain, _try(renderer, QUESTION, tools=(TOOL,))),
        tool_format=renderer.tool_format,
    )


def _prefix(renderer: Renderer, prompt: str | None) -> HistoryMode:
    if not _preserves_prefix(renderer, prompt, PLAIN):
        return HistoryMode.REWRITES
    if not _preserves_prefix(renderer, prompt, THOUGHT):
        return HistoryMode.STRIPS_THINKING
    is_kept = _preserves_prefix(renderer, prompt, SPACED)
    return HistoryMode.APPEND_ONLY if is_kept else HistoryMode.REWRITES


def _preserves_prefix(renderer: Renderer, prompt: str | None, answer: str) -> bool:
    """True if the next prompt starts with this prompt and answer."""
    reply = {"role": "assistant", "content": answer}
    longer = _try(renderer, QUESTION, reply, NEXT_QUESTION)
    return prompt is not None and longer is not None and longer.startswith(prompt + answer)


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _try(
    renderer: Renderer,
    *messages: JsonObject,
    tools: tuple[JsonObject, ...] = (),
    thinking: bool | None = None,
) -> str | None:
    """The rendered prompt; None if the template rejects the messages."""
    try:
        return renderer.render(messages, tools=tools, thinking=thinking)
    except BadRequest:
        return None
