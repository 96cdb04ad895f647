# SPDX-License-Identifier: Apache-2.0
"""Laws of the flow of work: slots, leases, groups and what became of them. Nothing appears,
vanishes or happens twice.

Times are not compared: the wall clock of a machine may step back between two lives of a service.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import groupby

from penstock.audit.evidence import Evidence, Fate, Group, Lease
from penstock.audit.report import Check, Findings

COST_AN_ATTEMPT = ("failed", "rejected", "expired")
ENDS = frozenset({"", "delivered", "failed", "rejected", "released", "expired", "cancelled"})
STATES = frozenset({"open", "closed", "dropped"})


def check_slots(evidence: Evidence) -> Check:
    """Each lease ends once, each slot is held by one at a time, each ended group is at rest."""
    findings = Findings("slots")
    scored: Counter[tuple[str, int]] = Counter()
    answered: set[tuple[str, int, int]] = set()
    for row in evidence.rows.values():
        answered.add((row.group_id, row.slot, row.epoch))
        if row.reward is not None:
            scored[row.group_id, row.slot] += 1
    last: dict[tuple[str, int], Lease] = {}
    for (group_id, slot), found in groupby(evidence.leases, key=lambda x: (x.group_id, x.slot)):
        leases = list(found)
        last[group_id, slot] = leases[-1]
        for why in _lease_faults(leases, answered):
            findings.add(f"{group_id}.{slot}", why)
        group = evidence.groups.get(group_id)
        if group is None or not 0 <= slot < group.num_slots:
            findings.add(f"{group_id}.{slot}", "leased, and belongs to no group")
    for (group_id, slot), num_rows in scored.items():
        if num_rows > 1:
            findings.add(f"{group_id}.{slot}", f"{num_rows} rows with a reward for one slot")
    for group in evidence.groups.values():
        ends = [last.get((group.group_id, slot)) for slot in range(group.num_slots)]
        for why in _group_faults(group, ends, evidence.run_file.may_close_without_all):
            findings.add(group.group_id, why)
    return findings.result(len(last))


def _lease_faults(leases: list[Lease], answered: set[tuple[str, int, int]]) -> Iterable[str]:
    num_spent = 0
    for index, lease in enumerate(leases):
        if lease.epoch != index + 1:
            yield f"epoch {lease.epoch} where {index + 1} is due"
            return
        if lease.ended not in ENDS:
            yield f"lease {lease.epoch} ended as {lease.ended!r}, which is no end"
        if lease.attempt != num_spent + 1:
            yield f"lease {lease.epoch} is attempt {lease.attempt} after {num_spent} spent ones"
        if lease.ended in COST_AN_ATTEMPT:
            num_spent += 1
        if lease.ended in ("", "delivered") and index + 1 < len(leases):
            yield f"leased again after lease {lease.epoch} {lease.ended or 'that still runs'}"
        has_row = (lease.group_id, lease.slot, lease.epoch) in answered
        if lease.ended in ("delivered", "failed") and not has_row:
            yield f"lease {lease.epoch} {lease.ended}, and no row stands for it"


def _group_faults(
    group: Group, ends: list[Lease | None], may_close_without_all: bool
) -> Iterable[str]:
    ended = [None if lease is None else lease.ended for lease in ends]
    delivered = ended.count("delivered")
    if group.state == "open":
        if delivered == group.num_slots:
            yield "still open, although every slot is delivered"
        return
    if "" in ended:
        yield f"{group.state}, and slot {ended.index('')} still has a running lease"
    if group.state == "closed":
        rest = ("delivered", *COST_AN_ATTEMPT) if may_close_without_all else ("delivered",)
        for slot, end in enumerate(ended):
            if end not in rest and end != "":
                yield f"closed, and slot {slot} came to no end ({end or 'never leased'})"


def check_groups(evidence: Evidence) -> Check:
    """Every issue of a task is a group, and every ended group has one fate per consumer."""
    findings = Findings("groups")
    _check_issues(evidence, findings)
    batches = {(batch.consumer, batch.seq) for batch in evidence.batches}
    fates: defaultdict[str, dict[str, Fate]] = defaultdict(dict)
    for fate in evidence.fates:
        fates[fate.group_id][fate.consumer] = fate
        if why := _fate_fault(fate, evidence.groups.get(fate.group_id), batches):
            findings.add(fate.group_id, f"for {fate.consumer}: {why}")
    for group in evidence.groups.values():
        if group.state == "open":
            continue
        for consumer in evidence.run_file.models:
            if consumer not in fates[group.group_id]:
                findings.add(group.group_id, f"{group.state}, and nobody judged it for {consumer}")
    return findings.result(len(evidence.groups))


def _check_issues(evidence: Evidence, findings: Findings) -> None:
    ordinals: defaultdict[str, list[int]] = defaultdict(list)
    for due, group in enumerate(evidence.groups.values(), start=1):
        if group.issue != due:
            findings.add(group.group_id, f"issue {group.issue} where {due} is due")
            break  # one gap shifts all that follow
    for group in evidence.groups.values():
        ordinals[group.source].append(group.ordinal)
        if group.group_id != f"p{group.partition}-{group.issue}":
            findings.add(group.group_id, f"is issue {group.issue} of partition {group.partition}")
        if group.state not in STATES or group.num_slots < 1:
            findings.add(group.group_id, f"{group.num_slots} slots in state {group.state!r}")
    issued = {source.name: source.next_ordinal for source in evidence.sources}
    for name in issued.keys() | ordinals.keys():
        found, due = sorted(ordinals[name]), issued.get(name, 0)
        if found != list(range(due)):
            findings.add(name, f"issued {due} tasks; the groups hold {len(set(found))} of them")


def _fate_fault(fate: Fate, group: Group | None, batches: set[tuple[str, int]]) -> str:
    if group is None:
        return "a fate without a group"
    if group.state == "open":
        return f"{fate.state}, and the group is still open"
    if group.state == "dropped" and fate.state != "dropped":
        return f"{fate.state}, and the group was dropped"
    if fate.state == "sealed":
        known = (fate.consumer, fate.seq) in batches
        return "" if known else f"sealed into batch {fate.seq}, which does not exist"
    if fate.state not in ("admitted", "dropped"):
        return f"{fate.state!r} is no fate"
    if fate.seq or (fate.state == "dropped") != bool(fate.reason):
        return f"{fate.state} for {fate.reason or 'no reason'}, in batch {fate.seq}"
    return ""
