# SPDX-License-Identifier: Apache-2.0
"""Live counters of the data flow, from the records that go to the ledger.

Amount exactly what becomes durable. Its totals are written in the same commit as the records they
count, so a restart continues without reading the tables. Keeps rows in memory only for groups that
some policy has not judged yet, and only rows since the service started."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from penstock.dataflow.core.ids import is_evaluation
from penstock.dataflow.core.manifests import ManifestCache
from penstock.dataflow.core.names import EVAL
from penstock.dataflow.records import (
    BatchRecord,
    FateRecord,
    FateState,
    GroupRecord,
    GroupState,
    MetaRecord,
    RowRecord,
)
from penstock.dataflow.report.figures import REFUSAL_REASONS, Flow
from penstock.dataflow.report.ledger_counts import SqlReader, count_from_ledger
from penstock.dataflow.report.shape import ZERO, Amount
from penstock.types import SANDBOX_MS, DropReason, GroupId, NodeId, OutcomeKind, PolicyName

KEY = "report"
"""Key of the totals in the ledger's `meta` table."""
TOTALS = "SELECT value FROM meta WHERE key = :key"
ADMITTED = "SELECT consumer, group_id FROM fates WHERE state = 'admitted'"
LAST_ROW = "SELECT max(arrival) FROM rows WHERE space = 'train'"
EARLIER_ROWS = (
    'SELECT node_id, sampled, "values" FROM rows WHERE group_id = :group_id AND arrival <= :last '
    "AND outcome IN ('completed', 'truncated')"
)
SCORED = frozenset({OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED})

Member = tuple[NodeId, Mapping[PolicyName, int], int]
"""The node of a scored row, its sampled tokens by policy, and how long its sandboxes were open."""
EffectiveNumber = Callable[[PolicyName, int, int], int]
"""Maps (policy, incarnation, number) to the version number on the current lineage."""
LoadEarlierRows = Callable[[GroupId], Sequence[Member]]
"""Scored rows of a group that were stored before the service started."""

_sampled = msgspec.json.Decoder(dict[PolicyName, int])
_due = msgspec.json.Decoder(dict[PolicyName, int])
_values = msgspec.json.Decoder(dict[str, float])


class _Values(Struct):
    """What is read of a packed row."""

    values: dict[str, float] = {}


_rows = msgspec.msgpack.Decoder(list[msgspec.Raw])
_row_values = msgspec.msgpack.Decoder(list[_Values])


class MutableAmount(Struct):
    """Mutable counts: updated once per row, where frozen records would be too slow."""

    sequences: int = 0
    tokens: int = 0
    sandbox_ms: int = 0

    def add(self, sequences: int, tokens: int, sandbox_ms: int = 0) -> None:
        self.sequences += sequences
        self.tokens += tokens
        self.sandbox_ms += sandbox_ms

    @property
    def counts(self) -> Amount:
        return Amount(sequences=self.sequences, tokens=self.tokens, sandbox_ms=self.sandbox_ms)


class PolicyCounters(Struct):
    """Flow of one policy as mutable counts; stored in the format of a Flow."""

    produced: MutableAmount = field(default_factory=MutableAmount)
    entered: MutableAmount = field(default_factory=MutableAmount)
    consumed: MutableAmount = field(default_factory=MutableAmount)
    replayed: MutableAmount = field(default_factory=MutableAmount)
    wasted: dict[str, MutableAmount] = field(default_factory=dict[str, MutableAmount])

    def waste(self, reason: str, counts: Amount) -> None:
        if counts != ZERO:
            found = self.wasted.setdefault(str(reason), MutableAmount())
            found.add(counts.sequences, counts.tokens, counts.sandbox_ms)

    @property
    def flow(self) -> Flow:
        return Flow(
            produced=self.produced.counts,
            entered=self.entered.counts,
            consumed=self.consumed.counts,
            replayed=self.replayed.counts,
            wasted={why: wasted.counts for why, wasted in self.wasted.items()},
        )


class NodeCounters(Struct):
    """Amount of one node since the service started."""

    produced: MutableAmount = field(default_factory=MutableAmount)
    accepted: MutableAmount = field(default_factory=MutableAmount)


def tokenless_fate(outcome: OutcomeKind) -> str:
    return DropReason.ABSENT if outcome in SCORED else outcome


def has_entered(fate: FateRecord) -> bool:
    return fate.state != FateState.DROPPED or fate.reason not in REFUSAL_REASONS


class FlowCounter:
    def __init__(
        self,
        policies: Iterable[PolicyName],
        number_of: EffectiveNumber,
        manifests: ManifestCache,
    ) -> None:
        self.policies = {policy: PolicyCounters() for policy in policies}
        self.nodes: dict[NodeId, NodeCounters] = {}
        self.staleness: dict[PolicyName, dict[int, MutableAmount]] = {p: {} for p in self.policies}
        """Rows by staleness, of batches sealed since the window opened."""
        self._number_of = number_of
        self._manifests = manifests
        self._load_earlier_rows: LoadEarlierRows = lambda group_id: ()
        self._issued_since_start: dict[GroupId, Collection[PolicyName]] = {}
        """Groups issued since the service started and not judged by all their policies, with these;
        they have no earlier rows."""
        self._undecided: dict[GroupId, set[PolicyName]] = {}
        """Policies that have not judged a group, once one of them has."""
        self._members: dict[GroupId, list[Member]] = {}
        """Scored rows since the service started, of groups not judged by all policies."""
        self._admitted: dict[tuple[str, GroupId], Amount | None] = {}
        """Admitted and not yet sealed or dropped; None if admitted before the service started."""
        self._has_changed = False
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            RowRecord: self._row,
            FateRecord: self._fate,
            BatchRecord: self._batch,
            GroupRecord: self._group,
        }

    def on_records(self, record: object) -> None:
        """Count a record that is being written; other kinds of records are ignored."""
        handler = self._handlers.get(type(record))
        if handler is not None:
            handler(record)
            self._has_changed = True

    def node_counters(self, node_id: NodeId) -> NodeCounters:
        counters = self.nodes.get(node_id)
        if counters is None:
            counters = self.nodes[node_id] = NodeCounters()
        return counters

    def _row(self, row: RowRecord) -> None:
        if row.space == EVAL:
            return  # not a part of training
        sampled = row.summary.sampled
        sandbox_ms = sandbox_ms_of(row.summary.values)
        is_scored = row.summary.outcome in SCORED
        if sandbox_ms and not any(sampled.values()):
            self._tokenless(row.summary.outcome, sandbox_ms)
        for policy, tokens in sampled.items():
            counters = self.policies.get(PolicyName(policy))
            if counters is None or not tokens:
                continue
            counters.produced.add(1, tokens, sandbox_ms)
            self.node_counters(row.node_id).produced.add(1, tokens, sandbox_ms)
            if not is_scored:
                failed = Amount(sequences=1, tokens=tokens, sandbox_ms=sandbox_ms)
                counters.waste(row.summary.outcome, failed)
        if is_scored:
            members = self._members.get(row.group_id)
            if members is None:
                members = self._members[row.group_id] = []
            members.append((row.node_id, sampled, sandbox_ms))

    def _tokenless(self, outcome: OutcomeKind, sandbox_ms: int) -> None:
        """A row without a token for any policy is never trained; its sandboxes were open."""
        for counters in self.policies.values():
            counters.produced.add(0, 0, sandbox_ms)
            counters.waste(
                tokenless_fate(outcome), Amount(sequences=0, tokens=0, sandbox_ms=sandbox_ms)
            )

    def _group(self, record: GroupRecord) -> None:
        if record.state is GroupState.OPEN and not is_evaluation(record.group_id):
            self._issued_since_start[record.group_id] = _due.decode(record.due).keys()

    def _judged(self, fate: FateRecord) -> None:
        taking_part = self._issued_since_start.get(fate.group_id, self.policies.keys())
        undecided = self._undecided.setdefault(fate.group_id, self.policies.keys() & taking_part)
        undecided.discard(fate.consumer)
        if not undecided:
            del self._undecided[fate.group_id]
            self._members.pop(fate.group_id, None)
            self._issued_since_start.pop(fate.group_id, None)

    def _fate(self, fate: FateRecord) -> None:
        key = (fate.consumer, fate.group_id)
        counters, is_held = self.policies.get(fate.consumer), key in self._admitted
        held = self._admitted.pop(key, None)
        if counters is None or (not is_held and fate.state == FateState.SEALED):
            return  # sealed before: a replay, or its end
        counts = held if held is not None and not fate.packed_rows else self._counts(fate)
        if has_entered(fate):
            before = ZERO if not is_held else held or counts
            more = counts - before
            counters.entered.add(more.sequences, more.tokens, more.sandbox_ms)
            if not is_held:
                self._accept(fate)
        if not is_held:
            self._judged(fate)
        if fate.state == FateState.SEALED:
            counters.consumed.add(counts.sequences, counts.tokens, counts.sandbox_ms)
        elif fate.state == FateState.DROPPED:
            counters.waste(fate.reason, counts)
        else:
            self._admitted[key] = counts

    def _counts(self, fate: FateRecord) -> Amount:
        if not fate.tokens:
            return ZERO
        if fate.packed_rows:
            return Amount(
                sequences=len(_rows.decode(fate.packed_rows)),
                tokens=fate.tokens,
                sandbox_ms=_packed_sandbox_ms(fate.packed_rows),
            )
        taken = [
            sandbox_ms
            for _, sampled, sandbox_ms in self._of(fate.group_id)
            if sampled.get(fate.consumer, 0) > 0
        ]
        return Amount(sequences=len(taken), tokens=fate.tokens, sandbox_ms=sum(taken))

    def _of(self, group_id: GroupId) -> Sequence[Member]:
        members = self._members.get(group_id, [])
        return (
            members
            if group_id in self._issued_since_start
            else [*self._load_earlier_rows(group_id), *members]
        )

    def _accept(self, fate: FateRecord) -> None:
        for node_id, sampled, sandbox_ms in self._of(fate.group_id):
            tokens = sampled.get(fate.consumer, 0)
            if tokens:
                self.node_counters(node_id).accepted.add(1, tokens, sandbox_ms)

    def _batch(self, batch: BatchRecord) -> None:
        policy, counters = batch.consumer, self.policies.get(batch.consumer)
        if counters is None:
            return
        manifest = self._manifests.decode(batch.manifest)
        # Most rows of a batch were sampled by the same versions, so their staleness is cached.
        by_versions: dict[tuple[tuple[int, int], ...], MutableAmount] = {}
        histogram = self.staleness[policy]
        for index, group in enumerate(manifest.groups):
            is_replayed = index >= batch.num_groups - batch.num_replayed
            for row in group.rows:
                sampled_by, tokens = row.versions.get(policy, ()), manifest.tokens(row)
                bucket = by_versions.get(sampled_by)
                if bucket is None:
                    numbers = (self._number_of(policy, *version) for version in sampled_by)
                    age = batch.trains_from - min(numbers, default=batch.trains_from)
                    bucket = histogram.setdefault(max(0, age), MutableAmount())
                    by_versions[sampled_by] = bucket
                bucket.add(1, tokens, sandbox_ms_of(row.values))
                if is_replayed:
                    counters.replayed.add(1, tokens)

    # --- restart ------------------------------------------------------------------------------

    def pop_totals(self) -> MetaRecord | None:
        """The totals, to be written with the records they count; None if unchanged."""
        if not self._has_changed:
            return None
        self._has_changed = False
        return MetaRecord(key=KEY, value=msgspec.json.encode(self.policies).decode())

    def restore(self, tables: SqlReader) -> None:
        """Continue from the ledger's totals; count a ledger without totals once."""
        found = tables.rows(TOTALS, key=KEY)
        text = found[0][0] if found else msgspec.json.encode(count_from_ledger(tables))
        for policy, counters in msgspec.json.decode(text, type=dict[str, PolicyCounters]).items():
            if policy in self.policies:
                self.policies[PolicyName(policy)] = counters
        for consumer, group_id in tables.rows(ADMITTED):
            self._admitted[consumer, group_id] = None
        last = tables.rows(LAST_ROW)[0][0] or 0

        def earlier(group_id: GroupId) -> Sequence[Member]:
            rows = tables.rows(EARLIER_ROWS, group_id=group_id, last=last)
            return [
                (node_id, _sampled.decode(sampled), sandbox_ms_of(_values.decode(values or "{}")))
                for node_id, sampled, values in rows
            ]

        self._load_earlier_rows = earlier


def sandbox_ms_of(values: Mapping[str, float]) -> int:
    return int(values.get(SANDBOX_MS, 0))


def _packed_sandbox_ms(packed_rows: bytes) -> int:
    """Read only where there is one: most runs have no sandboxes, and packed rows are many."""
    if SANDBOX_MS.encode() not in packed_rows:
        return 0
    return sum(sandbox_ms_of(row.values) for row in _row_values.decode(packed_rows))
