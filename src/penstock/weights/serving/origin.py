# SPDX-License-Identifier: Apache-2.0
"""A store on this machine as a source: what is no longer whole is made again when somebody asks,
and who is far behind gets one delta in place of many.

Owns when that is done: one piece of such work at a time, each once however many ask. Nobody's
request is held up by it for long; he gets what there is, or is told when to ask again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import BinaryIO

import structlog
from anyio.to_thread import run_sync

from penstock.errors import NotFound, Unreachable, WeightsError
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.rebuild import chain_from_full, merge_deltas, rebuild_blob
from penstock.weights.store import DirectoryStore

log = structlog.get_logger(__name__)

JOB_WAIT_S = 2.0
"""How long a request waits for work that it has caused; callers give it a little more."""
MARK_INTERVAL_S = 20.0
MIN_MERGE_STEPS = 4
"""Steps that are worth one delta in their place; fewer overlap little, so merging saves little."""


class Origin:
    def __init__(self, store: DirectoryStore) -> None:
        self._store = store
        self._jobs = _BackgroundJobs()
        self._marked_at: dict[str, float] = {}

    async def manifest(self, digest: str) -> bytes:
        try:
            return await run_sync(self._store.read_manifest, digest)
        except OSError:
            raise _missing("manifest", digest) from None
        except WeightsError as error:
            log.error("manifest damaged", digest=digest, detail=str(error))
            raise NotFound(str(error)) from None

    async def blob(self, digest: str) -> StoredBlob:
        with suppress(FileNotFoundError):
            return await self._open(digest)
        if not await run_sync(chain_from_full, self._store, digest):
            raise _missing("blob", digest)
        if not await self._jobs.run_and_wait(digest, lambda: rebuild_blob(self._store, digest)):
            raise Unreachable(f"blob {digest} is being made from deltas", retry_after_s=1.0)
        try:
            return await self._open(digest)
        except FileNotFoundError:
            raise _missing("blob", digest) from None

    async def _open(self, digest: str) -> StoredBlob:
        try:
            blob = StoredBlob(await run_sync(self._store.open_blob, digest))
            await self._mark_read(digest)
            return blob
        except FileNotFoundError:
            raise
        except OSError:
            raise _missing("blob", digest) from None

    async def _mark_read(self, digest: str) -> None:
        """Each range of a blob is a request; one note in a while tells of all of them."""
        now = time.monotonic()
        if now - self._marked_at.get(digest, -MARK_INTERVAL_S) >= MARK_INTERVAL_S:
            self._marked_at = {
                blob: at for blob, at in self._marked_at.items() if now - at < MARK_INTERVAL_S
            }
            self._marked_at[digest] = now
            await run_sync(self._store.mark_read, digest)

    async def chain(
        self, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        chain = await run_sync(self._store.chain_to, target, num_bytes, have)
        if len(chain) < MIN_MERGE_STEPS:
            return chain
        base = chain[0].base
        await self._jobs.run_and_wait(
            base + target, lambda: merge_deltas(self._store, base, target)
        )
        return await run_sync(self._store.chain_to, target, num_bytes, have)

    async def close(self) -> None:
        await self._jobs.close()


class _BackgroundJobs:
    """Slow work in threads, by name."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[None]] = {}
        self._one_at_a_time = asyncio.Semaphore(1)

    async def run_and_wait(self, name: str, work: Callable[[], object]) -> bool:
        """Start it unless it runs, and wait a moment; whether it ended, well or not."""
        task = self._running.get(name)
        if task is None:
            task = self._running[name] = asyncio.create_task(self._do(name, work))
        done, _ = await asyncio.wait([task], timeout=JOB_WAIT_S)
        return bool(done)

    async def _do(self, name: str, work: Callable[[], object]) -> None:
        try:
            async with self._one_at_a_time:
                await asyncio.to_thread(work)
        except (WeightsError, OSError) as error:
            log.error("deltas of the store are of no use", why=str(error))
        finally:
            self._running.pop(name, None)

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class StoredBlob:
    """A file of the store; it stays readable when its name is deleted meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = os.fstat(file.fileno()).st_size

    async def read(self, start: int, num_bytes: int) -> bytes:
        return await run_sync(os.pread, self._file.fileno(), num_bytes, start)

    async def close(self) -> None:
        self._file.close()


def _missing(kind: str, digest: str) -> NotFound:
    return NotFound(
        f"no {kind} {digest} in this store; was the version published from another one?"
    )
