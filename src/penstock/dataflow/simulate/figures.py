# SPDX-License-Identifier: Apache-2.0
"""Totals of a run, recorded or simulated: trained, replayed, skipped and wasted data.

The same function counts both, so that they are comparable."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from penstock.dataflow.ledger.recorded import RecordedRun
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import BatchRecord, DecisionRecord, FateRecord, FateState
from penstock.types import GroupId, Manifest, PolicyName
from penstock.wire.codec import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAmount:
    """An amount of data."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0

    def __add__(self, other: DataAmount) -> DataAmount:
        return DataAmount(
            groups=self.groups + other.groups,
            rows=self.rows + other.rows,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTotals:
    batches: int
    """Sealed."""
    trained: DataAmount
    """Sealed into a batch for the first time."""
    replayed: DataAmount
    """Sealed into a batch again, by a replay rule."""
    waiting: DataAmount
    """Admitted, not in a batch yet."""
    wasted: Mapping[str, DataAmount]
    """By reason."""
    staleness_mean: float

    @property
    def total_wasted(self) -> DataAmount:
        return sum(self.wasted.values(), start=DataAmount())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    issued: int
    """Groups."""
    skipped: Mapping[str, int]
    """Tasks skipped before rollout, by rule."""
    rule_failures: int
    unknown: int
    """Tasks issued in the simulation that were never rolled out in the record, so that their
    outcome is unknown."""
    policies: Mapping[PolicyName, PolicyTotals]


def recorded_totals(recorded: RecordedRun) -> RunTotals:
    count = (
        "SELECT group_id, count(*) FROM rows WHERE space = 'train' "
        "AND outcome IN ('completed', 'truncated') GROUP BY group_id"
    )
    rows = {
        GroupId(group_id): int(num)
        for tables in (recorded.coordinator, *recorded.partitions.values())
        for group_id, num in tables.rows(count)
    }
    return count_totals(recorded.coordinator, rows, frozenset())


def count_totals(tables: Tables, rows: Mapping[GroupId, int], unknown: Set[GroupId]) -> RunTotals:
    decisions = tables.read(DecisionRecord)
    fates: defaultdict[PolicyName, list[FateRecord]] = defaultdict(list)
    for fate in tables.read(FateRecord):
        if fate.group_id not in unknown:
            fates[fate.consumer].append(fate)
    return RunTotals(
        issued=int(tables.scalar("SELECT count(*) FROM groups")) - len(unknown),
        skipped=Counter(one.rule for one in decisions if one.verdict == "skipped"),
        rule_failures=sum(one.verdict == "error" for one in decisions),
        unknown=len(unknown),
        policies={policy: _of_policy(tables, policy, own, rows) for policy, own in fates.items()},
    )


def _of_policy(
    tables: Tables, policy: PolicyName, fates: list[FateRecord], rows: Mapping[GroupId, int]
) -> PolicyTotals:
    batches = tables.read(BatchRecord, "consumer = :policy", policy=policy)
    sealed = sum((_sealed(batch) for batch in batches), start=DataAmount())
    by_end: defaultdict[str, DataAmount] = defaultdict(DataAmount)
    for fate in fates:
        end = fate.reason if fate.state == FateState.DROPPED else str(fate.state)
        by_end[end] += DataAmount(groups=1, rows=rows.get(fate.group_id, 0), tokens=fate.tokens)
    trained, waiting = (
        by_end.pop(s.value, DataAmount()) for s in (FateState.SEALED, FateState.ADMITTED)
    )
    num_rows = sum(batch.num_rows for batch in batches)
    return PolicyTotals(
        batches=len(batches),
        trained=trained,
        replayed=DataAmount(
            groups=sealed.groups - trained.groups,
            rows=sealed.rows - trained.rows,
            tokens=sealed.tokens - trained.tokens,
        ),
        waiting=waiting,
        wasted=dict(by_end),
        staleness_mean=sum(b.staleness_mean * b.num_rows for b in batches) / max(1, num_rows),
    )


def _sealed(batch: BatchRecord) -> DataAmount:
    manifest = decode(batch.manifest, Manifest)
    tokens = sum(manifest.tokens(row) for row in manifest.rows)
    return DataAmount(groups=batch.num_groups, rows=batch.num_rows, tokens=tokens)
