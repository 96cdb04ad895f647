# SPDX-License-Identifier: Apache-2.0
"""A store on this machine as a source."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import BinaryIO

import structlog
from anyio.to_thread import run_sync

from penstock.errors import NotFound, WeightsError
from penstock.weights.chain import DeltaEntry
from penstock.weights.store import DirectoryStore

log = structlog.get_logger(__name__)


class Origin:
    def __init__(self, store: DirectoryStore) -> None:
        self._store = store

    async def manifest(self, digest: str) -> bytes:
        try:
            return await run_sync(self._store.read_manifest, digest)
        except OSError:
            raise _missing("manifest", digest) from None
        except WeightsError as error:
            log.error("manifest damaged", digest=digest, detail=str(error))
            raise NotFound(str(error)) from None

    async def blob(self, digest: str) -> StoredBlob:
        try:
            return StoredBlob(await run_sync(self._store.open_blob, digest))
        except OSError:
            raise _missing("blob", digest) from None

    async def way(
        self, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        return await run_sync(self._store.way_to, target, num_bytes, have)

    async def close(self) -> None:
        return None


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
