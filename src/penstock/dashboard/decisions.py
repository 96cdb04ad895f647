# SPDX-License-Identifier: Apache-2.0
"""What the data rules decided, with reasons and examples.

Looks at the newest MAX_FATES decisions of each policy; the totals since the start come from the
ledger."""

from __future__ import annotations

from typing import Any

from penstock.dashboard.overview import flow_totals
from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.records import DecisionRecord, SourceRecord

MAX_FATES = 5_000
MAX_EXAMPLES = 5
MAX_DECISIONS = 100
FATES = (
    "SELECT group_id, state, reason, rule, tokens, at, seq FROM fates "
    "WHERE consumer = :policy ORDER BY arrival DESC LIMIT :num"
)


def read_decisions(run: ShownRun) -> dict[str, Any]:
    """By policy and rule: how many groups it admitted, sealed or dropped and why."""
    opened = run.open()
    tables = opened.recorded.coordinator
    newest = "TRUE ORDER BY number DESC LIMIT :num"
    return {
        "looked_at": MAX_FATES,
        "policies": {policy: _by_rule(run, policy) for policy in opened.policies},
        "totals": flow_totals(run),
        "configured": [rule.model_dump(mode="json") for rule in run.config.dataflow.rules],
        "skipped": [
            {"source": one.name, "tasks": one.next_ordinal, "skipped": one.skipped}
            for one in tables.read(SourceRecord)
        ],
        "others": tables.read(DecisionRecord, newest, num=MAX_DECISIONS),
    }


def _by_rule(run: ShownRun, policy: str) -> list[dict[str, Any]]:
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    tables = run.recorded.coordinator
    for group_id, state, reason, rule, tokens, at, seq in tables.rows(
        FATES, policy=policy, num=MAX_FATES
    ):
        line = found.setdefault(
            (rule, state, reason),
            {
                "rule": rule,
                "verdict": state,
                "reason": reason,
                "groups": 0,
                "tokens": 0,
                "last_at": at,
                "examples": [],
            },
        )
        line["groups"] += 1
        line["tokens"] += tokens
        if len(line["examples"]) < MAX_EXAMPLES:
            line["examples"].append(
                {"group_id": group_id, "batch": f"{policy}.{seq}" if seq else ""}
            )
    return sorted(found.values(), key=lambda line: -line["groups"])
