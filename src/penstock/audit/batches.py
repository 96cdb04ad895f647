# SPDX-License-Identifier: Apache-2.0
"""Checks of sealed batches: their content is intact, was admitted, and is not too stale."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from blake3 import blake3

from penstock.audit.config import REWARD
from penstock.audit.evidence import Evidence
from penstock.audit.lineage import Lineage, effective_number
from penstock.audit.records import (
    SCORED,
    Batch,
    Manifest,
    ManifestGroup,
    ManifestRow,
    Row,
    VersionId,
    decode_json,
)
from penstock.audit.report import Check, Violations

Counts = dict[str, int]
TOLERANCE = 1e-9
"""Tolerance for means of the same numbers, summed in another order."""


def check_batches(evidence: Evidence) -> Check:
    """Batches are numbered 1, 2, 3, …; each manifest is intact and has exactly its groups' rows."""
    violations = Violations("batches")
    sealed = _sealed_groups(evidence)
    members = _RowChecker(evidence)
    uses: Counter[tuple[str, str]] = Counter()
    expected: defaultdict[str, int] = defaultdict(lambda: 1)
    for batch in evidence.tables.batches:
        if batch.seq != expected[batch.consumer]:
            violations.add(batch.name, f"found where batch {expected[batch.consumer]} is expected")
        expected[batch.consumer] = batch.seq + 1
        if blake3(batch.manifest).hexdigest() != batch.digest:
            violations.add(batch.name, "its manifest does not match the digest in the ledger")
        manifest = evidence.manifests.get(batch.name)
        if manifest is None:
            violations.add(batch.name, "its manifest cannot be read")
            continue
        named = {group.group_id for group in manifest.groups}
        max_uses = evidence.config.max_uses(batch.consumer)
        violations.extend(batch.name, _batch_faults(batch, manifest))
        violations.extend(
            batch.name, _fate_faults(manifest, sealed[batch.consumer], is_replayed=max_uses > 1)
        )
        for group in manifest.groups:
            violations.extend(f"{batch.name} {group.group_id}", members.faults(manifest, group))
        for group_id in named:
            uses[batch.consumer, group_id] += 1
            if uses[batch.consumer, group_id] > max_uses:
                violations.add(f"{batch.name} {group_id}", f"used in more than {max_uses} batches")
    known = {(batch.consumer, batch.seq) for batch in evidence.tables.batches}
    for commit in evidence.coordinator.commits:
        if (commit.consumer, commit.seq) not in known:
            violations.add(f"{commit.consumer}.{commit.seq}", "committed but never sealed")
    return violations.result(len(evidence.tables.batches))


def _sealed_groups(evidence: Evidence) -> defaultdict[str, dict[str, int]]:
    """By consumer: the batch that each group was sealed into, the last one if there are several."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for fate in evidence.coordinator.fates:
        if fate.state == "sealed":
            found[fate.consumer][fate.group_id] = fate.seq
    return found


def _fate_faults(manifest: Manifest, sealed: dict[str, int], *, is_replayed: bool) -> Iterable[str]:
    named = {group.group_id for group in manifest.groups}
    expected = {group_id for group_id, seq in sealed.items() if seq == manifest.seq}
    mismatched = expected - named
    for group_id in named - expected:
        if not (is_replayed and sealed.get(group_id, 0) > manifest.seq):
            mismatched.add(group_id)
    if mismatched:
        names = ", ".join(sorted(mismatched)[:3])
        yield f"its manifest and the recorded fates of groups disagree on {names}"


def _batch_faults(batch: Batch, manifest: Manifest) -> Iterable[str]:
    written = (manifest.consumer, manifest.seq, manifest.trains_from)
    if written != (batch.consumer, batch.seq, batch.trains_from):
        yield f"its manifest has (consumer, seq, trains_from) = {written}"
    groups = [group.group_id for group in manifest.groups]
    rows = [row for group in manifest.groups for row in group.rows]
    if (len(groups), len(rows)) != (batch.num_groups, batch.num_rows):
        expected = f"{batch.num_groups} of {batch.num_rows}"
        yield f"its manifest has {len(groups)} groups of {len(rows)} rows, expected {expected}"
    if len(set(groups)) != len(groups) or len({row.row_id for row in rows}) != len(rows):
        yield "its manifest has a duplicate group or row"
    if rows:
        mean = math.fsum(_consumer_reward(row, manifest) for row in rows) / len(rows)
        if not math.isclose(mean, batch.reward_mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"recorded mean reward is {batch.reward_mean}, but its rows have {mean}"


def _consumer_reward(member: ManifestRow, manifest: Manifest) -> float:
    """The mean over the roles that its consumer trains in this row, each with its own reward or the
    row's."""
    consumer, visible_roles = manifest.consumer, manifest.visible_roles
    roles = [
        role
        for policy, tokens in member.sampled.items()
        for role in member.roles.get(policy, {"": tokens})
        if (policy == consumer if visible_roles is None else (policy, role) in visible_roles)
    ]
    rewards = [member.values.get(f"reward.{role}", member.reward) for role in roles]
    return math.fsum(rewards) / len(rewards) if rewards else member.reward


class _RowChecker:
    """Compares the rows of a manifest with the ledger."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._by_group: defaultdict[str, list[Row]] = defaultdict(list)
        for row in evidence.rows.values():
            self._by_group[row.group_id].append(row)

    def faults(self, manifest: Manifest, group: ManifestGroup) -> Iterable[str]:
        known = self._evidence.coordinator.issued.get(group.group_id)
        if known is None or known.task_key != group.task_key:
            yield "its task differs from the issued one"
        if self._evidence.is_exempt(group.group_id):
            return  # its rows were lost with their partition
        expected = {
            row.row_id
            for row in self._by_group[group.group_id]
            if self._is_complete(row) and self._is_seen(row, manifest)
        }
        if mismatched := sorted(expected.symmetric_difference(row.row_id for row in group.rows)):
            yield f"ledger and manifest disagree on rows {', '.join(mismatched[:3])}"
        for member in group.rows:
            row = self._evidence.rows.get(member.row_id)
            if row is not None and (wrong := self._member_fault(member, row)):
                yield f"{member.row_id}: {wrong}"

    def _is_seen(self, row: Row, manifest: Manifest) -> bool:
        """Whether it has a token that this batch trains."""
        sampled = decode_json(row.sampled, Counts) or {}
        if manifest.visible_roles is None:
            return sampled.get(manifest.consumer, 0) > 0
        roles = decode_json(row.roles or "{}", dict[str, Counts]) or {}
        return any(
            tokens > 0 and (policy, role) in manifest.visible_roles
            for policy, count in sampled.items()
            for role, tokens in roles.get(policy, {"": count}).items()
        )

    def _is_complete(self, row: Row) -> bool:
        """Whether it is scored and has every required column."""
        if row.outcome not in SCORED:
            return False
        columns = self._evidence.columns.get(row.row_id, {})
        required_columns = self._evidence.config.required_columns
        if row.reward is not None:  # it came with the row; a stage scores only those without
            required_columns -= {REWARD}
        return all(name in columns and not columns[name].failed for name in required_columns)

    def _member_fault(self, member: ManifestRow, row: Row) -> str:
        if (member.reward, member.outcome) != (self._evidence.reward(row), row.outcome):
            return f"sealed as {member.outcome}, reward {member.reward}, but the row differs"
        if member.sampled != decode_json(row.sampled, Counts):
            return f"sealed with tokens {member.sampled}, but the row has {row.sampled}"
        if member.versions != decode_json(row.versions, dict[str, list[VersionId]]):
            return f"sealed with versions {member.versions}, but the row has {row.versions}"
        if member.roles != decode_json(row.roles or "{}", dict[str, Counts]):
            return f"sealed with roles {member.roles}, but the row has {row.roles}"
        if member.compute_cost != decode_json(row.compute_cost or "{}", dict[str, tuple[int, int]]):
            return f"sealed with cost {member.compute_cost}, but the row has {row.compute_cost}"
        delivered = decode_json(row.values or "{}", dict[str, float]) or {}
        if any(member.values.get(name) != value for name, value in delivered.items()):
            return f"sealed with rewards {member.values}, but the row has {row.values}"
        # Another check reports damaged rows; their digest proves nothing here.
        if member.digest != row.digest and not self._evidence.contents[row.row_id].damage:
            return "sealed with another digest than the row has"
        return self._column_fault(member)

    def _column_fault(self, member: ManifestRow) -> str:
        """Compare the columns of a complete row with its manifest."""
        columns = self._evidence.columns.get(member.row_id, {})
        for name in sorted(self._evidence.config.required_columns - {REWARD}):
            column = columns.get(name)
            if column is None or column.failed:
                continue  # then it should not be a member, which `faults` reports
            sealed = member.columns.get(name) if column.value is None else member.values.get(name)
            if sealed != (column.digest if column.value is None else column.value):
                return f"sealed with another value of column {name} than the row has"
        return ""


def check_staleness(evidence: Evidence, lineages: dict[str, Lineage]) -> Check:
    """Every row was within its staleness bound at sealing, recomputed from its tokens' versions."""
    violations = Violations("staleness")
    for batch in evidence.tables.batches:
        manifest = evidence.manifests.get(batch.name)
        lineage = lineages[batch.consumer]
        if manifest is None:
            continue
        if batch.incarnation not in lineage.forks:
            violations.add(
                batch.name, f"sealed for incarnation {batch.incarnation}, which does not exist"
            )
            continue
        if batch.trains_from not in _possible_numbers(lineage, batch):
            violations.add(
                batch.name, f"trains from {batch.trains_from}, which no earlier commit leads to"
            )
        stalenesses, is_complete = _stalenesses(evidence, lineage, batch, manifest)
        bound = evidence.config.max_staleness(batch.consumer)
        violations.extend(batch.name, _staleness_faults(batch, stalenesses, bound, is_complete))
    return violations.result(len(evidence.tables.batches))


def _possible_numbers(lineage: Lineage, batch: Batch) -> set[int]:
    """Possible numbers of the version before this batch: for each commit that may have been the
    last one at sealing, assuming that every batch in between is trained."""
    fork = lineage.forks[batch.incarnation]
    numbers = {fork.seq: fork.number}
    numbers.update((c.seq, c.number) for c in lineage.commits.get(batch.incarnation, []))
    return {number + batch.seq - 1 - seq for seq, number in numbers.items() if seq <= batch.seq - 1}


def _stalenesses(
    evidence: Evidence, lineage: Lineage, batch: Batch, manifest: Manifest
) -> tuple[list[int], bool]:
    """Staleness of each row when it was sealed, and whether it could be computed for all rows."""
    stalenesses: list[int] = []
    is_complete = True
    for sealing in _sealings(evidence, batch, manifest):
        found, all_found = _stalenesses_at(evidence, lineage, batch, manifest, sealing)
        stalenesses += found
        is_complete = is_complete and all_found
    return stalenesses, is_complete


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sealing:
    """When some groups of a batch became final: all of them, or one instalment's."""

    incarnation: int
    at: float
    groups: Sequence[ManifestGroup]


def _sealings(evidence: Evidence, batch: Batch, manifest: Manifest) -> list[_Sealing]:
    instalments = evidence.instalments.get(batch.name)
    if not instalments:
        at_once = _Sealing(
            incarnation=batch.incarnation, at=batch.sealed_at, groups=manifest.groups
        )
        return [at_once]
    ends = [*accumulate(one.num_groups for one in instalments)]
    return [
        _Sealing(
            incarnation=one.incarnation,
            at=one.sealed_at,
            groups=manifest.groups[end - one.num_groups : end],
        )
        for one, end in zip(instalments, ends, strict=True)
    ]


def _stalenesses_at(
    evidence: Evidence, lineage: Lineage, batch: Batch, manifest: Manifest, sealing: _Sealing
) -> tuple[list[int], bool]:
    matches_up_to = lineage.matches_up_to(sealing.at)
    effective_numbers: dict[VersionId, int] = {}
    stalenesses: list[int] = []
    is_complete = True
    for group in sealing.groups:
        for member in group.rows:
            if manifest.visible_roles is not None and batch.consumer not in member.versions:
                stalenesses.append(0)  # tokens of other policies do not become stale
                continue
            found = _versions(evidence, batch.consumer, group.group_id, member)
            for version in found:
                if version not in effective_numbers and version in lineage.versions:
                    effective_numbers[version] = (
                        lineage.effective_with_replays(
                            version, sealing.incarnation, sealing.at, matches_up_to
                        )
                        if evidence.config.deterministic
                        else effective_number(version, sealing.incarnation, matches_up_to)
                    )
            known = [
                effective_numbers[version] for version in found if version in effective_numbers
            ]
            is_complete = is_complete and len(known) == len(found) > 0
            if known:
                stalenesses.append(batch.trains_from - min(known))
    return stalenesses, is_complete


def _versions(
    evidence: Evidence, consumer: str, group_id: str, member: ManifestRow
) -> Sequence[VersionId]:
    """Versions that sampled its tokens: from its payload; from the row record if the payload was
    freed; from the manifest if its partition is lost."""
    content = evidence.contents.get(member.row_id)
    if content is None:
        is_exempt = evidence.is_exempt(group_id)
        return member.versions.get(consumer, ()) if is_exempt else ()
    if not content.is_freed:
        return content.trainable.get(consumer, ())
    kept = decode_json(evidence.rows[member.row_id].versions, dict[str, list[VersionId]])
    return () if kept is None else kept.get(consumer, ())


def _staleness_faults(
    batch: Batch, stalenesses: list[int], bound: int, is_complete: bool
) -> Iterable[str]:
    if not stalenesses:
        return
    oldest, mean = max(stalenesses), math.fsum(stalenesses) / len(stalenesses)
    if oldest > bound:
        yield f"has a row with staleness {oldest}, the bound is {bound}"
    if not is_complete:  # the row checks report this
        return
    if oldest != batch.staleness_max:
        yield f"recorded max staleness is {batch.staleness_max}, but its rows have {oldest}"
    elif not math.isclose(mean, batch.staleness_mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        yield f"recorded mean staleness is {batch.staleness_mean}, but its rows have {mean}"
