# SPDX-License-Identifier: Apache-2.0
"""Response of Anthropic Messages: content blocks, stop reason, errors and stream events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.errors import ContextOverflow, WireError
from penstock.gateway.dialects.dialect import AnsweredTurn, Progress, sse_event
from penstock.gateway.model_calls import Answer, Delta, ToolCall
from penstock.types import FinishReason, JsonObject, view_ids
from penstock.wire.codec import encode_json

SIGNATURE = "penstock"
"""Placeholder: Anthropic signs thinking blocks; this gateway does not verify signatures."""
TEXT, THINKING = "text", "thinking"
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


# --- complete answer ----------------------------------------------------------------------------


def content_blocks(answer: Answer) -> list[JsonObject]:
    blocks: list[JsonObject] = []
    if answer.reasoning:
        thought = {"type": THINKING, "thinking": answer.reasoning, "signature": SIGNATURE}
        blocks.append(thought)
    if answer.text or not answer.tool_calls:
        blocks.append({"type": TEXT, "text": answer.text, "citations": None})
    return [*blocks, *(_call_block(call) for call in answer.tool_calls)]


def _call_block(call: ToolCall) -> JsonObject:
    try:
        arguments = msgspec.json.decode(call.arguments, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        arguments = {"arguments": call.arguments}  # not an object: passed on as written
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def usage_fields(answer: Answer) -> JsonObject:
    return {
        "input_tokens": answer.usage.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": answer.usage.completion_tokens,
    }


def stop_fields(reply: AnsweredTurn, stop: Sequence[str]) -> JsonObject:
    """Why the answer ended, and the stop string that ended it."""
    answer = reply.answer
    if answer.finish is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    found = _stop_string(reply, stop) if stop else None
    return {"stop_reason": "stop_sequence" if found else "end_turn", "stop_sequence": found}


def _stop_string(reply: AnsweredTurn, stop: Sequence[str]) -> str | None:
    text = reply.renderer.decode(view_ids(reply.turn.sampled_ids).tolist())
    found = [(at, string) for string in stop if (at := text.find(string)) >= 0]
    return min(found)[1] if found else None


def error_body(error: WireError) -> JsonObject:
    kind = _ERROR_TYPES.get(error.status)
    if kind is None:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
    message = str(error)
    if isinstance(error, ContextOverflow):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.window} maximum"
    fields = {"type": kind, "message": message}
    return {"type": "error", "error": fields, "request_id": f"req_{secrets.token_hex(12)}"}


# --- stream -------------------------------------------------------------------------------------


@dataclass(slots=True)
class MessageWriter:
    """Events in Anthropic's order: message_start, per block start to stop, message_delta,
    message_stop."""

    _head: JsonObject
    _stop: Sequence[str]
    _progress: Progress = field(default_factory=Progress)
    _has_started: bool = False
    _kind: str = ""
    """Type of the open block; empty between blocks."""
    _num_blocks: int = 0

    def write_delta(self, choice: int, delta: Delta) -> bytes:
        self._progress.add(delta)
        events = [self._start(0)]
        for kind, text in ((THINKING, delta.reasoning), (TEXT, delta.text)):
            if text:
                events.append(self._add(kind, text))
        return b"".join(events)

    def write_end(self, choice: int, reply: AnsweredTurn) -> bytes:
        answer = reply.answer
        events = [self._start(answer.usage.prompt_tokens)]
        events.append(self.write_delta(choice, self._progress.remaining(answer)))
        if not answer.text and not answer.tool_calls:
            events.append(self._add(TEXT, ""))
        events.append(self._close_block())
        events.extend(self._call(call) for call in answer.tool_calls)
        ending = {"delta": stop_fields(reply, self._stop), "usage": usage_fields(answer)}
        events.append(_event("message_delta", ending))
        events.append(_event("message_stop", {}))
        return b"".join(events)

    def write_done(self, replies: Sequence[AnsweredTurn]) -> bytes:
        return b""

    def write_error(self, error: WireError) -> bytes:
        return _event("error", error_body(error))

    def _start(self, prompt_tokens: int) -> bytes:
        """Write message_start once. `prompt_tokens` is 0 in a stream: it is known only at the
        end."""
        if self._has_started:
            return b""
        self._has_started = True
        message: JsonObject = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
        }
        return _event("message_start", {"message": message})

    def _add(self, kind: str, text: str) -> bytes:
        events: list[bytes] = []
        if self._kind != kind:
            events.append(self._close_block())
            self._kind = kind
            block: JsonObject = {"type": kind, kind: ""}
            if kind == THINKING:
                block["signature"] = ""
            events.append(self._block("start", {"content_block": block}))
        delta = {"type": f"{kind}_delta", kind: text}
        events.append(self._block("delta", {"delta": delta}))
        return b"".join(events)

    def _close_block(self) -> bytes:
        if not self._kind:
            return b""
        signed = b""
        if self._kind == THINKING:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = self._block("delta", {"delta": delta})
        stopped = self._block("stop", {})
        self._kind = ""
        self._num_blocks += 1
        return signed + stopped

    def _call(self, call: ToolCall) -> bytes:
        block = _call_block(call)
        written = encode_json(block["input"]).decode()
        delta = {"type": "input_json_delta", "partial_json": written}
        events = [
            self._block("start", {"content_block": {**block, "input": {}}}),
            self._block("delta", {"delta": delta}),
            self._block("stop", {}),
        ]
        self._num_blocks += 1
        return b"".join(events)

    def _block(self, verb: str, fields: JsonObject) -> bytes:
        return _event(f"content_block_{verb}", {"index": self._num_blocks, **fields})


def _event(kind: str, fields: JsonObject) -> bytes:
    return sse_event({"type": kind, **fields}, kind)
