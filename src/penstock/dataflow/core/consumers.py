# SPDX-License-Identifier: Apache-2.0
"""One policy's consumer of groups: which are admitted, ready, sealed, kept for replay or dropped.

Owns the fate of every group for its policy: every change is journaled here and nowhere else.
Decides nothing about other policies, issuing or partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from penstock.dataflow.core import pacing
from penstock.dataflow.core.closed_groups import ClosedGroup, PartCounts, VisibleRoles, with_rows
from penstock.dataflow.core.histograms import AGES, REWARDS, Histogram
from penstock.dataflow.core.ids import partition_of
from penstock.dataflow.core.messages import (
    Admitted,
    ColumnsCompleted,
    GroupEnded,
    SendToPartition,
)
from penstock.dataflow.core.retention import Retention
from penstock.dataflow.core.rule_runner import ReplaySpec, RuleRunner
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import (
    FATE_TRANSITIONS,
    BatchRecord,
    FateRecord,
    FateState,
    GroupRecord,
    InstalmentRecord,
    Journal,
    MetaRecord,
    WasteRecord,
)
from penstock.types import DropReason, GroupId, OutcomeKind, PolicyName, RowId, RowSummary

POOL_GROUPS = 10_000
"""Maximum groups in a replay pool; beyond it the oldest are removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """What a policy requires of the dataflow."""

    policy: PolicyName
    groups_per_batch: int
    max_staleness: int
    steps: int
    train_columns: frozenset[str] = frozenset()
    """Columns that stages add and its trainer needs, in addition to the columns that rules judge
    by."""
    is_lockstep: bool = False
    """Groups are trained in the order of issue, each sampled by exactly the version `max_staleness`
    batches behind, so results do not depend on node speed."""
    max_partner_lag: int | None = None
    """Versions that tokens of other policies may be behind their policy's newest; None for any
    number."""
    is_streamed: bool = False
    """Its trainer may get a batch in instalments, group by group as they are admitted."""


@dataclass(slots=True, kw_only=True)
class Starvation:
    """Counts of groups dropped since the last sealed batch, by reason. Kept in memory only; reset
    on restart."""

    counts: dict[DropReason, int] = field(default_factory=dict[DropReason, int])
    newest: dict[DropReason, GroupId] = field(default_factory=dict[DropReason, GroupId])
    """An example group for each reason."""
    low: float = inf
    high: float = -inf
    """Range of rewards over groups whose members all earned the same reward."""
    num_truncated: int = 0
    """How many of those groups have every answer cut at a limit."""
    num_logged: int = 0
    """Number of groups at the last log line."""
    has_participated: bool = False
    """The policy took part in a group; from then on, groups without it are not counted."""
    baseline_yield: float | None = None
    """Share of ended groups that went into the previous batch, or the yield that pacing expected
    then, whichever is lower; None if this process has sealed no batch."""

    @property
    def num_groups(self) -> int:
        return sum(self.counts.values())

    def add(self, group: FateRecord, reason: DropReason) -> None:
        if reason in (DropReason.REMAINDER, DropReason.OUTPACED):
            return  # a run that is ending, or has enough groups, is not starving
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
            self.num_truncated += all(row.outcome is OutcomeKind.TRUNCATED for row in group.rows)

    def reset_after_batch(self, num_fresh: int, expected_yield: float) -> Starvation:
        """A fresh count, started when a batch with `num_fresh` fresh groups was sealed."""
        share = max(1, num_fresh) / (max(1, num_fresh) + self.num_groups)
        return Starvation(has_participated=True, baseline_yield=min(share, expected_yield))


class Waste:
    """Tokens that were generated but will never be trained, by reason."""

    def __init__(self, journal: Journal) -> None:
        self.tokens: dict[str, int] = {}
        self._journal = journal

    def add(self, reason: DropReason, tokens: int) -> None:
        if tokens:
            total = self.tokens[reason] = self.tokens.get(reason, 0) + tokens
            self._journal(WasteRecord(reason=reason, tokens=total))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerDeps:
    """Dependencies that all consumers of a run share."""

    rules: RuleRunner
    retention: Retention
    waste: Waste
    journal: Journal
    send: SendToPartition
    free: Callable[[Sequence[GroupId], float], None]
    """Reports groups whose payload no policy needs anymore."""
    lineage_of: Callable[[PolicyName], Lineage | None]
    """The lineage of a policy; None for one that is not trained."""


class Consumer:
    """One policy: its lineage, its ready groups and its sealed batches."""

    def __init__(self, terms: PolicySpec, deps: ConsumerDeps) -> None:
        self.terms = terms
        self.lineage = Lineage(terms.policy)
        self.lineage.is_deterministic = terms.is_lockstep
        self.ready: dict[GroupId, FateRecord] = {}
        self.incomplete: dict[GroupId, FateRecord] = {}
        """Admitted groups that wait for columns the trainer needs."""
        self.pool: dict[GroupId, FateRecord] = {}
        """Groups sealed before that the replay rule may use in another batch."""
        self.has_pool = deps.rules.replay(terms.policy) is not None
        """Whether a replay rule is active."""
        self.num_undecided = 0
        """Issued groups that this consumer has not judged yet."""
        self.sealed: dict[int, int] = {}
        """Number of fresh groups by batch, for batches after the last committed one."""
        self.last_sealed = 0
        self.instalments: list[InstalmentRecord] = []
        """Sealed so far of the batch after the last sealed one."""
        self.expected_yield = 1.0
        self.num_arrived = 0
        self.newest_batch: BatchRecord | None = None
        self.num_replayable = 0
        """How many groups of the next batch would come from the pool."""
        self.missing_stages = ""
        """A stage this policy needs that has no live worker; until one is back, no group starts for
        the policy."""
        self.starvation = Starvation()
        self.parts = PartCounts()
        self.partner_lags: dict[PolicyName, Counter[int]] = {}
        """Rows sealed since the start of the service, by other policy and by how many versions its
        oldest token was behind."""
        self.sealed_rewards, self.sealed_ages = Histogram(REWARDS), Histogram(AGES)
        """Rewards of the rows sealed since the start of the service, and their staleness."""
        self._last_expiry_check = (-1, -1)
        """Next number and incarnation at the last check for stale groups."""
        self._deps = deps

    # --- levels and staleness -----------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """Version the next unsealed batch will train from, if all batches sealed before it are
        trained. A batch with an instalment keeps the version that it had then."""
        if self.instalments:
            return self.instalments[0].trains_from
        return self.lineage.number + max(0, self.last_sealed - self.lineage.seq)

    @property
    def num_fresh_needed(self) -> int:
        """Number of fresh groups in the next batch."""
        return self.terms.groups_per_batch - self.num_replayable

    @property
    def num_admitted(self) -> int:
        """Number of groups that wait for a batch."""
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

    def oldest(self, group: FateRecord) -> int:
        """Oldest version of this policy's tokens in the group, on the surviving lineage. Tokens
        sampled only by other policies do not age."""
        return self._oldest(group.versions)

    def oldest_versions(self, rows: Iterable[RowSummary]) -> Iterator[int]:
        """Like `oldest`, for each of these rows; few rows differ in their versions."""
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

    def partner_ages(self, row: RowSummary) -> Iterator[tuple[PolicyName, int]]:
        """For each other trained policy that acted in the row: versions from its oldest token to
        its newest published version."""
        for policy, versions in row.versions.items():
            lineage = None if policy == self.terms.policy else self._deps.lineage_of(policy)
            if lineage is not None and lineage.newest is not None and versions:
                newest = lineage.newest
                now = lineage.effective_number(newest.incarnation, newest.number)
                oldest = min(lineage.effective_number(*version) for version in versions)
                yield policy, max(0, now - oldest)

    def count_partners(self, rows: Iterable[RowSummary]) -> None:
        """Count the ages of other policies' tokens in rows that are being sealed."""
        for row in rows:
            for partner, age in self.partner_ages(row):
                self.partner_lags.setdefault(partner, Counter())[age] += 1

    def count_sealed(self, rewards: Iterable[float], ages: Iterable[int]) -> None:
        """Count rows that are being sealed."""
        for reward in rewards:
            self.sealed_rewards.add(reward)
        for age in ages:
            self.sealed_ages.add(age)

    def is_lagging(self, group: FateRecord) -> bool:
        """Whether tokens of another policy in it exceed `max_partner_lag`. Needs its rows."""
        bound = self.terms.max_partner_lag
        if bound is None or self.terms.is_lockstep:
            return False
        return any(age > bound for row in group.rows for _, age in self.partner_ages(row))

    def staleness(self, group: FateRecord) -> int:
        return self.next_number - self.oldest(group)

    def is_stale(self, group: FateRecord) -> bool:
        if self.terms.is_lockstep:
            return False  # one version sampled it, and a rewind recomputes that one
        return self.staleness(group) > self.terms.max_staleness

    def eligible(self, replay: ReplaySpec | None) -> list[FateRecord]:
        """Groups in the pool that a batch sealed now may replay."""
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

    def candidates(self, groups: Iterable[FateRecord]) -> list[FateRecord]:
        """These groups as candidates for a rule, each with its current age."""
        return [replace(group, oldest=self.oldest(group)) for group in groups]

    # --- pacing -------------------------------------------------------------------------------

    def room(self) -> float:
        """Number of groups that may start now; zero or negative means none."""
        if self.missing_stages:
            return 0.0
        terms, levels = self.terms, self.levels()
        return min(
            pacing.room(
                levels,
                fresh=self.num_fresh_needed,
                max_staleness=terms.max_staleness,
                expected_yield=self.expected_yield,
            ),
            pacing.room_to_end(
                levels,
                groups_per_batch=terms.groups_per_batch,
                batches_left=terms.steps - self.lineage.number,
                expected_yield=self.expected_yield,
            ),
        )

    @property
    def has_recent_version(self) -> bool:
        """Would the next batch accept what the newest published version samples?"""
        newest = self.lineage.newest
        if newest is None:
            return False
        number = self.lineage.effective_number(newest.incarnation, newest.number)
        return self.next_number - number <= self.terms.max_staleness

    def due_number(self, num_issued: int) -> int:
        """What the next issued group waits for: in lockstep, the number of batches before its own;
        otherwise the version its batch is expected to train from."""
        if self.terms.is_lockstep:
            return num_issued // self.terms.groups_per_batch
        return pacing.due_number(
            self.levels(),
            committed=self.lineage.number,
            groups_per_batch=self.terms.groups_per_batch,
        )

    def update_num_replayable(self) -> None:
        """Update how many groups of the next batch would come from the pool: the replay ratio, or
        all eligible groups if there are fewer."""
        replay = self._deps.rules.replay(self.terms.policy)
        if replay is not None:
            share = int(replay.ratio * self.terms.groups_per_batch)
            self.num_replayable = min(share, len(self.eligible(replay)))

    def _update_yield(self, *, passed: bool) -> None:
        """Update the expected yield. It survives restarts: without it, the service would start too
        few groups for a while."""
        before = self.expected_yield
        self.expected_yield = pacing.next_yield(before, passed=passed)
        if self.expected_yield != before:
            key = yield_key(self.terms.policy)
            self._deps.journal(MetaRecord(key=key, value=repr(self.expected_yield)))

    # --- admission ----------------------------------------------------------------------------

    def judge(
        self, issued: GroupRecord, ended: GroupEnded, forgotten: Set[RowId], now: float
    ) -> None:
        """Admit or drop an ended group."""
        self.num_arrived += 1
        visible_roles = self._deps.rules.visible_turns(self.terms.policy, ended.rows, now)
        group = with_rows(
            FateRecord(
                consumer=self.terms.policy,
                group_id=issued.group_id,
                task_key=issued.task_key,
                source=issued.source,
                arrival=self.num_arrived,
                number=self.lineage.number,
            ),
            ended.rows,
            visible_roles,
        )
        if ended.dropped is not None or not group.tokens:
            reason = ended.dropped or DropReason.ABSENT
            if reason in (DropReason.FAILED_SLOTS, DropReason.ABSENT):
                self._update_yield(passed=False)
            self.drop(group, reason, "closing", now)
        elif forgotten and any(row.row_id in forgotten for row in group.rows):
            self.drop(group, DropReason.FORGOTTEN, "forget", now)
        elif self.has_trained_all:
            self.drop(group, DropReason.REMAINDER, "end", now)
        elif self.is_stale(group):
            self.drop(group, DropReason.STALE, "staleness", now)
        elif not self.terms.is_lockstep and pacing.is_outpaced(
            self.levels(),
            groups_per_batch=self.terms.groups_per_batch,
            max_staleness=self.terms.max_staleness,
        ):
            self.drop(group, DropReason.OUTPACED, "pacing", now)
        else:
            self._apply_rules(group, ended.rows, visible_roles, now)

    def _apply_rules(
        self,
        group: FateRecord,
        members: Sequence[RowSummary],
        visible_roles: VisibleRoles,
        now: float,
    ) -> None:
        rules, closed = self._deps.rules, ClosedGroup.of(group, visible_roles, members)
        self.parts.add(closed, visible_roles)
        rule, reason = rules.judge(closed, now)
        rules.learn(closed, reason, now)
        rules.save_state()
        self._update_yield(passed=reason is None)
        if reason is None:
            self._admit(group, rule, now)
        else:
            self.drop(group, reason, rule, now)

    def _admit(self, group: FateRecord, rule: str, now: float) -> None:
        waits = bool(self.terms.train_columns)
        group = replace(group, rule=rule, at=now, is_complete=not waits)
        (self.incomplete if waits else self.ready)[group.group_id] = group
        self._deps.journal(group)
        if waits:
            admitted = Admitted(group_id=group.group_id, policy=self.terms.policy)
            self._deps.send(partition_of(group.group_id), admitted)

    def complete(self, message: ColumnsCompleted, now: float) -> None:
        """The columns that the trainer needs are present, or have failed for good."""
        group = self.incomplete.pop(message.group_id, None)
        if group is None:
            return
        visible_roles = self._deps.rules.visible_turns(self.terms.policy, message.rows, now)
        full = with_rows(group, message.rows, visible_roles)
        if message.dropped is not None or not full.tokens:
            self.drop(group, message.dropped or DropReason.COLUMN_FAILED, "columns", now)
            return
        full = replace(full, rule="columns", at=now, is_complete=True)
        self.ready[group.group_id] = full
        self._deps.journal(full)

    # --- fates --------------------------------------------------------------------------------

    def drop(self, group: FateRecord, reason: DropReason, rule: str, now: float) -> None:
        """Drop this group, so that no batch gets it; it need not be among the waiting groups."""
        self.ready.pop(group.group_id, None)
        self.incomplete.pop(group.group_id, None)
        self._deps.waste.add(reason, group.tokens)
        self.parts.drop(group, reason)
        self.starvation.add(group, reason)
        assert FateState.DROPPED in FATE_TRANSITIONS[group.state]
        dropped = replace(group, state=FateState.DROPPED, reason=reason, rule=rule, at=now)
        self._deps.journal(replace(dropped, packed_rows=b"", is_complete=True))
        self._deps.free(self._deps.retention.dropped(group.group_id), now)

    def expire(self, now: float) -> None:
        """Drop groups that exceed max_staleness; called at every report, commit and fork."""
        moment = (self.next_number, self.lineage.incarnation)
        if self._last_expiry_check == moment:
            return  # no cursor moved since the last check, so no group has become stale
        self._last_expiry_check = moment
        for group in [g for g in self._waiting() if self.is_stale(g)]:
            self.drop(group, DropReason.STALE, "staleness", now)

    def drop_remainder(self, now: float) -> None:
        """The policy has trained all its steps: drop the remaining groups."""
        for group in [*self._waiting()]:
            self.drop(group, DropReason.REMAINDER, "end", now)

    def drop_lost(self, partition: int, now: float) -> None:
        """The partition was declared lost: its waiting groups have lost their rows, and its groups
        in the pool cannot be replayed."""
        for group in [g for g in self._waiting() if partition_of(g.group_id) == partition]:
            self.drop(group, DropReason.PARTITION_LOST, "partition", now)
        for group in [g for g in self.pool.values() if partition_of(g.group_id) == partition]:
            self.remove_from_pool(group, now)
        self.update_num_replayable()

    def _waiting(self) -> Iterator[FateRecord]:
        yield from self.ready.values()
        yield from self.incomplete.values()

    def seal(
        self,
        record: BatchRecord,
        fresh: Sequence[FateRecord],
        replayed: Sequence[FateRecord],
        rule: str,
        now: float,
    ) -> None:
        """Put these groups into this batch; `rule` chose the fresh ones."""
        replay = None if self.terms.is_lockstep else self._deps.rules.replay(self.terms.policy)
        self._seal_groups(record.seq, (*fresh, *replayed), replay, rule, now)
        self.sealed[record.seq] = len(fresh)
        self._batch_sealed(record, len(fresh))
        self._trim_pool(replay, now)
        self.update_num_replayable()

    def add_instalment(
        self, record: InstalmentRecord, fresh: Sequence[FateRecord], rule: str, now: float
    ) -> None:
        """Put these groups into the next batch, which stays open for more."""
        self._seal_groups(record.seq, fresh, None, rule, now)
        self.sealed[record.seq] = self.sealed.get(record.seq, 0) + len(fresh)
        self.instalments.append(record)

    def complete_batch(self, record: BatchRecord) -> None:
        """The next batch has its last instalment."""
        self.instalments = []
        self._batch_sealed(record, record.num_groups)

    def _batch_sealed(self, record: BatchRecord, num_fresh: int) -> None:
        self.last_sealed = record.seq
        self.newest_batch = record
        self.starvation = self.starvation.reset_after_batch(num_fresh, self.expected_yield)

    def _seal_groups(
        self,
        seq: int,
        groups: Sequence[FateRecord],
        replay: ReplaySpec | None,
        rule: str,
        now: float,
    ) -> None:
        policy, retention = self.terms.policy, self._deps.retention
        retention.sealed(policy, seq, [group.group_id for group in groups])
        for group in groups:
            assert FateState.SEALED in FATE_TRANSITIONS[group.state]
            self.ready.pop(group.group_id, None)
            sealed = replace(
                group,
                state=FateState.SEALED,
                rule="replay" if group.uses else rule,
                at=now,
                seq=seq,
                uses=group.uses + 1,
            )
            keeps = replay is not None and sealed.uses < replay.max_uses
            if keeps and group.group_id not in self.pool:
                retention.pooled(group.group_id, policy)
            if keeps or group.group_id in self.pool:
                self.pool[group.group_id] = sealed
            self._deps.journal(sealed if keeps else replace(sealed, packed_rows=b""))

    def _trim_pool(self, replay: ReplaySpec | None, now: float) -> None:
        """Remove groups that can never be replayed, and the oldest beyond POOL_GROUPS."""
        if replay is None:
            return
        bound = replay.max_staleness
        if bound is None:
            bound = self.terms.max_staleness
        leaving = [
            group
            for group in self.pool.values()
            if group.uses >= replay.max_uses or self.staleness(group) > bound
        ]
        staying = len(self.pool) - len(leaving)
        gone: set[GroupId] = {group.group_id for group in leaving}
        spare = (group for group in self.pool.values() if group.group_id not in gone)
        leaving += [next(spare) for _ in range(max(0, staying - POOL_GROUPS))]
        for group in leaving:
            self.remove_from_pool(group, now)

    def remove_from_pool(self, group: FateRecord, now: float) -> None:
        del self.pool[group.group_id]
        self._deps.journal(replace(group, rule="replay", at=now, packed_rows=b""))
        self._deps.free(self._deps.retention.unpooled(group.group_id, self.terms.policy), now)

    def cursor_moved(self, num_groups: Mapping[int, int], now: float) -> None:
        """The committed cursor moved: forward by a commit, or back by a fork."""
        policy, seq = self.terms.policy, self.lineage.seq
        self.sealed = {sealed: n for sealed, n in num_groups.items() if sealed > seq}
        self.expire(now)
        self._deps.free(self._deps.retention.committed(policy, seq), now)
        if self.has_trained_all:
            self.drop_remainder(now)
        self.update_num_replayable()


def yield_key(policy: PolicyName) -> str:
    """The key in `meta` for the share of groups that a policy's rules admit."""
    return f"yield/{policy}"
