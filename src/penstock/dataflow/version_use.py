# SPDX-License-Identifier: Apache-2.0
"""Which published versions somebody may still ask the weight store for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from penstock.dataflow.protocol import LiveVersion, UsedBy, VersionInUse
from penstock.dataflow.versions import Lineage


def versions_in_use(
    lineage: Lineage,
    *,
    live: Collection[LiveVersion],
    retained: Sequence[tuple[int, int]],
    max_staleness: int,
) -> Iterator[VersionInUse]:
    """Oldest first. live: what nodes serve · retained: (number, seq) of the trainer's checkpoints.

    Rows after the oldest checkpoint may be trained again; none of them is older than the version it
    is trained from by more than the bound on staleness."""
    served = {(found.incarnation, found.number) for found in live if found.policy == lineage.policy}
    checkpoints = {number for number, _ in retained}
    oldest = min(checkpoints, default=lineage.number) - max_staleness
    versions = list(lineage.versions())
    newest = {record.manifest_digest for record in versions[-2:]}
    for record in versions:
        if record.manifest_digest in newest:
            by = UsedBy.NEWEST
        elif (record.incarnation, record.number) in served:
            by = UsedBy.NODE
        elif record.number in checkpoints:
            by = UsedBy.CHECKPOINT
        elif record.number >= oldest:
            by = UsedBy.ROWS
        else:
            continue
        yield VersionInUse(
            policy=record.policy,
            incarnation=record.incarnation,
            number=record.number,
            manifest_digest=record.manifest_digest,
            by=by,
        )
