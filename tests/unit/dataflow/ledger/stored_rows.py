# SPDX-License-Identifier: Apache-2.0
"""A delivered row whose payload is in a ledger, for tests of what keeps and deletes payload."""

from __future__ import annotations

from blake3 import blake3

from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.records import RowRecord
from penstock.types import GroupId, NodeId, OutcomeKind, RowId, RowSummary


def stored_row(group: str, at: Location, payload: bytes, *, arrival: int = 0) -> RowRecord:
    """The first row of this group."""
    return RowRecord(
        summary=RowSummary(
            row_id=RowId(f"{group}.0.1"),
            digest=blake3(payload).hexdigest(),
            outcome=OutcomeKind.COMPLETED,
            reward=0.0,
            sampled={},
            versions={},
        ),
        group_id=GroupId(group),
        slot=0,
        epoch=1,
        node_id=NodeId("n"),
        segment=at.segment,
        offset=at.offset,
        length=at.length,
        delivered_at=0.0,
        arrival=arrival,
    )
