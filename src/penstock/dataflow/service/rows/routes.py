# SPDX-License-Identifier: Apache-2.0
"""HTTP routes for rows, columns, readers, spaces and blobs, bound to one RowService."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass

from starlette.responses import FileResponse

from penstock.dataflow.columns.reading import ANSWER_BYTES
from penstock.dataflow.columns.row_leases import ReaderRequest, ReaderSpec, RowTrigger
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
    ReadersAnswer,
    ReaderState,
    ResultsAnswer,
    ResultsRequest,
    RowLeaseAnswer,
    RowLeaseRequest,
    SpacesAnswer,
    check_cells,
)
from penstock.dataflow.service.rows.upload_quotas import UploadQuotas, owner_of
from penstock.errors import BadRequest, NotFound, TooLarge
from penstock.observe.admin_log import AdminAction
from penstock.wire.auth import Role
from penstock.wire.codec import MSGPACK, encode
from penstock.wire.routes import Call, RawResponse, Route, route, routes_of

PUT_BYTES = 32 << 20
PIECE_BYTES = 1 << 20
"""Bytes of an upload held in memory at a time."""
WRITERS = frozenset({Role.STAGE, Role.TRAINER, Role.ADMIN})
READERS = WRITERS | {Role.READER}
UPLOADERS = WRITERS | {Role.ROLLOUT, Role.GATEWAY}
OPERATORS = frozenset({Role.ADMIN})
OCTET_STREAM = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRoutes:
    service: RowService

    # --- readers ------------------------------------------------------------------------------

    @route("GET", "/v1/readers", READERS, shares_budget=True)
    async def readers(self, call: Call) -> ReadersAnswer:
        """All readers of rows with their state."""
        names = sorted(self.service.row_window.readers)
        return ReadersAnswer(readers=tuple(self.service.state(name) for name in names))

    @route("PUT", "/v1/readers/{name}", READERS)
    async def declare(self, call: Call, body: ReaderRequest) -> ReaderState:
        """Declare a reader: the columns it reads and writes; a known one continues."""
        terms = ReaderSpec(name=call.path["name"], **asdict(body))
        check_reader_spec(terms)
        rights, credential = self.service.rights, call.credential
        rights.require(credential, terms.name, terms.space, terms.writes)
        rights.reserve(credential, terms.name, self.service.row_window.readers)
        return await self.service.declare(terms)

    @route("DELETE", "/v1/readers/{name}", READERS)
    async def remove(self, call: Call) -> Ack:
        """Forget a reader; columns it wrote stay."""
        await self.service.remove(self._reader(call))
        return Ack()

    @route("POST", "/v1/readers/{name}/leases", READERS)
    async def lease(self, call: Call, body: RowLeaseRequest) -> RowLeaseAnswer:
        """Lease up to n rows; held open while there are none."""
        name = self._reader(call)
        with self.service.rights.poll(call.credential):
            return await self.service.lease(name, body, call.is_disconnected)

    @route("PUT", "/v1/readers/{name}/leases", READERS)
    async def extend(self, call: Call, body: ExtendRequest) -> ExtendAnswer:
        """Extend leases; the answer names those that are lost."""
        return await self.service.extend(self._reader(call), body)

    @route(
        "PUT",
        "/v1/rows/columns",
        READERS,
        max_body_bytes=PUT_BYTES,
        check_parts=check_cells,
        shares_budget=True,
    )
    async def record(self, call: Call, body: ResultsRequest) -> ResultsAnswer:
        """Add columns to rows under lease and end leases; durable when answered."""
        self._require(call, body.reader)
        return await self.service.record(body)

    def _reader(self, call: Call) -> str:
        self._require(call, call.path["name"])
        return call.path["name"]

    def _require(self, call: Call, name: str) -> None:
        """No token consumes the attempts of a stage that is not its own."""
        terms = self.service.readers.reader(name).terms
        self.service.rights.require(call.credential, name, terms.space, terms.writes)

    # --- spaces -------------------------------------------------------------------------------

    @route("GET", "/v1/spaces", READERS, shares_budget=True)
    async def spaces(self, call: Call) -> SpacesAnswer:
        """User spaces with their size and quota."""
        return SpacesAnswer(spaces=self.service.space_states())

    @route("PUT", "/v1/spaces/{space}", OPERATORS, audited=AdminAction.QUOTA_SET)
    async def set_quota(self, call: Call, body: QuotaRequest) -> Ack:
        """Create a space, or change its quota."""
        await self.service.set_quota(call.path["space"], body.quota_bytes)
        return Ack()

    @route("DELETE", "/v1/spaces/{space}", WRITERS)
    async def clear(self, call: Call) -> Ack:
        """Delete all rows of this space."""
        await self.service.clear(call.path["space"])
        return Ack()

    @route(
        "POST",
        "/v1/spaces/{space}/rows",
        WRITERS,
        max_body_bytes=PUT_BYTES,
        check_parts=check_cells,
        shares_budget=True,
    )
    async def put(self, call: Call, body: PutRequest) -> PutAnswer:
        """Put rows by key; columns are write-once; durable when answered."""
        writer = call.credential.subject or call.credential.role.value
        return await self.service.put(call.path["space"], body, writer)

    @route(
        "POST",
        "/v1/spaces/{space}/get",
        READERS,
        response=GetAnswer,
        shares_budget=True,
        answer_bytes=ANSWER_BYTES,
    )
    async def get(self, call: Call, body: GetRequest) -> GetAnswer | RawResponse:
        """Columns of rows by key, each key once; in 'train' the key is the row id."""
        if MSGPACK in call.headers.get("accept", ""):
            return await self.service.get(call.path["space"], body, _encode_msgpack)
        return await self.service.get(call.path["space"], body)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRoutes:
    blobs: BlobStore
    require_room: Callable[[int], None]
    """Refuses an upload for which memory or disk has no room."""
    quotas: UploadQuotas

    @route(
        "PUT",
        "/v1/blobs/{digest}",
        UPLOADERS,
        query=("offset", "size"),
        is_streamed=True,
        shares_budget=True,
    )
    async def put(self, call: Call) -> BlobState:
        """Upload bytes from `offset` of `size`; durable when `complete`."""
        digest, owner = call.path["digest"], owner_of(call.credential)
        offset, size = _number(call, "offset"), _number(call, "size")
        state = await self.state(call)
        if state.complete:
            async for _ in call.body:  # closing the connection would look like an outage
                pass
            return state
        self.require_room(size - offset)
        self.quotas.reserve(owner, digest, size)
        descriptor = await asyncio.to_thread(self.blobs.begin, digest, offset, size, owner)
        try:
            async for piece in _pieces(call.body, size - offset):
                offset = await asyncio.to_thread(self.blobs.write, descriptor, offset, piece)
        finally:
            os.close(descriptor)
        if offset == size:
            try:
                await asyncio.to_thread(self.blobs.finish, digest, size, owner)
            except BadRequest:
                self.quotas.release(owner, digest)  # nothing was kept
                raise
        return BlobState(held_bytes=offset, complete=offset == size)

    @route("GET", "/v1/blobs/{digest}/state", UPLOADERS | READERS)
    async def state(self, call: Call) -> BlobState:
        """Bytes of a blob stored so far: the offset to continue an upload at."""
        owner = owner_of(call.credential)
        held, is_complete = await asyncio.to_thread(self.blobs.held, call.path["digest"], owner)
        return BlobState(held_bytes=held, complete=is_complete)

    @route("GET", "/v1/blobs/{digest}", UPLOADERS | READERS, response=None, shares_budget=True)
    async def get(self, call: Call) -> FileResponse:
        """The bytes of a blob; supports Range."""
        digest = call.path["digest"]
        if not (await self.state(call)).complete:
            raise NotFound(f"no blob {digest}")
        return FileResponse(self.blobs.path(digest), media_type=OCTET_STREAM)


def row_routes(service: RowService) -> list[Route]:
    """All routes about rows: readers, spaces and blobs."""
    blobs = BlobRoutes(
        blobs=service.blobs, require_room=service.require_room, quotas=service.upload_quotas
    )
    return [*routes_of(RowRoutes(service=service)), *routes_of(blobs)]


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
