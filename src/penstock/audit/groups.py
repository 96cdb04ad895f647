# SPDX-License-Identifier: Apache-2.0
"""Checks of slots, leases, groups and their fates. Nothing appears, vanishes or happens twice.

Times are not compared: a machine's wall clock may step back between restarts of a service.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import groupby

from penstock.audit.evidence import Evidence
from penstock.audit.partition_links import undelivered_issues, undelivered_reports
from penstock.audit.records import SCORED, Fate, Group, Lease
from penstock.audit.report import Check, Violations

COUNTS_AS_ATTEMPT = ("failed", "rejected", "expired")
LEASE_ENDS = frozenset({*COUNTS_AS_ATTEMPT, "", "delivered", "released", "cancelled", "truncated"})
GROUP_STATES = frozenset({"open", "closed", "dropped"})


def check_slots(evidence: Evidence) -> Check:
    """Each lease ends once, each slot has one lease at a time, each ended group has none."""
    violations = Violations("slots")
    scored: Counter[tuple[str, int]] = Counter()
    has_row_keys: set[tuple[str, int, int]] = set()
    for row in evidence.rows.values():
        has_row_keys.add((row.group_id, row.slot, row.epoch))
        if row.outcome in SCORED:
            scored[row.group_id, row.slot] += 1
    last: dict[tuple[str, int], Lease] = {}
    for (group_id, slot), found in groupby(evidence.leases, key=lambda x: (x.group_id, x.slot)):
        leases = list(found)
        last[group_id, slot] = leases[-1]
        violations.extend(f"{group_id}.{slot}", _lease_faults(leases, has_row_keys))
        group = evidence.groups.get(group_id)
        if group is None or not 0 <= slot < group.num_slots:
            violations.add(f"{group_id}.{slot}", "leased but does not belong to a group")
    for (group_id, slot), num_rows in scored.items():
        if num_rows > 1:
            violations.add(f"{group_id}.{slot}", f"has {num_rows} scored rows, expected one")
    for group in evidence.groups.values():
        ends = [last.get((group.group_id, slot)) for slot in range(group.num_slots)]
        min_survivors = 0 if group.is_evaluation else evidence.config.min_survivors
        violations.extend(group.group_id, _group_faults(group, ends, min_survivors))
    return violations.result(len(last))


def _lease_faults(leases: list[Lease], has_row_keys: set[tuple[str, int, int]]) -> Iterable[str]:
    num_spent = 0
    for index, lease in enumerate(leases):
        if lease.epoch != index + 1:
            yield f"epoch {lease.epoch} found where {index + 1} is expected"
            return
        if lease.ended not in LEASE_ENDS:
            yield f"lease {lease.epoch} has unknown end {lease.ended!r}"
        if lease.attempt != num_spent + 1:
            yield f"lease {lease.epoch} is attempt {lease.attempt} after {num_spent} used attempts"
        if lease.ended in COUNTS_AS_ATTEMPT:
            num_spent += 1
        if lease.ended in ("", "delivered") and index + 1 < len(leases):
            state = "was delivered" if lease.ended else "is still running"
            yield f"leased again although lease {lease.epoch} {state}"
        has_row = (lease.group_id, lease.slot, lease.epoch) in has_row_keys
        if lease.ended in ("delivered", "failed") and not has_row:
            yield f"lease {lease.epoch} {lease.ended}, but its row is missing"


def _group_faults(
    group: Group, ends: list[Lease | None], min_survivors: int | None
) -> Iterable[str]:
    ended = [None if lease is None else lease.ended for lease in ends]
    delivered = ended.count("delivered")
    if group.state == "open":
        if delivered == group.num_slots:
            yield "still open although every slot is delivered"
        return
    if "" in ended:
        yield f"{group.state}, but slot {ended.index('')} still has a running lease"
    if group.state != "closed":
        return
    if min_survivors is not None and delivered < min_survivors:
        yield f"closed with {delivered} members, the minimum is {min_survivors}"
    for slot, end in enumerate(ended):
        # With closing by survivors, a slot may end without a result.
        is_wrong = end == "cancelled" if min_survivors is not None else end != "delivered"
        if is_wrong and end != "":
            yield f"closed, but slot {slot} has no result ({end or 'never leased'})"


def check_groups(evidence: Evidence) -> Check:
    """Every issued group exists in its partition, or its message is in flight; every ended group
    has one fate per consumer, or its report is in flight."""
    violations = Violations("groups")
    _check_issues(evidence, violations)
    _check_arrivals(evidence, violations)
    batches = {
        (one.consumer, one.seq) for one in (*evidence.tables.batches, *evidence.tables.instalments)
    }
    for fate in evidence.coordinator.fates:
        group = evidence.groups.get(fate.group_id)
        why = _fate_fault(fate, batches)
        if not evidence.is_exempt(fate.group_id):
            why = _fate_of_group_fault(fate, group) or why
        if why:
            violations.add(fate.group_id, f"for {fate.consumer}: {why}")
    _check_judged(evidence, violations)
    return violations.result(len(evidence.coordinator.issued))


def _check_issues(evidence: Evidence, violations: Violations) -> None:
    ordinals: defaultdict[str, list[int]] = defaultdict(list)
    training = [one for one in evidence.coordinator.issued.values() if not one.is_evaluation]
    for expected, issued in enumerate(training, start=1):
        if issued.issue != expected:
            violations.add(
                issued.group_id, f"issue {issued.issue} found where {expected} is expected"
            )
            break  # one gap shifts all later ones
    for issued in training:
        ordinals[issued.source].append(issued.ordinal)
        if issued.group_id != f"p{issued.partition}-{issued.issue}":
            where = f"issue {issued.issue} of partition {issued.partition}"
            violations.add(issued.group_id, f"its name does not match {where}")
    sources = {source.name: source for source in evidence.tables.sources}
    for name in sources.keys() | ordinals.keys():
        found = set(ordinals[name])
        source = sources.get(name)
        expected, skipped = (source.next_ordinal, source.skipped) if source else (0, 0)
        is_inside = all(0 <= ordinal < expected for ordinal in found)
        is_complete = is_inside and len(found) == expected - skipped
        if not is_complete or len(found) != len(ordinals[name]):
            issued_text = f"{expected - skipped} of {expected}" if skipped else f"{expected}"
            why = f"issued {issued_text} tasks, but the groups have {len(found)} of them"
            violations.add(name, why)


def _check_arrivals(evidence: Evidence, violations: Violations) -> None:
    """Compare groups as issued by the coordinator and as stored by their partitions."""
    undelivered = undelivered_issues(evidence)
    for group_id in evidence.coordinator.issued:
        if group_id in evidence.groups or group_id in undelivered:
            continue
        if not evidence.is_exempt(group_id):
            violations.add(group_id, "issued, but its partition does not have it")
    for group in evidence.groups.values():
        issued = evidence.coordinator_after.issued.get(group.group_id)
        if issued is None:
            violations.add(group.group_id, "exists in its partition but was never issued")
        elif _task_identity(issued) != _task_identity(group):
            violations.add(
                group.group_id,
                f"is {_task_identity(group)} but was issued as {_task_identity(issued)}",
            )
        if group.state not in GROUP_STATES or group.num_slots < 1:
            violations.add(group.group_id, f"has {group.num_slots} slots, state {group.state!r}")


def _task_identity(one: Group) -> tuple[int, int, str, int, str]:
    return one.partition, one.issue, one.source, one.ordinal, one.task_key


def _check_judged(evidence: Evidence, violations: Violations) -> None:
    """Compare with the second read of the coordinator: every ended group is judged, or its report
    is in flight, or it still lacks columns."""
    reports = undelivered_reports(evidence)
    judged: defaultdict[str, set[str]] = defaultdict(set)
    for fate in evidence.coordinator_after.fates:
        judged[fate.group_id].add(fate.consumer)
    for group_id, issued in evidence.coordinator_after.issued.items():
        group = evidence.groups.get(group_id)
        lacks = (evidence.config.trained & issued.judges) - judged[group_id]
        if evidence.is_exempt(group_id):
            state = "its partition is missing"
        elif group is None or (group.state == "open" and lacks):
            continue
        else:
            state = group.state
            lacks -= reports.get(group_id, set())
            lacks = {p for p in lacks if (group_id, p) not in evidence.awaiting_columns}
        for consumer in sorted(lacks):
            violations.add(group_id, f"{state}, but not judged for {consumer}")


def _fate_of_group_fault(fate: Fate, group: Group | None) -> str:
    if group is None:
        return "has a fate but no group"
    if group.state == "open":
        return f"{fate.state}, but the group is still open"
    if group.state == "dropped" and fate.state != "dropped":
        return f"{fate.state}, but the group was dropped"
    return ""


def _fate_fault(fate: Fate, batches: set[tuple[str, int]]) -> str:
    if fate.state == "sealed":
        known = (fate.consumer, fate.seq) in batches
        return "" if known else f"sealed into batch {fate.seq}, which does not exist"
    if fate.state not in ("admitted", "dropped"):
        return f"has unknown fate {fate.state!r}"
    if fate.seq or (fate.state == "dropped") != bool(fate.reason):
        return f"{fate.state} for {fate.reason or 'no reason'}, in batch {fate.seq}"
    return ""
