# SPDX-License-Identifier: Apache-2.0
"""Decides whether a node's loaded versions are recent enough to lease a group, so that
max_staleness is enforced before work starts.

A partition calls it at each lease and each time a policy advances. It knows lineages and limits,
but not groups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.dataflow.core import pacing
from penstock.dataflow.core.leasing import LiveVersion
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import VersionRecord
from penstock.types import PolicyName, PublishedVersion, RowSummary


@dataclass(slots=True)
class VersionGate:
    lineages: Mapping[PolicyName, Lineage]
    max_staleness: Mapping[PolicyName, int]
    """Of the policies in training; a frozen one has a lineage only."""
    horizon: dict[PolicyName, int] = field(default_factory=dict[PolicyName, int])
    """Number that the next unsealed batch trains from; the committed number until the coordinator
    sends a newer one."""
    is_lockstep: bool = False
    """Each group is sampled by exactly one version, `max_staleness` batches behind its own
    batch."""
    _newest: tuple[VersionRecord, ...] = ()
    _targets: tuple[PublishedVersion, ...] = ()
    """Built from `_newest`."""

    def known(self, versions: Sequence[LiveVersion]) -> tuple[LiveVersion, ...]:
        """What a node says it serves, of the policies of the run: the last version of each. A node
        may name anything."""
        last = {one.policy: one for one in versions if one.policy in self.lineages}
        return tuple(last.values())

    def can_lease(
        self,
        due: Mapping[str, int],
        live: Sequence[LiveVersion],
        policies: Collection[PolicyName] = (),
    ) -> bool:
        """Are a node's live versions recent enough for a group with these due numbers?

        policies: those that the group calls; empty: all. Each must be live, and one that is trained
        on the group recent. A policy that has not published its committed version makes a node wait
        only if no other policy could use the group, because its trainer may never come back.
        """
        held = {version.policy: version for version in live}
        if self.is_lockstep:
            return all(
                (version := held.get(policy)) is not None
                and lineage.has(version.incarnation, version.number)
                and version.number == self._due_number(policy, due)
                for policy, lineage in self.lineages.items()
            )
        is_useful = False
        for policy in policies or self.lineages:
            lineage, version = self.lineages[policy], held.get(policy)
            newest = lineage.newest
            if version is None or newest is None:
                return False
            if not lineage.has(version.incarnation, version.number):
                return False
            if policy not in due or policy not in self.max_staleness:
                continue  # frozen, or added after the group was issued
            needed = pacing.oldest_useful(
                due[policy],
                committed=lineage.number,
                max_staleness=self.max_staleness[policy],
            )
            serves = lineage.effective_number(version.incarnation, version.number)
            if serves >= needed:
                is_useful = True
            elif serves < lineage.effective_number(newest.incarnation, newest.number):
                return False  # it can load a newer version
        return is_useful

    def target_versions(self, oldest_due: Mapping[str, int] | None) -> tuple[PublishedVersion, ...]:
        """The versions nodes should load. oldest_due: due numbers of the oldest open group, None if
        no group is open; only read in lockstep."""
        found = self._in_lockstep(oldest_due) if self.is_lockstep else self._newest_of_all()
        newest = tuple(version for version in found if version is not None)
        if newest != self._newest:  # called at every command, so cached
            self._newest = newest
            self._targets = tuple(map(_published, newest))
        return self._targets

    def published(self, pins: Mapping[PolicyName, tuple[int, int]]) -> tuple[PublishedVersion, ...]:
        """These versions, given as (incarnation, number) by policy."""
        found = [self.lineages[policy].version(*pin) for policy, pin in pins.items()]
        return tuple(_published(version) for version in found if version is not None)

    def _newest_of_all(self) -> Iterator[VersionRecord | None]:
        yield from (lineage.newest for lineage in self.lineages.values())

    def _in_lockstep(self, due: Mapping[str, int] | None) -> Iterator[VersionRecord | None]:
        """The version that the oldest open group needs; the previous answer until that version is
        committed."""
        before = {version.policy: version for version in self._newest}
        for policy, lineage in self.lineages.items():
            number = lineage.number if due is None else self._due_number(policy, due)
            found = None if number is None else lineage.first_version(number)
            yield found or before.get(policy)

    def _due_number(self, policy: PolicyName, due: Mapping[str, int]) -> int | None:
        seq = max(0, due[policy] - self.max_staleness[policy])
        return self.lineages[policy].number_after(seq)

    def is_published(self, policy: PolicyName, incarnation: int, number: int) -> bool:
        lineage = self.lineages.get(policy)
        return lineage is not None and lineage.has(incarnation, number)

    def batches_left(
        self, rows: Sequence[RowSummary], policies: Collection[PolicyName] = ()
    ) -> int:
        """Batches that rows of this age can still wait for, for the policy that can wait longest of
        those that their group calls; empty: all.

        0: the next batch is their last; below 0: no policy can use them anymore.
        """
        if self.is_lockstep:
            return max(self.max_staleness.values(), default=0) + 1
        trained = [p for p in policies or self.lineages if p in self.max_staleness]
        return max((self._slack(policy, rows) for policy in trained), default=0)

    def _slack(self, policy: PolicyName, rows: Sequence[RowSummary]) -> int:
        lineage = self.lineages[policy]
        numbers = [
            lineage.effective_number(*version)
            for row in rows
            for version in row.versions.get(policy, ())
        ]
        if not numbers:
            return self.max_staleness[policy]
        horizon = max(self.horizon.get(policy, 0), lineage.number)
        return min(numbers) + self.max_staleness[policy] - horizon


def _published(version: VersionRecord) -> PublishedVersion:
    return PublishedVersion(
        policy=version.policy,
        incarnation=version.incarnation,
        number=version.number,
        manifest_digest=version.manifest_digest,
    )
