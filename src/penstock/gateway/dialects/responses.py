# SPDX-License-Identifier: Apache-2.0
"""OpenAI Responses: items in, items out. Formats only; the stream is in `responses_stream`.

Nothing is stored between requests: an agent sends the full conversation as `input`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.errors import BadRequest
from penstock.gateway.dialects.chat import ROLES
from penstock.gateway.dialects.dialect import AnsweredTurn, Dialect, ParsedRequest
from penstock.gateway.dialects.fields import (
    UNSUPPORTED,
    convert,
    get_object,
    join_text,
    read_format,
    read_thinking,
    read_tools,
    reject_unsupported,
    select_tools,
    tool_call,
)
from penstock.gateway.dialects.openai_common import error_body
from penstock.gateway.dialects.responses_stream import ResponseWriter, finished, output_items
from penstock.gateway.model_calls import Call
from penstock.gateway.sampling import SamplingFields
from penstock.types import JsonObject, PolicyName

ALL_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    **UNSUPPORTED,
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
TEXT_PARTS = ("input_text", "output_text", "text")
INCLUDABLE = frozenset(("reasoning.encrypted_content",))
"""Accepted and ignored: reasoning is not encrypted here."""
NO_STATE = (
    "previous_response_id: this gateway does not store responses; send the full conversation as "
    "`input`, including the output items of earlier responses"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest(SamplingFields):
    """`POST /v1/responses`. Unknown fields are handled as in chat."""

    model: str
    input: str | list[JsonObject]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    stream: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: JsonObject | None = None
    text: JsonObject | None = None
    metadata: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None


# --- request ------------------------------------------------------------------------------------


def read(fields: JsonObject) -> ParsedRequest:
    reject_unsupported(fields, ALL_UNSUPPORTED)
    request = convert(fields, ResponseRequest)
    if request.previous_response_id is not None:
        raise BadRequest(NO_STATE)
    if set(request.include or ()) - INCLUDABLE:
        raise BadRequest(f"include: only {', '.join(INCLUDABLE)} is supported")
    reject_unsupported(request.text or {}, {"verbosity": ("medium",)})
    format = get_object(request.text, "format")
    effort = (request.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise BadRequest("reasoning.effort must be a string")
    call = Call(
        messages=_messages(request),
        policy=PolicyName(request.model),
        tools=select_tools(
            read_tools([_to_chat_tool(tool) for tool in request.tools or ()]),
            request.tool_choice,
            is_parallel=request.parallel_tool_calls,
        ),
        thinking=read_thinking(request.chat_template_kwargs, effort),
        overrides=request.overrides(
            max_tokens=request.max_output_tokens,
            json_schema=read_format(format or None, format.get("schema"), "text.format"),
        ),
    )
    head = _head(request)
    return ParsedRequest(
        calls=[call],
        model=PolicyName(request.model),
        is_stream=bool(request.stream),
        body=partial(_body, head),
        writer=partial(ResponseWriter, head),
    )


def _to_chat_tool(tool: JsonObject) -> JsonObject:
    """Chat nests a function under its own key; Responses does not."""
    function = {name: value for name, value in tool.items() if name not in ("type", "strict")}
    return {"type": tool.get("type"), "function": function}


def _messages(request: ResponseRequest) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    conversation = _Conversation(messages)
    for at, item in enumerate(request.input):
        conversation.add(item, f"input[{at}]")
    conversation.end_answer()
    return messages


class _Conversation:
    """Converts items to messages: reasoning, text and calls of one answer become one message."""

    def __init__(self, messages: list[JsonObject]) -> None:
        self._messages = messages
        self._answer: JsonObject = {}

    def add(self, item: JsonObject, where: str) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, where)
        elif kind == "function_call":
            call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            self._answer.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            self._add_reasoning(item, where)
        elif kind == "function_call_output":
            self.end_answer()
            content = join_text(item.get("output"), f"{where}.output", TEXT_PARTS)
            tool = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            self._messages.append(tool)
        else:
            raise BadRequest(
                f"{where}: items of type {kind!r} are not supported; send message, reasoning, "
                "function_call and function_call_output"
            )

    def _add_message(self, item: JsonObject, where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str):
            raise BadRequest(f"{where} has no role")
        content = join_text(item.get("content"), f"{where}.content", TEXT_PARTS)
        if role != "assistant":
            self.end_answer()
            self._messages.append({"role": ROLES.get(role, role), "content": content})
            return
        if self._answer.keys() & {"content", "tool_calls"}:
            self.end_answer()
        self._answer["content"] = content

    def _add_reasoning(self, item: JsonObject, where: str) -> None:
        if self._answer:
            self.end_answer()
        parts: object = item.get("content") or item.get("summary")
        text = join_text(parts, f"{where}.content", ("reasoning_text", "summary_text"))
        if text:
            self._answer["reasoning_content"] = text

    def end_answer(self) -> None:
        if self._answer:
            self._messages.append({"role": "assistant", "content": "", **self._answer})
            self._answer = {}


# --- answer -------------------------------------------------------------------------------------


def _head(request: ResponseRequest) -> JsonObject:
    """A response before it has any output."""
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": request.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _body(head: JsonObject, replies: Sequence[AnsweredTurn]) -> JsonObject:
    (reply,) = replies
    return finished(head, reply, output_items(reply.answer))


RESPONSES = Dialect(
    path="/v1/responses",
    summary="OpenAI Responses.",
    request=ResponseRequest,
    read=read,
    error=error_body,
)
