# SPDX-License-Identifier: Apache-2.0
"""Checks of training: nothing is trained twice along the surviving lineage, and every version has a
commit. Also the summary of a run."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from penstock.audit.evidence import Evidence
from penstock.audit.lineage import Lineage
from penstock.audit.records import Commit, Fork, ManifestRow, Version
from penstock.audit.report import Check, Summary, Violations
from penstock.durable import read_regular

MAX_MANIFEST_BYTES = 256 << 20

NUM_FIRST = 2
NUM_LAST = 5


def check_trained_twice(evidence: Evidence, lineages: dict[str, Lineage]) -> Check:
    """Along the surviving lineage, each batch is committed once and in order, and no row is trained
    more often than once, or than its replay rule allows."""
    violations = Violations("trained_twice")
    for policy, lineage in lineages.items():
        for where, why in _order_faults(lineage):
            violations.add(where, why)
        allowed = evidence.config.max_uses(policy)
        for row_id, times in _times_trained(evidence, lineage).items():
            if times > allowed:
                violations.add(row_id, f"trained {times} times by {policy}")
    return violations.result(sum(len(lineage.surviving) for lineage in lineages.values()))


def _order_faults(lineage: Lineage) -> Iterator[tuple[str, str]]:
    for expected, fork in enumerate(lineage.forks.values(), start=1):
        where = f"{lineage.policy}@{fork.incarnation}"
        if fork.incarnation != expected:
            yield where, f"incarnation {fork.incarnation} found where {expected} is expected"
        before = {c.seq: c.number for c in lineage.chain(fork.incarnation - 1)} | {0: 0}
        if before.get(fork.seq) != fork.number:
            yield where, f"starts from batch {fork.seq}, number {fork.number}: never committed"
        yield from _incarnation_faults(fork, lineage.commits.get(fork.incarnation, []))
    for incarnation in lineage.commits.keys() - lineage.forks.keys():
        yield f"{lineage.policy}@{incarnation}", "has commits but was never allocated"


def _incarnation_faults(fork: Fork, commits: list[Commit]) -> Iterator[tuple[str, str]]:
    """Within one incarnation, batches are consecutive, and numbers count the trained ones."""
    seq, number = fork.seq, fork.number
    for commit in commits:
        where = f"{fork.policy}.{commit.seq}"
        if commit.seq != seq + 1:
            yield where, f"committed by incarnation {fork.incarnation} after batch {seq}"
        expected = number if commit.skipped else number + 1
        if commit.number != expected:
            kind = "skipped" if commit.skipped else "trained"
            yield where, f"{kind} after number {number} but committed as number {commit.number}"
        seq, number = commit.seq, commit.number


def _times_trained(evidence: Evidence, lineage: Lineage) -> Counter[str]:
    """Number of surviving commits that trained each row."""
    times: Counter[str] = Counter()
    for commit in _trained(lineage):
        times.update(member.row_id for member in _members(evidence, commit))
    return times


def _trained(lineage: Lineage) -> list[Commit]:
    return [commit for commit in lineage.surviving if not commit.skipped]


def _members(evidence: Evidence, commit: Commit) -> Iterable[ManifestRow]:
    manifest = evidence.manifests.get(f"{commit.consumer}.{commit.seq}")
    groups = () if manifest is None else manifest.groups
    return [member for group in groups for member in group.rows]


def check_versions(evidence: Evidence, lineages: dict[str, Lineage]) -> Check:
    """Each published version was committed or is a restore point, and its manifest is in the store
    while it may be needed."""
    violations = Violations("versions")
    needed = _versions_to_keep(evidence)
    manifests = evidence.weights / "manifests"
    proved: dict[tuple[str, int, str, bool], str] = {}
    for version in evidence.coordinator.versions:
        lineage = lineages[version.policy]
        fork = lineage.forks.get(version.incarnation)
        committed = {c.number for c in lineage.commits.get(version.incarnation, [])}
        if fork is None or version.number not in committed | {fork.number}:
            violations.add(version.name, "published but neither committed nor a restore point")
        if manifests.is_dir():
            is_needed = version.name in needed
            content = (version.policy, version.number, version.manifest_digest, is_needed)
            if content not in proved:  # a replay publishes the same bytes again
                proved[content] = _manifest_fault(manifests, version, is_needed=is_needed)
            if why := proved[content]:
                violations.add(version.name, why)
    return violations.result(len(evidence.coordinator.versions))


def _versions_to_keep(evidence: Evidence) -> set[str]:
    """The two newest versions of each policy, and all whose rows may be trained again after a
    restart."""
    checkpoints = {one.policy: json.loads(one.retained) for one in evidence.tables.checkpoints}
    needed: set[str] = set()
    for policy in {version.policy for version in evidence.coordinator.versions}:
        mine = [version for version in evidence.coordinator.versions if version.policy == policy]
        mine.sort(key=lambda version: (version.incarnation, version.number))
        oldest = min((number for number, _ in checkpoints.get(policy) or [(0, 0)]), default=0)
        floor = oldest - evidence.config.max_fresh_staleness(policy)
        needed |= {version.name for version in mine[-2:]}
        needed |= {version.name for version in mine if version.number >= floor}
    return needed


def _manifest_fault(folder: Path, version: Version, *, is_needed: bool) -> str:
    digest = version.manifest_digest
    if len(digest) != 64 or not digest.isalnum():
        return f"{digest[:80]!r} is not a digest"
    try:
        data = read_regular(folder / f"{digest}.json", MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return f"its manifest {digest} is missing but still needed" if is_needed else ""
    except OSError as error:
        return f"its manifest {digest} cannot be read: {error.strerror}"
    if blake3(data).hexdigest() != digest:
        return f"the bytes of its manifest {digest} do not match the digest"
    try:
        written: Any = json.loads(data)
        found = (written["policy"], written["number"], written["weights_digest"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"its manifest {digest} cannot be parsed"
    if found != (version.policy, version.number, version.weights_digest):
        return f"its manifest {digest} belongs to {found[0]} number {found[1]}"
    return ""


def summarise(evidence: Evidence, lineages: dict[str, Lineage], lost: Check) -> Summary:
    trained = {
        name: _trained(lineage)
        for name, lineage in lineages.items()
        if not evidence.config.is_frozen(name)
    }
    twice = 0
    for policy, lineage in lineages.items():
        allowed = evidence.config.max_uses(policy)
        times = _times_trained(evidence, lineage).values()
        twice += sum(int(found - allowed) for found in times if found > allowed)
    return Summary(
        reward_first=_reward(evidence, [c for all_ in trained.values() for c in all_[:NUM_FIRST]]),
        reward_last=_reward(evidence, [c for all_ in trained.values() for c in all_[-NUM_LAST:]]),
        steps=min((len(found) for found in trained.values()), default=0),
        trajectories=len(evidence.rows),
        lost=lost.num_violations,
        trained_twice=twice,
    )


def _reward(evidence: Evidence, commits: Iterable[Commit]) -> float | None:
    """Mean over all rows of these batches; for rows of a lost partition, from the manifest."""
    rewards: list[float] = []
    for member in (member for c in commits for member in _members(evidence, c)):
        row = evidence.rows.get(member.row_id)
        if row is not None:
            reward = evidence.reward(row)
        else:
            reward = member.reward if evidence.is_exempt(member.row_id.partition(".")[0]) else None
        if reward is not None:
            rewards.append(reward)
    return math.fsum(rewards) / len(rewards) if rewards else None
