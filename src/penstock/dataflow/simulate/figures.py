# SPDX-License-Identifier: Apache-2.0
"""What was trained, skipped and wasted, counted from the records of a run, real or simulated.

One function counts both, so that two columns side by side differ by what happened alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from penstock.dataflow.ledger.recorded import Recorded
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import BatchRecord, DecisionRecord, FateRecord, FateState
from penstock.types import GroupId, Manifest, PolicyName
from penstock.wire.codec import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Of one kind of data."""

    groups: int = 0
    rows: int = 0
    tokens: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            groups=self.groups + other.groups,
            rows=self.rows + other.rows,
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    batches: int
    """Sealed."""
    trained: Amount
    """In batches for the first time."""
    served_again: Amount
    """In batches once more, by a replay rule."""
    waiting: Amount
    """Admitted, in no batch yet."""
    wasted: Mapping[str, Amount]
    """By reason."""
    staleness_mean: float

    @property
    def all_wasted(self) -> Amount:
        return sum(self.wasted.values(), start=Amount())


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    issued: int
    """Groups."""
    skipped: Mapping[str, int]
    """Tasks that were never rolled out, by rule."""
    rule_failures: int
    unknown: int
    """Tasks that the record never rolled out: what they would have been nobody knows."""
    policies: Mapping[PolicyName, PolicyFigures]


def recorded_figures(recorded: Recorded) -> Figures:
    count = (
        "SELECT group_id, count(*) FROM rows WHERE space = 'train' "
        "AND outcome IN ('completed', 'truncated') GROUP BY group_id"
    )
    rows = {
        GroupId(group_id): int(num)
        for tables in (recorded.home, *recorded.partitions.values())
        for group_id, num in tables.rows(count)
    }
    return count_figures(recorded.home, rows, frozenset())


def count_figures(tables: Tables, rows: Mapping[GroupId, int], unknown: Set[GroupId]) -> Figures:
    decisions = tables.read(DecisionRecord)
    fates: defaultdict[PolicyName, list[FateRecord]] = defaultdict(list)
    for fate in tables.read(FateRecord):
        if fate.group_id not in unknown:
            fates[fate.consumer].append(fate)
    return Figures(
        issued=int(tables.scalar("SELECT count(*) FROM issued")) - len(unknown),
        skipped=Counter(one.rule for one in decisions if one.verdict == "skipped"),
        rule_failures=sum(one.verdict == "error" for one in decisions),
        unknown=len(unknown),
        policies={policy: _of_policy(tables, policy, own, rows) for policy, own in fates.items()},
    )


def _of_policy(
    tables: Tables, policy: PolicyName, fates: list[FateRecord], rows: Mapping[GroupId, int]
) -> PolicyFigures:
    batches = tables.read(BatchRecord, "consumer = :policy", policy=policy)
    served = sum((_served(batch) for batch in batches), start=Amount())
    by_end: defaultdict[str, Amount] = defaultdict(Amount)
    for fate in fates:
        end = fate.reason if fate.state == FateState.DROPPED else str(fate.state)
        by_end[end] += Amount(groups=1, rows=rows.get(fate.group_id, 0), tokens=fate.tokens)
    trained, waiting = (
        by_end.pop(s.value, Amount()) for s in (FateState.SEALED, FateState.ADMITTED)
    )
    num_rows = sum(batch.num_rows for batch in batches)
    return PolicyFigures(
        batches=len(batches),
        trained=trained,
        served_again=Amount(
            groups=served.groups - trained.groups,
            rows=served.rows - trained.rows,
            tokens=served.tokens - trained.tokens,
        ),
        waiting=waiting,
        wasted=dict(by_end),
        staleness_mean=sum(b.staleness_mean * b.num_rows for b in batches) / max(1, num_rows),
    )


def _served(batch: BatchRecord) -> Amount:
    manifest = decode(batch.manifest, Manifest)
    tokens = sum(manifest.tokens(row) for row in manifest.rows)
    return Amount(groups=batch.num_groups, rows=batch.num_rows, tokens=tokens)
