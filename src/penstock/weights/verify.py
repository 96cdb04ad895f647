# SPDX-License-Identifier: Apache-2.0
"""Verifies a weight store: hashes every file, tensor and delta.

Read-only; suggests a fix for each damage but does not apply it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.durable import open_regular
from penstock.errors import WeightsError
from penstock.weights.catalog import (
    SHORT_DIGEST_CHARS,
    CatalogFile,
    CatalogVersion,
    deletion_paused,
    full_file,
)
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.manifest import SnapshotManifest, parse_manifest
from penstock.weights.rebuild import chain_from_full
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import Scan, TensorEntry, scan

MAX_NAMED_TENSORS = 3
"""Maximum number of tensors named in one line."""
REPUBLISH = "publish the version again, or copy the file from a relay or node that has it"

ProgressCallback = Callable[[str, str, int], object]
"""Called before each file is read with version, file name and size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    version: str
    what: str
    """The damaged file or other item."""
    path: str
    why: str
    fix: str


class Verifier:
    """Verifies versions; files shared by several versions are read once."""

    def __init__(self, store: DirectoryStore, scratch: Path, report: ProgressCallback) -> None:
        self.num_bytes = 0
        """Bytes read so far."""
        self._store = store
        self._scratch = scratch
        self._report = report
        self._scans: dict[str, Scan | str] = {}
        """Scan of each blob, or the reason why it could not be read."""
        self._deltas: set[str] = set()

    def verify(self, version: CatalogVersion) -> list[Damage]:
        """List the damage; empty if the version is intact or was deleted meanwhile."""
        with deletion_paused(self._store):
            try:
                self._store.read_manifest(version.digest)
            except FileNotFoundError:
                return []
            found = [wrong for file in version.files for wrong in self._file(version, file)]
            return found or list(self._tensors(version))

    def _file(self, version: CatalogVersion, file: CatalogFile) -> Iterator[Damage]:
        entry = file.entry
        scanned = self._scan(version.name, file)
        if isinstance(scanned, str):
            yield self._damage(version, file, scanned)
        elif scanned.blob != entry.blob:
            why = f"its digest is {scanned.blob[:SHORT_DIGEST_CHARS]}"
            named = _differing(version.manifest, scanned.tensors)
            yield self._damage(version, file, f"{why}; {named}" if named else why)
        for step in file.deltas:
            yield from self._delta(version, file, step)

    def _scan(self, name: str, file: CatalogFile) -> Scan | str:
        blob = file.entry.blob
        if blob not in self._scans:
            self._report(name, file.entry.name, file.entry.bytes)
            self.num_bytes += file.entry.bytes
            try:
                with (
                    full_file(self._store, blob, self._scratch) as path,
                    open_regular(path) as opened,
                ):
                    self._scans[blob] = scan(opened, file.entry.name)
            except (WeightsError, OSError) as error:
                self._scans[blob] = str(error)
        return self._scans[blob]

    def _delta(
        self, version: CatalogVersion, file: CatalogFile, step: DeltaEntry
    ) -> Iterator[Damage]:
        if step.blob in self._deltas:
            return
        self._deltas.add(step.blob)
        path = self._store.blob_path(step.blob)
        try:
            with open_regular(path) as opened:
                found = scan(opened, "")
            self.num_bytes += found.num_bytes
            if (found.blob, found.num_bytes) == (step.blob, step.bytes):
                return
            why = f"its digest is {found.blob[:SHORT_DIGEST_CHARS]}"
        except OSError as error:
            why = str(error)
        what = f"delta to {file.entry.name} from {step.base[:SHORT_DIGEST_CHARS]}"
        fix = "delete it; nodes fetch the full file instead" if file.is_full else REPUBLISH
        yield Damage(version=version.name, what=what, path=str(path), why=why, fix=fix)

    def _damage(self, version: CatalogVersion, file: CatalogFile, why: str) -> Damage:
        path = self._store.blob_path(file.entry.blob)
        if not file.is_full:
            fix = REPUBLISH
        elif chain_from_full(self._store, file.entry.blob):
            fix = "delete it; it is rebuilt from deltas on the next request"
        else:
            fix = f"delete it and {REPUBLISH}"
        what = file.entry.name if file.is_full else f"{file.entry.name} (from deltas)"
        return Damage(version=version.name, what=what, path=str(path), why=why, fix=fix)

    def _tensors(self, version: CatalogVersion) -> Iterator[Damage]:
        """Check tensors separately: files may match the manifest while its tensor list is wrong."""
        scans = [self._scans[file.entry.blob] for file in version.files]
        found = [tensor for each in scans if isinstance(each, Scan) for tensor in each.tensors]
        listed = {tensor.name for tensor in version.manifest.tensors}
        named = _differing(version.manifest, found)
        if len(found) != len(listed) and not named:
            named = f"files contain {len(found)} tensors, the manifest lists {len(listed)}"
        if named:
            yield Damage(
                version=version.name,
                what="manifest",
                path=version.digest,
                why=f"{named}, although all files match their digests",
                fix="nodes reject this version; publish it again",
            )


def _differing(manifest: SnapshotManifest, found: Iterable[TensorEntry]) -> str:
    """Message naming the tensors that differ from the manifest."""
    listed = {tensor.name: tensor for tensor in manifest.tensors}
    wrong = [tensor.name for tensor in found if listed.get(tensor.name) != tensor]
    if not wrong:
        return ""
    more = f" and {len(wrong) - MAX_NAMED_TENSORS} more" if len(wrong) > MAX_NAMED_TENSORS else ""
    return f"different bits in {', '.join(wrong[:MAX_NAMED_TENSORS])}{more}"


def damaged_manifest(root: Path, store: DirectoryStore, digest: str) -> Damage:
    """Damage report for a manifest the catalog could not read."""
    try:
        parse_manifest(store.read_manifest(digest))
        why = "unreadable before, readable now"
    except (WeightsError, OSError) as error:
        why = str(error).partition("; ")[0]
    return Damage(
        version=digest[:SHORT_DIGEST_CHARS],
        what="manifest",
        path=str(root / "manifests" / f"{digest}.json"),
        why=why,
        fix=f"delete it and {REPUBLISH}",
    )
