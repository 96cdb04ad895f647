# SPDX-License-Identifier: Apache-2.0
"""Client used by trainers: stores a snapshot with deltas from the previous one, and deletes old
versions.

Owns the order of writes: blobs, deltas, then the manifest. The ledger does the publishing. Adapters
are ordinary versions that name their base model; if that model is in their folder, each version
adds only the adapter's bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO

import structlog

from penstock.durable import open_regular
from penstock.errors import WeightsError, wrap_errors
from penstock.types import PolicyName
from penstock.weights.deltas.delta import Writable, write_delta_header
from penstock.weights.deltas.file_delta import (
    ScannedPair,
    has_same_layout,
    make_delta,
    scan_and_diff,
)
from penstock.weights.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FileEntry,
    SnapshotManifest,
    base_digest,
    encode_manifest,
    file_digest,
    is_file_name,
    make_manifest,
    parse_manifest,
)
from penstock.weights.retention import execute_plan, plan_deletion
from penstock.weights.store import DigestingWriter, DirectoryStore
from penstock.weights.tensors import PIECE_BYTES, Scan, scan

log = structlog.get_logger(__name__)

MAX_FRAMES_IN_MEMORY = 256 << 20
"""A delta's frames wait for the digest of the file that they lead to; larger ones on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A stored version, ready to be published in the ledger."""

    manifest_digest: str
    weights_digest: str
    scans: Mapping[str, Scan] = field(default_factory=dict[str, Scan], repr=False, compare=False)
    """Scans of its files by name, so that the next version need not read unchanged files."""


def put_snapshot(
    store_root: Path,
    folder: Path,
    *,
    policy: PolicyName,
    number: int,
    after: StoredVersion | None = None,
    base: str = "",
    unchanged: Collection[str] = (),
    incoming: Mapping[str, Path] | None = None,
) -> StoredVersion:
    """Store a Hugging Face folder. Durable when this returns, but not yet published.

    Stores the allowed files at its top level: weights, config, tokenizer, template. `after` is the
    version most nodes have; deltas from it are stored too. Files named in `unchanged` are identical
    to its files and are not read or copied again. Files in `incoming` (by name) were written to an
    `incoming_path` of this store: they are linked, not copied. A PEFT adapter needs `base`, the
    weights digest of its base model, or that model in the same folder.
    """
    incoming = incoming or {}
    names = sorted({*incoming, *(path.name for path in folder.iterdir())})
    names = [name for name in names if is_file_name(name)]
    if not any(name.endswith(".safetensors") for name in names):
        raise WeightsError(f"no .safetensors file in {folder}; save the model there first")
    _check_folder_base(folder, names, base)
    known = {name: after.scans[name] for name in unchanged if name in after.scans} if after else {}
    with wrap_errors(WeightsError, f"storing {folder} in the weight store {store_root}"):
        store = DirectoryStore(store_root)
        store.prepare()
        with store.writing():
            scans = {
                name: _put_incoming(store, path, name, after) for name, path in incoming.items()
            }
            others = [name for name in names if name not in incoming]
            scans |= _put_files(store, folder, others, known)
            manifest = _manifest(policy, number, scans, base)
            if after is not None:
                _put_deltas(store, after.manifest_digest, manifest, others)
            digest = store.put_manifest(encode_manifest(manifest))
    return StoredVersion(
        manifest_digest=digest, weights_digest=manifest.weights_digest, scans=scans
    )


def incoming_path(store_root: Path, token: int) -> Path:
    """Where ranks write a file together, before it belongs to a version; no reader looks there."""
    return DirectoryStore(store_root).incoming_path(f"{token:016x}")


def prepare_store(store_root: Path) -> None:
    """Create the folders of the store; files that dead writers left are removed after a day."""
    DirectoryStore(store_root).prepare()


def link_file(store_root: Path, stored: StoredVersion, name: str, target: Path) -> str:
    """Hard-link a file of a stored version to a path of the same file system; its digest."""
    digest = stored.scans[name].blob
    with wrap_errors(WeightsError, f"linking {name} of the weight store {store_root} to {target}"):
        target.hardlink_to(DirectoryStore(store_root).blob_path(digest))
    return digest


def delete_unreferenced(
    store_root: Path, in_use: Collection[str], newest: Collection[str], *, anchor_every: int
) -> None:
    """Delete unreferenced versions. Does nothing while a writer holds the lock; a later call will.

    in_use: referenced manifests of all policies · newest: those whose files stay stored in full."""
    with wrap_errors(WeightsError, f"deleting old versions from the weight store {store_root}"):
        store = DirectoryStore(store_root)
        with store.deleting() as has_lock:
            if has_lock:
                execute_plan(store, plan_deletion(store, in_use, newest, anchor_every=anchor_every))


def _check_folder_base(folder: Path, names: Sequence[str], base: str) -> None:
    """Fail early, before copying gigabytes; the manifest check would catch the same errors
    later."""
    is_adapter_only = not any(n.endswith(".safetensors") and n != ADAPTER_WEIGHTS for n in names)
    if ADAPTER_CONFIG in names and is_adapter_only and not base:
        raise WeightsError(
            f"{folder} contains an adapter ({ADAPTER_CONFIG}); pass the weights digest of its base "
            "model as `base`, or delete that file if this is a full model"
        )
    if base and ADAPTER_CONFIG not in names:
        raise WeightsError(
            f"{folder} is not an adapter ({ADAPTER_CONFIG} is missing); do not pass `base`"
        )


def _put_deltas(
    store: DirectoryStore, after: str, new: SnapshotManifest, names: Collection[str]
) -> None:
    """Store deltas between files of these names that have the same layout. Errors are only logged:
    a delta saves bandwidth, and nodes fetch the full file without it."""
    try:
        old = parse_manifest(store.read_manifest(after))
    except Exception as error:
        log.warning("no deltas, previous version unreadable", manifest=after, error=str(error))
        return
    bases = {file.name: file for file in old.files if file.name.endswith(".safetensors")}
    for file in new.files:
        base = bases.get(file.name)
        is_new = file.name in names and base is not None and base.blob != file.blob
        if base is None or not is_new or base.bytes != file.bytes:
            continue
        try:
            _put_delta(store, base, file)
        except Exception as error:
            log.warning(
                "no delta, nodes will fetch the full file", file=file.name, error=str(error)
            )


def _put_delta(store: DirectoryStore, base: FileEntry, file: FileEntry) -> None:
    """Verify the base first: a delta from a damaged base is useless, yet full files may be deleted
    because a delta exists."""
    paths = store.blob_path(base.blob), store.blob_path(file.blob)
    found = file_digest(paths[0])
    if found != base.blob:
        raise WeightsError(f"{paths[0]} is damaged (its digest is {found}); delete it")
    if has_same_layout(*paths):
        make = partial(make_delta, *paths, base_blob=base.blob, target_blob=file.blob)
        store.put_delta(base.blob, file.blob, make)


def _put_incoming(
    store: DirectoryStore, path: Path, name: str, after: StoredVersion | None
) -> Scan:
    """Turn an incoming file into a blob, with a delta from the previous version. Each of the two
    files is read once. Errors of the delta are only logged."""
    base = after.scans.get(name) if after else None
    with SpooledTemporaryFile(MAX_FRAMES_IN_MEMORY, dir=str(path.parent)) as frames:
        pair = None if base is None else _scan_and_diff(store, path, base, frames)
        if pair is None:
            with open_regular(path) as file:
                found = scan(file, name, num_bytes=path.stat().st_size)
        else:
            found = pair.new
        store.put_incoming(path, found.blob)
        if pair is not None and pair.base_blob != found.blob:
            frames.seek(0)
            _put_frames(store, pair, frames)
    return found


def _scan_and_diff(
    store: DirectoryStore, path: Path, base: Scan, frames: Writable
) -> ScannedPair | None:
    """None if there can be no delta. The base is verified on the way: full files may be deleted
    because a delta exists, and one from a damaged base is useless."""
    try:
        if base.num_bytes != path.stat().st_size:
            return None
        known = store.blob_path(base.blob)
        pair = scan_and_diff(known, path, frames)
        if pair is not None and pair.base_blob != base.blob:
            raise WeightsError(f"{known} is damaged (its digest is {pair.base_blob}); delete it")
        return pair
    except Exception as error:
        log.warning("no delta, nodes will fetch the full file", file=path.name, error=str(error))
        return None


def _put_frames(store: DirectoryStore, pair: ScannedPair, frames: IO[bytes]) -> None:
    def write(out: DigestingWriter) -> None:
        write_delta_header(out, pair.base_blob, pair.new.blob)
        shutil.copyfileobj(frames, out, PIECE_BYTES)

    try:
        store.put_delta(pair.base_blob, pair.new.blob, write)
    except Exception as error:
        log.warning("no delta, nodes will fetch the full file", error=str(error))


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
    store: DirectoryStore,
    folder: Path,
    names: Sequence[str],
    known: Mapping[str, Scan],
) -> dict[str, Scan]:
    """Store the files; durable when this returns. Known files still in the store are not copied."""
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
            f"{path} is not a regular file; replace the link with a copy of its target"
        )
    with open_regular(path) as file:
        return store.put_blob(file, path.name)
