# SPDX-License-Identifier: Apache-2.0
"""What a weight store may delete: versions that nobody uses, and whole files of those in use that
deltas lead to.

A whole file that cannot be made again in fewer than `anchor_every` steps, for fewer bytes than its
own, stays: that is an anchor. Nothing marks one; who restarts finds them where they are. What
somebody reads now stays too: over a slow link many versions pass while one travels. Planning
changes nothing; `execute_plan` does, and a crash in its middle leaves a store that is whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass

import structlog

from penstock.errors import WeightsError
from penstock.weights.deltas.chain import DeltaEntry, cheapest_chain
from penstock.weights.manifest import FileEntry, SnapshotManifest, parse_manifest
from penstock.weights.rebuild import ANY_SIZE
from penstock.weights.store import DirectoryStore

log = structlog.get_logger(__name__)

ANCHOR_EVERY = 25
GRACE_S = 60.0
"""A manifest so young may be about to be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    manifests: tuple[str, ...]
    """Of versions that nobody uses."""
    blobs: tuple[tuple[str, int], ...]
    """With their bytes."""
    deltas: tuple[DeltaEntry, ...]
    num_versions: int
    """That stay."""
    kept_bytes: int

    @property
    def freed_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.blobs)


def plan_deletion(
    store: DirectoryStore,
    in_use: Collection[str],
    newest: Collection[str],
    *,
    anchor_every: int = ANCHOR_EVERY,
) -> DeletionPlan:
    """in_use: manifests of all policies that somebody refers to · newest: those of them whose files
    stay whole, because they are asked for most."""
    if not newest:
        raise WeightsError("nobody says which versions are the newest; nothing is deleted")
    unreferenced: list[str] = []
    retained: dict[str, SnapshotManifest] = {}
    for digest in store.manifests():
        if digest not in in_use and digest not in newest and store.age_s(digest) > GRACE_S:
            unreferenced.append(digest)
        elif (manifest := _read(store, digest)) is not None:
            retained[digest] = manifest
    keeping = _RetentionPlanner(store, store.recently_read())
    newest_manifests = [retained[digest] for digest in newest if digest in retained]
    for file in _files_of(newest_manifests):
        keeping.keep_full(file)
    for file in _files_of(sorted(retained.values(), key=lambda manifest: manifest.number)):
        keeping.keep(file, anchor_every)
    keeping.keep_chains(_files_of(retained.values()), _files_of(newest_manifests))
    return keeping.plan_deletion(unreferenced, num_versions=len(retained))


class _RetentionPlanner:
    """What stays of a store, as it was looked at once."""

    def __init__(self, store: DirectoryStore, being_read: Collection[str]) -> None:
        self._blobs = dict(store.blobs())
        self._being_read = being_read
        self._steps: dict[str, list[DeltaEntry]] = defaultdict(list)
        for entry in store.deltas():
            self._steps[entry.target].append(entry)
        self._whole: set[str] = set()
        self._deltas: set[DeltaEntry] = set()

    def keep_full(self, file: FileEntry) -> None:
        if file.blob in self._blobs:
            self._whole.add(file.blob)

    def keep(self, file: FileEntry, anchor_every: int) -> None:
        """The file itself, or what it can be made from."""
        if file.blob in self._whole:
            return
        chain = self._chain(file.blob, self._whole, file.bytes)
        if chain and len(chain) < anchor_every:
            self._deltas.update(chain)
        elif file.blob in self._blobs:
            self._whole.add(file.blob)
        elif chain := self._chain(file.blob, self._blobs, ANY_SIZE):
            self._whole.add(chain[0].base)
            self._deltas.update(chain)
        else:
            log.error("no deltas lead to a file in use", file=file.name, blob=file.blob)

    def keep_chains(self, bases: Iterable[FileEntry], targets: Iterable[FileEntry]) -> None:
        """For nodes that have one of these files and will ask for another."""
        wanted = list(targets)
        for base in {file.blob for file in bases}:
            for target in wanted:
                if target.blob != base:
                    self._deltas.update(self._chain(target.blob, {base}, target.bytes))

    def _chain(self, blob: str, have: Container[str], below: int) -> tuple[DeltaEntry, ...]:
        return cheapest_chain(blob, have.__contains__, self._steps_to, below=below)

    def _steps_to(self, blob: str) -> list[DeltaEntry]:
        return [step for step in self._steps.get(blob, ()) if step.blob in self._blobs]

    def plan_deletion(self, unreferenced: Sequence[str], *, num_versions: int) -> DeletionPlan:
        stay = self._whole | {delta.blob for delta in self._deltas} | set(self._being_read)
        return DeletionPlan(
            manifests=tuple(unreferenced),
            blobs=tuple(found for found in self._blobs.items() if found[0] not in stay),
            deltas=tuple(
                step for steps in self._steps.values() for step in steps if step not in self._deltas
            ),
            num_versions=num_versions,
            kept_bytes=sum(size for blob, size in self._blobs.items() if blob in stay),
        )


def execute_plan(store: DirectoryStore, found: DeletionPlan) -> None:
    """Only inside `store.deleting()`, in which it was planned. Names go before what they name."""
    for digest in found.manifests:
        store.delete_manifest(digest)
    for entry in found.deltas:
        store.delete_delta(entry)
    for digest, _ in found.blobs:
        store.delete_blob(digest)


def _files_of(manifests: Iterable[SnapshotManifest]) -> list[FileEntry]:
    return [file for manifest in manifests for file in manifest.files]


def _read(store: DirectoryStore, digest: str) -> SnapshotManifest | None:
    """None for a damaged one: nobody can use it, and nobody deletes it unseen."""
    try:
        return parse_manifest(store.read_manifest(digest))
    except (WeightsError, OSError) as error:
        log.error("manifest damaged", digest=digest, detail=str(error))
        return None
