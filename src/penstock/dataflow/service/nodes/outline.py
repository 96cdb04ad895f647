# SPDX-License-Identifier: Apache-2.0
"""How much of a delivered row is structure, found without building it: decoding costs time for each
small part, and no other call is answered meanwhile. Owns the limit; judges nothing else of a row.

A field may stand in a record again and again, and each time would be read. A list is therefore read
only after it was seen to be most of what it stands in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, cast

from msgspec import Meta, Raw, Struct

from penstock.bounds import MAX_TOOL_USES, MAX_TURNS
from penstock.dataflow.service.nodes.messages import MAX_ROWS
from penstock.errors import BadRequest
from penstock.wire.codec import decode

MAX_PARTS_BYTES = 8 << 20
"""Of a row beside its bulk: as many turns and calls of tools as a row may have, with 16 spans
each, are 5 MB."""

MAX_CALL_PARTS_BYTES = 2 << 20
"""The same of one call with turns of running attempts, or with rows. Of turns a node sends half of
it, with their bulk, and one turn more; 10,000 rows have 1.5 MB."""
MAX_SAMPLING_BYTES = 128 << 10
"""A longer one has more than a schema, whose length is bounded."""


class _Experts(Struct):
    choices: Raw


class _Sampling(Struct):
    json_schema: Raw = Raw()


class _Turn(Struct):
    prompt_ids: Raw
    sampled_ids: Raw
    logprobs: Raw
    sampling: Raw
    experts: _Experts | None = None


class _ToolUse(Struct):
    arguments: Raw
    result: Raw


class _Row(Struct):
    turns: Raw
    tool_uses: Raw = Raw(b"\x90")


class _Recorded(Struct):
    turn: _Turn


class _RecordedTurns(Struct):
    turns: Raw


class _Delivery(Struct):
    payload: Raw


class _Deliveries(Struct):
    deliveries: Raw


_Turns: type[list[_Turn]] = cast(Any, Annotated[list[_Turn], Meta(max_length=MAX_TURNS)])
_ToolUses: type[list[_ToolUse]] = cast(
    Any, Annotated[list[_ToolUse], Meta(max_length=MAX_TOOL_USES)]
)
_AllRecorded: type[list[_Recorded]] = cast(
    Any, Annotated[list[_Recorded], Meta(max_length=MAX_ROWS)]
)
_AllDeliveries: type[list[_Delivery]] = cast(
    Any, Annotated[list[_Delivery], Meta(max_length=MAX_ROWS)]
)


def parts_bytes(payload: memoryview) -> int:
    """Bytes of a row beside its bulk: token ids, log-probs, expert choices, schemas and the texts
    of tools. BadRequest if it is not a row. Unknown and repeated fields are structure."""
    row = decode(payload, _Row)
    num_bytes = len(payload) - _num_bytes((row.turns, row.tool_uses))
    if num_bytes > MAX_PARTS_BYTES:
        return num_bytes
    uses = decode(memoryview(row.tool_uses), _ToolUses)
    turns = decode(memoryview(row.turns), _Turns)
    texts = [part for use in uses for part in (use.arguments, use.result)]
    return len(payload) - _num_bytes(texts) - _bulk_bytes(turns)


def check_turns(body: bytes) -> None:
    """Raise BadRequest for turns with too many parts. Anybody with a node's token may send them:
    whether a lease is behind them is known only when they are read."""
    found = decode(body, _RecordedTurns).turns
    _require_few(len(body) - _num_bytes((found,)), "turns")
    recorded = decode(memoryview(found), _AllRecorded)
    _require_few(len(body) - _bulk_bytes([one.turn for one in recorded]), "turns")


def check_deliveries(body: bytes) -> None:
    """The same for rows."""
    found = decode(body, _Deliveries).deliveries
    _require_few(len(body) - _num_bytes((found,)), "rows")
    rows = decode(memoryview(found), _AllDeliveries)
    _require_few(len(body) - _num_bytes([row.payload for row in rows]), "rows")


def _require_few(num_bytes: int, what: str) -> None:
    if num_bytes > MAX_CALL_PARTS_BYTES:
        raise BadRequest(
            f"these {what} have {num_bytes} bytes beside tokens, log-probs, experts and payload; "
            f"at most {MAX_CALL_PARTS_BYTES} in one call: send fewer at a time"
        )


def _bulk_bytes(turns: Sequence[_Turn]) -> int:
    parts: list[Raw] = []
    for turn in turns:
        parts += (turn.prompt_ids, turn.sampled_ids, turn.logprobs)
        if turn.experts is not None:
            parts.append(turn.experts.choices)
        sampling = memoryview(turn.sampling)
        if len(sampling) <= MAX_SAMPLING_BYTES:
            parts.append(decode(sampling, _Sampling).json_schema)
    return _num_bytes(parts)


def _num_bytes(parts: Iterable[Raw]) -> int:
    return sum([len(memoryview(part)) for part in parts])
