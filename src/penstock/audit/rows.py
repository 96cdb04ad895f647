# SPDX-License-Identifier: Apache-2.0
"""Invariants of single trajectories: acknowledged ones exist, each matches its lease, and its
tokens were sampled by the policy they count for.

An unreadable payload is reported once: as lost if its delivery was acknowledged, otherwise as a
damaged row. The other checks then skip it. Freed payload may be deleted: the check of freed groups
covers when.
"""

from __future__ import annotations

from penstock.audit.evidence import Evidence
from penstock.audit.payloads import PayloadSummary
from penstock.audit.records import SCORED, Lease, Row, decode_json
from penstock.audit.report import Check, Violations

LEASE_END_BY_OUTCOME = {
    "completed": "delivered",
    "truncated": "delivered",
    "failed": "failed",
    "cancelled": "released",
}
"""The expected end of a row's lease, by the row's outcome."""


def check_lost(evidence: Evidence) -> Check:
    """Every acknowledged id is a row whose payload is readable and has the row's digest. Rows of a
    partition that was declared lost are exempt."""
    violations = Violations("lost")
    for row_id in sorted(evidence.acknowledged):
        content = evidence.contents.get(row_id)
        if content is None:
            if not evidence.is_exempt(row_id.partition(".")[0]):
                violations.add(row_id, "acknowledged, but not in the ledger")
        elif content.damage:
            violations.add(row_id, f"acknowledged, but {content.damage}")
    return violations.result(len(evidence.acknowledged))


def check_rows(evidence: Evidence) -> Check:
    """Every row belongs to a group and to one lease that ended as the row's outcome requires."""
    violations = Violations("rows")
    leases = {(lease.group_id, lease.slot, lease.epoch): lease for lease in evidence.leases}
    for row in evidence.rows.values():
        content = evidence.contents[row.row_id]
        if content.damage:
            if row.row_id not in evidence.acknowledged:
                violations.add(row.row_id, content.damage)
        elif not content.is_freed and (wrong := _against_payload(row, content)):
            violations.add(row.row_id, wrong)
        lease = leases.get((row.group_id, row.slot, row.epoch))
        if wrong := _against_lease(evidence, row, lease):
            violations.add(row.row_id, wrong)
    return violations.result(len(evidence.rows))


def _against_payload(row: Row, content: PayloadSummary) -> str:
    if content.name != (row.row_id, row.group_id, row.slot, row.epoch, row.node_id):
        return f"its payload identifies itself as {content.name}"
    if (content.outcome, content.reward) != (row.outcome, row.reward):
        said = f"{content.outcome} with {content.reward}"
        return f"{row.outcome} with reward {row.reward}; its payload says {said}"
    values = decode_json(row.values or "{}", dict[str, float]) or {}
    rewards = {name: value for name, value in values.items() if name.startswith("reward.")}
    if rewards != {f"reward.{role}": value for role, value in content.role_rewards.items()}:
        return f"has rewards {row.values}; its payload says {content.role_rewards}"
    return ""


def _against_lease(evidence: Evidence, row: Row, lease: Lease | None) -> str:
    group = evidence.groups.get(row.group_id)
    if row.row_id != f"{row.group_id}.{row.slot}.{row.epoch}":
        return "its id does not match its group, slot and epoch"
    if group is None or not 0 <= row.slot < group.num_slots:
        return "belongs to no slot of any group"
    if lease is None:
        return "was delivered under a lease that was never granted"
    if lease.node_id != row.node_id:
        return f"came from {row.node_id}; {lease.node_id} held the lease"
    is_scored = row.outcome in SCORED
    if row.reward is not None and not is_scored:
        return f"{row.outcome} with reward {row.reward}: failure is not a reward"
    if row.reward is None and is_scored and not evidence.config.is_scored_by_stage:
        return f"{row.outcome} without a reward, and no stage adds one"
    if lease.ended != LEASE_END_BY_OUTCOME.get(row.outcome):
        return f"{row.outcome}, but its lease {lease.ended or 'still runs'}"
    return ""


def check_sampled(evidence: Evidence) -> Check:
    """Every trainable token was sampled by the policy it counts for, under a published version."""
    violations = Violations("sampled_by_policy")
    published = {(v.policy, v.incarnation, v.number) for v in evidence.coordinator_after.versions}
    for row in evidence.rows.values():
        content = evidence.contents[row.row_id]
        if content.damage or content.is_freed:
            continue
        if content.fault:
            violations.add(row.row_id, content.fault)
        for policy, versions in content.all_versions.items():
            for incarnation, number in versions:
                if (policy, incarnation, number) not in published:
                    name = f"{policy}@{incarnation}.{number}"
                    violations.add(row.row_id, f"{name} was never published")
        if content.sampled != decode_json(row.sampled, dict[str, int]):
            why = f"counted as {row.sampled}; its payload has {content.sampled}"
            violations.add(row.row_id, why)
    return violations.result(len(evidence.rows))
