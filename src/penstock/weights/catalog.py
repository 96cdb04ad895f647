# SPDX-License-Identifier: Apache-2.0
"""Lists a weight store for humans: its versions, how each file is stored, and lookup by reference.

Read-only. Only the ledger knows which versions were published. A manifest on disk has a policy and
a number; after a rewind several may share them.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.durable import open_regular
from penstock.errors import WeightsError
from penstock.types import PolicyName
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.delta import read_delta
from penstock.weights.deltas.file_delta import layout_of
from penstock.weights.deltas.payload import Kind
from penstock.weights.manifest import FileEntry, SnapshotManifest, parse_manifest
from penstock.weights.rebuild import apply_chain, chain_from_full
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import ITEM_BYTES

SHORT_DIGEST_CHARS = 12
"""Number of digest characters shown to humans."""
MIN_PREFIX = 4
NUM_SUGGESTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFile:
    entry: FileEntry
    is_full: bool
    chain: tuple[DeltaEntry, ...]
    """Deltas from a full file to this one, if it is not stored in full."""
    deltas: tuple[DeltaEntry, ...]
    """All deltas that produce this file."""

    @property
    def is_available(self) -> bool:
        return self.is_full or bool(self.chain)

    @property
    def delta_bytes(self) -> int:
        """Size of the smallest delta to this file; 0 if there is none."""
        return min((step.bytes for step in self.deltas), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogVersion:
    digest: str
    """Digest of its manifest."""
    manifest: SnapshotManifest
    files: tuple[CatalogFile, ...]

    @property
    def name(self) -> str:
        return f"{self.manifest.policy}@{self.manifest.number}"

    @property
    def num_bytes(self) -> int:
        return sum(file.entry.bytes for file in self.files)

    @property
    def delta_bytes(self) -> int:
        return sum(file.delta_bytes for file in self.files)

    @property
    def is_full(self) -> bool:
        return all(file.is_full for file in self.files)

    @property
    def is_available(self) -> bool:
        return all(file.is_available for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    versions: tuple[CatalogVersion, ...]
    """Sorted by policy and number."""
    damaged: tuple[str, ...]
    """Digests of manifests that cannot be read."""

    @property
    def policies(self) -> list[PolicyName]:
        return sorted({version.manifest.policy for version in self.versions})


def read_catalog(store: DirectoryStore) -> Catalog:
    versions: list[CatalogVersion] = []
    damaged: list[str] = []
    for digest in store.manifests():
        try:
            manifest = parse_manifest(store.read_manifest(digest))
        except FileNotFoundError:  # deleted after it was listed
            continue
        except (WeightsError, OSError):
            damaged.append(digest)
            continue
        files = tuple(_catalog_file(store, entry) for entry in manifest.files)
        versions.append(CatalogVersion(digest=digest, manifest=manifest, files=files))
    versions.sort(key=lambda found: (found.manifest.policy, found.manifest.number, found.digest))
    return Catalog(versions=tuple(versions), damaged=tuple(damaged))


def _catalog_file(store: DirectoryStore, entry: FileEntry) -> CatalogFile:
    is_full = store.has_blob(entry.blob)
    chain = () if is_full else chain_from_full(store, entry.blob)
    deltas = tuple(store.entries_to(entry.blob))
    return CatalogFile(entry=entry, is_full=is_full, chain=chain, deltas=deltas)


# --- lookup by reference --------------------------------------------------------------------------


def find_version(catalog: Catalog, reference: str) -> CatalogVersion:
    """Find a version by `policy@number`, by number alone if there is one policy, or by a prefix of
    its manifest digest."""
    versions, is_only_policy = catalog.versions, len(catalog.policies) == 1
    found = [
        version
        for version in versions
        if reference == version.name
        or (is_only_policy and reference == str(version.manifest.number))
    ]
    if not found and len(reference) >= MIN_PREFIX:
        found = [version for version in versions if version.digest.startswith(reference)]
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(
            f"{reference} is ambiguous ({len(found)} versions); use a manifest digest: "
            + ", ".join(
                f"{version.digest[:SHORT_DIGEST_CHARS]} ({version.name})" for version in found
            )
        )
    raise WeightsError(
        f"version {reference[:80]!r} not found in this store; {_suggestion(catalog, reference)}"
    )


def _suggestion(catalog: Catalog, reference: str) -> str:
    names = list(dict.fromkeys(version.name for version in catalog.versions))
    if not names:
        return "the store is empty"
    policy, _, number = reference.rpartition("@")
    without_incarnation = f"{policy}@{number.rpartition('.')[2]}"
    if "." in number and without_incarnation in names:
        return f"weight versions are addressed without the incarnation; use {without_incarnation}"
    near: list[str] = []
    if not policy and len(catalog.policies) > 1:
        near = [name for each in catalog.policies if (name := f"{each}@{number}") in names]
    near = near or _nearest(names, reference if policy else f"{catalog.policies[0]}@{reference}")
    return f"did you mean {' or '.join(near)}? `penstock weights ls RUN` lists all"


def _nearest(names: Sequence[str], reference: str) -> list[str]:
    """Versions of the same policy with the closest numbers."""
    policy, _, number = reference.rpartition("@")
    policies = list(dict.fromkeys(name.rpartition("@")[0] for name in names))
    [meant] = difflib.get_close_matches(policy, policies, 1, 0.0) or policies[:1]
    same = [name for name in names if name.rpartition("@")[0] == meant]
    if not number.isdecimal():
        return same[-1:]
    by_distance = sorted(same, key=lambda name: abs(int(name.rpartition("@")[2]) - int(number)))
    return by_distance[:NUM_SUGGESTED]


def names_by_blob(catalog: Catalog, policy: PolicyName) -> dict[str, str]:
    """The first version each blob belongs to, preferably of this policy."""
    found: dict[str, str] = {}
    for version in sorted(catalog.versions, key=lambda found: found.manifest.policy != policy):
        for file in version.files:
            found.setdefault(file.entry.blob, version.name)
    return found


# --- reading files of a version -------------------------------------------------------------------


@contextmanager
def deletion_paused(store: DirectoryStore) -> Generator[None]:
    """Prevent deletion while reading, if this user can read the lock."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(store.reading())
        yield


def count_changes(
    store: DirectoryStore, step: DeltaEntry, full_files: Sequence[str]
) -> tuple[int, int] | None:
    """Elements that a delta changes, and all elements; a tensor stored in full counts as changed.
    `full_files` may be files of the same layout; None if none of them is available."""
    available = [blob for blob in full_files if store.has_blob(blob)]
    if not available:
        return None
    layout = layout_of(store.blob_path(available[0]))
    sizes, ranges = layout.sizes, layout.byte_ranges
    nums = {name: size // ITEM_BYTES[ranges[name].dtype] for name, size in sizes.items()}
    changed = 0
    with open_regular(store.blob_path(step.blob)) as file:
        for frame in read_delta(file, sizes)[1]:
            if frame.payload.kind is Kind.FULL:
                changed += sum(nums[name] for name in frame.names)
            else:
                changed += frame.payload.num_changed
    return changed, sum(nums.values())


@contextmanager
def full_file(store: DirectoryStore, blob: str, scratch: Path) -> Generator[Path]:
    """Path of the full file: the stored one, or a temporary one rebuilt from deltas. It was no link
    a moment ago; open it so that it is none now."""
    if store.has_blob(blob):
        yield store.blob_path(blob)
        return
    chain = chain_from_full(store, blob)
    if not chain:
        raise WeightsError(f"blob {blob} is missing and cannot be rebuilt from deltas")
    made = scratch / blob
    try:
        apply_chain(chain, store.blob_path, made)
        yield made
    finally:
        made.unlink(missing_ok=True)
