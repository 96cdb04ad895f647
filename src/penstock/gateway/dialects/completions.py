# SPDX-License-Identifier: Apache-2.0
"""OpenAI Completions: raw text or token ids in, text out; no chat template. Formats only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

from penstock.errors import BadRequest, WireError
from penstock.gateway.dialects.chat import StreamOptions
from penstock.gateway.dialects.dialect import (
    AnsweredTurn,
    Dialect,
    ParsedRequest,
    Progress,
    sse_event,
)
from penstock.gateway.dialects.fields import (
    UNSUPPORTED,
    convert,
    read_response_format,
    reject_unsupported,
)
from penstock.gateway.dialects.limits import check_choices
from penstock.gateway.dialects.openai_common import (
    DONE,
    error_body,
    response_head,
    tokens_with_logprobs,
    usage_body,
)
from penstock.gateway.model_calls import Delta, RawPrompt
from penstock.gateway.sampling import SamplingFields
from penstock.types import JsonObject, PolicyName

ALL_UNSUPPORTED = {**UNSUPPORTED, "echo": (False,), "suffix": ("",), "logprobs": (0,)}
"""`logprobs` is the number of alternatives: 0 returns log-probs of the sampled tokens; alternatives
are not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(SamplingFields):
    """`POST /v1/completions`. Unknown fields are handled as in chat."""

    model: str
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    response_format: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class _ResponseShape:
    """Request settings needed by both body and stream."""

    head: JsonObject
    num_prompts: int
    has_logprobs: bool
    include_usage: bool

    def choice(self, index: int, text: str, reply: AnsweredTurn | None) -> JsonObject:
        return {
            "index": index,
            "text": text,
            "logprobs": _logprobs(reply) if self.has_logprobs and reply else None,
            "finish_reason": None if reply is None else reply.answer.finish.value,
        }


# --- request ------------------------------------------------------------------------------------


def read(fields: JsonObject) -> ParsedRequest:
    reject_unsupported(fields, ALL_UNSUPPORTED)
    request = convert(fields, CompletionRequest)
    num_choices = 1 if request.n is None else request.n
    prompts = _prompts(request.prompt)
    check_choices(num_choices)
    check_choices(num_choices * len(prompts))
    if request.best_of not in (None, num_choices):
        raise BadRequest("best_of: not supported by this gateway; omit it")
    options = request.stream_options
    shape = _ResponseShape(
        head=response_head("cmpl", "text_completion", request.model),
        num_prompts=len(prompts),
        has_logprobs=request.logprobs is not None,
        include_usage=options is not None and bool(options.include_usage),
    )
    return ParsedRequest(
        calls=_calls(request, prompts, num_choices),
        model=PolicyName(request.model),
        is_stream=bool(request.stream),
        body=partial(_body, shape),
        writer=partial(_CompletionWriter, shape),
        is_incremental=request.logprobs is None,
    )


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Normalize to a list: the request has one text, several texts, one list of ids, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [cast(list[int], prompt)]
    if not prompt or any(isinstance(item, int) for item in prompt):
        raise BadRequest("prompt must be a string, a list of token ids, or a list of either")
    return cast(list[str | list[int]], prompt)


def _calls(
    request: CompletionRequest, prompts: Sequence[str | list[int]], num_choices: int
) -> list[RawPrompt]:
    json_schema = read_response_format(request.response_format)
    return [
        RawPrompt(
            prompt=prompt,
            policy=PolicyName(request.model),
            overrides=request.overrides(
                max_tokens=request.max_tokens,
                json_schema=json_schema,
                choice=at * num_choices + choice,
            ),
        )
        for at, prompt in enumerate(prompts)
        for choice in range(num_choices)
    ]


# --- answer -------------------------------------------------------------------------------------


def _body(shape: _ResponseShape, replies: Sequence[AnsweredTurn]) -> JsonObject:
    return {
        **shape.head,
        "choices": [
            shape.choice(index, reply.answer.text, reply) for index, reply in enumerate(replies)
        ],
        "usage": usage_body(replies, shape.num_prompts),
    }


def _logprobs(reply: AnsweredTurn) -> JsonObject:
    tokens = tokens_with_logprobs(reply)
    *offsets, _ = accumulate((len(text) for text, _ in tokens), initial=0)
    return {
        "tokens": [text for text, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }


class _CompletionWriter:
    def __init__(self, shape: _ResponseShape) -> None:
        self._shape = shape
        self._progress: dict[int, Progress] = {}

    def write_delta(self, choice: int, delta: Delta) -> bytes:
        self._progress.setdefault(choice, Progress()).add(delta)
        return self._chunk(choice, delta.text, None) if delta.text else b""

    def write_end(self, choice: int, reply: AnsweredTurn) -> bytes:
        rest = self._progress.get(choice, Progress()).remaining(reply.answer)
        return self._chunk(choice, rest.text, reply)

    def write_done(self, replies: Sequence[AnsweredTurn]) -> bytes:
        if not self._shape.include_usage:
            return DONE
        usage = usage_body(replies, self._shape.num_prompts)
        return sse_event({**self._shape.head, "choices": [], "usage": usage}) + DONE

    def write_error(self, error: WireError) -> bytes:
        return sse_event(error_body(error))

    def _chunk(self, choice: int, text: str, reply: AnsweredTurn | None) -> bytes:
        return sse_event({**self._shape.head, "choices": [self._shape.choice(choice, text, reply)]})


COMPLETIONS = Dialect(
    path="/v1/completions",
    summary="OpenAI Completions.",
    request=CompletionRequest,
    read=read,
    error=error_body,
)
