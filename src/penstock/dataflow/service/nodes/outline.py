# SPDX-License-Identifier: Apache-2.0
"""How much of a delivered row is structure, found without building it: decoding costs time for each
small part, and no other call is answered meanwhile. Owns the limit; judges nothing else of a row.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw, Struct

from penstock.bounds import MAX_TOOL_USES, MAX_TURNS
from penstock.wire.codec import decode

MAX_PARTS_BYTES = 8 << 20
"""Of a row beside its bulk: as many turns and calls of tools as a row may have, with 16 spans
each, are 5 MB."""


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


def parts_bytes(payload: memoryview) -> int:
    """Bytes of a row beside its bulk: token ids, log-probs, expert choices, schemas and the texts
    of tools. BadRequest if it is not a row. Unknown and repeated fields are structure."""
    row = decode(payload, RowOutline)
    bulk = [part for use in row.tool_uses for part in (use.arguments, use.result)]
    for turn in row.turns:
        bulk += (turn.prompt_ids, turn.sampled_ids, turn.logprobs, turn.sampling.json_schema)
        if turn.experts is not None:
            bulk.append(turn.experts.choices)
    return len(payload) - sum([len(memoryview(part)) for part in bulk])
