# SPDX-License-Identifier: Apache-2.0
"""A bucket as a source of weights, and the names of its objects.

Objects are named like the files of a directory store. Readers verify all data, as with every
source.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from penstock.bounds import is_digest
from penstock.errors import NotFound, Unreachable
from penstock.weights.deltas.chain import DeltaEntry, cheapest_chain
from penstock.weights.manifest import MAX_MANIFEST_BYTES, digest_of
from penstock.weights.serving.sources import missing
from penstock.wire.objects import list_objects, open_objects

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = structlog.get_logger(__name__)

READ_TIMEOUT_S = 10.0
"""After this long without a response from the bucket, readers get Retry-After."""
RETRY_S = 1.0
NUM_CHAIN_THREADS = 32
MAX_KNOWN = 100_000
"""Delta entries cached; they never change."""
_entry_decoder = msgspec.json.Decoder(DeltaEntry)


class ObjectSource:
    """A bucket as a source for a weight server, read by range."""

    def __init__(self, url: str) -> None:
        self._objects = open_objects(url, "weights", retry_timeout_s=READ_TIMEOUT_S)
        self._known: dict[str, DeltaEntry | None] = {}
        self._chain_threads = CapacityLimiter(NUM_CHAIN_THREADS)

    async def manifest(self, digest: str) -> bytes:
        with _translated_errors("manifest", digest):
            found = await self._objects.get_async(manifest_name(digest))
            if found.meta["size"] > MAX_MANIFEST_BYTES:
                raise NotFound(f"manifest {digest} is too large ({found.meta['size']} bytes)")
            data = bytes(await found.bytes_async())
        if digest_of(data) != digest:
            log.error("damaged manifest in object storage, not served", digest=digest)
            raise NotFound(
                f"manifest {digest} is damaged in the bucket; delete it and upload it again"
            )
        return data

    async def blob(self, digest: str) -> ObjectBlob:
        with _translated_errors("blob", digest):
            meta = await self._objects.head_async(blob_name(digest))
        return ObjectBlob(self._objects, digest, meta["size"])

    async def chain(
        self, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        with _translated_errors("deltas to", target):
            return await run_sync(self._chain, target, num_bytes, have, limiter=self._chain_threads)

    def _chain(self, target: str, num_bytes: int, have: Collection[str]) -> tuple[DeltaEntry, ...]:
        def steps_to(blob: str) -> Iterable[DeltaEntry]:
            return deltas_to(self._objects, blob, self._known)

        if len(self._known) > MAX_KNOWN:
            self._known.clear()
        return cheapest_chain(target, lambda blob: blob in have, steps_to, below=num_bytes)

    async def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ObjectBlob:
    objects: ObjectStore
    digest: str
    num_bytes: int

    async def read(self, start: int, num_bytes: int) -> bytes:
        end = min(start + num_bytes, self.num_bytes)
        if start >= end:
            return b""
        name = blob_name(self.digest)
        with _translated_errors("blob", self.digest):
            return bytes(await self.objects.get_range_async(name, start=start, end=end))

    async def close(self) -> None:
        return None


@contextmanager
def _translated_errors(kind: str, digest: str) -> Generator[None]:
    """Translate bucket errors: missing objects to NotFound, failures to Unreachable with
    Retry-After."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise missing(kind, digest) from None
    except (BaseError, OSError) as error:
        log.error("object storage failed", kind=kind, digest=digest, error=str(error))
        raise Unreachable(
            f"object storage of this weight server failed ({type(error).__name__}); see its log",
            retry_after_s=RETRY_S,
        ) from None


def deltas_to(
    objects: ObjectStore, target: str, known: dict[str, DeltaEntry | None]
) -> list[DeltaEntry]:
    """Deltas to this blob; damaged entries are skipped."""
    names = sorted(name for name, _ in list_objects(objects, f"deltas/{target}"))
    for name in names:
        if name not in known:
            known[name] = _read_entry(objects, name, target)
    return [entry for name in names if (entry := known[name]) is not None]


def _read_entry(objects: ObjectStore, name: str, target: str) -> DeltaEntry | None:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, FileNotFoundError):
        entry = _entry_decoder.decode(bytes(objects.get(name).bytes()))
        if entry.target == target and is_valid_entry(entry):
            return entry
    return None


def is_valid_entry(entry: DeltaEntry) -> bool:
    return entry.bytes > 0 and all(map(is_digest, (entry.base, entry.target, entry.blob)))


def manifest_name(digest: str) -> str:
    return f"manifests/{digest}.json"


def blob_name(digest: str) -> str:
    return f"blobs/{digest}"


def entry_name(entry: DeltaEntry) -> str:
    return f"deltas/{entry.target}/{entry.base}.json"
