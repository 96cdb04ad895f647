# SPDX-License-Identifier: Apache-2.0
"""Anthropic Messages: request format. The response is in `messages_stream`."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from penstock.errors import BadRequest
from penstock.gateway.dialects.dialect import AnsweredTurn, Dialect, ParsedRequest
from penstock.gateway.dialects.fields import (
    convert,
    get_object,
    join_text,
    read_format,
    read_tools,
    reject_unsupported,
    select_tools,
    tool_call,
)
from penstock.gateway.dialects.messages_stream import (
    MessageWriter,
    content_blocks,
    error_body,
    stop_fields,
    usage_fields,
)
from penstock.gateway.model_calls import Call
from penstock.gateway.sampling import SamplingFields
from penstock.types import JsonObject, PolicyName

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
    "prompt_embeds": (),
    "stop": (),
}
THINKING = {"enabled": True, "disabled": False, "adaptive": None}
"""`adaptive` leaves it to the chat template. The token budget is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRequest(SamplingFields):
    """`POST /v1/messages`. Unknown fields are handled as in chat."""

    model: str
    messages: list[JsonObject]
    max_tokens: int
    system: str | list[JsonObject] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None


# --- request ------------------------------------------------------------------------------------


def read(fields: JsonObject) -> ParsedRequest:
    reject_unsupported(fields, UNSUPPORTED)
    request = convert(
        {**fields, "stop": fields["stop_sequences"]} if "stop_sequences" in fields else fields,
        MessageRequest,
    )
    call = Call(
        messages=_messages(request),
        policy=PolicyName(request.model),
        tools=_tools(request),
        thinking=_thinking(request.thinking),
        overrides=request.overrides(
            max_tokens=request.max_tokens, json_schema=_format(request.output_config)
        ),
    )
    head: JsonObject = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
    }
    stop = request.stop_sequences or ()
    return ParsedRequest(
        calls=[call],
        model=PolicyName(request.model),
        is_stream=bool(request.stream),
        body=partial(_body, head, stop),
        writer=partial(MessageWriter, head, stop),
    )


def _messages(request: MessageRequest) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if request.system:
        content = join_text(request.system, "system", ("text",), "\n")
        messages.append({"role": "system", "content": content})
    for at, message in enumerate(request.messages):
        where = f"messages[{at}]"
        role = message.get("role")
        if role == "assistant":
            messages.append(_assistant(message, where))
        elif role in ("user", "system"):
            messages.extend(_user(message, where))
        else:
            raise BadRequest(f"{where}.role {role!r} must be user or assistant")
    if messages and messages[-1]["role"] == "assistant":
        raise BadRequest(
            "the last message must not be from the assistant: prefill is not supported"
        )
    return messages


def _blocks(message: JsonObject, where: str) -> list[JsonObject]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks: list[Any] = cast(list[Any], content) if isinstance(content, list) else [None]
    if not all(isinstance(block, dict) for block in blocks):
        raise BadRequest(f"{where}.content must be a string or a list of blocks")
    return blocks


def _assistant(message: JsonObject, where: str) -> JsonObject:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[JsonObject] = []
    for block in _blocks(message, where):
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(tool_call(block.get("id"), block.get("name"), arguments, where))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        else:
            texts.append(join_text([block], f"{where}.content", ("text",)))
    answer: JsonObject = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        answer["reasoning_content"] = "".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _user(message: JsonObject, where: str) -> list[JsonObject]:
    """One message per tool result; text blocks between them are merged into one message."""
    messages: list[JsonObject] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:  # joined once: a body of small blocks would be copied for each of them
            messages.append({"role": message["role"], "content": "\n".join(texts)})
            texts.clear()

    for block in _blocks(message, where):
        if block.get("type") == "tool_result":
            end_text()
            content = join_text(block.get("content"), f"{where}.content", ("text",), "\n")
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
            messages.append(result | ({"is_error": True} if block.get("is_error") else {}))
        else:
            texts.append(join_text([block], f"{where}.content", ("text",)))
    end_text()
    return messages


def _tools(request: MessageRequest) -> Sequence[JsonObject]:
    choice = request.tool_choice or {}
    tools: list[JsonObject] = []
    for at, tool in enumerate(request.tools or ()):
        if tool.get("type", "custom") not in ("custom", None):
            raise BadRequest(f"tools[{at}]: only custom tools (with input_schema) are supported")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description", ""),
            "parameters": tool.get("input_schema"),
        }
        tools.append({"type": "function", "function": function})
    is_parallel = False if choice.get("disable_parallel_tool_use") else None
    return select_tools(read_tools(tools), choice.get("type"), is_parallel=is_parallel)


def _thinking(thinking: JsonObject | None) -> bool | None:
    if thinking is None:
        return None
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in THINKING or thinking.get("display") == "omitted":
        raise BadRequest(
            f"thinking.type must be one of {', '.join(THINKING)}; "
            'display "omitted" is not supported'
        )
    return THINKING[kind]


def _format(config: JsonObject | None) -> str | None:
    if (config or {}).get("effort") is not None:
        raise BadRequest("output_config.effort: not supported by this gateway; omit it")
    format = get_object(config, "format")
    return read_format(format or None, format.get("schema"), "output_config.format")


# --- answer -------------------------------------------------------------------------------------


def _body(head: JsonObject, stop: Sequence[str], replies: Sequence[AnsweredTurn]) -> JsonObject:
    (reply,) = replies
    return {
        **head,
        "content": content_blocks(reply.answer),
        **stop_fields(reply, stop),
        "usage": usage_fields(reply.answer),
    }


MESSAGES = Dialect(
    path="/v1/messages",
    summary="Anthropic Messages.",
    request=MessageRequest,
    read=read,
    error=error_body,
)
