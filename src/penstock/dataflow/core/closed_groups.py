# SPDX-License-Identifier: Apache-2.0
"""A closed group as one policy sees it: its rows, what rules judge, and counts by source and role.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from penstock.bounds import MAX_SHOWN_ROLES, OTHER_ROLES
from penstock.dataflow.records import FateRecord
from penstock.types import DropReason, GroupId, PolicyName, RowSummary

VisibleRoles = Collection[tuple[PolicyName, str]] | None
"""The (policy, role) pairs whose turns a trainer sees; None: all of its policy."""


def trained_rows(
    policy: PolicyName, members: Sequence[RowSummary], visible_roles: VisibleRoles
) -> list[RowSummary]:
    """Those that the policy's trainer sees tokens of."""
    return [row for row in members if row.tokens_for(policy, visible_roles) > 0]


def with_rows(
    group: FateRecord,
    members: Sequence[RowSummary],
    visible_roles: VisibleRoles = None,
) -> FateRecord:
    """The group with the members that the policy's trainer sees."""
    policy = group.consumer
    rows = trained_rows(policy, members, visible_roles)
    return replace(
        group,
        tokens=sum([row.tokens_for(policy, visible_roles) for row in rows]),
        rewards=tuple(
            row.reward_for(policy, visible_roles) for row in rows if row.reward is not None
        ),
        versions=tuple(sorted({v for row in rows for v in row.versions.get(policy, ())})),
        packed_rows=msgspec.msgpack.encode(rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedGroup:
    """A group as rules judge it and learn from it, for one policy: a JudgedGroup."""

    group_id: GroupId
    task_key: str
    source: str
    policy: PolicyName
    number: int
    rows: tuple[RowSummary, ...]
    rewards: tuple[float, ...]
    role_rewards: Mapping[str, Sequence[float]]

    @classmethod
    def of(
        cls,
        group: FateRecord,
        visible_roles: VisibleRoles,
        members: Sequence[RowSummary] | None = None,
    ) -> ClosedGroup:
        """members: rows that the group was made of; None: read them from it."""
        rows = (
            group.rows
            if members is None
            else tuple(trained_rows(group.consumer, members, visible_roles))
        )
        by_role: dict[str, list[float]] = {}
        for row in rows:
            if row.reward is None:
                continue
            if visible_roles is None and not row.roles and not row.values:  # most rows
                by_role.setdefault("", []).append(row.reward)
                continue
            for role, reward in row.role_rewards(group.consumer, visible_roles).items():
                by_role.setdefault(role, []).append(reward)
        return cls(
            group_id=group.group_id,
            task_key=group.task_key,
            source=group.source,
            policy=group.consumer,
            number=group.number,
            rows=rows,
            rewards=group.rewards,
            role_rewards=by_role,
        )


@dataclass(slots=True, kw_only=True)
class PartCount:
    """What one role of a policy did in the groups of one source."""

    groups: int = 0
    """Groups that rules judged."""
    dropped: Counter[str] = field(default_factory=Counter[str])
    """Groups that were dropped, by reason, those without a rule's verdict included."""
    rows: int = 0
    tokens: int = 0
    reward_sum: float = 0.0


class PartCounts:
    """Counts of one policy by source and role, of at most MAX_SHOWN_ROLES pairs: a node may name
    any role. Kept in memory only; reset on restart."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], PartCount] = {}

    def add(self, group: ClosedGroup, visible_roles: VisibleRoles) -> None:
        """Count a group that rules judge."""
        for role in group.role_rewards:
            self._part(group.source, role).groups += 1
        for row in group.rows:
            if visible_roles is None and not row.roles and not row.values:  # most rows
                part = self._part(group.source, "")
                part.rows += 1
                part.tokens += row.sampled[group.policy]
                part.reward_sum += row.score
                continue
            for pair, tokens in row.parts:
                if pair[0] == group.policy if visible_roles is None else pair in visible_roles:
                    part = self._part(group.source, pair[1])
                    part.rows += 1
                    part.tokens += tokens
                    part.reward_sum += row.role_reward(pair[1])

    def drop(self, group: FateRecord, reason: DropReason) -> None:
        """Count a dropped group for each role of the policy in it."""
        if reason is DropReason.ABSENT:
            return
        pairs = {pair for row in group.rows for pair, _ in row.parts}
        for role in {role for policy, role in pairs if policy == group.consumer} or {""}:
            self._part(group.source, role).dropped[reason] += 1

    def _part(self, source: str, role: str) -> PartCount:
        key = (source, role)
        if key not in self.counts and len(self.counts) >= MAX_SHOWN_ROLES:
            key = (source, OTHER_ROLES)
        found = self.counts.get(key)
        if found is None:
            found = self.counts[key] = PartCount()
        return found
