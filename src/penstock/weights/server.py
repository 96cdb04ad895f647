# SPDX-License-Identifier: Apache-2.0
"""Read-only HTTP front of a weight store: manifests, blobs with Range, metrics.

Owns ranges and streaming from disk; never holds more than one piece of a blob per request. Accepts
nothing: versions enter the store beside it, and what a reader gets it verifies itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

import structlog
from prometheus_client import CollectorRegistry, Counter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.errors import BadRequest, NotFound, WeightsError
from penstock.observe.prometheus import MEDIA_TYPE, exposition, new_registry
from penstock.weights.chain import Way
from penstock.weights.manifest import is_digest
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Role, Verifier
from penstock.wire.codec import JSON
from penstock.wire.server import Call, Raw, Route, build_app, error_response

log = structlog.get_logger(__name__)

READERS = frozenset(Role) - {Role.SESSION}
PIECE_BYTES = 1 << 20
OCTETS = "application/octet-stream"
RANGE = re.compile(r"bytes=(?:(\d{1,18})-(\d{0,18})|-(\d{1,18}))")


MAX_BASES = 64
MAX_DIGITS = 18


def build(store_root: Path, verifier: Verifier) -> Starlette:
    front = Front(DirectoryStore(store_root), new_registry("weights", verifier.run))
    routes = [
        Route(
            method="GET",
            path="/v1/manifests/{digest}",
            handler=front.manifest,
            roles=READERS,
            summary="The manifest with this BLAKE3, as JSON, byte for byte.",
        ),
        Route(
            method="GET",
            path="/v1/blobs/{digest}",
            handler=front.blob,
            roles=READERS,
            summary="The blob with this BLAKE3; a Range of bytes may be asked for.",
        ),
        Route(
            method="GET",
            path="/v1/deltas/{digest}",
            handler=front.deltas,
            roles=READERS,
            response=Way,
            query=("from", "bytes"),
            summary="Deltas that lead to the blob with this BLAKE3, of `bytes` bytes, from one of "
            "the blobs `from=DIGEST,DIGEST,…`; none when they would not be smaller.",
        ),
        Route(
            method="GET",
            path="/metrics",
            handler=front.metrics,
            roles=READERS,
            summary="Prometheus text.",
        ),
    ]
    return build_app(routes, verifier, title="penstock weights")


class Front:
    def __init__(self, store: DirectoryStore, registry: CollectorRegistry) -> None:
        self._store = store
        self._registry = registry
        self._requests = Counter(
            "penstock_weights_requests",
            "Answered reads, by kind and role.",
            ["kind", "role"],
            registry=registry,
        )
        self._sent_bytes = Counter(
            "penstock_weights_sent_bytes", "Bytes of blobs sent.", registry=registry
        )

    async def manifest(self, call: Call) -> object:
        digest = call.path["digest"]
        try:
            data = await run_in_threadpool(self._store.read_manifest, digest)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        except OSError:
            raise _missing("manifest", digest) from None
        except WeightsError as error:
            log.error("manifest damaged", digest=digest, detail=str(error))
            raise NotFound(str(error)) from None
        self._requests.labels("manifest", call.credential.role).inc()
        return Raw(data, JSON)

    async def blob(self, call: Call) -> object:
        digest = call.path["digest"]
        try:
            file = await run_in_threadpool(self._store.open_blob, digest)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        except OSError:
            raise _missing("blob", digest) from None
        self._requests.labels("blob", call.credential.role).inc()
        size = os.fstat(file.fileno()).st_size
        asked = call.headers.get("range", "")
        span = parse_range(asked, size)
        if span is None:
            file.close()
            return _unsatisfiable(asked, size)
        return BlobResponse(
            file, span, size, self._sent_bytes, is_part=bool(RANGE.fullmatch(asked))
        )

    async def deltas(self, call: Call) -> Way:
        have = call.query.get("from", "").split(",")
        target, num_bytes = call.path["digest"], call.query.get("bytes", "")
        if not all(map(is_digest, (target, *have))) or len(have) > MAX_BASES:
            raise BadRequest(f"give 1 to {MAX_BASES} digests in 64 lower-case hex digits each")
        if not (num_bytes.isascii() and num_bytes.isdecimal()) or len(num_bytes) > MAX_DIGITS:
            raise BadRequest(f"bytes is {num_bytes[:20]!r}; give the size of the wanted blob")
        way = await run_in_threadpool(self._store.way_to, target, int(num_bytes), have)
        self._requests.labels("deltas", call.credential.role).inc()
        return Way(steps=way)

    async def metrics(self, call: Call) -> object:
        return Raw(exposition(self._registry), MEDIA_TYPE)


def parse_range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and the one after the last; None when no byte of the file is asked for.

    A header of another form, several ranges included, means the whole file, as RFC 9110 allows.
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
    """Bytes `span` of an open file, piece by piece; the file is closed whatever happens."""

    def __init__(
        self, file: BinaryIO, span: tuple[int, int], size: int, sent: Counter, *, is_part: bool
    ) -> None:
        start, end = span
        headers = {"accept-ranges": "bytes", "content-length": str(end - start)}
        if is_part:
            headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
        super().__init__(
            self._pieces(start, end),
            status_code=HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK,
            headers=headers,
            media_type=OCTETS,
        )
        self._file = file
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)

    async def _pieces(self, start: int, end: int) -> AsyncIterator[bytes]:
        descriptor = self._file.fileno()
        while start < end:
            length = min(PIECE_BYTES, end - start)
            piece = await run_in_threadpool(os.pread, descriptor, length, start)
            if not piece:
                raise OSError(f"blob was cut off at byte {start} while it was being sent")
            self._sent.inc(len(piece))
            start += len(piece)
            yield piece


def _missing(kind: str, digest: str) -> NotFound:
    return NotFound(
        f"no {kind} {digest} in this store; was the version published from another one?"
    )


def _unsatisfiable(asked: str, size: int) -> Response:
    response = error_response(BadRequest(f"range {asked!r} lies outside this blob of {size} bytes"))
    response.status_code = HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    response.headers["content-range"] = f"bytes */{size}"
    return response
