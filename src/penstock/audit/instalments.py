# SPDX-License-Identifier: Apache-2.0
"""Checks of streamed batches: their instalments are intact, and together they are the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from blake3 import blake3

from penstock.audit.evidence import Evidence
from penstock.audit.records import Batch, Instalment, Manifest, ManifestGroup, decode_manifest
from penstock.audit.report import Check, Violations


def check_instalments(evidence: Evidence) -> Check:
    """Instalments are numbered 1, 2, 3, … up to one last; their groups, in order, are the batch's
    groups; and only the batch after the newest may still lack some."""
    violations = Violations("instalments")
    batches = {batch.name: batch for batch in evidence.tables.batches}
    newest = {batch.consumer: batch.seq for batch in evidence.tables.batches}
    fates: defaultdict[str, set[str]] = defaultdict(set)
    for fate in evidence.coordinator.fates:
        if fate.state == "sealed":
            fates[f"{fate.consumer}.{fate.seq}"].add(fate.group_id)
    for name, found in evidence.instalments.items():
        violations.extend(name, _order_faults(found))
        parts = [decode_manifest(one) for one in found]
        for one, part in zip(found, parts, strict=True):
            violations.extend(one.name, _content_faults(one, part))
        groups = [group for part in parts if part for group in part.groups]
        violations.extend(name, _membership_faults(groups, fates[name]))
        if (batch := batches.get(name)) is not None:
            violations.extend(
                name, _batch_faults(found, groups, batch, evidence.manifests.get(name))
            )
        elif found[-1].is_last:
            violations.add(name, "has its last instalment, but was never sealed")
        elif found[0].seq != newest.get(found[0].consumer, 0) + 1:
            violations.add(name, "lacks its last instalment, but a later batch was sealed")
    return violations.result(len(evidence.tables.instalments))


def _order_faults(found: Sequence[Instalment]) -> Iterable[str]:
    numbers = [one.instalment for one in found]
    if numbers != [*range(1, len(found) + 1)]:
        yield f"its instalments are numbered {numbers}"
    if any(one.is_last for one in found[:-1]):
        yield "has an instalment after its last"
    if len({one.trains_from for one in found}) > 1:
        yield "its instalments train from different versions"


def _content_faults(one: Instalment, part: Manifest | None) -> Iterable[str]:
    if blake3(one.manifest).hexdigest() != one.digest:
        yield "its manifest does not match the digest in the ledger"
    if part is None:
        yield "its manifest cannot be read"
        return
    num_rows = sum(len(group.rows) for group in part.groups)
    if (len(part.groups), num_rows) != (one.num_groups, one.num_rows):
        yield f"its manifest has {len(part.groups)} groups of {num_rows} rows"
    if (part.consumer, part.seq, part.trains_from) != (one.consumer, one.seq, one.trains_from):
        yield "its manifest is of another batch"


def _membership_faults(groups: Sequence[ManifestGroup], sealed: set[str]) -> Iterable[str]:
    names = [group.group_id for group in groups]
    if len(set(names)) != len(names):
        yield "a group is in two of its instalments"
    if mismatched := sealed.symmetric_difference(names):
        yield f"its instalments and the recorded fates of groups disagree on {min(mismatched)}"


def _batch_faults(
    found: Sequence[Instalment],
    groups: Sequence[ManifestGroup],
    batch: Batch,
    manifest: Manifest | None,
) -> Iterable[str]:
    if not found[-1].is_last:
        yield "was sealed without a last instalment"
    if manifest is not None and list(manifest.groups) != list(groups):
        yield "its manifest does not have the groups of its instalments, in their order"
    if batch.trains_from != found[0].trains_from:
        yield f"trains from {batch.trains_from}, its instalments from {found[0].trains_from}"
