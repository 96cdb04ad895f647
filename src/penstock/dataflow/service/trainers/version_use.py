# SPDX-License-Identifier: Apache-2.0
"""Published versions that may still be requested from the weight store. Decides nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from penstock.dataflow.core.evaluations import in_use_by_evaluations
from penstock.dataflow.core.leasing import LiveVersion
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.ledger.recorded import RecordedRun
from penstock.dataflow.ledger.restore import restore_lineage
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import CheckpointRecord, EvaluationRecord
from penstock.dataflow.service.trainers.messages import VersionInUse, VersionUser
from penstock.types import PolicyName

NO_CHECKPOINT: Sequence[tuple[int, int]] = ((0, 0),)
"""Without a checkpoint, a trainer restores the initial model."""


def versions_in_use(
    lineage: Lineage,
    *,
    live: Collection[LiveVersion],
    retained: Sequence[tuple[int, int]],
    max_staleness: int,
    evaluated: Collection[tuple[PolicyName, int, int]] = (),
) -> Iterator[VersionInUse]:
    """Oldest first. live: versions that nodes serve · retained: (number, seq) of the trainer's
    checkpoints · evaluated: versions that evaluations need, as (policy, incarnation, number).

    Rows after the oldest checkpoint may be trained again; each was sampled at most max_staleness
    versions before the version it trains."""
    served = {(found.incarnation, found.number) for found in live if found.policy == lineage.policy}
    checkpoints = {number for number, _ in retained}
    oldest = min(checkpoints, default=lineage.number) - max_staleness
    versions = list(lineage.versions())
    newest = {record.manifest_digest for record in versions[-2:]}
    for record in versions:
        if record.manifest_digest in newest:
            by = VersionUser.NEWEST
        elif (record.incarnation, record.number) in served:
            by = VersionUser.NODE
        elif record.number in checkpoints:
            by = VersionUser.CHECKPOINT
        elif record.number >= oldest:
            by = VersionUser.ROWS
        elif (record.policy, record.incarnation, record.number) in evaluated:
            by = VersionUser.EVALUATION
        else:
            continue
        yield VersionInUse(
            policy=record.policy,
            incarnation=record.incarnation,
            number=record.number,
            manifest_digest=record.manifest_digest,
            by=by,
        )


def retained_checkpoints(tables: Tables) -> dict[PolicyName, Sequence[tuple[int, int]]]:
    """(number, seq) of the checkpoints that each trainer has listed."""
    return {
        record.policy: msgspec.json.decode(record.retained, type=list[tuple[int, int]])
        for record in tables.read(CheckpointRecord)
    }


def versions_in_use_on_disk(
    recorded: RecordedRun, max_staleness: Mapping[PolicyName, int]
) -> Iterator[VersionInUse]:
    """Versions in use of a run without a running service: no node serves any."""
    retained = retained_checkpoints(recorded.coordinator)
    evaluated = in_use_by_evaluations(recorded.coordinator.read(EvaluationRecord))
    for policy, bound in max_staleness.items():
        lineage = Lineage(policy)
        restore_lineage(lineage, recorded.coordinator)
        yield from versions_in_use(
            lineage,
            live=(),
            retained=retained.get(policy, NO_CHECKPOINT),
            max_staleness=bound,
            evaluated=evaluated,
        )
