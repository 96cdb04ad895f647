# SPDX-License-Identifier: Apache-2.0
"""A policy's incarnations: which commits survive restarts, and each version's effective number.

Each incarnation forks from the previous one; commits after the fork are abandoned. Reconstructed
from forks, commits and versions only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from penstock.audit.evidence import Evidence
from penstock.audit.records import Commit, Fork, Version, VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The history of one policy."""

    policy: str
    forks: dict[int, Fork]
    """By incarnation, in order."""
    commits: dict[int, list[Commit]]
    """By incarnation, in order of seq."""
    versions: dict[VersionId, Version]
    """By (incarnation, number), in that order."""
    bitwise_replays: list[Version]
    """Versions reproduced bit for bit after a fork, without a gap, in the same order."""

    @property
    def surviving(self) -> list[Commit]:
        """Commits of the current incarnation and its ancestors, in order of seq."""
        return self.chain(max(self.forks, default=0))

    def chain(self, incarnation: int) -> list[Commit]:
        """Commits of this incarnation and its ancestors up to each fork. An intact ledger has each
        seq once."""
        limit: float = float("inf")
        found: list[Commit] = []
        for incarnation_id in sorted((i for i in self.forks if i <= incarnation), reverse=True):
            found += [
                commit for commit in self.commits.get(incarnation_id, []) if commit.seq <= limit
            ]
            limit = min(limit, self.forks[incarnation_id].seq)
        return sorted(found, key=lambda commit: commit.seq)

    def matches_up_to(self, at: float) -> dict[int, int]:
        """By incarnation, the number up to which it equals the previous one, as known at this time:
        its fork, or higher if later versions were reproduced bit for bit."""
        found = {incarnation_id: fork.number for incarnation_id, fork in self.forks.items()}
        for version in self.bitwise_replays:
            if version.at <= at:
                found[version.incarnation] = version.number
        return found

    def effective_with_replays(
        self, version: VersionId, incarnation: int, at: float, matches_up_to: dict[int, int]
    ) -> int:
        """Effective number of this version for that incarnation at this time, in a deterministic
        run: a version that any later incarnation reproduced is the same version."""
        incarnation_id, number = version
        effective = effective_number(version, incarnation, matches_up_to)
        original = self.versions.get(version)
        for later in self.forks:
            if not incarnation_id < later <= incarnation:
                continue
            replay = self.versions.get((later, number))
            if effective == number or original is None or replay is None or replay.at > at:
                continue
            if replay.weights_digest == original.weights_digest:
                replayed = effective_number((later, number), incarnation, matches_up_to)
                effective = max(effective, replayed)
        return effective


def effective_number(version: VersionId, incarnation: int, matches_up_to: dict[int, int]) -> int:
    """Effective number of this version for that incarnation: limited by every fork in between."""
    incarnation_id, number = version
    later = [at for fork, at in matches_up_to.items() if incarnation_id < fork <= incarnation]
    return min([number, *later])


def read_lineages(evidence: Evidence) -> dict[str, Lineage]:
    """By policy: all in the config, and any other in the ledger."""
    names = dict.fromkeys(
        [
            *evidence.config.models,
            *(fork.policy for fork in evidence.coordinator.forks),
            *(commit.consumer for commit in evidence.coordinator.commits),
            *(version.policy for version in evidence.coordinator.versions),
            *(batch.consumer for batch in evidence.tables.batches),
        ]
    )
    return {name: _read_lineage(evidence, name) for name in names}


def _read_lineage(evidence: Evidence, policy: str) -> Lineage:
    commits: defaultdict[int, list[Commit]] = defaultdict(list)
    for commit in evidence.coordinator.commits:
        if commit.consumer == policy:
            commits[commit.incarnation].append(commit)
    forks = {fork.incarnation: fork for fork in evidence.coordinator.forks if fork.policy == policy}
    versions = {
        (version.incarnation, version.number): version
        for version in evidence.coordinator.versions
        if version.policy == policy
    }
    return Lineage(
        policy=policy,
        forks=forks,
        commits=dict(commits),
        versions=versions,
        bitwise_replays=_replays(forks, versions),
    )


def _replays(forks: dict[int, Fork], versions: dict[VersionId, Version]) -> list[Version]:
    found: list[Version] = []
    reached = {incarnation_id: fork.number for incarnation_id, fork in forks.items()}
    for (incarnation_id, number), version in versions.items():
        predecessor = versions.get((incarnation_id - 1, number))
        if predecessor is None or number != reached.get(incarnation_id, number) + 1:
            continue
        if predecessor.weights_digest == version.weights_digest:
            reached[incarnation_id] = number
            found.append(version)
    return found
