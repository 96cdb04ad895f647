# SPDX-License-Identifier: Apache-2.0
"""Rebuilds files from deltas.

Results are verified before they get their final name. Blocking; do not call on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from penstock.durable import copy_regular, open_regular
from penstock.errors import WeightsError
from penstock.weights.deltas.chain import DeltaEntry, cheapest_chain
from penstock.weights.deltas.file_delta import apply_in_place
from penstock.weights.store import DirectoryStore

ANY_SIZE = 1 << 62


def chain_from_full(store: DirectoryStore, blob: str) -> tuple[DeltaEntry, ...]:
    """Deltas from a full file to this one; empty if there is no such chain."""
    return cheapest_chain(blob, store.has_blob, store.deltas_to, below=ANY_SIZE)


def rebuild_blob(store: DirectoryStore, blob: str) -> Path:
    """Path of the full file, rebuilt if necessary; raises WeightsError if that is impossible."""
    path = store.blob_path(blob)
    if path.exists():
        return path
    with store.writing():
        chain = chain_from_full(store, blob)
        if not chain:
            raise WeightsError(
                f"blob {blob} is missing and cannot be rebuilt from deltas; "
                "publish the version again"
            )
        store.make_blob(blob, partial(apply_chain, chain, store.blob_path))
    return path


def apply_chain(chain: Sequence[DeltaEntry], blob_path: Callable[[str], Path], made: Path) -> None:
    """Create the target file of a chain at `made`; the caller verifies it."""
    copy_regular(blob_path(chain[0].base), made)
    for step in chain:
        with open_regular(blob_path(step.blob)) as delta:
            apply_in_place(made, delta, base_blob=step.base)
