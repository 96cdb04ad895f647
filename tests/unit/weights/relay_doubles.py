# SPDX-License-Identifier: Apache-2.0
"""Relays and what lies before them: real fronts over a source that counts, alters or stalls."""

from __future__ import annotations

import io
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.weights.weight_servers import listening

from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.relay import Relay
from penstock.weights.serving.server import build
from penstock.weights.serving.sources import Blob, Source
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import connect

Tamper = Callable[[str, int, bytes], Awaitable[bytes]]
CHUNK = 64 << 10
MB = 1 << 20


async def _unmodified(digest: str, start: int, data: bytes) -> bytes:
    return data


@dataclass(slots=True)
class TamperingSource:
    """A source behind somebody who notes what is asked and may change it."""

    source: Source
    tamper: Tamper = _unmodified
    """Gets a digest, the first byte and the bytes; those of a manifest begin at -1."""
    reads: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    """Digest, first byte, number of bytes."""
    num_chain_queries: int = 0

    async def manifest(self, digest: str) -> bytes:
        return await self.tamper(digest, -1, await self.source.manifest(digest))

    async def blob(self, digest: str) -> Blob:
        return TamperedBlob(self, digest, await self.source.blob(digest))

    async def chain(
        self, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        self.num_chain_queries += 1
        return await self.source.chain(target, num_bytes, have)

    async def close(self) -> None:
        await self.source.close()

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self.reads)


@dataclass(slots=True)
class TamperedBlob:
    tampering: TamperingSource
    digest: str
    blob: Blob

    @property
    def num_bytes(self) -> int:
        return self.blob.num_bytes

    async def read(self, start: int, num_bytes: int) -> bytes:
        data = await self.blob.read(start, min(num_bytes, CHUNK))
        tampered = await self.tampering.tamper(self.digest, start, data)
        self.tampering.reads.append((self.digest, start, len(data)))
        return tampered

    async def close(self) -> None:
        await self.blob.close()


async def flip(digest: str, start: int, data: bytes) -> bytes:
    """One bit of every chunk."""
    return bytes([data[0] ^ 1]) + data[1:]


def put_blob(store: Path, num_bytes: int, seed: int = 0) -> tuple[str, bytes]:
    data = random.Random(seed).randbytes(num_bytes)
    directory = DirectoryStore(store)
    directory.prepare()
    return directory.put_blob(io.BytesIO(data), "x.json").blob, data


def origin(store: Path, tamper: Tamper = _unmodified) -> TamperingSource:
    return TamperingSource(Origin(DirectoryStore(store)), tamper)


@asynccontextmanager
async def relay(
    tmp_path: Path, *sources: Source, max_bytes: int = 64 * MB, cache: str = "relay"
) -> AsyncGenerator[Relay]:
    """Of real fronts over these sources, the first of them preferred."""
    signer = Signer.create(tmp_path / "keys", "run")
    token = signer.mint(Role.RELAY, [Audience.WEIGHTS], ttl_s=600)
    async with AsyncExitStack() as stack:
        callers = [
            await stack.enter_async_context(
                connect(
                    await stack.enter_async_context(
                        listening(build(source, signer.verifier(Audience.WEIGHTS)))
                    ),
                    token,
                )
            )
            for source in sources
        ]
        made = Relay(callers, tmp_path / cache, max_bytes=max_bytes)
        try:
            yield made
        finally:
            await made.close()


async def read_all(source: Source, digest: str, num_bytes: int = MB) -> bytes:
    blob = await source.blob(digest)
    pieces: list[bytes] = []
    at = 0
    try:
        while piece := await blob.read(at, num_bytes):
            pieces.append(piece)
            at += len(piece)
    finally:
        await blob.close()
    assert at == blob.num_bytes
    return b"".join(pieces)


def cached(tmp_path: Path, cache: str = "relay") -> dict[str, int]:
    """Names and allocated or reserved bytes of what lies in a relay's folder."""
    files = [path for path in (tmp_path / cache).rglob("*") if path.is_file()]
    return {path.name: path.stat().st_size for path in files if path.name != "lock"}
