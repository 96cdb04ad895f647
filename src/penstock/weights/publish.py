# SPDX-License-Identifier: Apache-2.0
"""What trainers call: put a snapshot into the store, with what changed since the one before, and
let go of old ones.

Owns the order of writes: blobs, deltas, then the manifest. Publishing is the ledger's business.
Adapters are versions like any other, and name the model they belong to; with that model in their
folder, each version adds the adapter's bytes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from blake3 import blake3

from penstock.errors import WeightsError, wrap_errors
from penstock.types import PolicyName
from penstock.weights.deltas.file_delta import has_same_layout, make_delta
from penstock.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FileEntry,
    SnapshotManifest,
    base_digest,
    encode_manifest,
    is_file_name,
    make_manifest,
    parse_manifest,
)
from penstock.weights.retention import execute_plan, plan_deletion
from penstock.weights.store import DirectoryStore, open_regular
from penstock.weights.tensors import Scan

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """What the trainer publishes to the ledger next."""

    manifest_digest: str
    weights_digest: str
    scans: Mapping[str, Scan] = field(default_factory=dict[str, Scan], repr=False, compare=False)
    """What was found in its files, by name: the next version need not read those that stay."""


def put_snapshot(
    store_root: Path,
    folder: Path,
    *,
    policy: PolicyName,
    number: int,
    after: StoredVersion | None = None,
    base: str = "",
    unchanged: Collection[str] = (),
) -> StoredVersion:
    """Put a Hugging Face folder into the store; lasting when this returns, but not published.

    Takes the files directly in it that a snapshot may carry: weights, config, tokenizer, template.
    `after` is the version that most nodes have: they get what changed since. Files named in
    `unchanged` are byte for byte those of `after`, and are neither read nor copied again. An
    adapter, as PEFT writes it, needs `base`, the weights digest of the model it belongs to, or that
    model beside it.
    """
    names = sorted(entry.name for entry in folder.iterdir() if is_file_name(entry.name))
    if not any(name.endswith(".safetensors") for name in names):
        raise WeightsError(f"no .safetensors file in {folder}; save the model there first")
    _check_base(folder, names, base)
    known = {name: after.scans[name] for name in unchanged if name in after.scans} if after else {}
    with wrap_errors(WeightsError, f"putting {folder} into the weight store {store_root}"):
        store = DirectoryStore(store_root)
        store.prepare()
        with store.writing():
            scans = _put_files(store, folder, names, known)
            manifest = _manifest(policy, number, scans, base)
            if after is not None:
                _put_deltas(store, after.manifest_digest, manifest)
            digest = store.put_manifest(encode_manifest(manifest))
    return StoredVersion(
        manifest_digest=digest, weights_digest=manifest.weights_digest, scans=scans
    )


def delete_unreferenced(
    store_root: Path, in_use: Collection[str], newest: Collection[str], *, anchor_every: int
) -> None:
    """Delete what the store need not keep; nothing while somebody writes, the next call will.

    in_use: manifests of every policy that somebody refers to · newest: those kept whole."""
    with wrap_errors(WeightsError, f"tidying the weight store {store_root}"):
        store = DirectoryStore(store_root)
        with store.deleting() as is_alone:
            if is_alone:
                execute_plan(store, plan_deletion(store, in_use, newest, anchor_every=anchor_every))


def _check_base(folder: Path, names: Sequence[str], base: str) -> None:
    """Before gigabytes are copied; the manifest's own check is the same, but comes after them."""
    is_alone = not any(n.endswith(".safetensors") and n != ADAPTER_WEIGHTS for n in names)
    if ADAPTER_CONFIG in names and is_alone and not base:
        raise WeightsError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}); name the weights digest of the model "
            "it belongs to as its base, or delete that file if this is a whole model"
        )
    if base and ADAPTER_CONFIG not in names:
        raise WeightsError(
            f"{folder} is no adapter: it has no {ADAPTER_CONFIG}, so it may not name a base"
        )


def _put_deltas(store: DirectoryStore, after: str, new: SnapshotManifest) -> None:
    """Between files of one name and layout; others travel whole, and so does whatever fails here:
    a delta is a saving, never a reason not to publish."""
    try:
        old = parse_manifest(store.read_manifest(after))
    except Exception as error:
        log.warning("no deltas: the version before is unreadable", manifest=after, why=str(error))
        return
    bases = {file.name: file for file in old.files if file.name.endswith(".safetensors")}
    for file in new.files:
        base = bases.get(file.name)
        if base is None or base.bytes != file.bytes or base.blob == file.blob:
            continue
        try:
            _put_delta(store, base, file)
        except Exception as error:
            log.warning("no delta: this file travels whole", file=file.name, why=str(error))


def _put_delta(store: DirectoryStore, base: FileEntry, file: FileEntry) -> None:
    """Its base is digested first: a delta from a damaged one leads nowhere, and whole files are
    deleted because deltas lead to them."""
    paths = store.blob_path(base.blob), store.blob_path(file.blob)
    found = blake3(max_threads=blake3.AUTO).update_mmap(paths[0]).hexdigest()
    if found != base.blob:
        raise WeightsError(f"{paths[0]} is damaged: its digest is {found}; delete it")
    if has_same_layout(*paths):
        make = partial(make_delta, *paths, base_blob=base.blob, target_blob=file.blob)
        store.put_delta(base.blob, file.blob, make)


def _manifest(
    policy: PolicyName, number: int, scans: Mapping[str, Scan], base: str
) -> SnapshotManifest:
    files = [
        FileEntry(name=name, blob=found.blob, bytes=found.num_bytes)
        for name, found in scans.items()
    ]
    tensors = [tensor for found in scans.values() for tensor in found.tensors]
    if ADAPTER_CONFIG in scans and not base:
        base = base_digest(tensors)
    return make_manifest(policy, number, files, tensors, base=base)


def _put_files(
    store: DirectoryStore, folder: Path, names: Sequence[str], known: Mapping[str, Scan]
) -> dict[str, Scan]:
    """Lasting when this returns. What is known stays where it is, unless the store let it go."""
    scans = {
        name: known[name]
        if name in known and store.has_blob(known[name].blob)
        else _put_file(store, folder / name)
        for name in names
    }
    store.sync_blobs()
    return scans


def _put_file(store: DirectoryStore, path: Path) -> Scan:
    if path.is_symlink() or not path.is_file():
        raise WeightsError(
            f"{path} is no regular file; a snapshot follows no links, copy what it points to"
        )
    with open_regular(path) as file:
        return store.put_blob(file, path.name)
