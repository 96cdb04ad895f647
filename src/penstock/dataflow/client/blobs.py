# SPDX-License-Identifier: Apache-2.0
"""Uploads values that are too large for a call: first the bytes, under their digest and resumable,
then a small record that references them."""

from __future__ import annotations

import asyncio

from blake3 import blake3

from penstock.dataflow.columns.values import BlobRef
from penstock.dataflow.service.rows.messages import BlobState
from penstock.errors import BadRequest, Conflict
from penstock.wire.client import AsyncServiceClient
from penstock.wire.codec import decode

INLINE_BYTES = 1 << 20
"""Longer values are uploaded as blobs."""
PIECE_BYTES = 4 << 20


async def put_blob(
    caller: AsyncServiceClient, data: bytes | memoryview, *, deadline_s: float
) -> BlobRef:
    """Upload a blob; resumes an earlier upload of the same bytes."""
    digest = await asyncio.to_thread(lambda: blake3(data).hexdigest())
    path = f"/v1/blobs/{digest}"
    state = await caller.call("GET", f"{path}/state", None, BlobState, deadline_s=deadline_s)
    may_restart = state.held_bytes > 0
    while not state.complete:
        offset = state.held_bytes
        piece = bytes(data[offset : offset + PIECE_BYTES])
        try:
            state = await _put_piece(
                caller, f"{path}?offset={offset}&size={len(data)}", piece, deadline_s
            )
        except (BadRequest, Conflict):
            if not may_restart:  # a damaged partial upload is deleted and may be restarted once
                raise
            may_restart = False
            state = BlobState(held_bytes=0, complete=False)
    return BlobRef(digest=digest, size=len(data))


async def _put_piece(
    caller: AsyncServiceClient, path: str, piece: bytes, deadline_s: float
) -> BlobState:
    headers = {"content-type": "application/octet-stream"}
    answer = await caller.request("PUT", path, piece, deadline_s=deadline_s, headers=headers)
    return decode(answer.content, BlobState)


async def get_blob(caller: AsyncServiceClient, ref: BlobRef, *, deadline_s: float) -> bytes:
    path = f"/v1/blobs/{ref.digest}"
    answer = await caller.request(
        "GET", path, deadline_s=deadline_s, timeout_s=120.0, max_response_bytes=ref.size
    )
    found = await asyncio.to_thread(lambda: blake3(answer.content).hexdigest())
    if found != ref.digest:
        raise BadRequest(f"blob {ref.digest} is damaged on the server: it has digest {found}")
    return answer.content
