# SPDX-License-Identifier: Apache-2.0
"""Checks that a version in the store matches its digests. Reads every byte."""

from __future__ import annotations

from pathlib import Path

from penstock.bounds import is_digest
from penstock.dataflow.service.trainers.messages import PublishRequest
from penstock.errors import WeightsError
from penstock.types import PolicyName
from penstock.weights.manifest import SnapshotManifest, digest_of, parse_manifest
from penstock.weights.tensors import TensorEntry, scan


def read_manifest(store: Path, digest: str) -> SnapshotManifest | str:
    """The manifest, or what is wrong with it; raises FileNotFoundError if it is missing."""
    if not is_digest(digest):
        return f"{digest[:80]!r} is not a BLAKE3 digest in hex"
    data = (store / "manifests" / f"{digest}.json").read_bytes()
    if digest_of(data) != digest:
        return f"the bytes of manifest {digest} do not match its digest"
    try:
        return parse_manifest(data)
    except WeightsError as error:
        return str(error)


def missing_blobs(store: Path, manifest: SnapshotManifest) -> list[str]:
    return [f.name for f in manifest.files if not (store / "blobs" / f.blob).is_file()]


def digest_problem(store: Path, manifest: SnapshotManifest) -> str:
    """The first file or tensor that differs from the manifest; empty if all match."""
    found: list[TensorEntry] = []
    for file in manifest.files:
        try:
            with (store / "blobs" / file.blob).open("rb") as blob:
                scanned = scan(blob, file.name)
        except (OSError, WeightsError) as error:
            return f"{file.name}: {error}"
        if (scanned.blob, scanned.num_bytes) != (file.blob, file.bytes):
            return f"the bytes of {file.name} do not match {file.blob}"
        found += scanned.tensors
    listed = {tensor.name: tensor for tensor in manifest.tensors}
    for tensor in found:
        if listed.pop(tensor.name, None) != tensor:
            return f"tensor {tensor.name} differs from the manifest"
    return f"no file contains tensor {min(listed)}" if listed else ""


def identity_problem(manifest: SnapshotManifest, policy: PolicyName, body: PublishRequest) -> str:
    if (manifest.policy, manifest.number) != (policy, body.number):
        return f"the manifest belongs to {manifest.policy} number {manifest.number}"
    if manifest.weights_digest != body.weights_digest:
        return "weights_digest differs from the manifest"
    return ""


def damaged_files(store: Path) -> list[str]:
    """Blobs and manifests whose bytes do not match their names."""
    blobs = [(path, path.name) for path in (store / "blobs").iterdir()]
    manifests = [(path, path.stem) for path in (store / "manifests").iterdir()]
    return [
        path.name for path, digest in blobs + manifests if digest_of(path.read_bytes()) != digest
    ]
