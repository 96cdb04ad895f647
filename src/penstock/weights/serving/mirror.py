# SPDX-License-Identifier: Apache-2.0
"""Copy of a directory store in a bucket, for remote readers and as an archive.

Owns uploading, listing and deletion. Objects are created only if absent, the manifest last, so a
visible version is complete. Uploads are hashed on the way: a file damaged on disk never gets its
name in the bucket. Blocking. The caller decides what to upload and delete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import BinaryIO

import msgspec
from blake3 import blake3

from penstock.bounds import is_digest
from penstock.durable import open_regular
from penstock.errors import WeightsError, wrap_errors
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.manifest import digest_of, parse_manifest
from penstock.weights.rebuild import rebuild_blob
from penstock.weights.serving.object_store import (
    blob_name,
    deltas_to,
    entry_name,
    is_valid_entry,
    manifest_name,
)
from penstock.weights.store import DirectoryStore
from penstock.wire.objects import list_objects, open_objects

NUM_FILES = 2
"""Files uploaded concurrently."""
NUM_PARTS = 2
"""Parts of one file uploaded concurrently."""
PART_BYTES = 8 << 20
"""Four parts in flight take 13 s at 20 Mbit/s; requests time out after 30 s (`AWS_TIMEOUT`)."""
MAX_PARTS = 9_000
"""Limit of object stores."""
UPLOAD_S = 180.0
"""How long a failing request is retried."""


class ObjectMirror:
    """Mirrors versions of a directory store to a bucket."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._objects = open_objects(url, "weights", retry_timeout_s=UPLOAD_S)
        self._has_stopped = False

    def stop(self) -> None:
        """Send no further parts: a running upload fails and leaves no object."""
        self._has_stopped = True

    def upload(self, store: DirectoryStore, manifest_digest: str) -> int:
        """Upload a version's blobs, their deltas and, last, its manifest. Returns the bytes sent.
        Safe to repeat after a failure: existing objects are kept."""
        what = f"uploading version {manifest_digest} to {self._url}"
        with wrap_errors(WeightsError, what), store.writing():
            data = store.read_manifest(manifest_digest)
            sizes = {file.blob: file.bytes for file in parse_manifest(data).files}
            deltas = [
                step for blob in sizes for step in store.deltas_to(blob) if is_valid_entry(step)
            ]
            sizes |= {step.blob: step.bytes for step in deltas}
            sent = self._each(partial(self._put_blob, store), sizes.items())
            sent += self._each(self._put_entry, ((step,) for step in deltas))
            return sent + self._create(manifest_name(manifest_digest), data)

    # --- listing and deletion, same interface as a directory store -----------------------------

    def manifests(self) -> Iterator[str]:
        names = (path.removesuffix(".json") for path, _ in self._listed("manifests"))
        yield from filter(is_digest, names)

    def blobs(self) -> Iterator[tuple[str, int]]:
        """Digests and sizes."""
        yield from ((name, size) for name, size in self._listed("blobs") if is_digest(name))

    def deltas(self) -> Iterator[DeltaEntry]:
        targets = {path.partition("/")[0] for path, _ in self._listed("deltas")}
        for target in sorted(targets):
            yield from deltas_to(self._objects, target, {})

    def blobs_of(self, manifest_digest: str) -> set[str]:
        """Blobs of a version in the bucket; empty if its manifest is damaged."""
        name = manifest_name(manifest_digest)
        with wrap_errors(WeightsError, f"reading {self._url}/{name}"):
            data = bytes(self._objects.get(name).bytes())
        if digest_of(data) != manifest_digest:
            return set()
        return {file.blob for file in parse_manifest(data).files}

    def delete_manifest(self, digest: str) -> None:
        self._delete(manifest_name(digest))

    def delete_blob(self, digest: str) -> None:
        self._delete(blob_name(digest))

    def delete_delta(self, entry: DeltaEntry) -> None:
        """Delete only the entry; its data is a blob."""
        self._delete(entry_name(entry))

    def _listed(self, folder: str) -> Iterator[tuple[str, int]]:
        with wrap_errors(WeightsError, f"listing {self._url}/{folder}"):
            for name, size in list_objects(self._objects, folder):
                yield name.removeprefix(f"{folder}/"), size

    def _delete(self, name: str) -> None:
        with wrap_errors(WeightsError, f"deleting {self._url}/{name}"), suppress(FileNotFoundError):
            self._objects.delete(name)

    # --- uploading ------------------------------------------------------------------------------

    def _each(self, put: Callable[..., int], arguments: Iterable[tuple[object, ...]]) -> int:
        with ThreadPoolExecutor(NUM_FILES) as pool:
            running = [pool.submit(put, *each) for each in arguments]
            try:
                return sum(future.result() for future in running)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _put_blob(self, store: DirectoryStore, digest: str, num_bytes: int) -> int:
        name = blob_name(digest)
        if self._has(name, num_bytes):
            return 0
        with open_regular(rebuild_blob(store, digest)) as file:
            if num_bytes <= PART_BYTES:
                return self._create(name, b"".join(_verified(file, digest, num_bytes, PART_BYTES)))
            # Multipart uploads cannot be create-if-absent: two concurrent uploads write the same
            # verified bytes twice.
            size = max(PART_BYTES, -(-num_bytes // MAX_PARTS))
            pieces = self._until_stopped(_verified(file, digest, num_bytes, size))
            self._objects.put(
                name, pieces, use_multipart=True, chunk_size=size, max_concurrency=NUM_PARTS
            )
        if not self._has(name, num_bytes):
            raise WeightsError(
                f"{self._url}/{name} is missing right after its upload; upload it again"
            )
        return num_bytes

    def _until_stopped(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if self._has_stopped:
                raise WeightsError(f"the upload to {self._url} was stopped")
            yield piece

    def _put_entry(self, step: DeltaEntry) -> int:
        return self._create(entry_name(step), msgspec.json.encode(step, order="sorted"))

    def _create(self, name: str, data: bytes) -> int:
        from obstore.exceptions import AlreadyExistsError

        try:
            self._objects.put(name, data, mode="create")
        except AlreadyExistsError:
            # The response to an earlier put may have been lost; its retry then finds the object.
            self._has(name, len(data))
            return 0
        return len(data)

    def _has(self, name: str, num_bytes: int) -> bool:
        try:
            found = self._objects.head(name)["size"]
        except FileNotFoundError:
            return False
        if found != num_bytes:
            raise WeightsError(
                f"{self._url}/{name} is damaged ({found} bytes instead of {num_bytes}); "
                "delete it and upload again"
            )
        return True


def _verified(file: BinaryIO, digest: str, num_bytes: int, piece_bytes: int) -> Iterator[bytes]:
    """The file in pieces; the last one only if the file matches its digest. Otherwise the upload
    fails and leaves no object."""
    hashed = blake3()
    last = b""
    while piece := file.read(piece_bytes):
        if last:
            yield last
        hashed.update(piece)
        num_bytes -= len(piece)
        last = piece
    if num_bytes or hashed.hexdigest() != digest:
        raise WeightsError(
            f"blob {digest} is damaged on disk and was not uploaded; delete it and publish again"
        )
    yield last
