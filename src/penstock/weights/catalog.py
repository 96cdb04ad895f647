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
from penstock.weights.rebuild import follow, way_from_whole
from penstock.weights.store import DirectoryStore

SHORT = 12
"""Digits of a digest that people are shown."""
MIN_PREFIX = 4
NUM_SUGGESTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    entry: FileEntry
    is_whole: bool
    way: tuple[DeltaEntry, ...]
    """From a whole file to this one, if it is not whole itself."""
    deltas: tuple[DeltaEntry, ...]
    """All that lead to it."""

    @property
    def is_there(self) -> bool:
        return self.is_whole or bool(self.way)

    @property
    def delta_bytes(self) -> int:
        """Of the smallest delta to it; 0 without one."""
        return min((step.bytes for step in self.deltas), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVersion:
    digest: str
    """Of its manifest."""
    manifest: SnapshotManifest
    files: tuple[KeptFile, ...]

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
    def is_whole(self) -> bool:
        return all(file.is_whole for file in self.files)

    @property
    def is_there(self) -> bool:
        return all(file.is_there for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    versions: tuple[KeptVersion, ...]
    """By policy and number."""
    damaged: tuple[str, ...]
    """Digests of manifests that cannot be read."""

    @property
    def policies(self) -> list[PolicyName]:
        return sorted({version.manifest.policy for version in self.versions})


def read_catalog(store: DirectoryStore) -> Catalog:
    versions: list[KeptVersion] = []
    damaged: list[str] = []
    for digest in store.manifests():
        try:
            manifest = parse_manifest(store.read_manifest(digest))
        except FileNotFoundError:  # deleted since it was listed
            continue
        except (WeightsError, OSError):
            damaged.append(digest)
            continue
        files = tuple(_keep(store, entry) for entry in manifest.files)
        versions.append(KeptVersion(digest=digest, manifest=manifest, files=files))
    versions.sort(key=lambda found: (found.manifest.policy, found.manifest.number, found.digest))
    return Catalog(versions=tuple(versions), damaged=tuple(damaged))


def _keep(store: DirectoryStore, entry: FileEntry) -> KeptFile:
    is_whole = store.has_blob(entry.blob)
    way = () if is_whole else way_from_whole(store, entry.blob)
    deltas = tuple(store.entries_to(entry.blob))
    return KeptFile(entry=entry, is_whole=is_whole, way=way, deltas=deltas)


# --- which version somebody means -----------------------------------------------------------------


def find_version(catalog: Catalog, word: str) -> KeptVersion:
    """`policy@number`, the number alone where there is one policy, or how a manifest's digest
    begins."""
    found = [version for version in catalog.versions if _is_meant(version, word, catalog.policies)]
    if not found and len(word) >= MIN_PREFIX:
        found = [version for version in catalog.versions if version.digest.startswith(word)]
    if len(found) == 1:
        return found[0]
    if found:
        raise WeightsError(
            f"{word} means {len(found)} versions; give one by its manifest: "
            + ", ".join(f"{version.digest[:SHORT]} ({version.name})" for version in found)
        )
    raise WeightsError(f"no version {word[:80]!r} in this store; {_suggestion(catalog, word)}")


def _is_meant(version: KeptVersion, word: str, policies: Sequence[PolicyName]) -> bool:
    return word == version.name or (len(policies) == 1 and word == str(version.manifest.number))


def _suggestion(catalog: Catalog, word: str) -> str:
    names = list(dict.fromkeys(version.name for version in catalog.versions))
    if not names:
        return "it has none at all"
    policy, _, number = word.rpartition("@")
    if "." in number and (named := [name for name in names if name == _without_life(word)]):
        return f"manifests know no incarnation, write {named[0]}"
    if not policy and number.isdecimal() and len(catalog.policies) > 1:
        near = [f"{policy}@{number}" for policy in catalog.policies]
        near = [name for name in near if name in names]
    else:
        near = []
    near = near or _nearest(names, word if policy else f"{catalog.policies[0]}@{word}")
    return f"did you mean {' or '.join(near)}? `penstock weights ls RUN` lists all"


def _without_life(word: str) -> str:
    policy, _, number = word.rpartition("@")
    return f"{policy}@{number.rpartition('.')[2]}"


def _nearest(names: Sequence[str], word: str) -> list[str]:
    """By number within the policy that was meant."""
    policy, _, number = word.rpartition("@")
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
def undisturbed(store: DirectoryStore) -> Generator[None]:
    """Nothing is deleted meanwhile, if this user may write there at all."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(store.writing())
        yield


@contextmanager
def whole_file(store: DirectoryStore, blob: str, scratch: Path) -> Generator[Path]:
    """The file where it lies, or one made from deltas for as long as it is read."""
    path = store.blob_path(blob)
    if path.exists():
        yield path
        return
    way = way_from_whole(store, blob)
    if not way:
        raise WeightsError(f"blob {blob} is gone, and no deltas lead to it")
    made = scratch / blob
    try:
        follow(store, way, made)
        yield made
    finally:
        made.unlink(missing_ok=True)
