# SPDX-License-Identifier: Apache-2.0
"""Output of OpenAI Responses: items and stream events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from penstock.errors import WireError
from penstock.gateway.dialects.dialect import AnsweredTurn, Progress, sse_event
from penstock.gateway.model_calls import Answer, Delta, ToolCall
from penstock.types import FinishReason, JsonObject

TEXT, REASONING = "message", "reasoning"
_DELTAS = {TEXT: "response.output_text", REASONING: "response.reasoning_text"}


# --- items --------------------------------------------------------------------------------------


def output_items(answer: Answer) -> list[JsonObject]:
    items = [_item(REASONING, answer.reasoning)] if answer.reasoning else []
    if answer.text or not answer.tool_calls:
        items.append(_item(TEXT, answer.text))
    return [*items, *(_call_item(call) for call in answer.tool_calls)]


def finished(head: JsonObject, reply: AnsweredTurn, items: list[JsonObject]) -> JsonObject:
    """The complete response; a truncated answer has status `incomplete`."""
    answer = reply.answer
    is_cut = answer.finish is not FinishReason.STOP
    details = {"reason": "max_output_tokens"} if is_cut else None
    usage = answer.usage
    return {
        **head,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": details,
        "output": items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _item(kind: str, text: str, *, id: str = "", is_done: bool = True) -> JsonObject:
    """A reasoning or text item; without content while in progress."""
    content = [_part(kind, text)] if is_done else []
    status = "completed" if is_done else "in_progress"
    item: JsonObject = {"type": kind, "id": id or _item_id(kind), "status": status}
    if kind == TEXT:
        return {**item, "role": "assistant", "content": content}
    return {**item, "summary": [], "content": content}


def _item_id(kind: str) -> str:
    return f"{'msg' if kind == TEXT else 'rs'}_{secrets.token_hex(12)}"


def _part(kind: str, text: str) -> JsonObject:
    if kind == TEXT:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _call_item(call: ToolCall) -> JsonObject:
    return {
        "type": "function_call",
        "id": f"fc_{secrets.token_hex(12)}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


# --- stream -------------------------------------------------------------------------------------


class ResponseWriter:
    """Events in OpenAI's order: created, in_progress, per item added to done, completed."""

    def __init__(self, head: JsonObject) -> None:
        self._head = head
        self._num_events = 0
        self._progress = Progress()
        self._items: list[JsonObject] = []
        self._kind = ""
        """Type of the open item; empty between items."""
        self._item_id = ""
        self._texts: list[str] = []

    def write_delta(self, choice: int, delta: Delta) -> bytes:
        events = [self._open()]
        self._progress.add(delta)
        for kind, text in ((REASONING, delta.reasoning), (TEXT, delta.text)):
            if text:
                events.append(self._add(kind, text))
        return b"".join(events)

    def write_end(self, choice: int, reply: AnsweredTurn) -> bytes:
        answer = reply.answer
        events = [self.write_delta(choice, self._progress.remaining(answer))]
        if not answer.text and not answer.tool_calls:
            events.append(self._add(TEXT, ""))
        events.append(self._close_item())
        events.extend(self._call(call) for call in answer.tool_calls)
        response = finished(self._head, reply, self._items)
        events.append(self._event(f"response.{response['status']}", {"response": response}))
        return b"".join(events)

    def write_done(self, replies: Sequence[AnsweredTurn]) -> bytes:
        return b""

    def write_error(self, error: WireError) -> bytes:
        fields = {"code": "server_error", "message": str(error)}
        response = {**self._head, "status": "failed", "error": fields, "output": self._items}
        return self._open() + self._event("response.failed", {"response": response})

    def _open(self) -> bytes:
        if self._num_events:
            return b""
        head = {"response": self._head}
        return self._event("response.created", head) + self._event("response.in_progress", head)

    def _add(self, kind: str, text: str) -> bytes:
        events: list[bytes] = []
        if self._kind != kind:
            events.append(self._close_item())
            self._kind, self._item_id, self._texts = kind, _item_id(kind), []
            item = _item(kind, "", id=self._item_id, is_done=False)
            events.append(self._item_event("added", item))
            events.append(self._part_event("response.content_part.added", part=_part(kind, "")))
        self._texts.append(text)
        fields: JsonObject = {"delta": text} | ({"logprobs": []} if kind == TEXT else {})
        events.append(self._part_event(f"{_DELTAS[kind]}.delta", **fields))
        return b"".join(events)

    def _close_item(self) -> bytes:
        kind, text = self._kind, "".join(self._texts)
        if not kind:
            return b""
        fields: JsonObject = {"text": text} | ({"logprobs": []} if kind == TEXT else {})
        item = _item(kind, text, id=self._item_id)
        events = [
            self._part_event(f"{_DELTAS[kind]}.done", **fields),
            self._part_event("response.content_part.done", part=_part(kind, text)),
            self._item_event("done", item),
        ]
        self._items.append(item)
        self._kind = ""
        return b"".join(events)

    def _call(self, call: ToolCall) -> bytes:
        item = _call_item(call)
        at: JsonObject = {"item_id": item["id"], "output_index": len(self._items)}
        name = "response.function_call_arguments"
        events = [
            self._item_event("added", {**item, "arguments": "", "status": "in_progress"}),
            self._event(f"{name}.delta", {**at, "delta": call.arguments}),
            self._event(f"{name}.done", {**at, "name": call.name, "arguments": call.arguments}),
            self._item_event("done", item),
        ]
        self._items.append(item)
        return b"".join(events)

    def _item_event(self, verb: str, item: JsonObject) -> bytes:
        fields = {"output_index": len(self._items), "item": item}
        return self._event(f"response.output_item.{verb}", fields)

    def _part_event(self, kind: str, **fields: object) -> bytes:
        at = {"item_id": self._item_id, "output_index": len(self._items), "content_index": 0}
        return self._event(kind, {**at, **fields})

    def _event(self, kind: str, fields: JsonObject) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return sse_event(body, kind)
