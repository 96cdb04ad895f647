# SPDX-License-Identifier: Apache-2.0
"""Patches between two snapshot folders, without a store."""

from __future__ import annotations

from pathlib import Path

from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.file_delta import make_delta
from penstock.weights.manifest import file_digest
from penstock.weights.patches import ChangedFile, patch_path, write_patch
from penstock.weights.tensors import TensorEntry, scan


def tensors_of(folder: Path) -> list[TensorEntry]:
    found: list[TensorEntry] = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found += scan(file, path.name).tensors
    return found


def changed_file(path: Path, steps: list[Path], scratch: Path) -> ChangedFile:
    """The last of `steps` is the new file `path`; deltas lead from each to the next."""
    deltas: list[tuple[DeltaEntry, Path]] = []
    for base, new in zip(steps, [*steps[1:]], strict=False):
        made = scratch / f"{path.name}.{len(deltas)}.delta"
        digests = file_digest(base), file_digest(new)
        with made.open("wb") as out:
            make_delta(base, new, out, base_blob=digests[0], target_blob=digests[1])
        entry = DeltaEntry(
            base=digests[0],
            target=digests[1],
            blob=file_digest(made),
            bytes=made.stat().st_size,
        )
        deltas.append((entry, made))
    return ChangedFile(path=path, deltas=deltas)


def patch_between(base: Path, folder: Path, scratch: Path) -> Path:
    """Write the patch where an engine that has loaded `base` finds it."""
    scratch.mkdir(exist_ok=True)
    files = [
        changed_file(path, [base / path.name, path], scratch)
        for path in sorted(folder.glob("*.safetensors"))
    ]
    made = patch_path(base, folder)
    assert write_patch(made, tensors_of(folder), files) is not None, "too many changes for a patch"
    return made
