# SPDX-License-Identifier: Apache-2.0
"""The flow of data from sources to weights: what is at each place, and what the run waits for.

Of a running run from its service, otherwise from the ledger: then places have totals, no queues.
Also the record of stalls. Counts nothing by itself."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.dashboard.overview import flow_totals
from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.column_records import ReaderRecord
from penstock.dataflow.core.names import TRAIN
from penstock.dataflow.records import SourceRecord
from penstock.durable import read_regular
from penstock.errors import PenstockError
from penstock.runs.bottleneck import bottleneck

MAX_STALLS = 20
MAX_STALL_BYTES = 256 << 10


def read_flow(run: ShownRun) -> dict[str, Any]:
    """Each place on the way of the data, with what is there now."""
    found = run.summary()
    status = found.status
    return {
        "is_live": status is not None,
        "bottleneck": "" if status is None else bottleneck(status),
        "sources": _sources(run),
        "stages": _stages(run),
        "policies": () if status is None else status.policies,
        "nodes": () if status is None else status.nodes,
        "partitions": () if status is None else status.partitions,
        "waiting": () if status is None else status.waiting,
        "trajectories": found.progress.trajectories,
        "steps": [
            {"policy": one.policy, "step": one.step, "steps": one.steps}
            for one in found.progress.policies
        ],
        "tokens_per_s": None if status is None else status.tokens_per_s,
        "totals": flow_totals(run),
        "versions": _newest_versions(run),
    }


def _sources(run: ShownRun) -> list[dict[str, Any]]:
    try:
        found = run.recorded.coordinator.read(SourceRecord)
    except PenstockError:
        return []
    return [
        {"name": one.name, "issued": one.next_ordinal - one.skipped, "skipped": one.skipped}
        for one in found
    ]


def _stages(run: ShownRun) -> list[dict[str, Any]]:
    """How far each reader of rows is behind the newest row of its partition."""
    found: list[dict[str, Any]] = []
    try:
        recorded = run.recorded
    except PenstockError:
        return []
    newest = "SELECT coalesce(max(arrival), 0) FROM rows WHERE space = :space"
    for tables in {
        id(one): one for one in (recorded.coordinator, *recorded.partitions.values())
    }.values():
        last = int(tables.scalar(newest, space=TRAIN))
        found += (
            {"name": one.name, "behind": max(0, last - one.cursor)}
            for one in tables.read(ReaderRecord, "space = :space", space=TRAIN)
        )
    return found


def _newest_versions(run: ShownRun) -> dict[str, int]:
    try:
        found = run.recorded.coordinator.rows("SELECT policy, max(number) FROM versions GROUP BY 1")
    except PenstockError:
        return {}
    return {policy: int(number) for policy, number in found}


def read_stalls(run: ShownRun) -> dict[str, Any]:
    """Who waits for whom now, and the stalls that the launcher recorded."""
    status = run.summary().status
    return {
        "is_live": status is not None,
        "limit_s": run.config.stall.limit_s,
        "action": run.config.stall.action,
        "chain": () if status is None else [str(link) for link in status.chain],
        "waiting": () if status is None else status.waiting,
        "alarms": () if status is None else status.alarms,
        "work": []
        if status is None
        else [{"node": one.node_id, "work": one.work} for one in status.nodes if one.work],
        "records": _stall_records(run),
    }


def _stall_records(run: ShownRun) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(run.folder.logs.glob("attempt_*/stall-*.json"), reverse=True)[:MAX_STALLS]:
        try:
            record = msgspec.json.decode(read_regular(path, MAX_STALL_BYTES))
            found.append({"file": f"{path.parent.name}/{path.name}", "record": record})
        except (OSError, msgspec.DecodeError, RecursionError):
            continue
    return found
