# SPDX-License-Identifier: Apache-2.0
"""Compares two versions tensor by tensor.

Files are memory-mapped; only tensors with different digests are read, one piece at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.durable import open_regular
from penstock.errors import WeightsError
from penstock.weights.catalog import CatalogVersion, deletion_paused, full_file
from penstock.weights.deltas.file_delta import layout_of
from penstock.weights.manifest import SnapshotManifest
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import ITEM_BYTES, TensorEntry

PIECE_ITEMS = 1 << 20
FLOATS = ("BF16", "F16", "F32")
"""Float types for which a distance in representable numbers (ULPs) can be computed."""
INTEGERS = {"U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    name: str
    num_elements: int
    num_changed: int
    max_ulps: int | None
    """Largest distance in representable numbers (ULPs); None if not applicable."""
    max_abs: float | None
    """NaN if either element is NaN."""

    @property
    def share(self) -> float:
        return self.num_changed / self.num_elements if self.num_elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    changes: tuple[TensorChange, ...]
    """Tensors that both versions have with the same shape and dtype; most changed first."""
    removed: tuple[str, ...]
    added: tuple[str, ...]
    reshaped: tuple[str, ...]
    """Tensors whose shape or dtype differs."""

    @property
    def num_elements(self) -> int:
        return sum(change.num_elements for change in self.changes)

    @property
    def num_changed(self) -> int:
        return sum(change.num_changed for change in self.changes)


def compare(
    store: DirectoryStore, old: CatalogVersion, new: CatalogVersion, scratch: Path
) -> Comparison:
    old_tensors, new_tensors = _by_name(old.manifest), _by_name(new.manifest)
    both = [name for name in new_tensors if name in old_tensors]
    same_kind = [name for name in both if _kind(old_tensors[name]) == _kind(new_tensors[name])]
    differing = {name for name in same_kind if old_tensors[name] != new_tensors[name]}
    with deletion_paused(store), ExitStack() as opened:
        before = _tensors(opened, store, old, scratch / "old", differing)
        after = _tensors(opened, store, new, scratch / "new", differing)
        changes = [
            _change(new_tensors[name], before[name], after[name])
            if name in differing
            else _unchanged(new_tensors[name])
            for name in same_kind
        ]
    return Comparison(
        changes=tuple(sorted(changes, key=lambda change: (-change.share, change.name))),
        removed=tuple(name for name in old_tensors if name not in new_tensors),
        added=tuple(name for name in new_tensors if name not in old_tensors),
        reshaped=tuple(name for name in both if name not in set(same_kind)),
    )


def _by_name(manifest: SnapshotManifest) -> dict[str, TensorEntry]:
    return {tensor.name: tensor for tensor in manifest.tensors}


def _kind(tensor: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def _tensors(
    opened: ExitStack,
    store: DirectoryStore,
    version: CatalogVersion,
    scratch: Path,
    names: set[str],
) -> Mapping[str, NDArray[np.uint8]]:
    """Memory-mapped bytes of the requested tensors."""
    found: dict[str, NDArray[np.uint8]] = {}
    scratch.mkdir()
    for file in version.files:
        if not file.entry.name.endswith(".safetensors") or names <= found.keys():
            continue
        path = opened.enter_context(full_file(store, file.entry.blob, scratch))
        with open_regular(path) as opened_file:
            mapped = np.memmap(opened_file, np.uint8, "r")
        for name, byte_range in layout_of(path).byte_ranges.items():
            if name in names:
                found[name] = mapped[byte_range.start : byte_range.end]
    if missing := names - found.keys():
        raise WeightsError(
            f"{version.name}: tensor {min(missing)} is in none of its files; "
            "run `penstock weights verify` to find the damage"
        )
    return found


def _unchanged(tensor: TensorEntry) -> TensorChange:
    num_elements = int(np.prod(tensor.shape, dtype=np.int64))
    return TensorChange(
        name=tensor.name, num_elements=num_elements, num_changed=0, max_ulps=0, max_abs=0.0
    )


def _change(tensor: TensorEntry, old: NDArray[np.uint8], new: NDArray[np.uint8]) -> TensorChange:
    item_bytes = ITEM_BYTES[tensor.dtype]
    bits = np.dtype(f"<u{item_bytes}")
    num_changed, max_ulps, max_abs = 0, 0, 0.0
    has_ulps = tensor.dtype in FLOATS
    has_values = has_ulps or tensor.dtype in INTEGERS
    step = PIECE_ITEMS * item_bytes
    for start in range(0, len(new), step):
        one, two = old[start : start + step].view(bits), new[start : start + step].view(bits)
        differs = one != two
        if not differs.any():
            continue
        one, two = one[differs], two[differs]
        num_changed += len(one)
        if has_ulps:
            max_ulps = max(max_ulps, int(np.abs(_ordered(one) - _ordered(two)).max()))
        if has_values:
            with np.errstate(invalid="ignore"):  # inf - inf, and NaN
                apart = np.abs(_values(one, tensor.dtype) - _values(two, tensor.dtype))
            max_abs = float(np.maximum(max_abs, apart.max()))
    return TensorChange(
        name=tensor.name,
        num_elements=len(new) // item_bytes,
        num_changed=num_changed,
        max_ulps=max_ulps if has_ulps else None,
        max_abs=max_abs if has_values else None,
    )


def _ordered(bits: NDArray[Any]) -> NDArray[np.int64]:
    """Map float bits to integers in the order of the floats; both zeros map to 0."""
    sign = np.int64(1) << (8 * bits.itemsize - 1)
    wide = bits.astype(np.int64)
    return np.where(wide & sign, sign - wide, wide)


def _values(bits: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    if dtype == "BF16":
        bits, dtype = bits.astype(np.uint32) << np.uint32(16), "F32"
    kinds = {"F16": "<f2", "F32": "<f4", **INTEGERS}
    return bits.view(kinds[dtype]).astype(np.float64)
