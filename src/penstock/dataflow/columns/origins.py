# SPDX-License-Identifier: Apache-2.0
"""What a rollout row was made from: its task, its slot's seed, and whether its node is trusted.

Read from the tables on demand, never stored twice. A stage that scores or repeats a rollout asks
for it as the column `origin`; nothing in it comes from the node."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import GroupRecord, NodeRecord, RowRecord
from penstock.dataflow.sources import slot_seeds
from penstock.types import NodeId, RowId, Task

_task = msgspec.json.Decoder(Task)


class RowOrigin(msgspec.Struct, frozen=True, kw_only=True):
    task: Task
    seed: int
    """Of the slot."""
    node_id: NodeId
    is_trusted: bool
    """Whether the node's credential is."""


def read_origins(tables: Tables, rows: Iterable[RowRecord]) -> dict[RowId, bytes]:
    """By row, encoded; without rows whose group is gone."""
    rows = list(rows)
    groups = [*{row.group_id for row in rows}]
    nodes = [*{row.node_id for row in rows}]
    tasks = {
        group.group_id: _task.decode(group.task)
        for group in tables.read(GroupRecord, "group_id IN :ids", ids=groups)
    }
    untrusted = {
        node.node_id
        for node in tables.read(NodeRecord, "node_id IN :ids", ids=nodes)
        if node.is_untrusted
    }
    found: dict[RowId, bytes] = {}
    for row in rows:
        task = tasks.get(row.group_id)
        if task is not None:
            [seed] = slot_seeds(task.seed, range(row.slot, row.slot + 1))
            origin = RowOrigin(
                task=task,
                seed=seed,
                node_id=row.node_id,
                is_trusted=row.node_id not in untrusted,
            )
            found[row.row_id] = msgspec.msgpack.encode(origin)
    return found
