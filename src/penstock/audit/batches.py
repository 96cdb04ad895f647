# SPDX-License-Identifier: Apache-2.0
"""Laws of sealed batches: their content is fixed, is what was admitted, and is young enough."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from blake3 import blake3

from penstock.audit.evidence import (
    Batch,
    Evidence,
    GroupSummary,
    Manifest,
    MemberSummary,
    Pair,
    Row,
    decode_map,
)
from penstock.audit.lineage import Lineage, effective
from penstock.audit.report import Check, Findings

SAME = 1e-9
"""Means of the same numbers, summed in another order, differ by less."""


def check_batches(evidence: Evidence) -> Check:
    """Batches are 1, 2, 3, …; each manifest is intact and holds exactly its groups' rows."""
    findings = Findings("batches")
    sealed = _sealed_groups(evidence)
    members = _Members(evidence)
    batch_of: dict[tuple[str, str], int] = {}
    due: defaultdict[str, int] = defaultdict(lambda: 1)
    for batch in evidence.batches:
        if batch.seq != due[batch.consumer]:
            findings.add(batch.name, f"where batch {due[batch.consumer]} is due")
        due[batch.consumer] = batch.seq + 1
        if blake3(batch.manifest).hexdigest() != batch.digest:
            findings.add(batch.name, "its manifest has another digest than the ledger says")
        manifest = evidence.manifests.get(batch.name)
        if manifest is None:
            findings.add(batch.name, "its manifest cannot be read")
            continue
        named = {group.group_id for group in manifest.groups}
        for why in _batch_faults(batch, manifest, sealed.get((batch.consumer, batch.seq), set())):
            findings.add(batch.name, why)
        for group in manifest.groups:
            for why in members.faults(batch.consumer, group):
                findings.add(f"{batch.name} {group.group_id}", why)
        for group_id in named:
            first = batch_of.setdefault((batch.consumer, group_id), batch.seq)
            if first != batch.seq:
                findings.add(f"{batch.name} {group_id}", f"sealed into batch {first} before")
    known = {(batch.consumer, batch.seq) for batch in evidence.batches}
    for commit in evidence.commits:
        if (commit.consumer, commit.seq) not in known:
            findings.add(f"{commit.consumer}.{commit.seq}", "committed, and was never sealed")
    return findings.result(len(evidence.batches))


def _sealed_groups(evidence: Evidence) -> dict[tuple[str, int], set[str]]:
    found: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for fate in evidence.fates:
        if fate.state == "sealed":
            found[fate.consumer, fate.seq].add(fate.group_id)
    return found


def _batch_faults(batch: Batch, manifest: Manifest, sealed: set[str]) -> Iterable[str]:
    written = (manifest.consumer, manifest.seq, manifest.trains_from)
    if written != (batch.consumer, batch.seq, batch.trains_from):
        yield f"its manifest calls itself {written}"
    groups = [group.group_id for group in manifest.groups]
    rows = [row for group in manifest.groups for row in group.rows]
    if (len(groups), len(rows)) != (batch.num_groups, batch.num_rows):
        due = f"{batch.num_groups} of {batch.num_rows}"
        yield f"{len(groups)} groups of {len(rows)} rows, not {due}"
    if len(set(groups)) != len(groups) or len({row.row_id for row in rows}) != len(rows):
        yield "names a group or a row twice"
    if odd := sorted(sealed.symmetric_difference(groups)):
        yield f"its manifest and the fates of groups differ on {', '.join(odd[:3])}"
    if rows:
        mean = math.fsum(row.reward for row in rows) / len(rows)
        if not math.isclose(mean, batch.reward_mean, rel_tol=SAME, abs_tol=SAME):
            yield f"mean reward {batch.reward_mean}; its rows have {mean}"


class _Members:
    """What the ledger says about the rows that a manifest may name."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._by_group = evidence.rows_by_group()
        self._counts: dict[str, dict[str, int]] = {}
        self._versions: dict[str, dict[str, list[Pair]]] = {}

    def faults(self, consumer: str, group: GroupSummary) -> Iterable[str]:
        known = self._evidence.groups.get(group.group_id)
        if known is None or known.task_key != group.task_key:
            yield "is not the group of this task"
        due = {
            row.row_id
            for row in self._by_group.get(group.group_id, [])
            if row.reward is not None and (self._sampled(row) or {}).get(consumer, 0) > 0
        }
        if odd := sorted(due.symmetric_difference(row.row_id for row in group.rows)):
            yield f"its rows and the manifest's differ on {', '.join(odd[:3])}"
        for member in group.rows:
            row = self._evidence.rows.get(member.row_id)
            if row is not None and (wrong := self._member_fault(member, row)):
                yield f"{member.row_id}: {wrong}"

    def _member_fault(self, member: MemberSummary, row: Row) -> str:
        if (member.reward, member.outcome) != (row.reward, row.outcome):
            return f"sealed as {member.outcome} with reward {member.reward}; the row says otherwise"
        if member.sampled != self._sampled(row):
            return f"sealed with {member.sampled} tokens; the row says {row.sampled}"
        if member.versions != decode_map(row.versions, dict[str, list[Pair]], self._versions):
            return f"sealed as made by {member.versions}; the row says {row.versions}"
        # A row that is damaged itself is told by another law; its digest proves nothing here.
        if member.digest != row.digest and not self._evidence.contents[row.row_id].damage:
            return "sealed with other bytes"
        return ""

    def _sampled(self, row: Row) -> dict[str, int] | None:
        return decode_map(row.sampled, dict[str, int], self._counts)


def check_staleness(evidence: Evidence, lineages: dict[str, Lineage]) -> Check:
    """Every row was young enough when it was sealed, recomputed from the versions of its tokens."""
    findings = Findings("staleness")
    for batch in evidence.batches:
        manifest = evidence.manifests.get(batch.name)
        lineage = lineages[batch.consumer]
        if manifest is None:
            continue
        if batch.incarnation not in lineage.forks:
            findings.add(batch.name, f"sealed for incarnation {batch.incarnation}, which never was")
            continue
        if batch.trains_from not in _possible_numbers(lineage, batch):
            findings.add(
                batch.name, f"trains from {batch.trains_from}, which nothing before it leads to"
            )
        ages, is_complete = _ages(evidence, lineage, batch, manifest)
        bound = evidence.run_file.max_staleness(batch.consumer)
        for why in _age_faults(batch, ages, bound, is_complete):
            findings.add(batch.name, why)
    return findings.result(len(evidence.batches))


def _possible_numbers(lineage: Lineage, batch: Batch) -> set[int]:
    """Numbers the version before this batch may have been given at sealing: after each commit that
    may have been the last one then, if every batch between is trained."""
    fork = lineage.forks[batch.incarnation]
    numbers = {fork.seq: fork.number}
    numbers.update((c.seq, c.number) for c in lineage.commits.get(batch.incarnation, []))
    return {number + batch.seq - 1 - seq for seq, number in numbers.items() if seq <= batch.seq - 1}


def _ages(
    evidence: Evidence, lineage: Lineage, batch: Batch, manifest: Manifest
) -> tuple[list[int], bool]:
    """Age of each row at sealing, and whether all rows could tell theirs."""
    meets = lineage.meets(batch.sealed_at)
    counts_as: dict[Pair, int] = {}
    ages: list[int] = []
    is_complete = True
    for group in manifest.groups:
        for member in group.rows:
            content = evidence.contents.get(member.row_id)
            found = () if content is None else content.trainable.get(batch.consumer, ())
            for version in found:
                if version not in counts_as and version in lineage.versions:
                    counts_as[version] = effective(version, batch.incarnation, meets)
            known = [counts_as[version] for version in found if version in counts_as]
            is_complete = is_complete and len(known) == len(found) > 0
            if known:
                ages.append(batch.trains_from - min(known))
    return ages, is_complete


def _age_faults(batch: Batch, ages: list[int], bound: int, is_complete: bool) -> Iterable[str]:
    if not ages:
        return
    oldest, mean = max(ages), math.fsum(ages) / len(ages)
    if oldest > bound:
        yield f"a row is {oldest} versions old; at most {bound}"
    if not is_complete:  # told by the laws of rows; what they would have said is unknown
        return
    if oldest != batch.staleness_max:
        yield f"sealed with a staleness of at most {batch.staleness_max}; its rows reach {oldest}"
    elif not math.isclose(mean, batch.staleness_mean, rel_tol=SAME, abs_tol=SAME):
        yield f"sealed with a mean staleness of {batch.staleness_mean}; its rows have {mean}"
