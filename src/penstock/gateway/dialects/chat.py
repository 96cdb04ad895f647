# SPDX-License-Identifier: Apache-2.0
"""OpenAI Chat Completions: its request, its answer, its stream. Shapes only; no session, no
HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.errors import BadRequest
from penstock.gateway.gateway import Answer
from penstock.gateway.renderer import Renderer
from penstock.gateway.sampling import Overrides
from penstock.gateway.seeds import derive
from penstock.types import JsonObject, Turn, view_ids, view_log_probs
from penstock.wire.codec import encode_json

MAX_CHOICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    include_usage: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Overrides):
    """`POST /v1/chat/completions`. Fields not named here are ignored and never reach the engine."""

    model: str
    messages: list[JsonObject]
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: JsonObject | None = None
    logit_bias: JsonObject | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer with the turn behind it, for its log-probs."""

    answer: Answer
    turn: Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """All choices of one request under one id."""

    model: str
    choices: Sequence[Choice]
    renderer: Renderer
    has_logprobs: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


# --- request ------------------------------------------------------------------------------------


def check(request: ChatRequest) -> None:
    """Refuse what would change the answer and is not implemented; silence would be a lie."""
    if not 1 <= request.num_choices <= MAX_CHOICES:
        raise BadRequest(f"n {request.n} is not between 1 and {MAX_CHOICES}")
    unsupported = {
        "tools": request.tools,
        "functions": request.functions,
        "top_logprobs": request.top_logprobs,
        "logit_bias": request.logit_bias,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "response_format": (request.response_format or {}).get("type", "text") != "text",
    }
    named = [name for name, value in unsupported.items() if value]
    if named:
        raise BadRequest(f"{', '.join(named)}: not supported by this gateway; leave it out")


def plain_messages(request: ChatRequest) -> list[JsonObject]:
    """Messages with string content, as chat templates expect them."""
    return [_plain(message, at) for at, message in enumerate(request.messages)]


def _plain(message: JsonObject, at: int) -> JsonObject:
    if not isinstance(message.get("role"), str):
        raise BadRequest(f"messages[{at}] has no role")
    if message.get("tool_calls"):
        raise BadRequest(f"messages[{at}].tool_calls: not supported by this gateway")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    parts = cast(list[Any], content) if isinstance(content, list) else [content]
    texts: list[str] = []
    for part in parts:
        text = cast(JsonObject, part).get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise BadRequest(f"messages[{at}].content: only text parts are supported")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def overrides_of(request: ChatRequest, choice: int) -> Overrides:
    """The sampling fields for one choice; choices that share a caller's seed must still differ."""
    seed = request.seed
    return Overrides(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        max_tokens=request.max_tokens,
        max_completion_tokens=request.max_completion_tokens,
        seed=seed if seed is None or choice == 0 else derive(seed, choice),
        stop=request.stop,
    )


# --- answer -------------------------------------------------------------------------------------


def completion_body(reply: Reply) -> JsonObject:
    return {
        **_head(reply, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.answer.text, "refusal": None},
                "logprobs": _logprobs(reply, choice),
                "finish_reason": choice.answer.finish.value,
            }
            for index, choice in enumerate(reply.choices)
        ],
        "usage": _usage(reply),
    }


def stream_events(reply: Reply, *, include_usage: bool) -> Iterator[bytes]:
    """Server-sent events, made after the answer is complete: an agent sees the usual shape."""
    for index, choice in enumerate(reply.choices):
        text = choice.answer.text
        yield _event(reply, _delta(index, {"role": "assistant", "content": ""}))
        yield _event(reply, _delta(index, {"content": text}, logprobs=_logprobs(reply, choice)))
        yield _event(reply, _delta(index, {}, finish=choice.answer.finish.value))
    if include_usage:
        yield _event(reply, None, usage=_usage(reply))
    yield b"data: [DONE]\n\n"


def _head(reply: Reply, kind: str) -> JsonObject:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.model}


def _delta(
    index: int,
    delta: JsonObject,
    *,
    logprobs: JsonObject | None = None,
    finish: str | None = None,
) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _event(reply: Reply, choice: JsonObject | None, *, usage: JsonObject | None = None) -> bytes:
    chunk = _head(reply, "chat.completion.chunk")
    chunk["choices"] = [] if choice is None else [choice]
    if usage is not None:
        chunk["usage"] = usage
    return b"data: " + encode_json(chunk) + b"\n\n"


def _usage(reply: Reply) -> JsonObject:
    prompt = reply.choices[0].answer.usage.prompt_tokens
    completion = sum(choice.answer.usage.completion_tokens for choice in reply.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _logprobs(reply: Reply, choice: Choice) -> JsonObject | None:
    if not reply.has_logprobs:
        return None
    pairs = zip(
        view_ids(choice.turn.sampled_ids), view_log_probs(choice.turn.logprobs), strict=True
    )
    content: list[JsonObject] = []
    for token, logprob in pairs:
        text = reply.renderer.decode([token])
        raw = list(text.encode())
        content.append({"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []})
    return {"content": content, "refusal": None}
