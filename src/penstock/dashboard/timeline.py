# SPDX-License-Identifier: Apache-2.0
"""The fleet over time: how busy each node was, what each trainer did, when versions appeared.

Looks at the newest MAX_ROWS attempts, or at those before an arrival, so that the cost does not grow
with the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from penstock.dashboard.shown_run import ShownRun
from penstock.dashboard.spend import latest_report
from penstock.dataflow.core.names import TRAIN
from penstock.dataflow.records import IncarnationRecord, VersionRecord
from penstock.runs.curves import MetricsRecord

MAX_ROWS = 4_000
NUM_BUCKETS = 160
MAX_STEPS = 400
PARTS = ("wait", "read", "train", "publish", "checkpoint")
"""Of a step, in this order, as `seconds/PART` of its metrics says."""
LEASES = (
    "SELECT r.node_id, g.granted_at, r.delivered_at, r.outcome, r.arrival FROM rows r "
    "JOIN grants g ON g.group_id = r.group_id AND g.epoch = r.epoch "
    "AND r.slot >= g.slot AND r.slot < g.slot + g.num_slots "
    "WHERE r.space = :space AND r.arrival < :before ORDER BY r.arrival DESC LIMIT :num"
)

Lease = tuple[str, float, float, str, int]


def read_timeline(run: ShownRun, before: int) -> dict[str, Any]:
    """Lanes of nodes and trainers between two moments."""
    recorded = run.recorded
    leases: list[Lease] = []
    for tables in (recorded.coordinator, *recorded.partitions.values()):
        leases += tables.rows(LEASES, space=TRAIN, before=before, num=MAX_ROWS)
    records = run.records()[-MAX_STEPS:] if before >= 1 << 62 else run.records()
    if not leases:
        return {"start": 0.0, "end": 0.0, "nodes": [], "trainers": [], "versions": [], "next": 0}
    start = min(granted for _, granted, *_ in leases)
    end = max(delivered for _, _, delivered, *_ in leases)
    where = "at BETWEEN :start AND :end"
    tables = recorded.coordinator
    report = latest_report(run)
    return {
        "start": start,
        "end": end,
        "nodes": node_lanes(leases, start, end),
        "trainers": _trainer_lanes(records, start, end),
        "versions": tables.read(VersionRecord, where, start=start, end=end),
        "restarts": tables.read(IncarnationRecord, where, start=start, end=end),
        "accounts": () if report is None else report.nodes,
        "next": min(arrival for *_, arrival in leases) if len(leases) >= MAX_ROWS else 0,
    }


def node_lanes(leases: Sequence[Lease], start: float, end: float) -> list[dict[str, Any]]:
    """By node: the mean number of slots in use in each of NUM_BUCKETS parts of the time, and the
    attempts that failed. The mean grows where an attempt starts, by the rest of that part, and one
    part later by what is left of 1; where it ends, it falls likewise."""
    width_s = max(1e-6, (end - start) / NUM_BUCKETS)
    changes: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * (NUM_BUCKETS + 1))
    failed: defaultdict[str, list[float]] = defaultdict(list)
    for node, granted, delivered, outcome, _ in leases:
        for at, sign in ((granted, 1.0), (max(granted, delivered), -1.0)):
            place = (at - start) / width_s
            bucket = min(NUM_BUCKETS - 1, int(place))
            changes[node][bucket] += sign * (1.0 - (place - bucket))
            changes[node][bucket + 1] += sign * (place - bucket)
        if outcome not in ("completed", "truncated"):
            failed[node].append(delivered)
    return [
        {
            "node": node,
            "busy": [round(abs(busy), 2) for busy in accumulate(lane[:NUM_BUCKETS])],
            "failed": failed[node],
        }
        for node, lane in sorted(changes.items())
    ]


def _trainer_lanes(
    records: Sequence[MetricsRecord], start: float, end: float
) -> list[dict[str, Any]]:
    """By policy: what its trainer did in each step, from the end of the step backwards."""
    lanes: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if not start <= record.time <= end:
            continue
        at = record.time
        for part in reversed(PARTS):
            took_s = record.values.get(f"seconds/{part}", 0.0)
            if took_s > 0:
                piece = {"part": part, "start": at - took_s, "end": at, "step": record.number}
                lanes[record.policy].append(piece)
            at -= took_s
    return [{"policy": policy, "pieces": found} for policy, found in sorted(lanes.items())]
