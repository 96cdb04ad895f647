# SPDX-License-Identifier: Apache-2.0
"""What trainers and nodes call: put a snapshot into the store, pull one and stage it verified.

Owns the order of writes (blobs, then the manifest) and the pull (fetch, verify every tensor, stage,
rename). Publishing is the ledger's business, loading the engine's; a folder returned by `pull`
holds nothing that was not digested in that call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from penstock.errors import BadRequest, NotFound, TooLarge, WeightsError, WireError, boundary
from penstock.types import PolicyName, PublishedVersion
from penstock.weights.cache import BlobCache
from penstock.weights.chain import Way, leads_to
from penstock.weights.file_delta import has_one_layout, make_delta
from penstock.weights.manifest import (
    MAX_MANIFEST_BYTES,
    FileEntry,
    SnapshotManifest,
    digest_of,
    encode_manifest,
    is_digest,
    is_file_name,
    make_manifest,
    parse_manifest,
)
from penstock.weights.store import DirectoryStore, open_regular
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


# --- for trainers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """What the trainer publishes to the ledger next."""

    manifest_digest: str
    weights_digest: str


def put_snapshot(
    store_root: Path,
    folder: Path,
    *,
    policy: PolicyName,
    number: int,
    after: StoredVersion | None = None,
) -> StoredVersion:
    """Put a Hugging Face folder into the store; lasting when this returns, but not published.

    Takes the files directly in it that a snapshot may carry: weights, config, tokenizer, template.
    `after` is the version that most nodes have: they get what changed since.
    """
    names = sorted(entry.name for entry in folder.iterdir() if is_file_name(entry.name))
    if not any(name.endswith(".safetensors") for name in names):
        raise WeightsError(f"no .safetensors file in {folder}; save the model there first")
    with boundary(WeightsError, f"putting {folder} into the weight store {store_root}"):
        store = DirectoryStore(store_root)
        store.prepare()
        scans = {name: _put_file(store, folder / name) for name in names}
        manifest = make_manifest(
            policy,
            number,
            [
                FileEntry(name=name, blob=found.blob, bytes=found.num_bytes)
                for name, found in scans.items()
            ],
            [tensor for found in scans.values() for tensor in found.tensors],
        )
        store.sync_blobs()
        if after is not None:
            _put_deltas(store, parse_manifest(store.read_manifest(after.manifest_digest)), manifest)
        digest = store.put_manifest(encode_manifest(manifest))
    return StoredVersion(manifest_digest=digest, weights_digest=manifest.weights_digest)


def _put_deltas(store: DirectoryStore, old: SnapshotManifest, new: SnapshotManifest) -> None:
    """Between files of one name and layout; others travel whole."""
    bases = {file.name: file for file in old.files if file.name.endswith(".safetensors")}
    for file in new.files:
        base = bases.get(file.name)
        if base is None or base.bytes != file.bytes or base.blob == file.blob:
            continue
        paths = store.blob_path(base.blob), store.blob_path(file.blob)
        if has_one_layout(*paths):
            make = partial(make_delta, *paths, base_blob=base.blob, target_blob=file.blob)
            store.put_delta(base.blob, file.blob, make)


def _put_file(store: DirectoryStore, path: Path) -> Scan:
    if path.is_symlink() or not path.is_file():
        raise WeightsError(
            f"{path} is no regular file; a snapshot follows no links, copy what it points to"
        )
    with open_regular(path) as file:
        return store.put_blob(file, path.name)


# --- for nodes -----------------------------------------------------------------------------------


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
