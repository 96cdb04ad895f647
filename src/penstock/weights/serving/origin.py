# SPDX-License-Identifier: Apache-2.0
"""A local store as a source: rebuilds deleted full files on request, and merges long delta chains
for clients that are far behind.

Owns the scheduling: one such job at a time, each run once for all its requests, and few that wait.
A request waits at most `JOB_WAIT_S`, then gets the existing deltas or a Retry-After.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import BinaryIO

import structlog
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from penstock.errors import NotFound, Unreachable, WeightsError
from penstock.weights.deltas.chain import DeltaEntry, cheapest_chain
from penstock.weights.rebuild import chain_from_full
from penstock.weights.serving.rebuilt import Rebuilt
from penstock.weights.serving.single_flight import SingleFlight
from penstock.weights.serving.sources import missing
from penstock.weights.store import DirectoryStore

log = structlog.get_logger(__name__)

JOB_WAIT_S = 2.0
"""How long a request waits for the job it started; client timeouts are slightly longer."""
NUM_CHAIN_THREADS = 2
"""Chains are found in separate threads: manifests and blobs do not wait behind them."""
MARK_INTERVAL_S = 20.0
MAX_JOBS = 16
"""That run or wait; further requests come again later."""
JOB_RETRY_S = 1.0
MIN_MERGE_STEPS = 4
"""Shortest chain worth merging; shorter ones overlap little, so merging saves little."""


class Origin:
    def __init__(self, store: DirectoryStore) -> None:
        self._store = store
        self._rebuilt = Rebuilt(store, store.rebuilt_folder)
        self._jobs = SingleFlight[str, None]()
        self._one_at_a_time = asyncio.Semaphore(1)
        self._chain_threads = CapacityLimiter(NUM_CHAIN_THREADS)
        self._marked_at: dict[str, float] = {}

    async def manifest(self, digest: str) -> bytes:
        try:
            return await run_sync(self._store.read_manifest, digest)
        except OSError:
            raise missing("manifest", digest) from None
        except WeightsError as error:
            log.error("manifest damaged", digest=digest, error=str(error))
            raise NotFound(str(error)) from None

    async def blob(self, digest: str) -> StoredBlob:
        with suppress(FileNotFoundError):
            return await self._open(digest)
        if not await run_sync(chain_from_full, self._store, digest, limiter=self._chain_threads):
            raise missing("blob", digest)
        if not await self._run_and_wait(digest, lambda: self._rebuilt.rebuild(digest)):
            raise Unreachable(
                f"blob {digest} is being rebuilt from deltas", retry_after_s=JOB_RETRY_S
            )
        try:
            return await self._open(digest)
        except FileNotFoundError:
            raise missing("blob", digest) from None

    async def _open(self, digest: str) -> StoredBlob:
        try:
            blob = StoredBlob(await run_sync(self._open_file, digest))
            await self._mark_read(digest)
            return blob
        except FileNotFoundError:
            raise
        except OSError:
            raise missing("blob", digest) from None

    def _open_file(self, digest: str) -> BinaryIO:
        with suppress(FileNotFoundError):
            return self._store.open_blob(digest)
        return self._rebuilt.open_blob(digest)

    async def _mark_read(self, digest: str) -> None:
        """Record a read at most once per `MARK_INTERVAL_S`: each range of a blob is a separate
        request."""
        now = time.monotonic()
        if now - self._marked_at.get(digest, -MARK_INTERVAL_S) >= MARK_INTERVAL_S:
            self._marked_at = {
                blob: at for blob, at in self._marked_at.items() if now - at < MARK_INTERVAL_S
            }
            self._marked_at[digest] = now
            for store in (self._store, self._rebuilt):
                await run_sync(store.mark_read, digest)

    async def chain(
        self, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        chain = await self._find_chain(target, num_bytes, have)
        if len(chain) < MIN_MERGE_STEPS or not await run_sync(self._is_worth_merging, chain):
            return chain
        base, size = chain[0].base, sum(step.bytes for step in chain)
        with suppress(Unreachable):
            await self._run_and_wait(base + target, lambda: self._rebuilt.merge(base, target, size))
        return await self._find_chain(target, num_bytes, have)

    def _is_worth_merging(self, chain: Sequence[DeltaEntry]) -> bool:
        """Only to files that are stored in full, such as the newest, which nodes should load; and
        not again if the merged delta was not smaller."""
        base, target = chain[0].base, chain[-1].target
        merged = {step.base for step in self._rebuilt.deltas_to(target)}
        return self._store.has_blob(target) and base not in merged

    async def _find_chain(
        self, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        def steps_to(blob: str) -> list[DeltaEntry]:
            return self._store.deltas_to(blob) + self._rebuilt.deltas_to(blob)

        find = partial(cheapest_chain, target, have.__contains__, steps_to, below=num_bytes)
        return await run_sync(find, limiter=self._chain_threads)

    async def close(self) -> None:
        await self._jobs.close()

    async def _run_and_wait(self, name: str, work: Callable[[], object]) -> bool:
        """Start a slow job in a thread unless it is running, and wait briefly; True if it ended,
        even with an error. Raises Unreachable if there is no room for it."""
        if len(self._jobs) >= MAX_JOBS and name not in self._jobs:
            raise Unreachable(
                f"{MAX_JOBS} files are being rebuilt from deltas", retry_after_s=JOB_RETRY_S
            )
        task = self._jobs.start(name, lambda: self._run(work))
        done, _ = await asyncio.wait([task], timeout=JOB_WAIT_S)
        for ended in done:
            await ended  # raises its error
        return bool(done)

    async def _run(self, work: Callable[[], object]) -> None:
        try:
            async with self._one_at_a_time:
                await asyncio.to_thread(work)
        except (WeightsError, OSError) as error:
            log.error("rebuild from deltas failed", error=str(error))


class StoredBlob:
    """An open file of the store; stays readable even if deleted meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = os.fstat(file.fileno()).st_size

    async def read(self, start: int, num_bytes: int) -> bytes:
        return await run_sync(os.pread, self._file.fileno(), num_bytes, start)

    async def close(self) -> None:
        self._file.close()
