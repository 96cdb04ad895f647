# SPDX-License-Identifier: Apache-2.0
"""Formats shared by OpenAI's three APIs: errors, log-probs, usage, end of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from penstock.errors import ContextOverflow, WireError
from penstock.gateway.dialects.dialect import AnsweredTurn
from penstock.types import FinishReason, JsonObject, view_ids, view_log_probs

_CODES = {
    "unauthorized": "invalid_api_key",
    "not_found": "model_not_found",
    "busy": "rate_limit_exceeded",
}


def error_body(error: WireError) -> JsonObject:
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = str(error)
    if isinstance(error, ContextOverflow):
        message = (
            f"the maximum context length is {error.window} tokens, but the prompt has "
            f"{error.num_tokens}; shorten the conversation"
        )
    code = _CODES.get(error.code, error.code)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def response_head(prefix: str, kind: str, model: str) -> JsonObject:
    """Fields shared by a response and the chunks of its stream."""
    id = f"{prefix}-{secrets.token_hex(12)}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


DONE = b"data: [DONE]\n\n"


def finish_reason(reply: AnsweredTurn) -> str:
    answer = reply.answer
    if answer.tool_calls and answer.finish is FinishReason.STOP:
        return "tool_calls"
    return answer.finish.value


def usage_body(replies: Sequence[AnsweredTurn], num_prompts: int = 1) -> JsonObject:
    """Token usage; the prompt is counted once for all its choices."""
    per_prompt = max(1, len(replies) // num_prompts)
    prompt = sum(reply.answer.usage.prompt_tokens for reply in replies[::per_prompt])
    completion = sum(reply.answer.usage.completion_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def tokens_with_logprobs(reply: AnsweredTurn) -> list[tuple[str, float]]:
    """Each sampled token as text, with its log-prob."""
    ids = view_ids(reply.turn.sampled_ids)
    logprobs = view_log_probs(reply.turn.logprobs)
    decode = reply.renderer.decode
    return [(decode([token]), logprob) for token, logprob in zip(ids, logprobs, strict=True)]
