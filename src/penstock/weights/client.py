# SPDX-License-Identifier: Apache-2.0
"""What nodes call: pull a version and stage it verified.

Owns the pull: fetch, verify every tensor, stage, rename. Loading is the engine's business; a folder
returned by `pull` holds nothing that was not digested in that call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from pathlib import Path

import structlog

from penstock.errors import BadRequest, NotFound, TooLarge, WeightsError, WireError, boundary
from penstock.types import PublishedVersion
from penstock.weights.cache import BlobCache
from penstock.weights.chain import Way, leads_to
from penstock.weights.manifest import (
    MAX_MANIFEST_BYTES,
    FileEntry,
    SnapshotManifest,
    digest_of,
    is_digest,
    parse_manifest,
)
from penstock.weights.tensors import PIECE_BYTES, Scan, TensorEntry
from penstock.wire.client import AsyncCaller

log = structlog.get_logger(__name__)

MAX_TRIES = 3
"""How often a damaged blob or manifest is fetched before the version is given up."""
ASK_S = 5.0
"""How long a front that does not answer is asked for deltas."""
NUM_PARALLEL = 8
"""Blobs fetched at once."""
PLAIN = {"accept-encoding": "identity"}


async def pull(caller: AsyncCaller, wanted: PublishedVersion, cache: Path) -> Path:
    """A Hugging Face folder with exactly the wanted version, every tensor verified.

    `caller` speaks to the weights front. Blobs that the cache holds are not fetched again, cut-off
    ones are resumed. May be cancelled at any time, and several pulls may share a cache, over tasks
    and processes.
    """
    what = f"pulling {wanted.policy}@{wanted.incarnation}.{wanted.number} into {cache}"
    with boundary(WeightsError, what):
        blobs = BlobCache(cache)
        async with blobs.in_use():
            manifest = await _fetch_manifest(caller, wanted)
            _check_tensors(manifest, await _bring_all(caller, blobs, manifest.files))
            return await asyncio.to_thread(blobs.stage, wanted.manifest_digest, manifest)


def prune(cache: Path, keep: Collection[str]) -> None:
    """Delete staged versions but those with these manifest digests, and blobs none of them uses.

    Does nothing while a pull runs in this cache; the next call will.
    """
    BlobCache(cache).prune(keep)


async def _fetch_manifest(caller: AsyncCaller, wanted: PublishedVersion) -> SnapshotManifest:
    digest = wanted.manifest_digest
    what = f"manifest of {wanted.policy}@{wanted.incarnation}.{wanted.number}"
    if not is_digest(digest):
        raise WeightsError(f"{what}: {digest[:80]!r} is no BLAKE3 digest")
    for _ in range(MAX_TRIES):
        data = await _get(caller, f"/v1/manifests/{digest}", PLAIN, MAX_MANIFEST_BYTES, what)
        if digest_of(data) == digest:
            break
    else:
        raise WeightsError(
            f"{what}: {caller.base_url} sent bytes of another digest than {digest}, "
            f"{MAX_TRIES} times; check its store"
        )
    manifest = parse_manifest(data)
    if (manifest.policy, manifest.number) != (wanted.policy, wanted.number):
        raise WeightsError(
            f"{what} is that of {manifest.policy} number {manifest.number}; "
            "the trainer published the wrong digest"
        )
    return manifest


async def _bring_all(
    caller: AsyncCaller, blobs: BlobCache, files: Iterable[FileEntry]
) -> list[Scan]:
    slots = asyncio.Semaphore(NUM_PARALLEL)

    async def bring(file: FileEntry) -> Scan:
        async with slots:
            return await _bring(caller, blobs, file)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(bring(file)) for file in files]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _bring(caller: AsyncCaller, blobs: BlobCache, file: FileEntry) -> Scan:
    """The verified blob is in the cache when this returns: it was there, or its deltas came, or the
    whole of it."""
    if blobs.has(file) and (found := await asyncio.to_thread(blobs.check, file)) is not None:
        return found
    try:
        if (found := await _bring_changes(caller, blobs, file)) is not None:
            return found
    except WeightsError as error:
        log.warning("a delta was of no use; the whole file is fetched", file=file.name, why=error)
    return await _bring_whole(caller, blobs, file)


async def _bring_changes(caller: AsyncCaller, blobs: BlobCache, file: FileEntry) -> Scan | None:
    """From a file in the cache along deltas; None when there is no such way."""
    have = await asyncio.to_thread(blobs.alike, file)
    if not have:
        return None
    path = f"/v1/deltas/{file.blob}?bytes={file.bytes}&from={','.join(have)}"
    try:
        way = await caller.call("GET", path, None, Way, deadline_s=ASK_S)
    except WireError:
        return None  # a front that knows no deltas, or none at all: the whole file waits for it
    if not leads_to(file.blob, way.steps, have, below=file.bytes):
        return None
    deltas = [
        FileEntry(name=f"{file.name} from {step.base[:12]}", blob=step.blob, bytes=step.bytes)
        for step in way.steps
    ]
    await _bring_all(caller, blobs, deltas)
    return await asyncio.to_thread(blobs.make, file, way.steps)


async def _bring_whole(caller: AsyncCaller, blobs: BlobCache, file: FileEntry) -> Scan:
    for _ in range(MAX_TRIES):
        if blobs.has(file) and (found := await asyncio.to_thread(blobs.check, file)) is not None:
            return found
        async with blobs.partial(file) as partial:
            if blobs.has(file):  # somebody else brought it while this pull waited for the lock
                partial.drop()
                continue
            while (have := partial.num_bytes) < file.bytes:
                last = min(have + PIECE_BYTES, file.bytes) - 1
                piece = await _get(
                    caller,
                    f"/v1/blobs/{file.blob}",
                    {"range": f"bytes={have}-{last}", **PLAIN},
                    last + 1 - have,
                    f"blob of {file.name}",
                )
                if not piece:
                    break
                await asyncio.to_thread(partial.append, piece)
            if (found := await asyncio.to_thread(partial.finish)) is not None:
                return found
    raise WeightsError(
        f"{file.name}: {caller.base_url} sent bytes of another digest than {file.blob}, "
        f"{MAX_TRIES} times; check its store, the last verified version stays in use"
    )


async def _get(
    caller: AsyncCaller, path: str, headers: dict[str, str], max_bytes: int, what: str
) -> bytes:
    try:
        answer = await caller.request("GET", path, headers=headers, max_answer_bytes=max_bytes)
    except (BadRequest, NotFound, TooLarge) as error:
        raise WeightsError(f"{what}: {error}") from error
    return answer.content


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
