# SPDX-License-Identifier: Apache-2.0
"""Turns of running attempts: reported by the node that holds the lease, offered to its next holder.
Nothing here is durable, and nothing waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.records import RowRecord
from penstock.dataflow.service.nodes.intake import parse_row_id
from penstock.dataflow.service.nodes.messages import RecordRequest, TurnsAnswer
from penstock.dataflow.service.nodes.salvage import Salvage
from penstock.dataflow.service.nodes.validate import check_turn
from penstock.errors import BadRequest, Fenced
from penstock.types import FailureKind, NodeId, Outcome, OutcomeKind, RowId, subject_of_node

_NOT_OF_THE_WORKFLOW = (FailureKind.ENGINE, FailureKind.SANDBOX, FailureKind.ENVIRONMENT)


class TurnHandlers:
    def __init__(self, partition: Partition) -> None:
        self.salvaged_tokens = 0
        self._partition = partition
        self._salvage = Salvage(
            partition.gate,
            max_attempts=partition.max_attempts,
            is_believed=lambda subject: not partition.node_registry.is_quarantined(subject),
        )

    def record(self, body: RecordRequest) -> None:
        """Keep turns of valid leases; the others are too late and are ignored. Nothing is kept of
        an untrusted node: a trusted one would deliver it, unchecked."""
        node = self._partition.nodes.get(body.node_id)
        if node is None or node.is_untrusted:
            return
        subject = subject_of_node(body.node_id)
        for recorded in body.turns:
            group_id, slot, epoch = parse_row_id(recorded.row_id)
            if not self._partition.holds(body.node_id, group_id, slot, epoch):
                continue
            if wrong := check_turn(recorded.turn, recorded.index):
                raise BadRequest(f"turn {recorded.index} of {recorded.row_id}: {wrong}")
            is_new = self._salvage.record(
                (group_id, slot), epoch, recorded.index, recorded.turn, subject
            )
            if is_new and recorded.is_reused:
                self.salvaged_tokens += len(recorded.turn.sampled_ids) // 4

    def offer(self, node_id: NodeId, row_id: RowId) -> TurnsAnswer:
        group_id, index, epoch = parse_row_id(row_id)
        if not self._partition.holds(node_id, group_id, index, epoch):
            raise Fenced(f"{node_id} no longer holds the lease of {row_id}; stop working on it")
        if self._partition.nodes[node_id].is_untrusted:
            return TurnsAnswer(turns=())
        attempt = self._partition.groups[group_id].slot(index).attempt + 1
        return TurnsAnswer(turns=tuple(self._salvage.offer((group_id, index), epoch, attempt)))

    def with_num_recorded(self, node_id: NodeId, grants: Sequence[Grant]) -> list[Grant]:
        """Add to each lease the number of turns recorded by earlier holders of its slot. An
        untrusted node gets none: it answers for its own versions alone."""
        if not len(self._salvage) or self._partition.nodes[node_id].is_untrusted:
            return list(grants)
        offer = self._salvage.offer
        turns = (
            offer((grant.group_id, grant.slot), grant.epoch, grant.attempt) for grant in grants
        )
        return [
            msgspec.structs.replace(grant, num_recorded=len(recorded)) if recorded else grant
            for grant, recorded in zip(grants, turns, strict=True)
        ]

    def on_delivery(self, row: RowRecord, outcome: Outcome) -> None:
        """Forget the turns of a finished slot; only an attempt that was released, or that an
        engine, a sandbox or an environment ended, is worth resuming."""
        is_ours = outcome.reason in _NOT_OF_THE_WORKFLOW
        if not is_ours and outcome.kind is not OutcomeKind.CANCELLED:
            self._salvage.forget((row.group_id, row.slot))

    def tick(self) -> None:
        self._salvage.retain(self._partition.groups)
