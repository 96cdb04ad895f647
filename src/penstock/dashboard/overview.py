# SPDX-License-Identifier: Apache-2.0
"""The overview: state, progress, health and totals of a run, and its curves.

Reads; decides only what a person should look at first. Counts come from the ledger's own totals, so
that no view counts the rows of a long run again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec

from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.report.figures import Flow
from penstock.dataflow.service.operators.messages import Status
from penstock.errors import PenstockError
from penstock.runs.curves import MetricsRecord
from penstock.runs.evaluations import read_best
from penstock.runs.state import RunState, RunSummary

MAX_POINTS = 800
"""Of a curve; more steps are averaged in groups."""
PACE_STEPS = 20
"""The time left is estimated from the pace of this many steps."""
LONG_WAIT_S = 15.0
TRAINED_TOKENS = "tokens/trained"
THROUGHPUT, STEP_SECONDS = "trained tokens per second", "seconds per step"
"""Series that are computed from the times of the steps."""
_flows = msgspec.json.Decoder(dict[str, Flow])


def summarise(run: ShownRun) -> dict[str, Any]:
    """State, progress and health of a run: all that is shown of it in every view."""
    found = run.summary()
    status = found.status
    is_running = found.state is RunState.RUNNING
    return {
        "key": run.key,
        "name": found.name,
        "state": found.state,
        "why": found.why,
        "started_at": found.started_at,
        "ended_at": found.ended_at,
        "at": time.time(),
        "policies": [
            {
                "policy": policy.policy,
                "step": policy.step,
                "steps": policy.steps,
                "reward": policy.reward,
                "skipped": policy.skipped,
            }
            for policy in found.progress.policies
        ],
        "trajectories": found.progress.trajectories,
        "totals": flow_totals(run),
        "tokens_per_s": None if status is None else status.tokens_per_s,
        "eta_s": _eta_s(found, run.records()) if is_running else None,
        "health": [{"level": level, "text": text} for level, text in _health(found)],
        "evaluations": _newest_scores(run),
        "best": read_best(run.folder.path),
    }


def flow_totals(run: ShownRun) -> dict[str, dict[str, Any]]:
    """By policy: sequences and tokens that were produced, trained, replayed, wasted by reason, and
    those that wait for a decision. They sum to what was produced."""
    try:
        text = run.recorded.coordinator.scalar("SELECT value FROM meta WHERE key = 'report'")
    except PenstockError:
        return {}
    return {} if not text else {name: _totals(one) for name, one in _flows.decode(text).items()}


def _totals(flow: Flow) -> dict[str, Any]:
    waiting = flow.produced - flow.consumed
    for wasted in flow.wasted.values():
        waiting -= wasted
    return {
        "produced": flow.produced,
        "trained": flow.consumed,
        "replayed": flow.replayed,
        "wasted": flow.wasted,
        "waiting": waiting,
    }


def _eta_s(found: RunSummary, records: Sequence[MetricsRecord]) -> float | None:
    """Seconds to the last step of the slowest policy; None before there is a pace."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        times[record.policy].append(record.time)
    left: list[float] = []
    for policy in found.progress.policies:
        recent = times[policy.policy][-PACE_STEPS:]
        if len(recent) > 2:
            pace_s = (recent[-1] - recent[0]) / (len(recent) - 1)
            left.append(max(0.0, policy.steps - policy.step) * pace_s)
    return max(left, default=None)


def _health(found: RunSummary) -> list[tuple[str, str]]:
    """What needs a look, the worst first: `bad`, `warn` or `ok`."""
    lines: list[tuple[str, str]] = []
    if found.state in (RunState.FAILED, RunState.KILLED):
        lines.append(("bad", f"{found.state}: {found.why}"))
    elif found.state is RunState.STOPPED:
        lines.append(("warn", f"stopped: {found.why}"))
    elif found.state is RunState.RUNNING and found.status is None:
        lines.append(("bad", f"its dataflow does not answer: {found.why}"))
    if found.status is not None:
        lines += _live_health(found.status)
    return lines or [("ok", "nothing needs attention")]


def _live_health(status: Status) -> list[tuple[str, str]]:
    lines = [("bad", status.failed)] if status.failed else []
    lines += [("warn", alarm) for alarm in status.alarms]
    silent = [node for node in status.nodes if node.silent_s > LONG_WAIT_S]
    lines += [
        ("warn", f"node {node.node_id} is silent for {node.silent_s:.0f} s") for node in silent
    ]
    lines += [
        ("warn", f"{wait.who} waits for {wait.on}, {wait.since_s:.0f} s")
        for wait in status.waiting
        if wait.since_s > LONG_WAIT_S
    ]
    return lines


def _newest_scores(run: ShownRun) -> list[dict[str, Any]]:
    newest = {(point["suite"], point["policy"]): point for point in run.evaluations()}
    return list(newest.values())


# --- curves -----------------------------------------------------------------------------------


def curves(run: ShownRun, metrics: Sequence[str]) -> dict[str, Any]:
    """These metrics by step, one series for each policy, and the names of all metrics."""
    records = run.records()
    by_policy: defaultdict[str, list[MetricsRecord]] = defaultdict(list)
    for record in records:
        if not record.skipped:
            by_policy[record.policy].append(record)
    names = {name for record in records for name in record.values}
    return {
        "names": sorted(names | {THROUGHPUT, STEP_SECONDS}),
        "series": [
            {"metric": metric, "policy": policy, **_thin(_points(found, metric))}
            for policy, found in by_policy.items()
            for metric in metrics
        ],
        "evaluations": run.evaluations(),
    }


def _points(records: Sequence[MetricsRecord], metric: str) -> list[tuple[int, float]]:
    if metric not in (THROUGHPUT, STEP_SECONDS):
        return [(one.number, one.values[metric]) for one in records if metric in one.values]
    found: list[tuple[int, float]] = []
    for before, one in pairwise(records):
        took_s = one.time - before.time
        amount = one.values.get(TRAINED_TOKENS) if metric == THROUGHPUT else None
        if metric == STEP_SECONDS:
            found.append((one.number, took_s))
        elif amount is not None and took_s > 0:
            found.append((one.number, amount / took_s))
    return found


def _thin(points: Sequence[tuple[int, float]]) -> dict[str, list[Any]]:
    """At most MAX_POINTS, each the mean of its share of the steps. A value that is not finite has
    no place on a chart."""
    num = min(MAX_POINTS, len(points))
    edges = [round(i * len(points) / num) for i in range(num + 1)] if num else []
    shares = [points[a:b] for a, b in pairwise(edges)]
    return {
        "steps": [share[-1][0] for share in shares],
        "values": [_finite(fmean(value for _, value in share)) for share in shares],
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
