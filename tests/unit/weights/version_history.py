# SPDX-License-Identifier: Apache-2.0
"""Histories of versions in a store, each with a few changes from the previous one."""

from __future__ import annotations

import random
from pathlib import Path

from tests.unit.weights.snapshot_folders import weights_bytes

from penstock.types import PolicyName
from penstock.weights.manifest import FileEntry, parse_manifest
from penstock.weights.publish import StoredVersion, put_snapshot
from penstock.weights.store import DirectoryStore

WEIGHTS = "model.safetensors"
SHAPES = {"a.weight": (200, 300), "b.weight": (300,), "c.weight": (40_000,)}


class VersionHistory:
    """Versions 0, 1, 2, … of one policy in a store."""

    def __init__(self, root: Path, *, share: float = 0.01, policy: str = "policy") -> None:
        self.store = DirectoryStore(root)
        self.versions: list[StoredVersion] = []
        self._root = root
        self._policy = PolicyName(policy)
        self._share = share
        self._draw = random.Random(policy)
        self._data = bytearray(weights_bytes(SHAPES, 1))
        self._start = self._data.index(b"}}") + 2
        self._folder = root.parent / f"hf-{policy}"
        self._folder.mkdir(parents=True)
        (self._folder / "config.json").write_text('{"model_type": "qwen3"}')

    def add_versions(self, num: int = 1) -> None:
        for _ in range(num):
            (self._folder / WEIGHTS).write_bytes(self._data)
            after = self.versions[-1] if self.versions else None
            number = len(self.versions)
            self.versions.append(
                put_snapshot(
                    self._root, self._folder, policy=self._policy, number=number, after=after
                )
            )
            for _ in range(int(self._share * (len(self._data) - self._start) / 4)):
                self._data[self._draw.randrange(self._start, len(self._data)) & ~3] ^= 1

    def digest(self, number: int) -> str:
        return self.versions[number].manifest_digest

    def file(self, number: int) -> FileEntry:
        """The weights file."""
        manifest = parse_manifest(self.store.read_manifest(self.digest(number)))
        return next(file for file in manifest.files if file.name == WEIGHTS)

    def whole(self) -> list[int]:
        """Numbers of versions whose weights are stored in full."""
        found = set(self.store.manifests())
        return [
            number
            for number in range(len(self.versions))
            if self.digest(number) in found and self.store.has_blob(self.file(number).blob)
        ]
