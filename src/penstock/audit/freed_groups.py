# SPDX-License-Identifier: Apache-2.0
"""Check of freed groups: payload is deleted only when it can never be needed again."""

from __future__ import annotations

from collections import defaultdict

from penstock.audit.evidence import Evidence
from penstock.audit.records import decode_json
from penstock.audit.report import Check, Violations


def check_freed(evidence: Evidence) -> Check:
    """Each freed group is judged by all policies, committed wherever it is sealed, and older than
    every retained checkpoint."""
    violations = Violations("freed")
    fates = {(fate.group_id, fate.consumer): fate.state for fate in evidence.coordinator.fates}
    batches = _batches_of_groups(evidence)
    committed, kept = _committed(evidence), _oldest_kept(evidence)
    for group_id in sorted(evidence.coordinator.freed):
        issued = evidence.coordinator.issued.get(group_id)
        if issued is None:
            violations.add(group_id, "freed but never issued")
            continue
        for consumer in sorted(evidence.config.trained & issued.judges):
            state = fates.get((group_id, consumer), "open")
            if state not in ("sealed", "dropped"):
                violations.add(group_id, f"freed while {state} for {consumer}")
        for consumer, seq in batches[group_id]:
            if seq > committed.get(consumer, 0):
                violations.add(group_id, f"freed before batch {consumer}.{seq} was committed")
            elif seq > kept.get(consumer, seq):
                needs = f"batch {kept[consumer]} needs batch {consumer}.{seq}"
                violations.add(group_id, f"freed, but the checkpoint after {needs}")
    return violations.result(len(evidence.coordinator.freed))


def _batches_of_groups(evidence: Evidence) -> defaultdict[str, list[tuple[str, int]]]:
    found: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for manifest in evidence.manifests.values():
        for group in manifest.groups:
            if group.group_id in evidence.coordinator.freed:
                found[group.group_id].append((manifest.consumer, manifest.seq))
    for fate in evidence.coordinator.fates:  # of a batch that still lacks instalments
        if fate.state == "sealed" and f"{fate.consumer}.{fate.seq}" not in evidence.manifests:
            found[fate.group_id].append((fate.consumer, fate.seq))
    return found


def _committed(evidence: Evidence) -> dict[str, int]:
    """Last batch that any incarnation of each trainer committed."""
    found: dict[str, int] = {}
    for commit in evidence.coordinator.commits:
        found[commit.consumer] = max(commit.seq, found.get(commit.consumer, 0))
    return found


def _oldest_kept(evidence: Evidence) -> dict[str, int]:
    """By policy, the batch of its oldest retained checkpoint."""
    found: dict[str, int] = {}
    for one in evidence.tables.checkpoints:
        if retained := decode_json(one.retained, list[tuple[int, int]]):
            found[one.policy] = min(seq for _, seq in retained)
    return found
