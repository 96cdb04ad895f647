# SPDX-License-Identifier: Apache-2.0
"""Turns a call into a prompt: renders it and matches it against the session's earlier turns.

Decides which turn a prompt continues and which of its tokens are new. Refuses a prompt that cannot
fit by its length, before it is tokenized; a large one is rendered, tokenized or decoded off the
event loop. Does not call engines or record anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from penstock.errors import BadRequest, ContextOverflow
from penstock.gateway.answer_history import AnswerHistory
from penstock.gateway.control_tokens import escape_trusted
from penstock.gateway.model_calls import Call
from penstock.gateway.parsing import PLAIN, THINK, AnswerFormat
from penstock.gateway.renderer import Renderer
from penstock.gateway.turn_tree import ROOT, TurnTree
from penstock.types import PolicyName, TokenIds, token_ids, view_ids

MAX_MESSAGES = 2_048
LOOP_CHARS = 16_384
"""The most that is tokenized on the event loop: some milliseconds."""
LOOP_IDS = 1_024
"""The most that is decoded there: as long, where every second one is a control token."""
LOOP_MESSAGES, LOOP_BYTES = 128, 64 << 10
"""The most of a prompt that is prepared on the event loop, and rendered in the queue of small ones.
A template may look back from each message to all others, or walk through every part of a tool."""


T = TypeVar("T")


class InThread(Protocol):
    """Runs work off the event loop, when it is the turn of the agent's key."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    policy: PolicyName
    renderer: Renderer
    parent: int
    """The turn it continues, or ROOT."""
    new_text: str
    """Escaped text after the parent's context."""
    new_ids: Sequence[int]
    context_ids: Sequence[int]
    """The complete prompt for the engine."""
    answer_format: AnswerFormat = PLAIN
    """How to parse the answer."""


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Builds the prompts of one agent; only reads the turns and answers of its session."""

    _tree: TurnTree
    _answer_history: AnswerHistory
    _in_thread: InThread
    _place: Callable[[], AbstractAsyncContextManager[None]]
    """In the queue of small prompts, when it is the turn of the agent's key."""
    _agent: str = ""
    """The sub-agent that asks; it continues its own turns where others have the same context."""

    async def from_call(self, call: Call, policy: PolicyName, renderer: Renderer) -> Prompt:
        if not 1 <= len(call.messages) <= MAX_MESSAGES:
            raise BadRequest(f"got {len(call.messages)} messages; send 1 to {MAX_MESSAGES}")
        sampled_texts = self._answer_history.find(policy, call.messages, self._agent)
        text = await self._render(call, renderer, sampled_texts)
        answer_format = AnswerFormat(
            has_thinking=renderer.has_thinking,
            is_thinking=renderer.has_thinking and text.rstrip().endswith(THINK),
            tools=renderer.tool_format if call.tools else None,
        )
        return await self._from_escaped(text, policy, renderer, answer_format)

    async def from_text(self, text: str, policy: PolicyName, renderer: Renderer) -> Prompt:
        return await self._from_escaped(escape_trusted(text), policy, renderer)

    async def from_ids(
        self, prompt: Sequence[int], policy: PolicyName, renderer: Renderer
    ) -> Prompt:
        if renderer.window is not None and len(prompt) > renderer.window:
            raise overflow(len(prompt), renderer.window)
        if not all(0 <= token < renderer.num_ids for token in prompt):
            raise BadRequest(f"the prompt contains token ids outside 0 to {renderer.num_ids - 1}")
        ids = token_ids(prompt)
        parent, length = self._tree.match_ids(policy, ids, self._agent)
        new_ids = view_ids(TokenIds(ids[length:])).tolist()
        if len(new_ids) <= LOOP_IDS:
            new_text = renderer.decode_escaped(new_ids)
        else:
            new_text = await self._in_thread(partial(renderer.decode_escaped, new_ids))
        return self._make(policy, renderer, parent, new_text, new_ids)

    async def _render(
        self, call: Call, renderer: Renderer, sampled_texts: Mapping[int, str]
    ) -> str:
        """Pass the session's own answers to the template as they were sampled; it may still strip
        or trim them."""
        try:
            return await self._render_with(sampled_texts, call, renderer)
        except BadRequest:
            if not sampled_texts:
                raise
        return await self._render_with({}, call, renderer)  # it may need an answer's separate parts

    async def _render_with(self, answers: Mapping[int, str], call: Call, renderer: Renderer) -> str:
        if len(call.messages) <= LOOP_MESSAGES:
            text = await renderer.render_soon(
                call.messages,
                tools=call.tools,
                thinking=call.thinking,
                answers=answers,
                max_bytes=LOOP_BYTES,
                place=self._place,
            )
            if text is not None:
                return text
        work = partial(
            renderer.render,
            call.messages,
            tools=call.tools,
            thinking=call.thinking,
            answers=answers,
        )
        return await self._in_thread(work)

    async def _from_escaped(
        self,
        text: str,
        policy: PolicyName,
        renderer: Renderer,
        answer_format: AnswerFormat = PLAIN,
    ) -> Prompt:
        parent, length = self._tree.match(policy, text, self._agent)
        new_text = text[length:]
        _check_length(new_text, renderer)
        if len(new_text) <= LOOP_CHARS:
            new_ids: Sequence[int] = renderer.encode(new_text)
        else:
            new_ids = await self._in_thread(partial(renderer.encode_large, new_text))
        return self._make(policy, renderer, parent, new_text, new_ids, answer_format)

    def _make(
        self,
        policy: PolicyName,
        renderer: Renderer,
        parent: int,
        new_text: str,
        new_ids: Sequence[int],
        answer_format: AnswerFormat = PLAIN,
    ) -> Prompt:
        context_ids = new_ids
        if parent != ROOT:
            context_ids = [*self._tree.context_ids(parent), *new_ids]
        if not context_ids:
            raise BadRequest("the prompt is empty; send at least one token")
        return Prompt(
            policy=policy,
            renderer=renderer,
            parent=parent,
            new_text=new_text,
            new_ids=new_ids,
            context_ids=context_ids,
            answer_format=answer_format,
        )


def _check_length(text: str, renderer: Renderer) -> None:
    """Refuse a text that exceeds the window even if all its tokens were the longest one."""
    if renderer.window is None or renderer.max_chars is None or len(text) <= renderer.max_chars:
        return
    raise overflow(-(-len(text) * renderer.window // renderer.max_chars), renderer.window)


def overflow(num_tokens: int, window: int) -> ContextOverflow:
    return ContextOverflow(
        f"the prompt of {num_tokens} tokens leaves no room for an answer in the model's "
        f"context window of {window}; shorten the conversation",
        num_tokens=num_tokens,
        window=window,
    )
