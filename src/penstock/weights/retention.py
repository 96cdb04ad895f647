# SPDX-License-Identifier: Apache-2.0
"""Decides what a weight store may delete: unreferenced versions, and full files of referenced ones
that can be rebuilt from deltas.

A full file is kept (an anchor) unless it can be rebuilt in fewer than `anchor_every` steps and from
fewer bytes than its own size. Anchors are not marked; they are recomputed after a restart. Blobs
being read are kept too, within a limit: over a slow link a transfer spans many versions. Planning
changes nothing; `execute_plan` deletes, and a crash during it leaves a consistent store.
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
NUM_READ_VERSIONS = 4
"""Blobs that are kept only because they are being read have at most this many times the bytes of
the newest versions."""
GRACE_S = 60.0
"""A younger manifest may be about to be published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    manifests: tuple[str, ...]
    """Manifests of unreferenced versions."""
    blobs: tuple[tuple[str, int], ...]
    """Blobs to delete, with their sizes."""
    deltas: tuple[DeltaEntry, ...]
    num_versions: int
    """Number of versions kept."""
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
    """Plan what to delete. in_use: referenced manifests of all policies · newest: those whose files
    stay stored in full, because they are requested most."""
    if not newest:
        raise WeightsError("no newest version given; refusing to delete anything")
    unreferenced: list[str] = []
    retained: dict[str, SnapshotManifest] = {}
    for digest in store.manifests():
        if digest not in in_use and digest not in newest and store.age_s(digest) > GRACE_S:
            unreferenced.append(digest)
        elif (manifest := _read(store, digest)) is not None:
            retained[digest] = manifest
    planner = _RetentionPlanner(store, store.recently_read())
    newest_manifests = [retained[digest] for digest in newest if digest in retained]
    for file in _files_of(newest_manifests):
        planner.keep_full(file)
    for file in _files_of(sorted(retained.values(), key=lambda manifest: manifest.number)):
        planner.keep(file, anchor_every)
    planner.keep_chains(_files_of(retained.values()), _files_of(newest_manifests))
    planner.keep_read(NUM_READ_VERSIONS * sum(file.bytes for file in _files_of(newest_manifests)))
    return planner.plan_deletion(unreferenced, num_versions=len(retained))


class _RetentionPlanner:
    """Collects what to keep, from one listing of the store."""

    def __init__(self, store: DirectoryStore, being_read: Sequence[str]) -> None:
        self._blobs = dict(store.blobs())
        self._being_read = being_read
        self._steps: dict[str, list[DeltaEntry]] = defaultdict(list)
        for entry in store.deltas():
            self._steps[entry.target].append(entry)
        self._full_files: set[str] = set()
        """To keep, as are the next two."""
        self._read: set[str] = set()
        self._deltas: set[DeltaEntry] = set()

    def keep_full(self, file: FileEntry) -> None:
        if file.blob in self._blobs:
            self._full_files.add(file.blob)

    def keep(self, file: FileEntry, anchor_every: int) -> None:
        """Keep the file itself, or the deltas it can be rebuilt from."""
        if file.blob in self._full_files:
            return
        chain = self._chain(file.blob, self._full_files, file.bytes)
        if chain and len(chain) < anchor_every:
            self._deltas.update(chain)
        elif file.blob in self._blobs:
            self._full_files.add(file.blob)
        elif chain := self._chain(file.blob, self._blobs, ANY_SIZE):
            self._full_files.add(chain[0].base)
            self._deltas.update(chain)
        else:
            log.error("referenced file cannot be rebuilt", file=file.name, blob=file.blob)

    def keep_chains(self, bases: Iterable[FileEntry], targets: Sequence[FileEntry]) -> None:
        """Keep the deltas for nodes that have one of `bases` and will request one of `targets`."""
        for base in {file.blob for file in bases}:
            for target in targets:
                if target.blob != base:
                    self._deltas.update(self._chain(target.blob, {base}, target.bytes))

    def keep_read(self, max_bytes: int) -> None:
        """Keep the blobs that were read last."""
        kept = self._kept
        for blob in self._being_read:
            size = self._blobs.get(blob, 0)
            if blob not in kept and size <= max_bytes:
                max_bytes -= size
                self._read.add(blob)

    @property
    def _kept(self) -> set[str]:
        return self._full_files | self._read | {delta.blob for delta in self._deltas}

    def _chain(self, blob: str, have: Container[str], below: int) -> tuple[DeltaEntry, ...]:
        return cheapest_chain(blob, have.__contains__, self._steps_to, below=below)

    def _steps_to(self, blob: str) -> list[DeltaEntry]:
        return [step for step in self._steps.get(blob, ()) if step.blob in self._blobs]

    def plan_deletion(self, unreferenced: Sequence[str], *, num_versions: int) -> DeletionPlan:
        kept = self._kept
        return DeletionPlan(
            manifests=tuple(unreferenced),
            blobs=tuple(found for found in self._blobs.items() if found[0] not in kept),
            deltas=tuple(
                step for steps in self._steps.values() for step in steps if step not in self._deltas
            ),
            num_versions=num_versions,
            kept_bytes=sum(size for blob, size in self._blobs.items() if blob in kept),
        )


def execute_plan(store: DirectoryStore, found: DeletionPlan) -> None:
    """Delete references before the blobs they point to. Call inside the `store.deleting()` block in
    which the plan was made."""
    for digest in found.manifests:
        store.delete_manifest(digest)
    for entry in found.deltas:
        store.delete_delta(entry)
    for digest, _ in found.blobs:
        store.delete_blob(digest)


def _files_of(manifests: Iterable[SnapshotManifest]) -> list[FileEntry]:
    return [file for manifest in manifests for file in manifest.files]


def _read(store: DirectoryStore, digest: str) -> SnapshotManifest | None:
    """None if the manifest is damaged: it is unusable, but not deleted automatically."""
    try:
        return parse_manifest(store.read_manifest(digest))
    except (WeightsError, OSError) as error:
        log.error("manifest damaged", digest=digest, error=str(error))
        return None
