# SPDX-License-Identifier: Apache-2.0
"""Where it went: every token and minute of sandboxes by its fate, every second by activity.

Each account sums to its whole: what is in no other part is in the part that waits for a decision.
"""

from __future__ import annotations

from typing import Any

from penstock.dashboard.overview import flow_totals
from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.report.shape import BalanceReport, TimeAccount
from penstock.errors import ConfigError, WireError
from penstock.runs.control import read_report, read_stored_report


def read_spend(run: ShownRun) -> dict[str, Any]:
    """Tokens and trajectories by fate, seconds by activity, and the budget."""
    usage, budget = run.folder.usage(), run.config.budget
    report = latest_report(run)
    return {
        "tokens": {policy: _fates(totals) for policy, totals in flow_totals(run).items()},
        "seconds": _seconds(report),
        "nodes": () if report is None else report.nodes,
        "since": None if report is None else report.since,
        "cost_per_hour": None if report is None else report.pool.cost_per_hour,
        "budget": {
            "tokens": budget.tokens,
            "node_hours": budget.node_hours,
            "used_tokens": usage.tokens,
            "used_node_hours": usage.node_s / 3600,
        },
    }


def latest_report(run: ShownRun) -> BalanceReport | None:
    """The balance report: of the service, or the last one that it stored; None before the first."""
    try:
        if run.summary().status is not None:
            return read_report(run.folder, patience_s=1.0)
        return read_stored_report(run.folder)
    except (ConfigError, WireError):
        return None


def _fates(totals: dict[str, Any]) -> dict[str, Any]:
    parts = {"trained": totals["trained"], "waits for a decision": totals["waiting"]}
    parts |= {f"lost: {reason}": amount for reason, amount in totals["wasted"].items()}
    return {
        "whole": totals["produced"],
        "parts": [
            {
                "fate": fate,
                "tokens": one.tokens,
                "sequences": one.sequences,
                "sandbox_ms": one.sandbox_ms,
            }
            for fate, one in parts.items()
        ],
        "replayed": totals["replayed"],
    }


def _seconds(report: BalanceReport | None) -> list[dict[str, Any]]:
    if report is None:
        return []
    found = [{"who": "rollout nodes", **_account(report.pool.node_time)}]
    found += (
        {"who": f"trainer of {one.policy}", **_account(one.trainer_time)} for one in report.policies
    )
    return found


def _account(account: TimeAccount) -> dict[str, Any]:
    return {"total_s": account.total_s, "seconds": account.seconds}
