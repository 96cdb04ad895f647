# SPDX-License-Identifier: Apache-2.0
"""How much of a delivered row is structure, found without building it: decoding costs time for each
small part, and no other call is answered meanwhile. Owns the limit; judges nothing else of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta, Raw, Struct

from penstock.bounds import MAX_TOOL_USES, MAX_TURNS
from penstock.dataflow.service.nodes.messages import MAX_ROWS
from penstock.errors import BadRequest
from penstock.wire.codec import decode

MAX_PARTS_BYTES = 8 << 20
"""Of a row beside its bulk: as many turns and calls of tools as a row may have, with 16 spans
each, are 5 MB."""

MAX_RECORDED_BYTES = 2 << 20
"""The same of turns of running attempts in one call; a node sends half of it, with their bulk, and
one turn more."""


class _Experts(Struct):
    choices: Raw


class _Sampling(Struct):
    json_schema: Raw = Raw()


class _Turn(Struct):
    prompt_ids: Raw
    sampled_ids: Raw
    logprobs: Raw
    sampling: _Sampling
    experts: _Experts | None = None


class _ToolUse(Struct):
    arguments: Raw
    result: Raw


class RowOutline(Struct):
    turns: Annotated[list[_Turn], Meta(max_length=MAX_TURNS)]
    tool_uses: Annotated[list[_ToolUse], Meta(max_length=MAX_TOOL_USES)] = []


class _Recorded(Struct):
    turn: _Turn


class _RecordOutline(Struct):
    turns: Annotated[list[_Recorded], Meta(max_length=MAX_ROWS)]


def parts_bytes(payload: memoryview) -> int:
    """Bytes of a row beside its bulk: token ids, log-probs, expert choices, schemas and the texts
    of tools. BadRequest if it is not a row. Unknown and repeated fields are structure."""
    row = decode(payload, RowOutline)
    texts = [part for use in row.tool_uses for part in (use.arguments, use.result)]
    return len(payload) - _num_bytes(texts) - _bulk_bytes(row.turns)


def check_turns(body: bytes) -> None:
    """Raise BadRequest for turns with too many parts. Anybody with a node's token may send them:
    whether a lease is behind them is known only when they are read."""
    turns = [one.turn for one in decode(body, _RecordOutline).turns]
    if (num_bytes := len(body) - _bulk_bytes(turns)) > MAX_RECORDED_BYTES:
        raise BadRequest(
            f"{len(turns)} turns have {num_bytes} bytes beside tokens, log-probs and experts; at "
            f"most {MAX_RECORDED_BYTES}: send fewer at a time"
        )


def _bulk_bytes(turns: Sequence[_Turn]) -> int:
    parts: list[Raw] = []
    for turn in turns:
        parts += (turn.prompt_ids, turn.sampled_ids, turn.logprobs, turn.sampling.json_schema)
        if turn.experts is not None:
            parts.append(turn.experts.choices)
    return _num_bytes(parts)


def _num_bytes(parts: Iterable[Raw]) -> int:
    return sum([len(memoryview(part)) for part in parts])
