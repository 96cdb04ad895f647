# SPDX-License-Identifier: Apache-2.0
"""Forgets sessions: removes them from everything not trained yet and masks them in sealed batches.

A mark in the ledger is durable before the call is answered, so no later process sends the row
again. Trained rows stay trained; their payload is deleted when their batch is freed.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import structlog

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.ids import partition_of
from penstock.dataflow.core.messages import RowForgotten
from penstock.dataflow.ledger.restore import load_group_rows
from penstock.dataflow.records import (
    FateRecord,
    FateState,
    GroupRecord,
    MetaRecord,
    gone_key,
)
from penstock.dataflow.service.nodes.intake import parse_row_id
from penstock.dataflow.service.operators.messages import ForgetSessionAnswer
from penstock.dataflow.service.process import Process
from penstock.errors import BadRequest, NotFound
from penstock.types import DropReason, GroupId, RowId, RowSummary

log = structlog.get_logger(__name__)
_rows = msgspec.msgpack.Decoder(tuple[RowSummary, ...])


class SessionEraser:
    def __init__(self, process: Process, coordinator: Coordinator) -> None:
        self._process = process
        self._coordinator = coordinator

    async def forget(self, session: str) -> ForgetSessionAnswer:
        """Forget the session with this row id, finished or running; idempotent."""
        row_id = RowId(session)
        group_id, _, _ = parse_row_id(row_id)
        await self._process.ledger.flush()
        self._process.run_deferred()
        self._require_session(row_id, group_id)
        was = self._state(row_id, group_id)
        if row_id not in self._coordinator.gone:
            self._process.journal(MetaRecord(key=gone_key(row_id), value=DropReason.FORGOTTEN))
            self._coordinator.gone.add(row_id)
            self._drop(row_id, group_id)
            self._coordinator.send_to(partition_of(group_id), RowForgotten(row_id=row_id))
            log.info("forgotten", session=row_id, was=was)
        await self._process.make_all_durable()
        return ForgetSessionAnswer(session=row_id, was=was)

    def _require_session(self, row_id: RowId, group_id: GroupId) -> None:
        found = self._process.ledger.tables.read(GroupRecord, "group_id = :id", id=group_id)
        if not found:
            raise NotFound(
                f"no session {row_id} in this run; the gateway returns the id of each session"
            )
        if found[0].source != self._coordinator.session_source:
            raise BadRequest(
                f"{row_id} is a rollout of source {found[0].source!r}, not an external agent's "
                "session; only sessions can be forgotten"
            )

    def _state(self, row_id: RowId, group_id: GroupId) -> str:
        """Its current state: running, waiting, sealed, trained or dropped."""
        if group_id in self._coordinator.open:
            return "running"
        if any(self._waiting(consumer, row_id, group_id) for consumer in self._consumers()):
            return "waiting"
        fates = self._process.ledger.tables.read(FateRecord, "group_id = :id", id=group_id)
        sealed = [fate for fate in fates if fate.state == FateState.SEALED]
        if not sealed:
            return "dropped"
        lineages = {consumer.terms.policy: consumer.lineage for consumer in self._consumers()}
        is_trained = any(fate.seq <= lineages[fate.consumer].seq for fate in sealed)
        return "trained" if is_trained else "sealed"

    def _consumers(self) -> Iterable[Consumer]:
        return self._coordinator.consumers.values()

    def _waiting(self, consumer: Consumer, row_id: RowId, group_id: GroupId) -> FateRecord | None:
        """The waiting group of this consumer that contains this row, if any: an earlier attempt at
        the slot may have been another session."""
        group = consumer.ready.get(group_id) or consumer.incomplete.get(group_id)
        if group is None:
            return None
        policy, tables = consumer.terms.policy, self._process.ledger.tables
        body = group.packed_rows or load_group_rows(tables, policy, [group_id])[group_id]
        return group if any(row.row_id == row_id for row in _rows.decode(body)) else None

    def _drop(self, row_id: RowId, group_id: GroupId) -> None:
        now = self._process.clock()
        for consumer in self._consumers():
            group = self._waiting(consumer, row_id, group_id)
            if group is not None:
                consumer.drop(group, DropReason.FORGOTTEN, "forget", now)
            pooled = consumer.pool.get(group_id)
            if pooled is not None:
                consumer.remove_from_pool(pooled, now)
                consumer.update_num_replayable()
