# SPDX-License-Identifier: Apache-2.0
"""HTTP routes for rows, columns, readers, spaces and blobs, bound to one RowService."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from starlette.responses import FileResponse

from penstock.dataflow.columns.row_leases import ReaderSpec, RowTrigger
from penstock.dataflow.columns.spaces import check_name
from penstock.dataflow.core.names import RESERVED, TRAIN
from penstock.dataflow.ledger.blobs import BlobStore
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.rows.handlers import RowService
from penstock.dataflow.service.rows.messages import (
    BlobState,
    ExtendAnswer,
    ExtendRequest,
    GetAnswer,
    GetRequest,
    PutAnswer,
    PutRequest,
    QuotaRequest,
    ReaderRequest,
    ReadersAnswer,
    ReaderState,
    ResultsAnswer,
    ResultsRequest,
    RowLeaseAnswer,
    RowLeaseRequest,
    SpacesAnswer,
)
from penstock.errors import BadRequest, Forbidden, NotFound, TooLarge
from penstock.wire.auth import Role
from penstock.wire.codec import MSGPACK, encode
from penstock.wire.routes import Call, RawResponse, Route

PUT_BYTES = 32 << 20
PIECE_BYTES = 1 << 20
"""Bytes of an upload held in memory at a time."""
WRITERS = frozenset({Role.STAGE, Role.TRAINER, Role.ADMIN})
READERS = WRITERS | {Role.READER}
UPLOADERS = WRITERS | {Role.ROLLOUT, Role.GATEWAY}
OCTET_STREAM = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRoutes:
    service: RowService

    # --- readers ------------------------------------------------------------------------------

    async def declare(self, call: Call) -> ReaderState:
        body: ReaderRequest = call.body
        terms = ReaderSpec(
            name=call.path["name"],
            reads=body.reads,
            writes=body.writes,
            space=body.space,
            on=body.on,
            deadline_s=body.deadline_s,
            ttl_s=body.ttl_s,
            max_attempts=body.max_attempts,
        )
        check_reader_spec(terms)
        if body.writes and call.credential.role is Role.READER:
            raise Forbidden(
                "role reader may not declare a reader that writes; use a token with role stage"
            )
        return await self.service.declare(terms)

    async def remove(self, call: Call) -> Ack:
        await self.service.remove(self._reader(call))
        return Ack()

    async def readers(self, call: Call) -> ReadersAnswer:
        names = sorted(self.service.row_window.readers)
        return ReadersAnswer(readers=tuple(self.service.state(name) for name in names))

    async def lease(self, call: Call) -> RowLeaseAnswer:
        return await self.service.lease(self._reader(call), call.body, call.is_disconnected)

    async def extend(self, call: Call) -> ExtendAnswer:
        return await self.service.extend(self._reader(call), call.body)

    async def record(self, call: Call) -> ResultsAnswer:
        body: ResultsRequest = call.body
        self._require(call, body.reader)
        return await self.service.record(body)

    def _reader(self, call: Call) -> str:
        self._require(call, call.path["name"])
        return call.path["name"]

    def _require(self, call: Call, name: str) -> None:
        """A read-only token must not consume a stage's attempts."""
        writes = self.service.readers.reader(name).terms.writes
        if writes and call.credential.role is Role.READER:
            raise Forbidden(f"role reader may not act for {name!r}, which writes {list(writes)}")

    # --- spaces -------------------------------------------------------------------------------

    async def spaces(self, call: Call) -> SpacesAnswer:
        return SpacesAnswer(spaces=self.service.space_states())

    async def set_quota(self, call: Call) -> Ack:
        body: QuotaRequest = call.body
        await self.service.set_quota(call.path["space"], body.quota_bytes)
        return Ack()

    async def put(self, call: Call) -> PutAnswer:
        writer = call.credential.subject or call.credential.role.value
        return await self.service.put(call.path["space"], call.body, writer)

    async def get(self, call: Call) -> GetAnswer | RawResponse:
        if MSGPACK in call.headers.get("accept", ""):
            return await self.service.get(call.path["space"], call.body, _encode_msgpack)
        return await self.service.get(call.path["space"], call.body)

    async def clear(self, call: Call) -> Ack:
        await self.service.clear(call.path["space"])
        return Ack()

    def routes(self) -> list[Route]:
        blobs = BlobRoutes(blobs=self.service.blobs, require_room=self.service.require_room)
        return [*self._reader_routes(), *self._space_routes(), *blobs.routes()]

    def _reader_routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/v1/readers",
                handler=self.readers,
                roles=READERS,
                summary="All readers of rows with their state.",
                response=ReadersAnswer,
            ),
            Route(
                method="PUT",
                path="/v1/readers/{name}",
                handler=self.declare,
                roles=READERS,
                summary="Declare a reader: the columns it reads and writes; a known one continues.",
                request=ReaderRequest,
                response=ReaderState,
            ),
            Route(
                method="DELETE",
                path="/v1/readers/{name}",
                handler=self.remove,
                roles=READERS,
                summary="Forget a reader; columns it wrote stay.",
                response=Ack,
            ),
            Route(
                method="POST",
                path="/v1/readers/{name}/leases",
                handler=self.lease,
                roles=READERS,
                summary="Lease up to n rows; held open while there are none.",
                request=RowLeaseRequest,
                response=RowLeaseAnswer,
            ),
            Route(
                method="PUT",
                path="/v1/readers/{name}/leases",
                handler=self.extend,
                roles=READERS,
                summary="Extend leases; the answer names those that are lost.",
                request=ExtendRequest,
                response=ExtendAnswer,
            ),
            Route(
                method="PUT",
                path="/v1/rows/columns",
                handler=self.record,
                roles=READERS,
                summary="Add columns to rows under lease and end leases; durable when answered.",
                request=ResultsRequest,
                response=ResultsAnswer,
                max_body_bytes=PUT_BYTES,
            ),
        ]

    def _space_routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/v1/spaces",
                handler=self.spaces,
                roles=READERS,
                summary="User spaces with their size and quota.",
                response=SpacesAnswer,
            ),
            Route(
                method="PUT",
                path="/v1/spaces/{space}",
                handler=self.set_quota,
                roles=frozenset({Role.ADMIN}),
                summary="Create a space, or change its quota.",
                request=QuotaRequest,
                response=Ack,
            ),
            Route(
                method="DELETE",
                path="/v1/spaces/{space}",
                handler=self.clear,
                roles=WRITERS,
                summary="Delete all rows of this space.",
                response=Ack,
            ),
            Route(
                method="POST",
                path="/v1/spaces/{space}/rows",
                handler=self.put,
                roles=WRITERS,
                summary="Put rows by key; columns are write-once; durable when answered.",
                request=PutRequest,
                response=PutAnswer,
                max_body_bytes=PUT_BYTES,
            ),
            Route(
                method="POST",
                path="/v1/spaces/{space}/get",
                handler=self.get,
                roles=READERS,
                summary="Columns of rows by key; in 'train' the key is the row id.",
                request=GetRequest,
                response=GetAnswer,
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRoutes:
    blobs: BlobStore
    require_room: Callable[[int], None]
    """Refuses an upload for which memory or disk has no room."""

    async def state(self, call: Call) -> BlobState:
        held, is_complete = await asyncio.to_thread(self.blobs.held, call.path["digest"])
        return BlobState(held_bytes=held, complete=is_complete)

    async def put(self, call: Call) -> BlobState:
        digest = call.path["digest"]
        offset, size = _number(call, "offset"), _number(call, "size")
        state = await self.state(call)
        if state.complete:
            async for (
                _
            ) in call.body:  # closing the connection would look like an outage to the sender
                pass
            return state
        self.require_room(size - offset)
        descriptor = await asyncio.to_thread(self.blobs.begin, digest, offset, size)
        try:
            async for piece in _pieces(call.body, size - offset):
                offset = await asyncio.to_thread(self.blobs.write, descriptor, offset, piece)
        finally:
            os.close(descriptor)
        if offset == size:
            await asyncio.to_thread(self.blobs.finish, digest, size)
        return BlobState(held_bytes=offset, complete=offset == size)

    async def get(self, call: Call) -> FileResponse:
        digest = call.path["digest"]
        if not (await self.state(call)).complete:
            raise NotFound(f"no blob {digest}")
        return FileResponse(self.blobs.path(digest), media_type=OCTET_STREAM)

    def routes(self) -> list[Route]:
        return [
            Route(
                method="PUT",
                path="/v1/blobs/{digest}",
                handler=self.put,
                roles=UPLOADERS,
                summary="Upload bytes from `offset` of `size`; durable when `complete`.",
                response=BlobState,
                query=("offset", "size"),
                is_streamed=True,
            ),
            Route(
                method="GET",
                path="/v1/blobs/{digest}/state",
                handler=self.state,
                roles=UPLOADERS | READERS,
                summary="Bytes of a blob stored so far: the offset to continue an upload at.",
                response=BlobState,
            ),
            Route(
                method="GET",
                path="/v1/blobs/{digest}",
                handler=self.get,
                roles=UPLOADERS | READERS,
                summary="The bytes of a blob; supports Range.",
            ),
        ]


async def _pieces(body: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """The body in pieces large enough for a thread call each; refuses more than `limit` bytes."""
    held: list[bytes] = []
    size = total = 0
    async for chunk in body:
        held.append(chunk)
        size += len(chunk)
        total += len(chunk)
        if total > limit:
            raise TooLarge(f"the body has more than the announced {limit} bytes")
        if size >= PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if size:
        yield b"".join(held)


def _encode_msgpack(answer: GetAnswer) -> RawResponse:
    return RawResponse(encode(answer))


def _number(call: Call, name: str) -> int:
    text = call.query.get(name, "0" if name == "offset" else "")
    if not (text.isdecimal() and len(text) < 16):
        raise BadRequest(f"give ?offset=N&size=N in bytes; {name} is {text[:20]!r}")
    return int(text)


def check_reader_spec(terms: ReaderSpec) -> None:
    """Reject an invalid reader before anything changes."""
    for name in (terms.name, terms.space):
        check_name(name)
    names = (*terms.reads, *terms.writes)
    if len(set(names)) != len(names) or len(names) > 64:
        raise BadRequest("a column may appear only once in reads and writes; at most 64 columns")
    if any(not 0 < len(name) <= 128 for name in names) or RESERVED.intersection(terms.writes):
        raise BadRequest(
            f"a column name must have 1 to 128 characters; {sorted(RESERVED)} cannot be written"
        )
    if terms.on is RowTrigger.ADMITTED and terms.space != TRAIN:
        raise BadRequest(
            "only rows of space 'train' are admitted; use `on: delivered` in other spaces"
        )
    if not (0 <= terms.deadline_s < 1e9 and 0.1 <= terms.ttl_s <= 3600):
        raise BadRequest("deadline_s must be 0 (never) or more, ttl_s 0.1 to 3600")
    if not 1 <= terms.max_attempts <= 1000:
        raise BadRequest("max_attempts must be 1 to 1000")
