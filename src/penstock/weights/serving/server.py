# SPDX-License-Identifier: Apache-2.0
"""Read-only HTTP server for a source of weights: manifests, blobs with Range, delta chains, both
in one answer, metrics.

Owns ranges and streaming; holds at most one piece of a blob per request, and the more downloads a
credential has, the smaller are its pieces. Accepts no writes: trainers write to the store directly,
and readers verify all data themselves.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

import structlog
from anyio.to_thread import run_sync
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.bounds import is_digest
from penstock.errors import BadRequest, NotFound, WeightsError, WireError
from penstock.observe.metric_names import PROMETHEUS
from penstock.observe.prometheus import new_registry
from penstock.weights.deltas.chain import MAX_BASES, DeltaChain, DeltaEntry
from penstock.weights.manifest import FileEntry, parse_manifest
from penstock.weights.serving.single_flight import SingleFlight
from penstock.weights.serving.sources import Blob, Source
from penstock.weights.update import MAX_CHAINS, Update, pack_manifest
from penstock.wire.auth import Role, Verifier
from penstock.wire.call_budget import CallBudget, Share
from penstock.wire.codec import JSON
from penstock.wire.routes import Call, RawResponse, route, routes_of
from penstock.wire.server import build_app, error_response

log = structlog.get_logger(__name__)

METRICS_READERS = frozenset(Role) - {Role.SESSION}
READERS = METRICS_READERS - {Role.READER}
"""Who may read weights; a reader's token is for figures only."""
PIECE_BYTES = 1 << 20
NUM_LARGE = 32
"""Downloads of one credential with pieces of PIECE_BYTES: as many as a node has. Smaller ones cost
more processor time, and a caller that does not read costs a piece."""
MAX_DOWNLOADS = 16 * NUM_LARGE
"""Of one credential at a time, of which each has an open file; the others wait for their turn."""
MAX_QUESTIONS = 32
"""About chains, of one credential at a time: one call asks for every file of a version."""
MAX_WAITING = 64 * MAX_CHAINS
MANIFEST_BYTES = 16 << 20
"""Manifests are rarely larger."""
OCTET_STREAM = "application/octet-stream"
RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))")
MAX_DIGITS = 18
MAX_PACKED = 8
"""Versions whose packed manifest is kept."""


def build(source: Source, verifier: Verifier) -> Starlette:
    served = WeightServer(source, verifier.run)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await served.close()

    return build_app(routes_of(served), verifier, title="penstock weights", lifespan=lifespan)


@dataclass(frozen=True, slots=True)
class _Packed:
    """What answers about one version have in common."""

    manifest: bytes
    """Compressed."""
    weights: tuple[FileEntry, ...]
    """The files for which chains are named."""


def _pack(data: bytes) -> _Packed:
    try:
        files = parse_manifest(data).files
    except WeightsError as error:
        raise NotFound(str(error)) from None
    weights = [file for file in files if file.name.endswith(".safetensors")]
    return _Packed(pack_manifest(data), tuple(weights[:MAX_CHAINS]))


class WeightServer:
    def __init__(self, source: Source, run: str) -> None:
        self._source = source
        self._packing = SingleFlight[str, _Packed]()
        self._newest: dict[str, _Packed] = {}
        self._one_at_a_time = asyncio.Semaphore(1)
        self._downloads = CallBudget(MAX_DOWNLOADS)
        self._questions = CallBudget(MAX_QUESTIONS, MAX_WAITING)
        self._registry = registry = new_registry("weights", run)
        self._requests = Counter(
            "penstock_weights_requests",
            PROMETHEUS["penstock_weights_requests"].meaning,
            PROMETHEUS["penstock_weights_requests"].labels,
            registry=registry,
        )
        self._sent_bytes = Counter(
            "penstock_weights_sent_bytes",
            PROMETHEUS["penstock_weights_sent_bytes"].meaning,
            registry=registry,
        )

    @route(
        "GET",
        "/v1/manifests/{digest}",
        READERS,
        response=None,
        shares_budget=True,
        answer_bytes=MANIFEST_BYTES,
    )
    async def manifest(self, call: Call) -> RawResponse:
        """The manifest with this BLAKE3, as JSON, byte for byte."""
        data = await self._source.manifest(_digest(call))
        self._requests.labels("manifest", call.credential.role).inc()
        return RawResponse(data, JSON)

    @route("GET", "/v1/blobs/{digest}", READERS, response=None)
    async def blob(self, call: Call) -> Response:
        """The blob with this BLAKE3; supports Range requests."""
        digest, who = _digest(call), (call.credential.subject, "blobs")

        def piece_bytes() -> int:
            return PIECE_BYTES * NUM_LARGE // max(NUM_LARGE, self._downloads.used(who))

        async with AsyncExitStack() as held:
            share = Share(self._downloads)
            await share.take(who, 1)
            held.callback(share.give_back)
            blob = await self._source.blob(digest)
            held.push_async_callback(blob.close)
            range_header = call.headers.get("range", "")
            byte_range = parse_range(range_header, blob.num_bytes)
            if byte_range is None:
                return _unsatisfiable(range_header, blob.num_bytes)
            start, end = byte_range
            first = await blob.read(start, min(piece_bytes(), end - start))
            self._requests.labels("blob", call.credential.role).inc()
            is_partial = bool(RANGE.fullmatch(range_header))
            return BlobResponse(
                blob,
                byte_range,
                first,
                piece_bytes,
                self._sent_bytes,
                is_partial,
                held.pop_all(),
            )

    @route("GET", "/v1/deltas/{digest}", READERS, query=("from", "bytes"), shares_budget=True)
    async def deltas(self, call: Call) -> DeltaChain:
        """Deltas to the blob with this BLAKE3 and size `bytes` from one of the blobs
        `from=DIGEST,DIGEST,…`; empty if they would not be smaller than the blob."""
        have = _bases(call)
        target, num_bytes = _digest(call), call.query.get("bytes", "")
        if not (num_bytes.isascii() and num_bytes.isdecimal()) or len(num_bytes) > MAX_DIGITS:
            raise BadRequest(f"bytes is {num_bytes[:20]!r}; pass the size of the target blob")
        chain = await self._chain(call, target, int(num_bytes), have)
        self._requests.labels("deltas", call.credential.role).inc()
        return DeltaChain(steps=chain)

    @route("GET", "/v1/updates/{digest}", READERS, query=("from",), shares_budget=True)
    async def updates(self, call: Call) -> Update:
        """The manifest with this BLAKE3, compressed, and deltas to its weights from the blobs
        `from=DIGEST,DIGEST,…`, by the blob to which they lead."""
        have, packed = _bases(call), await self._packed(_digest(call))
        new = [file for file in packed.weights if file.blob not in have]
        chains = await asyncio.gather(
            *(self._chain(call, file.blob, file.bytes, have) for file in new)
        )
        self._requests.labels("updates", call.credential.role).inc()
        found = {file.blob: chain for file, chain in zip(new, chains, strict=True) if chain}
        return Update(manifest=packed.manifest, chains=found)

    async def _chain(
        self, call: Call, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        share = Share(self._questions)
        await share.take((call.credential.subject, "chains"), 1)
        try:
            return await self._source.chain(target, num_bytes, have)
        finally:
            share.give_back()

    async def _packed(self, digest: str) -> _Packed:
        """Half a second of work for a large mixture: once for all that ask, and beside the loop."""
        if (known := self._newest.get(digest)) is not None:
            return known

        async def pack() -> _Packed:
            data = await self._source.manifest(digest)
            async with self._one_at_a_time:
                packed = self._newest[digest] = await run_sync(_pack, data)
            for oldest in [*self._newest][:-MAX_PACKED]:
                del self._newest[oldest]
            return packed

        return await self._packing.get(digest, pack)

    async def close(self) -> None:
        await self._packing.close()
        await self._source.close()

    @route("GET", "/metrics", METRICS_READERS, response=None)
    async def metrics(self, call: Call) -> RawResponse:
        """Prometheus metrics."""
        return RawResponse(generate_latest(self._registry), CONTENT_TYPE_LATEST)


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and end (exclusive); None if the range is outside the file.

    Any other header, including several ranges, means the full file, as RFC 9110 allows.
    """
    match = RANGE.fullmatch(header)
    if match is None:
        return 0, size
    first, last, tail = match.groups()
    if tail is not None:
        start, end = max(0, size - int(tail)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    return (start, end) if start < end else None


class BlobResponse(StreamingResponse):
    """Streams `byte_range` of an open blob, piece by piece, and always gives back what is `held`.

    The first piece is read before the response starts, so that a source can still report an error.
    """

    def __init__(
        self,
        blob: Blob,
        byte_range: tuple[int, int],
        first: bytes,
        piece_bytes: Callable[[], int],
        sent: Counter,
        is_partial: bool,
        held: AsyncExitStack,
    ) -> None:
        start, end = byte_range
        headers = {"accept-ranges": "bytes", "content-length": str(end - start)}
        if is_partial:
            headers["content-range"] = f"bytes {start}-{end - 1}/{blob.num_bytes}"
        super().__init__(
            self._pieces(start, end, first),
            status_code=HTTPStatus.PARTIAL_CONTENT if is_partial else HTTPStatus.OK,
            headers=headers,
            media_type=OCTET_STREAM,
        )
        self._blob = blob
        self._piece_bytes = piece_bytes
        self._sent = sent
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except WireError as error:  # too late for a status; the closed connection signals it
            log.warning("blob response aborted", error=str(error))
        finally:
            await self._held.aclose()

    async def _pieces(self, start: int, end: int, piece: bytes) -> AsyncIterator[bytes]:
        while start < end:
            if not piece:
                raise OSError(f"blob ended at byte {start} while it was being sent")
            self._sent.inc(len(piece))
            start += len(piece)
            yield piece
            piece = b""
            yield piece  # goes on when the caller has read most of the piece before
            if start < end:
                piece = await self._blob.read(start, min(self._piece_bytes(), end - start))


def _digest(call: Call) -> str:
    digest = call.path["digest"]
    if not is_digest(digest):
        raise BadRequest(f"{digest[:80]!r} is not a BLAKE3 digest (64 lowercase hex characters)")
    return digest


def _bases(call: Call) -> list[str]:
    have = call.query.get("from", "").split(",")
    if not all(map(is_digest, have)) or len(have) > MAX_BASES:
        raise BadRequest(f"`from` must list 1 to {MAX_BASES} BLAKE3 digests")
    return have


def _unsatisfiable(range_header: str, size: int) -> Response:
    response = error_response(
        BadRequest(f"range {range_header!r} is outside this blob of {size} bytes")
    )
    response.status_code = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    response.headers["content-range"] = f"bytes */{size}"
    return response
