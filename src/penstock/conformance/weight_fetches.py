# SPDX-License-Identifier: Apache-2.0
"""Tracks which weights the peer under test fetched, and serves one blob damaged.

A manifest may come alone or within an update. Owns byte ranges and the damage. Does not
know which version is live.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starlette.responses import Response

from penstock.bounds import is_digest
from penstock.conformance.dataflow_double import Handler
from penstock.weights.manifest import parse_manifest
from penstock.weights.serving.server import RANGE, parse_range
from penstock.wire.routes import Call

DAMAGED_BYTE = -1
"""The last byte of the file: inside a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRange:
    blob: str
    start: int
    end: int
    is_damaged: bool


class WeightFetches:
    def __init__(self, store: Path) -> None:
        self._store = store
        self._manifests: set[str] = set()
        self._served: list[ServedRange] = []
        self._blob_to_damage = ""

    def damage(self, manifest_digest: str) -> None:
        """Serve the weights of this version damaged, once."""
        self._blob_to_damage = self._weights(manifest_digest)[0][0]

    def has_all(self, manifest_digest: str, *, undamaged: bool = False) -> bool:
        """Whether every byte of this version's weights was served."""
        return manifest_digest in self._manifests and all(
            self._covers(blob, num_bytes, undamaged)
            for blob, num_bytes in self._weights(manifest_digest)
        )

    async def manifest(self, call: Call, handler: Handler) -> object:
        answer = await handler(call)
        self._manifests.add(call.path["digest"])
        return answer

    async def blob(self, call: Call, handler: Handler) -> object:
        digest = call.path["digest"]
        path = self._store / "blobs" / digest
        if not is_digest(digest) or not path.is_file():
            return await handler(call)
        data = path.read_bytes()
        range_header = call.headers.get("range", "")
        byte_range = parse_range(range_header, len(data))
        if byte_range is None:
            return await handler(call)
        start, end = byte_range
        is_damaged = digest == self._blob_to_damage and end == len(data)
        self._served.append(ServedRange(blob=digest, start=start, end=end, is_damaged=is_damaged))
        if not is_damaged:
            return await handler(call)
        self._blob_to_damage = ""
        damaged = bytearray(data)
        damaged[DAMAGED_BYTE] ^= 1
        headers = {"content-range": f"bytes {start}-{end - 1}/{len(data)}"}
        is_partial = bool(RANGE.fullmatch(range_header))
        return Response(
            bytes(damaged[start:end]),
            status_code=206 if is_partial else 200,
            headers=headers if is_partial else {},
            media_type="application/octet-stream",
        )

    def _covers(self, blob: str, num_bytes: int, undamaged: bool) -> bool:
        """A peer may repair damaged bytes only, or fetch everything again."""
        position = 0
        served = [part for part in self._served if part.blob == blob]
        for part in sorted(served, key=lambda part: part.start):
            if part.start <= position:
                position = max(position, part.end - (undamaged and part.is_damaged))
        return position >= num_bytes

    def _weights(self, manifest_digest: str) -> list[tuple[str, int]]:
        """Only tensor files: a peer may already have the others, under the same digest."""
        data = (self._store / "manifests" / f"{manifest_digest}.json").read_bytes()
        files = parse_manifest(data).files
        return [(f.blob, f.bytes) for f in files if f.name.endswith(".safetensors")]
