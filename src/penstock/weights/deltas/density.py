# SPDX-License-Identifier: Apache-2.0
"""Counts the elements a delta changes, from its frames alone."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.delta import read_delta
from penstock.weights.deltas.file_delta import layout_of
from penstock.weights.deltas.payload import Kind
from penstock.weights.store import DirectoryStore, open_regular
from penstock.weights.tensors import ITEM_BYTES


def count_changes(
    store: DirectoryStore, step: DeltaEntry, full_files: Sequence[str]
) -> tuple[int, int] | None:
    """Changed and total elements; a tensor stored in full counts as changed. `full_files` may be
    files of the same layout; None if none of them is available."""
    available = [blob for blob in full_files if store.has_blob(blob)]
    if not available:
        return None
    byte_ranges = layout_of(store.blob_path(available[0])).byte_ranges
    with open_regular(store.blob_path(step.blob)) as file:
        _, frames = read_delta(
            file, {name: byte_range.num_bytes for name, byte_range in byte_ranges.items()}
        )
        changed = 0
        for frame in frames:
            num_bytes = sum(byte_ranges[name].num_bytes for name in frame.names)
            is_full = frame.payload.kind is Kind.FULL
            changed += num_bytes // frame.item_bytes if is_full else frame.payload.num_changed
    return changed, sum(
        byte_range.num_bytes // ITEM_BYTES[byte_range.dtype] for byte_range in byte_ranges.values()
    )
