# SPDX-License-Identifier: Apache-2.0
"""How many elements a delta changes, read from its frames alone."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.delta import read_delta
from penstock.weights.deltas.file_delta import layout_of
from penstock.weights.deltas.payload import Kind
from penstock.weights.store import DirectoryStore, open_regular
from penstock.weights.tensors import ITEM_BYTES


def count_changes(
    store: DirectoryStore, step: DeltaEntry, whole: Sequence[str]
) -> tuple[int, int] | None:
    """Changed elements, and all; a tensor that travels whole counts as changed. `whole` may be
    files of its layout; None when none of them is here."""
    here = [blob for blob in whole if store.has_blob(blob)]
    if not here:
        return None
    spans = layout_of(store.blob_path(here[0])).spans
    with open_regular(store.blob_path(step.blob)) as file:
        _, frames = read_delta(file, {name: span.num_bytes for name, span in spans.items()})
        changed = 0
        for frame in frames:
            num_bytes = sum(spans[name].num_bytes for name in frame.names)
            is_full = frame.payload.kind is Kind.FULL
            changed += num_bytes // frame.item_bytes if is_full else frame.payload.num_changed
    return changed, sum(span.num_bytes // ITEM_BYTES[span.dtype] for span in spans.values())
