# SPDX-License-Identifier: Apache-2.0
"""One policy's reader of the ledger: what it asks for, what is ready for it, what is sealed, and
what came to nothing since."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from penstock.dataflow.core import pacing
from penstock.dataflow.core.rulebook import ReplaySpec
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import BatchRecord
from penstock.types import Candidate, DropReason, GroupId, OutcomeKind, PolicyName, RowSummary

_ROWS = msgspec.msgpack.Decoder(tuple[RowSummary, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """What a policy asks of the flow."""

    policy: PolicyName
    groups_per_batch: int
    max_staleness: int
    steps: int
    train_columns: frozenset[str] = frozenset()
    """Columns that stages add and its trainer needs, beyond what rules judge by."""
    is_lockstep: bool = False
    """Groups are trained in the order of issue, each sampled by exactly the version that lies
    `max_staleness` batches behind: nothing depends on who is fast."""


@dataclass(slots=True, kw_only=True)
class ReadyGroup:
    """An admitted group: what decisions need of it, and its rows still encoded."""

    group_id: GroupId
    task_key: str
    source: str
    arrival: int
    tokens: int
    rewards: array[float]
    versions: tuple[tuple[int, int], ...]
    """Every version that sampled tokens of this policy in it; none if its trainer only sees what
    others sampled."""
    rows: bytes
    """msgpack list of RowSummary; decoded when it is sealed. Empty after a restart: the ledger has
    them."""
    uses: int = 0
    last_seq: int = 0
    """Newest batch it was in."""

    def decoded(self) -> tuple[RowSummary, ...]:
        return _ROWS.decode(self.rows)


def issue_number(group_id: GroupId) -> int:
    """Its place in the order of issue, from 1, which is part of its name."""
    return int(group_id.rpartition("-")[2])


def ready_group(
    group_id: GroupId,
    task_key: str,
    source: str,
    rows: Sequence[RowSummary],
    policy: PolicyName,
    arrival: int,
    visible_roles: Collection[tuple[PolicyName, str]] | None = None,
) -> ReadyGroup:
    return ReadyGroup(
        group_id=group_id,
        task_key=task_key,
        source=source,
        arrival=arrival,
        tokens=sum(row.tokens_for(policy, visible_roles) for row in rows),
        rewards=array("d", (row.reward for row in rows if row.reward is not None)),
        versions=tuple(sorted({v for row in rows for v in row.versions.get(policy, ())})),
        rows=msgspec.msgpack.encode(rows),
    )


@dataclass(slots=True, kw_only=True)
class Starvation:
    """What became of the groups that ended since the last batch and go into none; not durable, a
    restart begins it anew."""

    counts: dict[DropReason, int] = field(default_factory=dict[DropReason, int])
    newest: dict[DropReason, GroupId] = field(default_factory=dict[DropReason, GroupId])
    """An example of each."""
    low: float = inf
    high: float = -inf
    """Rewards of groups whose members all earned the same, from the lowest to the highest."""
    num_truncated: int = 0
    """Of those, the groups in which every answer was cut at a limit."""
    num_logged: int = 0
    """Groups when the log last told of them."""
    has_participated: bool = False
    """The policy had a part in a group: those of others alone are not missed then."""
    baseline_yield: float | None = None
    """Share of ended groups that went into the batch before, or what pacing reckoned with then, if
    that is less; None where this process saw no batch."""

    @property
    def num_groups(self) -> int:
        return sum(self.counts.values())

    def add(self, group: ReadyGroup, reason: DropReason) -> None:
        if reason in (DropReason.REMAINDER, DropReason.OUTPACED):
            return  # a run that ends, or has plenty of groups, lacks none
        if reason is DropReason.ABSENT and self.has_participated:
            return
        if reason is not DropReason.ABSENT and not self.has_participated:
            self.has_participated = True
            self.counts.pop(DropReason.ABSENT, None)
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.newest[reason] = group.group_id
        if reason is DropReason.UNIFORM_REWARD and group.rewards:
            self.low = min(self.low, *group.rewards)
            self.high = max(self.high, *group.rewards)
            self.num_truncated += all(
                row.outcome is OutcomeKind.TRUNCATED for row in group.decoded()
            )

    def reset_after_batch(self, num_fresh: int, expected_yield: float) -> Starvation:
        """Anew, because a batch with so many fresh groups was sealed."""
        share = max(1, num_fresh) / (max(1, num_fresh) + self.num_groups)
        return Starvation(has_participated=True, baseline_yield=min(share, expected_yield))


@dataclass(slots=True)
class Consumer:
    """One policy's reader: its lineage, its ready groups, its sealed batches."""

    terms: PolicySpec
    lineage: Lineage
    ready: dict[GroupId, ReadyGroup] = field(default_factory=dict[GroupId, ReadyGroup])
    incomplete: dict[GroupId, ReadyGroup] = field(default_factory=dict[GroupId, ReadyGroup])
    """Admitted, waiting for columns its trainer needs."""
    pool: dict[GroupId, ReadyGroup] = field(default_factory=dict[GroupId, ReadyGroup])
    """Served before and, for the replay rule, worth serving again."""
    has_pool: bool = False
    """A replay rule is in force."""
    num_undecided: int = 0
    """Groups issued that this consumer has not decided about."""
    sealed: dict[int, int] = field(default_factory=dict[int, int])
    """Fresh groups by batch, of batches after the last committed one."""
    last_sealed: int = 0
    expected_yield: float = 1.0
    num_arrived: int = 0
    newest_batch: BatchRecord | None = None
    num_replayable: int = 0
    """Groups of the next batch that would be served again."""
    last_expiry_check: tuple[int, int] = (-1, -1)
    """Next number and incarnation when stale groups were last looked for."""
    missing_stages: str = ""
    """A stage it needs that has no live worker: nothing starts for this policy meanwhile."""
    starvation: Starvation = field(default_factory=Starvation)

    @property
    def next_number(self) -> int:
        """Version the next unsealed batch will train from, if all sealed before it are trained."""
        return self.lineage.number + max(0, self.last_sealed - self.lineage.seq)

    @property
    def num_fresh_needed(self) -> int:
        """Fresh groups of the next batch."""
        return self.terms.groups_per_batch - self.num_replayable

    @property
    def num_admitted(self) -> int:
        """Groups that wait for a batch."""
        return len(self.ready) + len(self.incomplete)

    @property
    def has_trained_all(self) -> bool:
        return self.lineage.number >= self.terms.steps

    def levels(self) -> pacing.Levels:
        return pacing.Levels(
            issued=self.num_undecided,
            admitted=self.num_admitted,
            sealed=sum(self.sealed.values()),
        )

    def oldest(self, group: ReadyGroup) -> int:
        """Oldest version of this policy's tokens in the group, on the surviving lineage; what only
        others sampled does not age."""
        return self._oldest(group.versions)

    def oldest_versions(self, rows: Iterable[RowSummary]) -> Iterator[int]:
        """As `oldest`, of each of these rows; few differ in what sampled them."""
        known = dict[tuple[tuple[int, int], ...], int]()
        for row in rows:
            versions = row.versions.get(self.terms.policy, ())
            number = known.get(versions)
            if number is None:
                number = known[versions] = self._oldest(versions)
            yield number

    def _oldest(self, versions: Iterable[tuple[int, int]]) -> int:
        numbers = (self.lineage.effective_number(*version) for version in versions)
        return min(numbers, default=self.next_number)

    def staleness(self, group: ReadyGroup) -> int:
        return self.next_number - self.oldest(group)

    def is_stale(self, group: ReadyGroup) -> bool:
        if self.terms.is_lockstep:
            return False  # the gate let only one version sample it, which a rewind makes again
        return self.staleness(group) > self.terms.max_staleness

    def eligible(self, replay: ReplaySpec | None) -> list[ReadyGroup]:
        """Groups of the pool that a batch sealed now may serve again."""
        if replay is None:
            return []
        bound = self.terms.max_staleness
        if replay.max_staleness is not None:
            bound = replay.max_staleness
        return [
            group
            for group in self.pool.values()
            if group.uses < replay.max_uses and self.staleness(group) <= bound
        ]

    def candidates(self, groups: Iterable[ReadyGroup]) -> list[Candidate]:
        return [
            Candidate(
                group_id=group.group_id,
                task_key=group.task_key,
                oldest=self.oldest(group),
                arrival=group.arrival,
                tokens=group.tokens,
                num_rows=len(group.rewards),
                rewards=tuple(group.rewards),
                uses=group.uses,
            )
            for group in groups
        ]
