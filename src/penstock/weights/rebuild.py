# SPDX-License-Identifier: Apache-2.0
"""Files of a store that are no longer whole, made again from deltas; one delta in place of many.

What is made is digested before it gets its name. Blocks, and belongs off the event loop.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from blake3 import blake3

from penstock.errors import WeightsError
from penstock.weights.deltas.chain import DeltaEntry, cheapest_chain
from penstock.weights.deltas.file_delta import apply_in_place, make_delta
from penstock.weights.store import DirectoryStore, open_regular

ANY_SIZE = 1 << 62


def chain_from_full(store: DirectoryStore, blob: str) -> tuple[DeltaEntry, ...]:
    """Deltas from a file that is whole to this one."""
    return cheapest_chain(blob, store.has_blob, store.deltas_to, below=ANY_SIZE)


def rebuild_blob(store: DirectoryStore, blob: str) -> Path:
    """Where this file lies, whole; WeightsError when nothing leads to it."""
    path = store.blob_path(blob)
    if path.exists():
        return path
    with store.writing():
        chain = chain_from_full(store, blob)
        if not chain:
            raise WeightsError(
                f"blob {blob} is gone, and no deltas lead to it; publish the version again"
            )
        store.make_blob(blob, partial(apply_chain, store, chain))
    return path


def merge_deltas(store: DirectoryStore, base: str, target: str) -> DeltaEntry:
    """One delta from base to target, both made whole for it. They are digested: what they were
    made from may be deleted on the strength of this delta."""
    with store.writing():
        old, new = rebuild_blob(store, base), rebuild_blob(store, target)
        for path, blob in ((old, base), (new, target)):
            if blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() != blob:
                raise WeightsError(f"{path} is damaged: its bytes have another digest; delete it")
        make = partial(make_delta, old, new, base_blob=base, target_blob=target)
        return store.put_delta(base, target, make)


def apply_chain(store: DirectoryStore, chain: Sequence[DeltaEntry], made: Path) -> None:
    """Make a file at the end of the way; the caller digests it."""
    shutil.copyfile(store.blob_path(chain[0].base), made)
    for step in chain:
        with open_regular(store.blob_path(step.blob)) as delta:
            apply_in_place(made, delta, base_blob=step.base)
