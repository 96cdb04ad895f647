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

from penstock.errors import WeightsError, WireError, wrap_errors
from penstock.types import PublishedVersion
from penstock.weights.deltas.chain import DeltaChain, DeltaEntry, is_valid_chain
from penstock.weights.manifest import (
    MAX_MANIFEST_BYTES,
    FileEntry,
    SnapshotManifest,
    digest_of,
    is_digest,
    parse_manifest,
)
from penstock.weights.pulling.cache import BlobCache, run_uncancelled
from penstock.weights.pulling.links import (
    LinkStats,
    Throughput,
    Transfer,
    WeightServerClient,
    prefers_delta,
    weight_server_clients,
)
from penstock.weights.pulling.partial import ByteRange, Partial
from penstock.weights.tensors import Scan, TensorEntry
from penstock.wire.client import AsyncServiceClient

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
        self._mtimes_ns: dict[Path, dict[str, int]] = {}
        """Of staged versions, when each file was last written to before it was verified."""
        self._transfer: Transfer = transfer
        self._num_ranges = num_ranges
        self._links: dict[str, LinkStats] = {}
        self._rebuild_speed = Throughput(num_warmup=1)  # the first file waits for a compiler, too

    async def pull(
        self, weight_servers: Sequence[AsyncServiceClient], wanted: PublishedVersion
    ) -> Path:
        """A Hugging Face folder with exactly the wanted version, every tensor verified.

        What a front does not have, or gives damaged, the next is asked for; only the last may sit
        out a long outage. Blobs that the cache holds are not fetched again, cut-off ones are
        resumed. May be cancelled at any time, and several pulls may share a cache, over tasks and
        processes.
        """
        what = f"pulling {wanted.policy}@{wanted.incarnation}.{wanted.number} into {self._cache}"
        with wrap_errors(WeightsError, what):
            blobs = BlobCache(self._cache)
            async with blobs.in_use():
                asked = weight_server_clients(weight_servers, self._links)
                manifest = await _first_success(
                    asked, lambda weight_server: _fetch_manifest(weight_server, wanted)
                )
                slots = asyncio.Semaphore(self._num_ranges)
                pull = _Pull(blobs, asked, manifest, slots, self._rebuild_speed, self._transfer)
                scans = await pull.fetch_all(manifest.files)
                _check_tensors(manifest, scans)
                folder = await asyncio.to_thread(blobs.stage, wanted.manifest_digest, manifest)
                self._mtimes_ns[folder] = {
                    file.name: found.mtime_ns
                    for file, found in zip(manifest.files, scans, strict=True)
                }
                return folder

    def require_unchanged(self, folder: Path) -> None:
        """Asked once a pulled version is loaded: WeightsError when a file of it was written to
        since it was verified, so that nobody knows what was loaded."""
        if folder not in self._mtimes_ns:
            raise WeightsError(f"{folder} was let go of while it was loaded")
        for name, mtime_ns in self._mtimes_ns[folder].items():
            with wrap_errors(WeightsError, f"looking at {folder / name} once more"):
                is_same = (folder / name).stat().st_mtime_ns == mtime_ns
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
        self._mtimes_ns = {f: mtimes for f, mtimes in self._mtimes_ns.items() if f.name in keep}


async def _first_success(
    weight_servers: Sequence[WeightServerClient], get: Callable[[WeightServerClient], Awaitable[T]]
) -> T:
    """From the first front that can; the error is that of the last."""
    for weight_server in weight_servers[:-1]:
        if weight_server.is_usable:
            try:
                return await get(weight_server)
            except (WeightsError, WireError) as error:
                log.warning(
                    "asking the next front", weight_server=weight_server.url, why=str(error)
                )
    return await get(weight_servers[-1])


async def _gather(works: Iterable[Coroutine[None, None, T]]) -> list[T]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _fetch_manifest(
    weight_server: WeightServerClient, wanted: PublishedVersion
) -> SnapshotManifest:
    digest = wanted.manifest_digest
    what = f"manifest of {wanted.policy}@{wanted.incarnation}.{wanted.number}"
    if not is_digest(digest):
        raise WeightsError(f"{what}: {digest[:80]!r} is no BLAKE3 digest")
    for _ in range(MAX_TRIES):
        data = await weight_server.get(f"/v1/manifests/{digest}", MAX_MANIFEST_BYTES, what)
        if digest_of(data) == digest:
            break
    else:
        raise WeightsError(
            f"{what}: {weight_server.url} sent bytes of another digest than {digest}, "
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
        weight_servers: Sequence[WeightServerClient],
        manifest: SnapshotManifest,
        slots: asyncio.Semaphore,
        rebuild_speed: Throughput,
        transfer: Transfer,
    ) -> None:
        self._blobs = blobs
        self._fronts = weight_servers
        self._tensors = {tensor.name: tensor for tensor in manifest.tensors}
        self._slots = slots
        self._rebuild_speed = rebuild_speed
        self._transfer: Transfer = transfer

    async def fetch_all(self, files: Iterable[FileEntry]) -> list[Scan]:
        file_slots = asyncio.Semaphore(NUM_FILES)

        async def fetch(file: FileEntry) -> Scan:
            async with file_slots:
                return await self._fetch(file)

        return await _gather(map(fetch, files))

    async def _fetch(self, file: FileEntry) -> Scan:
        """The verified blob is in the cache when this returns: it was there, or its deltas came, or
        the whole of it."""
        if (found := await self._from_cache(file)) is not None:
            return found
        try:
            if (found := await self._fetch_deltas(file)) is not None:
                return found
        except WeightsError as error:
            log.warning("a delta was of no use", file=file.name, why=str(error))
        return await _first_success(
            self._fronts, lambda weight_server: self._fetch_full(weight_server, file)
        )

    async def _from_cache(self, file: FileEntry) -> Scan | None:
        if not self._blobs.has(file):
            return None
        return await asyncio.to_thread(self._blobs.check, file)

    async def _fetch_deltas(self, file: FileEntry) -> Scan | None:
        """From a file in the cache along deltas; None when no such way is worth taking."""
        steps = await self._find_chain(file)
        if not steps:
            return None
        await self.fetch_all(
            FileEntry(name=f"{file.name} from {step.base[:12]}", blob=step.blob, bytes=step.bytes)
            for step in steps
        )
        began_at = time.monotonic()
        found = await asyncio.to_thread(self._blobs.make, file, steps)
        self._rebuild_speed.add(file.bytes, time.monotonic() - began_at)
        return found

    async def _find_chain(self, file: FileEntry) -> tuple[DeltaEntry, ...]:
        have = (
            await asyncio.to_thread(self._blobs.possible_bases, file)
            if self._transfer != "full"
            else ()
        )
        if not have:
            return ()
        path = f"/v1/deltas/{file.blob}?bytes={file.bytes}&from={','.join(have)}"
        for weight_server in self._fronts:
            if not weight_server.is_usable:
                continue
            try:
                steps = (await weight_server.ask(path, DeltaChain)).steps
            except WireError:
                continue  # it knows no deltas, or does not answer: the whole file waits for it
            if is_valid_chain(file.blob, steps, have, below=file.bytes):
                return steps if self._is_delta_faster(weight_server, steps, file) else ()
        return ()

    def _is_delta_faster(
        self, weight_server: WeightServerClient, steps: Sequence[DeltaEntry], file: FileEntry
    ) -> bool:
        is_faster = prefers_delta(
            self._transfer,
            delta_bytes=sum(step.bytes for step in steps),
            file_bytes=file.bytes,
            link_bytes_per_s=weight_server.bytes_per_s,
            rebuild_bytes_per_s=self._rebuild_speed.bytes_per_s,
        )
        if not is_faster:
            self._rebuild_speed.decay()
        return is_faster

    async def _fetch_full(self, weight_server: WeightServerClient, file: FileEntry) -> Scan:
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
                await _gather(
                    self._fetch_range(weight_server, file, partial, byte_range)
                    for byte_range in missing
                )
                found = await asyncio.to_thread(partial.finish)
        if found is not None:
            return found
        raise WeightsError(
            f"{file.name}: {weight_server.url} sent bytes of another digest than {file.blob}, "
            f"{MAX_TRIES} times; check its store, the last verified version stays in use"
        )

    async def _fetch_range(
        self,
        weight_server: WeightServerClient,
        file: FileEntry,
        partial: Partial,
        byte_range: ByteRange,
    ) -> None:
        start, end = byte_range
        pieces: list[bytes] = []
        async with self._slots:
            at = start
            while at < end:
                piece = await weight_server.get(
                    f"/v1/blobs/{file.blob}",
                    end - at,
                    f"blob of {file.name}",
                    {"range": f"bytes={at}-{end - 1}"},
                )
                if not piece:
                    raise WeightsError(
                        f"{file.name}: {weight_server.url} sent nothing for byte {at}"
                    )
                pieces.append(piece)
                at += len(piece)
            await run_uncancelled(partial.write, start, b"".join(pieces))


def _check_tensors(manifest: SnapshotManifest, scans: list[Scan]) -> None:
    """Each tensor of the manifest stands in exactly one file, with its dtype, shape and digest."""
    expected = {tensor.name: tensor for tensor in manifest.tensors}
    for tensor in (tensor for found in scans for tensor in found.tensors):
        if expected.pop(tensor.name, None) != tensor:
            raise WeightsError(_mismatch_message(manifest, tensor))
    if expected:
        raise WeightsError(
            f"{manifest.policy} number {manifest.number}: no file holds tensor "
            f"{min(expected)} of the manifest; the version was put together wrongly"
        )


def _mismatch_message(manifest: SnapshotManifest, tensor: TensorEntry) -> str:
    return (
        f"{manifest.policy} number {manifest.number}: tensor {tensor.name} ({tensor.dtype}, "
        f"{'x'.join(map(str, tensor.shape))}) is not what the manifest says, though the file's own "
        "digest is right; the version was put together wrongly and cannot be used"
    )
