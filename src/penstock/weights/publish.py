# SPDX-License-Identifier: Apache-2.0
"""What trainers call: put a snapshot into the store, with what changed since the one before.

Owns the order of writes: blobs, deltas, then the manifest. Publishing is the ledger's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from penstock.errors import WeightsError, boundary
from penstock.types import PolicyName
from penstock.weights.file_delta import has_one_layout, make_delta
from penstock.weights.manifest import (
    FileEntry,
    SnapshotManifest,
    encode_manifest,
    is_file_name,
    make_manifest,
    parse_manifest,
)
from penstock.weights.store import DirectoryStore, open_regular
from penstock.weights.tensors import Scan

log = structlog.get_logger(__name__)


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
