# SPDX-License-Identifier: Apache-2.0
"""A caching relay as a source: one copy from upstream, any number to readers.

Owns which pieces are fetched, and when. Pieces are passed on as they arrive, so a tree of relays
moves a blob at the speed of its slowest link. A blob is verified once its last piece has arrived,
and dropped if it is wrong; until then readers get unverified bytes. That is safe: relays are not
trusted, and every reader verifies its data.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import structlog
from anyio.to_thread import run_sync

from penstock.errors import BadRequest, PenstockError, Unreachable, WeightsError
from penstock.weights.deltas.chain import DeltaChain, DeltaEntry
from penstock.weights.manifest import MAX_MANIFEST_BYTES, digest_of
from penstock.weights.serving.piece_cache import MANIFEST, PIECE_BYTES, CachedBlob, PieceCache
from penstock.weights.serving.single_flight import PieceFetch, SingleFlight
from penstock.weights.serving.upstreams import SizeMismatch, Upstream, Upstreams
from penstock.wire.client import AsyncServiceClient
from penstock.wire.codec import MSGPACK, decode

log = structlog.get_logger(__name__)
Steps = tuple[DeltaEntry, ...]
NUM_PARALLEL = 48
"""Concurrent fetches from upstream; a client has a few more connections."""
HEAD_BYTES = 128 << 10
"""Size of the first request, which also returns the blob's size; many deltas fit in it."""
CHAIN_TTL_S = 5.0
"""How long a delta chain is cached for identical requests."""
MAX_CACHED_CHAINS = 1024
MAX_CHAIN_BYTES = 1 << 16
MAX_OPEN_ATTEMPTS = 3
NOTHING = digest_of(b"")
"""Digest of the empty blob, for which no range can be requested."""


class Relay:
    """`upstreams` are in order of preference; the caller closes them. One process per cache
    folder."""

    def __init__(
        self, upstreams: Sequence[AsyncServiceClient], cache: Path, *, max_bytes: int
    ) -> None:
        self._upstreams = Upstreams(upstreams)
        self._cache = PieceCache(cache, max_bytes=max_bytes)
        self._slots = asyncio.Semaphore(NUM_PARALLEL)
        self._suppliers: WeakKeyDictionary[CachedBlob, set[Upstream]] = WeakKeyDictionary()
        self._manifests: SingleFlight[str, bytes] = SingleFlight()
        self._openings: SingleFlight[str, CachedBlob] = SingleFlight()
        self._fetches: dict[tuple[CachedBlob, int], PieceFetch] = {}
        self._checks: SingleFlight[CachedBlob, bool] = SingleFlight()
        self._chain_queries: SingleFlight[tuple[str, ...], Steps] = SingleFlight()
        self._chain_cache: dict[tuple[str, ...], tuple[float, Steps]] = {}
        """Cached chains with their expiry time."""

    async def close(self) -> None:
        fetches = [fetch.task for fetch in self._fetches.values() if fetch.task is not None]
        for task in fetches:
            task.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        for shared in (self._manifests, self._openings, self._chain_queries, self._checks):
            await shared.close()
        self._cache.close()

    # --- manifests and delta chains ---------------------------------------------------------------

    async def manifest(self, digest: str) -> bytes:
        return await self._manifests.get(digest, lambda: self._manifest(digest))

    async def _manifest(self, digest: str) -> bytes:
        cached = self._cache.find(digest + MANIFEST)
        if cached is not None:
            with cached.in_use(), suppress(OSError):
                data = await run_sync(cached.path.read_bytes)
                if digest_of(data) == digest:
                    return data
            self._cache.drop(cached)

        async def get(upstream: Upstream) -> bytes:
            found = (await upstream.get(f"/v1/manifests/{digest}", MAX_MANIFEST_BYTES)).content
            if digest_of(found) != digest:
                raise WeightsError(f"sent a manifest that does not match digest {digest}")
            return found

        data = await self._upstreams.try_each(get)
        await self._keep(digest + MANIFEST, data)
        return data

    async def _keep(self, name: str, data: bytes) -> None:
        """Cache it if there is space; the response does not depend on it."""
        with suppress(PenstockError), self._writing(name):
            cached = self._cache.admit(name, len(data))
            with cached.in_use():
                await run_sync(cached.write, 0, data)
                self._cache.promote(cached)

    async def chain(self, target: str, num_bytes: int, have: Collection[str]) -> Steps:
        key = (target, str(num_bytes), *sorted(have))
        expires_at_s, steps = self._chain_cache.get(key, (0.0, ()))
        if time.monotonic() < expires_at_s:
            return steps
        return await self._chain_queries.get(key, lambda: self._chain(key))

    async def _chain(self, key: tuple[str, ...]) -> Steps:
        target, num_bytes, *have = key
        path = f"/v1/deltas/{target}?bytes={num_bytes}&from={','.join(have)}"

        async def get(upstream: Upstream) -> Steps:
            answer = await upstream.get(path, MAX_CHAIN_BYTES)
            try:
                return decode(answer.content, DeltaChain, media_type=MSGPACK).steps
            except BadRequest as error:
                raise WeightsError(f"sent an invalid delta chain: {error}") from None

        steps = await self._upstreams.try_each(get)
        now = time.monotonic()
        self._chain_cache = {
            key: chain for key, chain in self._chain_cache.items() if now < chain[0]
        }
        if len(self._chain_cache) < MAX_CACHED_CHAINS:
            self._chain_cache[key] = now + CHAIN_TTL_S, steps
        return steps

    # --- blobs ------------------------------------------------------------------------------------

    async def blob(self, digest: str) -> RelayedBlob:
        for _ in range(MAX_OPEN_ATTEMPTS):
            cached = await self._openings.get(digest, lambda: self._open(digest))
            try:
                return RelayedBlob(self, cached)
            except FileNotFoundError:  # already evicted
                self._cache.drop(cached)
        raise Unreachable(f"this relay has no cache space for {digest}")

    async def ensure_fetched(self, cached: CachedBlob, at: int) -> int:
        """Wait until byte `at` is available; returns the end of the available bytes. Also starts
        fetching the next piece, so that the link does not idle."""
        piece = at // PIECE_BYTES
        while (there := cached.missing(piece)[0]) <= at:
            fetch = self._fetches.get((cached, piece)) or self._start_fetch(cached, piece)
            await fetch.wait_progress()
        ahead, end = cached.missing(piece + 1)
        if ahead < end and (cached, piece + 1) not in self._fetches:
            self._start_fetch(cached, piece + 1)
        return there

    async def _open(self, digest: str) -> CachedBlob:
        cached = self._cache.find(digest)
        if cached is not None and (not cached.is_unverified or await self._verify(cached)):
            return cached
        for _ in range(len(self._upstreams)):
            cached = await self._start_blob(digest)
            if not cached.is_complete or await self._verify(cached):
                return cached
        raise Unreachable(f"every upstream sent data that does not match digest {digest}")

    async def _start_blob(self, digest: str) -> CachedBlob:
        """Start a blob with its first bytes, which come with the total size."""
        if digest == NOTHING:
            return self._cache.admit(digest, 0)

        async def get(upstream: Upstream) -> tuple[Upstream, bytes, int]:
            return upstream, *await upstream.head(digest, HEAD_BYTES)

        upstream, data, num_bytes = await self._upstreams.try_each(get)
        with self._writing(digest):
            cached = self._cache.admit(digest, num_bytes)
            with cached.in_use():
                await self._put(cached, 0, data, upstream)
        return cached

    def _start_fetch(self, cached: CachedBlob, piece: int) -> PieceFetch:
        fetch = self._fetches[cached, piece] = PieceFetch()

        def end(task: asyncio.Task[None]) -> None:
            del self._fetches[cached, piece]
            is_cancelled = task.cancelled()
            error = Unreachable("this relay is shutting down") if is_cancelled else task.exception()
            fetch.notify(error)

        fetch.task = asyncio.create_task(self._fetch_piece(cached, piece, fetch))
        fetch.task.add_done_callback(end)
        return fetch

    async def _fetch_piece(self, cached: CachedBlob, piece: int, fetch: PieceFetch) -> None:
        async def fetch_from(upstream: Upstream) -> None:
            start, end = cached.missing(piece)  # keep what a failed upstream sent
            part = upstream.part(cached.digest, start, end, cached.num_bytes)
            try:
                async with upstream.no_slower(end - start), aclosing(part) as chunks:
                    async for chunk in chunks:
                        await self._put(cached, piece, chunk, upstream)
                        fetch.notify()
            except SizeMismatch:  # only a restart shows which one is wrong
                self._cache.drop(cached)
                raise

        with cached.in_use(), self._writing(cached.name):
            async with self._slots:
                await self._upstreams.try_each(fetch_from)
        if cached.is_complete:
            self._checks.start(cached, lambda: self._verify(cached))

    async def _put(self, cached: CachedBlob, piece: int, data: bytes, upstream: Upstream) -> None:
        self._suppliers.setdefault(cached, set()).add(upstream)
        await run_sync(cached.write, cached.missing(piece)[0], data)
        cached.advance(piece, len(data))

    @contextmanager
    def _writing(self, name: str) -> Generator[None]:
        """Turn cache write errors into Unreachable, without blaming or retrying an upstream."""
        try:
            yield
        except OSError as error:
            log.error("cache write failed", name=name, error=str(error))
            if (cached := self._cache.find(name)) is not None:
                self._cache.drop(cached)
            raise Unreachable(f"this relay cannot write its cache: {error.strerror}") from error

    async def _verify(self, cached: CachedBlob) -> bool:
        """Verify the blob. A damaged one is dropped, and the upstreams that sent it are demoted."""
        try:
            with cached.in_use():
                matches_digest = await run_sync(cached.matches_digest)
            if matches_digest:
                self._cache.promote(cached)
                return True
        except OSError as error:
            log.error("cache read failed", path=str(cached.path), error=str(error))
        suppliers = self._suppliers.pop(cached, set[Upstream]())
        sent_by = sorted(upstream.url for upstream in suppliers)
        log.error("digest mismatch, blob dropped", digest=cached.digest, sent_by=sent_by)
        for upstream in suppliers:
            upstream.demote(f"sent data that does not match digest {cached.digest}")
        self._cache.drop(cached)
        return False


class RelayedBlob:
    """A blob that may still be arriving; a read waits only for its first byte."""

    def __init__(self, relay: Relay, cached: CachedBlob) -> None:
        self.num_bytes = cached.num_bytes
        self._relay = relay
        self._cached = cached
        self._file = cached.open()
        cached.num_users += 1

    async def read(self, start: int, num_bytes: int) -> bytes:
        if start >= self.num_bytes:
            return b""
        there = await self._relay.ensure_fetched(self._cached, start)
        return await run_sync(os.pread, self._file.fileno(), min(num_bytes, there - start), start)

    async def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._cached.num_users -= 1
