# SPDX-License-Identifier: Apache-2.0
"""What nodes call: pull a version and stage it verified.

Owns the pull: fetch from whichever front has it, along deltas or whole, verify every tensor, mend
what is damaged, stage, rename. Loading is the engine's business; a folder returned by `pull` holds
nothing that was not digested in that call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from penstock.errors import WeightsError, WireError, boundary
from penstock.types import PublishedVersion
from penstock.weights.deltas.chain import DeltaEntry, Way, leads_to
from penstock.weights.manifest import (
    MAX_MANIFEST_BYTES,
    FileEntry,
    SnapshotManifest,
    digest_of,
    is_digest,
    parse_manifest,
)
from penstock.weights.pulling.cache import BlobCache, to_the_end
from penstock.weights.pulling.links import Front, Link, Speed, Transfer, fronts_of, takes_delta
from penstock.weights.pulling.partial import Partial, Span
from penstock.weights.tensors import Scan, TensorEntry
from penstock.wire.client import AsyncCaller

log = structlog.get_logger(__name__)
T = TypeVar("T")

MAX_TRIES = 3
"""How often one front is asked for what came damaged."""
NUM_FILES = 8
"""Brought at once."""
NUM_RANGES = 32
"""Requests at once. With a connection to each, a link of 20 Mbit/s and 300 ms is full even while
one packet in a hundred is lost; a fast one is with fewer."""


class Puller:
    """Pulls versions into one folder, and learns how fast links and this machine are."""

    def __init__(
        self, cache: Path, *, transfer: Transfer = "auto", num_ranges: int = NUM_RANGES
    ) -> None:
        self._cache = cache
        self._written_ns: dict[Path, dict[str, int]] = {}
        """Of staged versions, when each file was last written to before it was verified."""
        self._transfer: Transfer = transfer
        self._num_ranges = num_ranges
        self._links: dict[str, Link] = {}
        self._making = Speed(num_unlike=1)  # the first file waits for a compiler, too

    async def pull(self, fronts: Sequence[AsyncCaller], wanted: PublishedVersion) -> Path:
        """A Hugging Face folder with exactly the wanted version, every tensor verified.

        What a front does not have, or gives damaged, the next is asked for; only the last may sit
        out a long outage. Blobs that the cache holds are not fetched again, cut-off ones are
        resumed. May be cancelled at any time, and several pulls may share a cache, over tasks and
        processes.
        """
        what = f"pulling {wanted.policy}@{wanted.incarnation}.{wanted.number} into {self._cache}"
        with boundary(WeightsError, what):
            blobs = BlobCache(self._cache)
            async with blobs.in_use():
                asked = fronts_of(fronts, self._links)
                manifest = await _from_any(asked, lambda front: _fetch_manifest(front, wanted))
                slots = asyncio.Semaphore(self._num_ranges)
                pull = _Pull(blobs, asked, manifest, slots, self._making, self._transfer)
                scans = await pull.bring_all(manifest.files)
                _check_tensors(manifest, scans)
                folder = await asyncio.to_thread(blobs.stage, wanted.manifest_digest, manifest)
                self._written_ns[folder] = {
                    file.name: found.written_ns
                    for file, found in zip(manifest.files, scans, strict=True)
                }
                return folder

    def require_unchanged(self, folder: Path) -> None:
        """Asked once a pulled version is loaded: WeightsError when a file of it was written to
        since it was verified, so that nobody knows what was loaded."""
        if folder not in self._written_ns:
            raise WeightsError(f"{folder} was let go of while it was loaded")
        for name, written_ns in self._written_ns[folder].items():
            with boundary(WeightsError, f"looking at {folder / name} once more"):
                is_same = (folder / name).stat().st_mtime_ns == written_ns
            if not is_same:
                raise WeightsError(
                    f"{folder / name} was written to between its verification and its load; only "
                    "nodes may write there, and the next try verifies it again"
                )

    def prune(self, keep: Collection[str]) -> None:
        """Delete staged versions but those with these manifest digests, and blobs none of them
        uses.

        Does nothing while a pull runs in this cache; the next call will.
        """
        BlobCache(self._cache).prune(keep)
        self._written_ns = {f: told for f, told in self._written_ns.items() if f.name in keep}


async def _from_any(fronts: Sequence[Front], get: Callable[[Front], Awaitable[T]]) -> T:
    """From the first front that can; the error is that of the last."""
    for front in fronts[:-1]:
        if front.is_worth_asking:
            try:
                return await get(front)
            except (WeightsError, WireError) as error:
                log.warning("asking the next front", front=front.url, why=str(error))
    return await get(fronts[-1])


async def _all_of(works: Iterable[Coroutine[None, None, T]]) -> list[T]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _fetch_manifest(front: Front, wanted: PublishedVersion) -> SnapshotManifest:
    digest = wanted.manifest_digest
    what = f"manifest of {wanted.policy}@{wanted.incarnation}.{wanted.number}"
    if not is_digest(digest):
        raise WeightsError(f"{what}: {digest[:80]!r} is no BLAKE3 digest")
    for _ in range(MAX_TRIES):
        data = await front.get(f"/v1/manifests/{digest}", MAX_MANIFEST_BYTES, what)
        if digest_of(data) == digest:
            break
    else:
        raise WeightsError(
            f"{what}: {front.url} sent bytes of another digest than {digest}, "
            f"{MAX_TRIES} times; check its store"
        )
    manifest = parse_manifest(data)
    if (manifest.policy, manifest.number) != (wanted.policy, wanted.number):
        raise WeightsError(
            f"{what} is that of {manifest.policy} number {manifest.number}; "
            "the trainer published the wrong digest"
        )
    return manifest


class _Pull:
    """One version on its way."""

    def __init__(
        self,
        blobs: BlobCache,
        fronts: Sequence[Front],
        manifest: SnapshotManifest,
        slots: asyncio.Semaphore,
        making: Speed,
        transfer: Transfer,
    ) -> None:
        self._blobs = blobs
        self._fronts = fronts
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._slots = slots
        self._making = making
        self._transfer: Transfer = transfer

    async def bring_all(self, files: Iterable[FileEntry]) -> list[Scan]:
        places = asyncio.Semaphore(NUM_FILES)

        async def bring(file: FileEntry) -> Scan:
            async with places:
                return await self._bring(file)

        return await _all_of(map(bring, files))

    async def _bring(self, file: FileEntry) -> Scan:
        """The verified blob is in the cache when this returns: it was there, or its deltas came, or
        the whole of it."""
        if (found := await self._from_cache(file)) is not None:
            return found
        try:
            if (found := await self._bring_changes(file)) is not None:
                return found
        except WeightsError as error:
            log.warning("a delta was of no use", file=file.name, why=str(error))
        return await _from_any(self._fronts, lambda front: self._bring_whole(front, file))

    async def _from_cache(self, file: FileEntry) -> Scan | None:
        if not self._blobs.has(file):
            return None
        return await asyncio.to_thread(self._blobs.check, file)

    async def _bring_changes(self, file: FileEntry) -> Scan | None:
        """From a file in the cache along deltas; None when no such way is worth taking."""
        steps = await self._find_way(file)
        if not steps:
            return None
        await self.bring_all(
            FileEntry(name=f"{file.name} from {step.base[:12]}", blob=step.blob, bytes=step.bytes)
            for step in steps
        )
        began_at = time.monotonic()
        found = await asyncio.to_thread(self._blobs.make, file, steps)
        self._making.add(file.bytes, time.monotonic() - began_at)
        return found

    async def _find_way(self, file: FileEntry) -> tuple[DeltaEntry, ...]:
        have = await asyncio.to_thread(self._blobs.alike, file) if self._transfer != "full" else ()
        if not have:
            return ()
        path = f"/v1/deltas/{file.blob}?bytes={file.bytes}&from={','.join(have)}"
        for front in self._fronts:
            if not front.is_worth_asking:
                continue
            try:
                steps = (await front.ask(path, Way)).steps
            except WireError:
                continue  # it knows no deltas, or does not answer: the whole file waits for it
            if leads_to(file.blob, steps, have, below=file.bytes):
                return steps if self._is_sooner(front, steps, file) else ()
        return ()

    def _is_sooner(self, front: Front, steps: Sequence[DeltaEntry], file: FileEntry) -> bool:
        is_sooner = takes_delta(
            self._transfer,
            delta_bytes=sum(step.bytes for step in steps),
            file_bytes=file.bytes,
            link_bytes_per_s=front.bytes_per_s,
            making_bytes_per_s=self._making.bytes_per_s,
        )
        if not is_sooner:
            self._making.doubt()
        return is_sooner

    async def _bring_whole(self, front: Front, file: FileEntry) -> Scan:
        """From one front, whatever of it is not here yet."""
        async with self._blobs.partial(file, self._tensors) as partial:
            # Somebody else may have brought it while this pull waited for the lock.
            if (found := await self._from_cache(file)) is not None:
                partial.drop()
                return found
            if partial.is_complete:  # and left by somebody who could not mend it
                found = await asyncio.to_thread(partial.finish)
            for _ in range(MAX_TRIES):
                if found is not None:
                    return found
                missing = await asyncio.to_thread(partial.missing)
                await _all_of(self._bring_piece(front, file, partial, span) for span in missing)
                found = await asyncio.to_thread(partial.finish)
        if found is not None:
            return found
        raise WeightsError(
            f"{file.name}: {front.url} sent bytes of another digest than {file.blob}, "
            f"{MAX_TRIES} times; check its store, the last verified version stays in use"
        )

    async def _bring_piece(
        self, front: Front, file: FileEntry, partial: Partial, span: Span
    ) -> None:
        start, end = span
        pieces: list[bytes] = []
        async with self._slots:
            at = start
            while at < end:
                piece = await front.get(
                    f"/v1/blobs/{file.blob}",
                    end - at,
                    f"blob of {file.name}",
                    {"range": f"bytes={at}-{end - 1}"},
                )
                if not piece:
                    raise WeightsError(f"{file.name}: {front.url} sent nothing for byte {at}")
                pieces.append(piece)
                at += len(piece)
            await to_the_end(partial.write, start, b"".join(pieces))


def _check_tensors(manifest: SnapshotManifest, scans: list[Scan]) -> None:
    """Each tensor of the manifest stands in exactly one file, with its dtype, shape and digest."""
    promised = {tensor.name: tensor for tensor in manifest.tensors}
    for tensor in (tensor for found in scans for tensor in found.tensors):
        if promised.pop(tensor.name, None) != tensor:
            raise WeightsError(_wrong(manifest, tensor))
    if promised:
        raise WeightsError(
            f"{manifest.policy} number {manifest.number}: no file holds tensor "
            f"{min(promised)} of the manifest; the version was put together wrongly"
        )


def _wrong(manifest: SnapshotManifest, tensor: TensorEntry) -> str:
    return (
        f"{manifest.policy} number {manifest.number}: tensor {tensor.name} ({tensor.dtype}, "
        f"{'x'.join(map(str, tensor.shape))}) is not what the manifest says, though the file's own "
        "digest is right; the version was put together wrongly and cannot be used"
    )
