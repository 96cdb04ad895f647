# SPDX-License-Identifier: Apache-2.0
"""Recomputes a step from the run's records and compares it bit for bit.

Owns the comparison: the same checkpoint, sealed batches and rows must give the same stats and the
same weights, under the same config and number of ranks; anything else is refused. Opens no ledger
and publishes nothing; the caller brings a reader of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.dataflow.service.trainers.messages import RowsAnswer
from penstock.errors import ConfigError, PenstockError, StoreError
from penstock.trainer.checkpoint import Checkpoint, Checkpoints, Cursor, format_unusable
from penstock.trainer.learner import Stats
from penstock.trainer.ranks.group import Ranks
from penstock.types import Manifest, PolicyName, RowPayload
from penstock.weights.publish import StoredVersion

_REFUSED = -1
"""Rank 0's value for no checkpoint at all."""
_MACHINE_METRICS = frozenset({"seconds", "memory"})


def is_compared(name: str) -> bool:
    """Whether a statistic describes the training, and not the machine."""
    return _MACHINE_METRICS.isdisjoint(name.split("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCommit:
    """What the trainer reported to the ledger about one batch, on the surviving lineage."""

    number: int
    skipped: str
    stats: Mapping[str, float]


class RunRecord(Protocol):
    """One policy's batches as the run kept them."""

    def manifest(self, seq: int) -> Manifest | None: ...

    def rows(self, manifest: Manifest) -> Sequence[RowPayload]: ...

    def committed(self, seq: int) -> RecordedCommit | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRows:
    """A record as ranks fetch their rows from it."""

    record: RunRecord

    def rows(
        self, policy: PolicyName, seq: int, indexes: Sequence[int] | None = None
    ) -> RowsAnswer:
        manifest = self.record.manifest(seq)
        rows = () if manifest is None else self.record.rows(manifest)
        return RowsAnswer(rows=tuple(rows if indexes is None else (rows[i] for i in indexes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One value that differs from its record."""

    seq: int
    what: str
    recorded: str
    computed: str

    def __str__(self) -> str:
        return f"batch {self.seq}: {self.what} was {self.recorded}, and is now {self.computed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    started_at: Cursor
    """Of the checkpoint that it started from."""
    ended_at: Cursor
    differences: Sequence[Difference]
    stored: StoredVersion
    """The resulting weights."""


def check_num_ranks(have: int, trained: int) -> None:
    if have != trained:
        raise StoreError(
            f"{trained} ranks trained this, and {have} would compute it again: sums over other "
            "parts of a batch are rounded differently, so bits cannot be compared. Replay it with "
            "as many ranks, as `penstock replay` does"
        )


def choose_start_checkpoint(
    checkpoints: Checkpoints, number: int, ranks: Ranks
) -> Checkpoint | None:
    """The newest before this number, chosen by rank 0; if it refuses, it raises why, and the others
    get None."""
    if not ranks.position.is_rank0:
        [chosen] = ranks.broadcast_from_rank0([0])
        return None if chosen == _REFUSED else checkpoints.read_step(chosen)
    try:
        found = _last_before(checkpoints, number)
    except PenstockError:
        ranks.broadcast_from_rank0([_REFUSED])
        raise
    ranks.broadcast_from_rank0([found.cursor.number])
    return found


def _last_before(checkpoints: Checkpoints, number: int) -> Checkpoint:
    """The newest before this number, if the step was trained under the current config."""
    complete, unusable = checkpoints.scan()
    before = [found for found in complete if found.cursor.number < number]
    if not before:
        known = ", ".join(str(found.cursor.number) for found in complete) or "none"
        raise StoreError(
            f"no checkpoint before number {number} is left in {checkpoints.root} (kept: {known}); "
            "a step can be computed again only after the oldest of them"
            + (f"\n  these cannot be used:\n{format_unusable(unusable)}" if unusable else "")
        )
    # A process restores one and trains until it saves the next, which records its config; steps
    # after the last one were trained under the config of the run.
    after = next((found for found in complete if found.cursor.number >= number), None)
    if after is not None and (changes := checkpoints.changes(after)):
        lines = "\n".join(f"    {change}" for change in changes)
        raise ConfigError(
            f"number {number} was trained under another config than the run has now, the one of "
            f"{after.folder}:\n{lines}\n"
            "  its bits cannot be compared; steps under the current config can"
        )
    return before[-1]


def replay(
    record: RunRecord, cursor: Cursor, number: int, *, step: Callable[[Manifest], Stats]
) -> tuple[Cursor, list[Difference]]:
    """Train again from `cursor` to `number`; return where that ends, and the differences."""
    found: list[Difference] = []
    while cursor.number < number:
        seq = cursor.seq + 1
        manifest, committed = record.manifest(seq), record.committed(seq)
        if manifest is None or committed is None:
            raise StoreError(
                f"number {number} was never committed on the surviving lineage: it ends at number "
                f"{cursor.number}, batch {cursor.seq}"
            )
        stats = step(manifest)
        found += compare(seq, committed, stats)
        is_trained = stats.skipped is None
        cursor = Cursor(number=cursor.number + is_trained, seq=seq, incarnation=cursor.incarnation)
        if cursor.number != committed.number:
            break  # from here on nothing can be equal
    return cursor, found


def compare(seq: int, committed: RecordedCommit, stats: Stats) -> list[Difference]:
    """Which values of a step differ from what the trainer reported."""
    found: list[Difference] = []
    if committed.skipped != (stats.skipped or ""):
        was, now = (word or "trained" for word in (committed.skipped, stats.skipped))
        found.append(Difference(seq=seq, what="the step", recorded=was, computed=now))
    for name, recorded in committed.stats.items():
        if not is_compared(name):
            continue
        again = stats.values.get(name, math.nan)
        if again != recorded:
            found.append(
                Difference(seq=seq, what=name, recorded=repr(recorded), computed=repr(again))
            )
    return found
