# SPDX-License-Identifier: Apache-2.0
"""A step computed again from what the run wrote down, and held against it bit for bit.

Owns the comparison: the same checkpoint, sealed batches and rows must give the same stats and the
same weights. Opens no ledger and publishes nothing; whoever calls brings a reader of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.dataflow.protocol import RowPayload
from penstock.errors import StoreError
from penstock.trainer.batches import Batch
from penstock.trainer.checkpoint import Cursor
from penstock.trainer.learner import Stats
from penstock.types import Manifest
from penstock.weights.publish import StoredVersion

_OF_THE_MACHINE = frozenset({"seconds", "memory"})


def is_compared(name: str) -> bool:
    """Whether a statistic tells about the training, and not about the machine."""
    return _OF_THE_MACHINE.isdisjoint(name.split("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What the trainer told the ledger about one batch, on the surviving lineage."""

    number: int
    skipped: str
    stats: Mapping[str, float]


class Record(Protocol):
    """One policy's batches as the run kept them."""

    def manifest(self, seq: int) -> Manifest | None: ...

    def rows(self, manifest: Manifest) -> Sequence[RowPayload]: ...

    def committed(self, seq: int) -> Committed | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that came out otherwise than it was recorded."""

    seq: int
    what: str
    recorded: str
    computed: str

    def __str__(self) -> str:
        return f"batch {self.seq}: {self.what} was {self.recorded}, and is now {self.computed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    begun_at: Cursor
    """Of the checkpoint that it started from."""
    ended_at: Cursor
    differences: Sequence[Difference]
    stored: StoredVersion
    """The weights that came out."""


def replay(
    record: Record,
    cursor: Cursor,
    number: int,
    *,
    assemble: Callable[[Manifest, Sequence[RowPayload]], Batch],
    step: Callable[[Batch], Stats],
) -> tuple[Cursor, list[Difference]]:
    """Train again from `cursor` until `number`; where that ends, and what differs on the way."""
    found: list[Difference] = []
    while cursor.number < number:
        seq = cursor.seq + 1
        manifest, committed = record.manifest(seq), record.committed(seq)
        if manifest is None or committed is None:
            raise StoreError(
                f"number {number} was never committed on the surviving lineage: it ends at number "
                f"{cursor.number}, batch {cursor.seq}"
            )
        stats = step(assemble(manifest, record.rows(manifest)))
        found += compare(seq, committed, stats)
        is_trained = stats.skipped is None
        cursor = Cursor(number=cursor.number + is_trained, seq=seq, incarnation=cursor.incarnation)
        if cursor.number != committed.number:
            break  # from here on nothing can be equal
    return cursor, found


def compare(seq: int, committed: Committed, stats: Stats) -> list[Difference]:
    """What of a step is not bit for bit as the trainer told it then."""
    found: list[Difference] = []
    if committed.skipped != (stats.skipped or ""):
        was, now = (word or "trained" for word in (committed.skipped, stats.skipped))
        found.append(Difference(seq=seq, what="the step", recorded=was, computed=now))
    for name, told in committed.stats.items():
        if not is_compared(name):
            continue
        again = stats.values.get(name, math.nan)
        if again != told:
            found.append(Difference(seq=seq, what=name, recorded=repr(told), computed=repr(again)))
    return found
