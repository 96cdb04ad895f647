# SPDX-License-Identifier: Apache-2.0
"""What lies in a weight store, for people who look into it: versions, how each file is kept, and
which version somebody means.

Reads only. Which versions were published the ledger knows; a manifest on disk knows its policy and
number, and after a rewind several may have the same.
"""

from __future__ import annotations

import difflib
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import WeightsError
from penstock.types import PolicyName
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.manifest import FileEntry, SnapshotManifest, parse_manifest
from penstock.weights.rebuild import apply_chain, chain_from_full
from penstock.weights.store import DirectoryStore

SHORT_DIGEST_CHARS = 12
"""Digits of a digest that people are shown."""
MIN_PREFIX = 4
NUM_SUGGESTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFile:
    entry: FileEntry
    is_full: bool
    chain: tuple[DeltaEntry, ...]
    """From a whole file to this one, if it is not whole itself."""
    deltas: tuple[DeltaEntry, ...]
    """All that lead to it."""

    @property
    def is_available(self) -> bool:
        return self.is_full or bool(self.chain)

    @property
    def delta_bytes(self) -> int:
        """Of the smallest delta to it; 0 without one."""
        return min((step.bytes for step in self.deltas), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogVersion:
    digest: str
    """Of its manifest."""
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
    """By policy and number."""
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
        except FileNotFoundError:  # deleted since it was listed
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


# --- which version somebody means -----------------------------------------------------------------


def find_version(catalog: Catalog, reference: str) -> CatalogVersion:
    """`policy@number`, the number alone where there is one policy, or how a manifest's digest
    begins."""
    found = [
        version
        for version in catalog.versions
        if _matches_reference(version, reference, catalog.policies)
    ]
    if not found and len(reference) >= MIN_PREFIX:
        found = [version for version in catalog.versions if version.digest.startswith(reference)]
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(
            f"{reference} means {len(found)} versions; give one by its manifest: "
            + ", ".join(
                f"{version.digest[:SHORT_DIGEST_CHARS]} ({version.name})" for version in found
            )
        )
    raise WeightsError(
        f"no version {reference[:80]!r} in this store; {_suggestion(catalog, reference)}"
    )


def _matches_reference(
    version: CatalogVersion, reference: str, policies: Sequence[PolicyName]
) -> bool:
    return reference == version.name or (
        len(policies) == 1 and reference == str(version.manifest.number)
    )


def _suggestion(catalog: Catalog, reference: str) -> str:
    names = list(dict.fromkeys(version.name for version in catalog.versions))
    if not names:
        return "it has none at all"
    policy, _, number = reference.rpartition("@")
    if "." in number and (
        named := [name for name in names if name == _without_incarnation(reference)]
    ):
        return f"manifests know no incarnation, write {named[0]}"
    if not policy and number.isdecimal() and len(catalog.policies) > 1:
        near = [f"{policy}@{number}" for policy in catalog.policies]
        near = [name for name in near if name in names]
    else:
        near = []
    near = near or _nearest(names, reference if policy else f"{catalog.policies[0]}@{reference}")
    return f"did you mean {' or '.join(near)}? `penstock weights ls RUN` lists all"


def _without_incarnation(reference: str) -> str:
    policy, _, number = reference.rpartition("@")
    return f"{policy}@{number.rpartition('.')[2]}"


def _nearest(names: Sequence[str], reference: str) -> list[str]:
    """By number within the policy that was meant."""
    policy, _, number = reference.rpartition("@")
    policies = list(dict.fromkeys(name.rpartition("@")[0] for name in names))
    [meant] = difflib.get_close_matches(policy, policies, 1, 0.0) or policies[:1]
    same = [name for name in names if name.rpartition("@")[0] == meant]
    if not number.isdecimal():
        return same[-1:]
    by_distance = sorted(same, key=lambda name: abs(int(name.rpartition("@")[2]) - int(number)))
    return by_distance[:NUM_SUGGESTED]


def names_by_blob(catalog: Catalog, policy: PolicyName) -> dict[str, str]:
    """The first version that each blob belongs to, of this policy if there is one."""
    found: dict[str, str] = {}
    for version in sorted(catalog.versions, key=lambda found: found.manifest.policy != policy):
        for file in version.files:
            found.setdefault(file.entry.blob, version.name)
    return found


# --- reading files of a version -------------------------------------------------------------------


@contextmanager
def deletion_paused(store: DirectoryStore) -> Generator[None]:
    """Nothing is deleted meanwhile, if this user may write there at all."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(store.writing())
        yield


@contextmanager
def full_file(store: DirectoryStore, blob: str, scratch: Path) -> Generator[Path]:
    """The file where it lies, or one made from deltas for as long as it is read."""
    path = store.blob_path(blob)
    if path.exists():
        yield path
        return
    chain = chain_from_full(store, blob)
    if not chain:
        raise WeightsError(f"blob {blob} is gone, and no deltas lead to it")
    made = scratch / blob
    try:
        apply_chain(store, chain, made)
        yield made
    finally:
        made.unlink(missing_ok=True)
