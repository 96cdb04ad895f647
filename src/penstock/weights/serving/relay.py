# SPDX-License-Identifier: Apache-2.0
"""Another front as a source, with a cache between: one copy from upstream, any number to readers.

Owns which pieces are fetched, and when. Pieces pass on as they arrive, so that a tree of relays
moves a blob at the speed of its slowest link; a blob of several pieces is digested when its last
one is here, and dropped if it is wrong. Until then its readers get what upstream sent. That is
no loss: a relay has no authority, and every reader verifies what he gets.
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
from penstock.weights.deltas.chain import DeltaEntry, Way
from penstock.weights.manifest import MAX_MANIFEST_BYTES, digest_of
from penstock.weights.serving.piece_cache import MANIFEST, PIECE_BYTES, Held, PieceCache
from penstock.weights.serving.single_flight import Flow, Shared
from penstock.weights.serving.upstreams import OtherSize, Upstream, Upstreams
from penstock.wire.client import AsyncCaller
from penstock.wire.codec import MSGPACK, decode

log = structlog.get_logger(__name__)
Steps = tuple[DeltaEntry, ...]
NUM_PARALLEL = 48
"""Pieces on their way from upstream at once; a caller has a few connections more."""
HEAD_BYTES = 128 << 10
"""Asked for first, to learn how long a blob is; many a delta is no longer."""
WAY_S = 5.0
"""How long an answer about deltas serves others who ask the same."""
MAX_WAYS = 1024
MAX_WAY_BYTES = 1 << 16
MAX_OPENINGS = 3
NOTHING = digest_of(b"")
"""A range of an empty blob cannot be asked for."""


class Relay:
    """`upstreams` in order of preference; they stay their owner's to close. One process per cache
    folder."""

    def __init__(self, upstreams: Sequence[AsyncCaller], cache: Path, *, max_bytes: int) -> None:
        self._upstreams = Upstreams(upstreams)
        self._cache = PieceCache(cache, max_bytes=max_bytes)
        self._slots = asyncio.Semaphore(NUM_PARALLEL)
        self._suppliers: WeakKeyDictionary[Held, set[Upstream]] = WeakKeyDictionary()
        self._manifests: Shared[str, bytes] = Shared()
        self._openings: Shared[str, Held] = Shared()
        self._flows: dict[tuple[Held, int], Flow] = {}
        self._checks: Shared[Held, bool] = Shared()
        self._questions: Shared[tuple[str, ...], Steps] = Shared()
        self._ways: dict[tuple[str, ...], tuple[float, Steps]] = {}
        """With the time until which they serve."""

    async def close(self) -> None:
        flows = [flow.task for flow in self._flows.values() if flow.task is not None]
        for task in flows:
            task.cancel()
        await asyncio.gather(*flows, return_exceptions=True)
        for shared in (self._manifests, self._openings, self._questions, self._checks):
            await shared.close()
        self._cache.close()

    # --- manifests and ways -----------------------------------------------------------------------

    async def manifest(self, digest: str) -> bytes:
        return await self._manifests.get(digest, lambda: self._manifest(digest))

    async def _manifest(self, digest: str) -> bytes:
        held = self._cache.find(digest + MANIFEST)
        if held is not None:
            with held.in_use(), suppress(OSError):
                data = await run_sync(held.path.read_bytes)
                if digest_of(data) == digest:
                    return data
            self._cache.drop(held)

        async def get(upstream: Upstream) -> bytes:
            found = await upstream.get(f"/v1/manifests/{digest}", MAX_MANIFEST_BYTES)
            if digest_of(found) != digest:
                raise WeightsError(f"it sent another manifest than {digest}")
            return found

        data = await self._upstreams.ask(get)
        await self._keep(digest + MANIFEST, data)
        return data

    async def _keep(self, name: str, data: bytes) -> None:
        """If there is room; it is passed on anyway."""
        with suppress(PenstockError), self._writing(name):
            held = self._cache.admit(name, len(data))
            with held.in_use():
                await run_sync(held.write, 0, data)
                self._cache.settle(held)

    async def way(self, target: str, num_bytes: int, have: Collection[str]) -> Steps:
        key = (target, str(num_bytes), *sorted(have))
        serves_until, steps = self._ways.get(key, (0.0, ()))
        if time.monotonic() < serves_until:
            return steps
        return await self._questions.get(key, lambda: self._way(key))

    async def _way(self, key: tuple[str, ...]) -> Steps:
        target, num_bytes, *have = key
        path = f"/v1/deltas/{target}?bytes={num_bytes}&from={','.join(have)}"

        async def get(upstream: Upstream) -> Steps:
            return _steps(await upstream.get(path, MAX_WAY_BYTES))

        steps = await self._upstreams.ask(get)
        now = time.monotonic()
        self._ways = {key: way for key, way in self._ways.items() if now < way[0]}
        if len(self._ways) < MAX_WAYS:
            self._ways[key] = now + WAY_S, steps
        return steps

    # --- blobs ------------------------------------------------------------------------------------

    async def blob(self, digest: str) -> PassedBlob:
        for _ in range(MAX_OPENINGS):
            held = await self._openings.get(digest, lambda: self._open(digest))
            try:
                return PassedBlob(self, held)
            except FileNotFoundError:  # it had to make room before we had it in hand
                self._cache.drop(held)
        raise Unreachable(f"this relay has no room to keep {digest}")

    async def bring(self, held: Held, at: int) -> int:
        """Byte `at` is there when this returns, and all up to the one returned. The piece after it
        is on its way: between two of them the link would be idle."""
        piece = at // PIECE_BYTES
        while (there := held.missing(piece)[0]) <= at:
            flow = self._flows.get((held, piece)) or self._begin(held, piece)
            await flow.moved()
        ahead, end = held.missing(piece + 1)
        if ahead < end and (held, piece + 1) not in self._flows:
            self._begin(held, piece + 1)
        return there

    async def _open(self, digest: str) -> Held:
        held = self._cache.find(digest)
        if held is not None and (not held.is_left or await self._is_right(held)):
            return held
        for _ in range(len(self._upstreams)):
            held = await self._start(digest)
            if not held.is_complete or await self._is_right(held):
                return held
        raise Unreachable(f"every upstream sends other bytes than {digest}")

    async def _start(self, digest: str) -> Held:
        """With its first bytes, which come with the number of all."""
        if digest == NOTHING:
            return self._cache.admit(digest, 0)

        async def get(upstream: Upstream) -> tuple[Upstream, bytes, int]:
            return upstream, *await upstream.head(digest, HEAD_BYTES)

        upstream, data, num_bytes = await self._upstreams.ask(get)
        with self._writing(digest):
            held = self._cache.admit(digest, num_bytes)
            with held.in_use():
                await self._put(held, 0, data, upstream)
        return held

    def _begin(self, held: Held, piece: int) -> Flow:
        flow = self._flows[held, piece] = Flow()

        def end(task: asyncio.Task[None]) -> None:
            del self._flows[held, piece]
            is_cancelled = task.cancelled()
            flow.tell(Unreachable("this relay is ending") if is_cancelled else task.exception())

        flow.task = asyncio.create_task(self._bring(held, piece, flow))
        flow.task.add_done_callback(end)
        return flow

    async def _bring(self, held: Held, piece: int, flow: Flow) -> None:
        async def take(upstream: Upstream) -> None:
            start, end = held.missing(piece)  # what a failed upstream sent is not asked for again
            part = upstream.part(held.digest, start, end, held.num_bytes)
            try:
                async with aclosing(part) as chunks:
                    async for chunk in chunks:
                        await self._put(held, piece, chunk, upstream)
                        flow.tell()
            except OtherSize:  # who is wrong only a new start can show
                self._cache.drop(held)
                raise

        with held.in_use(), self._writing(held.name):
            async with self._slots:
                await self._upstreams.ask(take)
        if held.is_complete:
            self._checks.begin(held, lambda: self._is_right(held))

    async def _put(self, held: Held, piece: int, data: bytes, upstream: Upstream) -> None:
        self._suppliers.setdefault(held, set()).add(upstream)
        await run_sync(held.write, held.missing(piece)[0], data)
        held.grow(piece, len(data))

    @contextmanager
    def _writing(self, name: str) -> Generator[None]:
        """No fault of an upstream, so none is asked again for it."""
        try:
            yield
        except OSError as error:
            log.error("cannot write the cache", name=name, why=str(error))
            if (held := self._cache.find(name)) is not None:
                self._cache.drop(held)
            raise Unreachable(f"this relay cannot write its cache: {error.strerror}") from error

    async def _is_right(self, held: Held) -> bool:
        """Digest all of it; one that is wrong is dropped, and its suppliers are asked last."""
        try:
            with held.in_use():
                is_right = await run_sync(held.is_right)
            if is_right:
                self._cache.settle(held)
                return True
        except OSError as error:
            log.error("cannot read the cache", path=str(held.path), why=str(error))
        suppliers = self._suppliers.pop(held, set[Upstream]())
        sent_by = sorted(upstream.url for upstream in suppliers)
        log.error("a blob with another digest is dropped", digest=held.digest, sent_by=sent_by)
        for upstream in suppliers:
            upstream.shun(f"it sent other bytes than {held.digest}")
        self._cache.drop(held)
        return False


class PassedBlob:
    """A blob that may still be on its way; a read waits for no more than its first byte."""

    def __init__(self, relay: Relay, held: Held) -> None:
        self.num_bytes = held.num_bytes
        self._relay = relay
        self._held = held
        self._file = held.open()
        held.num_users += 1

    async def read(self, start: int, num_bytes: int) -> bytes:
        if start >= self.num_bytes:
            return b""
        there = await self._relay.bring(self._held, start)
        return await run_sync(os.pread, self._file.fileno(), min(num_bytes, there - start), start)

    async def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._held.num_users -= 1


def _steps(answer: bytes) -> Steps:
    try:
        return decode(answer, Way, media_type=MSGPACK).steps
    except BadRequest as error:
        raise WeightsError(f"it answered nonsense about deltas: {error}") from None
