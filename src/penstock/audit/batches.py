# SPDX-License-Identifier: Apache-2.0
"""Laws of sealed batches: their content is fixed, is what was admitted, and is young enough."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from blake3 import blake3

from penstock.audit.config import REWARD
from penstock.audit.evidence import Evidence
from penstock.audit.lineage import Lineage, effective
from penstock.audit.records import (
    SCORED,
    Batch,
    GroupSummary,
    Manifest,
    MemberSummary,
    Pair,
    Row,
    decode_map,
)
from penstock.audit.report import Check, Findings

SAME = 1e-9
"""Means of the same numbers, summed in another order, differ by less."""


def check_batches(evidence: Evidence) -> Check:
    """Batches are 1, 2, 3, …; each manifest is intact and holds exactly its groups' rows."""
    findings = Findings("batches")
    sealed = _sealed_groups(evidence)
    members = _Members(evidence)
    uses: Counter[tuple[str, str]] = Counter()
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
        max_uses = evidence.run_file.max_uses(batch.consumer)
        for why in _batch_faults(batch, manifest):
            findings.add(batch.name, why)
        for why in _fate_faults(manifest, sealed[batch.consumer], is_replayed=max_uses > 1):
            findings.add(batch.name, why)
        for group in manifest.groups:
            for why in members.faults(manifest, group):
                findings.add(f"{batch.name} {group.group_id}", why)
        for group_id in named:
            uses[batch.consumer, group_id] += 1
            if uses[batch.consumer, group_id] > max_uses:
                findings.add(f"{batch.name} {group_id}", f"in more than {max_uses} batches")
    known = {(batch.consumer, batch.seq) for batch in evidence.batches}
    for commit in evidence.commits:
        if (commit.consumer, commit.seq) not in known:
            findings.add(f"{commit.consumer}.{commit.seq}", "committed, and was never sealed")
    return findings.result(len(evidence.batches))


def _sealed_groups(evidence: Evidence) -> defaultdict[str, dict[str, int]]:
    """By consumer: the batch each group was sealed into, the last one where there are several."""
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for fate in evidence.fates:
        if fate.state == "sealed":
            found[fate.consumer][fate.group_id] = fate.seq
    return found


def _fate_faults(manifest: Manifest, sealed: dict[str, int], *, is_replayed: bool) -> Iterable[str]:
    named = {group.group_id for group in manifest.groups}
    due = {group_id for group_id, seq in sealed.items() if seq == manifest.seq}
    odd = due - named
    for group_id in named - due:
        if not (is_replayed and sealed.get(group_id, 0) > manifest.seq):
            odd.add(group_id)
    if odd:
        yield f"its manifest and the fates of groups differ on {', '.join(sorted(odd)[:3])}"


def _batch_faults(batch: Batch, manifest: Manifest) -> Iterable[str]:
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
        self._by_role: dict[str, dict[str, dict[str, int]]] = {}

    def faults(self, manifest: Manifest, group: GroupSummary) -> Iterable[str]:
        known = self._evidence.issued.get(group.group_id)
        if known is None or known.task_key != group.task_key:
            yield "is not the group of this task"
        if self._evidence.is_excused(group.group_id):
            return  # its rows went with their partition
        due = {
            row.row_id
            for row in self._by_group.get(group.group_id, [])
            if self._is_complete(row) and self._is_seen(row, manifest)
        }
        if odd := sorted(due.symmetric_difference(row.row_id for row in group.rows)):
            yield f"its rows and the manifest's differ on {', '.join(odd[:3])}"
        for member in group.rows:
            row = self._evidence.rows.get(member.row_id)
            if row is not None and (wrong := self._member_fault(member, row)):
                yield f"{member.row_id}: {wrong}"

    def _is_seen(self, row: Row, manifest: Manifest) -> bool:
        """It has a token that this batch trains."""
        sampled = self._sampled(row) or {}
        if manifest.sees is None:
            return sampled.get(manifest.consumer, 0) > 0
        roles = self._roles(row) or {}
        return any(
            tokens > 0 and (policy, role) in manifest.sees
            for policy, count in sampled.items()
            for role, tokens in roles.get(policy, {"": count}).items()
        )

    def _is_complete(self, row: Row) -> bool:
        """It came to a good end, and has every column that its run waits for."""
        if row.outcome not in SCORED:
            return False
        columns = self._evidence.columns.get(row.row_id, {})
        needs = self._evidence.run_file.needs
        return all(name in columns and not columns[name].failed for name in needs)

    def _member_fault(self, member: MemberSummary, row: Row) -> str:
        if (member.reward, member.outcome) != (self._evidence.reward(row), row.outcome):
            return f"sealed as {member.outcome} with reward {member.reward}; the row says otherwise"
        if member.sampled != self._sampled(row):
            return f"sealed with {member.sampled} tokens; the row says {row.sampled}"
        if member.versions != decode_map(row.versions, dict[str, list[Pair]], self._versions):
            return f"sealed as made by {member.versions}; the row says {row.versions}"
        if member.roles != self._roles(row):
            return f"sealed as made in {member.roles}; the row says {row.roles}"
        if member.computed != decode_map(row.computed or "{}", dict[str, tuple[int, int]], {}):
            return f"sealed with {member.computed} to compute; the row says {row.computed}"
        # A row that is damaged itself is told by another law; its digest proves nothing here.
        if member.digest != row.digest and not self._evidence.contents[row.row_id].damage:
            return "sealed with other bytes"
        return self._column_fault(member)

    def _column_fault(self, member: MemberSummary) -> str:
        """Columns of a complete row, against what its manifest says of them."""
        columns = self._evidence.columns.get(member.row_id, {})
        for name in sorted(self._evidence.run_file.needs - {REWARD}):
            column = columns.get(name)
            if column is None or column.failed:
                continue  # then it is no member at all, and told as such
            sealed = member.columns.get(name) if column.value is None else member.values.get(name)
            if sealed != (column.digest if column.value is None else column.value):
                return f"sealed with another {name} than its column has"
        return ""

    def _sampled(self, row: Row) -> dict[str, int] | None:
        return decode_map(row.sampled, dict[str, int], self._counts)

    def _roles(self, row: Row) -> dict[str, dict[str, int]] | None:
        return decode_map(row.roles or "{}", dict[str, dict[str, int]], self._by_role)


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
            if manifest.sees is not None and batch.consumer not in member.versions:
                ages.append(0)  # what only other policies sampled does not age
                continue
            found = _versions(evidence, batch.consumer, group.group_id, member)
            for version in found:
                if version not in counts_as and version in lineage.versions:
                    counts_as[version] = (
                        lineage.repeated(version, batch.incarnation, batch.sealed_at, meets)
                        if evidence.run_file.deterministic
                        else effective(version, batch.incarnation, meets)
                    )
            known = [counts_as[version] for version in found if version in counts_as]
            is_complete = is_complete and len(known) == len(found) > 0
            if known:
                ages.append(batch.trains_from - min(known))
    return ages, is_complete


def _versions(
    evidence: Evidence, consumer: str, group_id: str, member: MemberSummary
) -> Sequence[Pair]:
    """Who sampled its tokens, by its payload; once that is freed, by what the ledger kept of it;
    once its partition is lost, by what home sealed."""
    content = evidence.contents.get(member.row_id)
    if content is None:
        is_excused = evidence.is_excused(group_id)
        return member.versions.get(consumer, ()) if is_excused else ()
    if not content.is_freed:
        return content.trainable.get(consumer, ())
    kept = decode_map(evidence.rows[member.row_id].versions, dict[str, list[Pair]], {})
    return () if kept is None else kept.get(consumer, ())


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
