# SPDX-License-Identifier: Apache-2.0
"""OpenAI Chat Completions: request, response and stream formats. No sessions, no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from penstock.errors import BadRequest, WireError
from penstock.gateway.dialects.dialect import (
    AnsweredTurn,
    Dialect,
    ParsedRequest,
    Progress,
    sse_event,
)
from penstock.gateway.dialects.fields import (
    convert,
    join_text,
    read_response_format,
    read_thinking,
    read_tools,
    reject_unsupported,
    select_tools,
    tool_call,
)
from penstock.gateway.dialects.limits import check_choices
from penstock.gateway.dialects.openai_common import (
    DONE,
    error_body,
    finish_reason,
    response_head,
    tokens_with_logprobs,
    usage_body,
)
from penstock.gateway.model_calls import Call, Delta
from penstock.gateway.sampling import SamplingFields
from penstock.types import JsonObject, PolicyName

ROLES = {"developer": "system"}
"""`developer` is OpenAI's newer name for `system`; templates expect the older one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    include_usage: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`. Other fields are accepted and ignored, unless ignoring them
    would change the answer: then they are rejected."""

    model: str
    messages: list[JsonObject]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    response_format: JsonObject | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None


# --- request ------------------------------------------------------------------------------------


def read(fields: JsonObject) -> ParsedRequest:
    reject_unsupported(fields)
    request = convert(fields, ChatRequest)
    num_choices = 1 if request.n is None else request.n
    check_choices(num_choices)
    head = response_head("chatcmpl", "chat.completion", request.model)
    return ParsedRequest(
        calls=_calls(request, num_choices),
        model=PolicyName(request.model),
        is_stream=bool(request.stream),
        body=partial(_body, head, bool(request.logprobs)),
        writer=partial(_ChatWriter, head, request, num_choices),
        is_incremental=not request.logprobs,
    )


def _calls(request: ChatRequest, num_choices: int) -> list[Call]:
    messages = [_normalise(message, at) for at, message in enumerate(request.messages)]
    tools = select_tools(
        read_tools(request.tools), request.tool_choice, is_parallel=request.parallel_tool_calls
    )
    thinking = read_thinking(request.chat_template_kwargs, request.reasoning_effort)
    json_schema = read_response_format(request.response_format)
    max_tokens = request.max_completion_tokens
    max_tokens = request.max_tokens if max_tokens is None else max_tokens
    return [
        Call(
            messages=messages,
            policy=PolicyName(request.model),
            tools=tools,
            thinking=thinking,
            overrides=request.overrides(
                max_tokens=max_tokens, json_schema=json_schema, choice=choice
            ),
        )
        for choice in range(num_choices)
    ]


def _normalise(message: JsonObject, at: int) -> JsonObject:
    """Convert content to a string, as chat templates expect; unknown fields are kept."""
    role = message.get("role")
    if not isinstance(role, str):
        raise BadRequest(f"messages[{at}] has no role")
    calls = message.get("tool_calls")
    content = message.get("content")
    if isinstance(content, str) and not calls and role not in ROLES and "reasoning" not in message:
        return message
    plain = {**message, "role": ROLES.get(role, role)}
    plain["content"] = join_text(content, f"messages[{at}].content", ("text",))
    if isinstance(plain.get("reasoning"), str):
        plain.setdefault("reasoning_content", plain.pop("reasoning"))
    if calls:
        plain["tool_calls"] = _history_calls(calls, f"messages[{at}].tool_calls")
    return plain


def _history_calls(calls: object, where: str) -> list[JsonObject]:
    if not isinstance(calls, list):
        raise BadRequest(f"{where} must be a list")
    plain: list[JsonObject] = []
    for at, call in enumerate(cast(list[Any], calls)):
        fields = cast(JsonObject, call) if isinstance(call, dict) else {}
        function = fields.get("function")
        if not isinstance(function, dict):
            raise BadRequest(f"{where}[{at}] has no function")
        named = cast(JsonObject, function)
        read = tool_call(fields.get("id"), named.get("name"), named.get("arguments"), where)
        plain.append({**fields, **read})
    return plain


# --- answer -------------------------------------------------------------------------------------


def _body(head: JsonObject, has_logprobs: bool, replies: Sequence[AnsweredTurn]) -> JsonObject:
    return {
        **head,
        "choices": [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": _logprobs(reply) if has_logprobs else None,
                "finish_reason": finish_reason(reply),
            }
            for index, reply in enumerate(replies)
        ],
        "usage": usage_body(replies),
    }


def _message(reply: AnsweredTurn) -> JsonObject:
    answer = reply.answer
    message = {**answer.message, "refusal": None}
    if answer.tool_calls:
        message["content"] = answer.text or None
    return message


def _logprobs(reply: AnsweredTurn) -> JsonObject:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in tokens_with_logprobs(reply)
    ]
    return {"content": content, "refusal": None}


class _ChatWriter:
    """Writes chunks; chunks of several choices are interleaved."""

    def __init__(self, head: JsonObject, request: ChatRequest, num_choices: int) -> None:
        self._head = {**head, "object": "chat.completion.chunk"}
        self._has_logprobs = bool(request.logprobs)
        options = request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._progress: list[Progress | None] = [None] * num_choices

    def write_delta(self, choice: int, delta: Delta) -> bytes:
        events: list[bytes] = []
        progress = self._progress[choice]
        if progress is None:
            progress = self._progress[choice] = Progress()
            events.append(self._chunk(choice, {"role": "assistant", "content": ""}))
        progress.add(delta)
        if delta.reasoning:
            events.append(self._chunk(choice, {"reasoning_content": delta.reasoning}))
        if delta.text:
            events.append(self._chunk(choice, {"content": delta.text}))
        return b"".join(events)

    def write_end(self, choice: int, reply: AnsweredTurn) -> bytes:
        progress = self._progress[choice] or Progress()
        events = [self.write_delta(choice, progress.remaining(reply.answer))]
        if reply.answer.tool_calls:
            calls = [{"index": at, **call.body} for at, call in enumerate(reply.answer.tool_calls)]
            events.append(self._chunk(choice, {"tool_calls": calls}))
        if self._has_logprobs:
            events.append(self._chunk(choice, {"content": ""}, logprobs=_logprobs(reply)))
        events.append(self._chunk(choice, {}, finish=finish_reason(reply)))
        return b"".join(events)

    def write_done(self, replies: Sequence[AnsweredTurn]) -> bytes:
        if not self._include_usage:
            return DONE
        return sse_event({**self._head, "choices": [], "usage": usage_body(replies)}) + DONE

    def write_error(self, error: WireError) -> bytes:
        return sse_event(error_body(error))

    def _chunk(
        self,
        choice: int,
        delta: JsonObject,
        *,
        logprobs: JsonObject | None = None,
        finish: str | None = None,
    ) -> bytes:
        part = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return sse_event({**self._head, "choices": [part]})


CHAT = Dialect(
    path="/v1/chat/completions",
    summary="OpenAI Chat Completions.",
    request=ChatRequest,
    read=read,
    error=error_body,
)
