# SPDX-License-Identifier: Apache-2.0
"""Formats the balance report as plain text, for a terminal, a log or an email."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.dataflow.report.shape import (
    Amount,
    BalanceReport,
    Decision,
    NodeReport,
    PolicyReport,
    PoolReport,
    Production,
    TimeAccount,
)

LABEL = 13
NAME = 22
MAX_NODES = 40
HEADS = ("node", "status", "doing", "gpus", "slots", "produced", "accepted", "rate", "busy")


def render(report: BalanceReport) -> str:
    """The full report, at most 100 columns wide unless names are long."""
    parts = [
        _head(report),
        *_decision(report.decision, report.pool),
        *_pool(report.pool),
    ]
    for policy in report.policies:
        parts += ["", *_policy(policy)]
    parts += ["", *_times(report), "", *_nodes(report.nodes)]
    return "\n".join(parts)


def _head(report: BalanceReport) -> str:
    window = report.window
    lasted = _clock(window.closed_at - window.opened_at)
    name = f"window {window.index}" if window.complete else "first window, still running"
    return f"{report.run} · balance at {_at(report.at)} · {name}, {lasted}\n"


def _decision(decision: Decision, pool: PoolReport) -> Iterator[str]:
    action = decision.branch.replace("_", " ").upper()
    size = _plural(pool.total_gpus, "GPU")
    if decision.estimated_delta_gpus:
        size += f" → {decision.target_gpus} ({decision.estimated_delta_gpus:+d})"
    yield _line("decision", f"{action}   {size}   {decision.reason}")
    if decision.drain_first:
        yield _line("", f"drain first: {_names(decision.drain_first)}")
    last = decision.last_action
    if last is not None:
        done = f"{last.branch.replace('_', ' ')} {last.gpus_before} → {last.target_gpus}"
        yield _line(
            "", f"last: {done} at {_at(last.at)}, cooldown until {_at(decision.cooldown_until)}"
        )


def _pool(pool: PoolReport) -> Iterator[str]:
    parts = [f"{_plural(pool.nodes_healthy, 'node')} healthy"]
    for num, doing in ((pool.nodes_pending, "starting"), (pool.nodes_draining, "draining")):
        if num:
            parts.append(f"{num} of them {doing}")
    if pool.cost_per_hour:
        parts.append(f"{pool.cost_per_hour:,.2f} per hour")
    yield _line("pool", " · ".join(parts))
    for status, names in (("suspect", pool.suspect), ("gone", pool.gone)):
        if names:
            yield _line("", f"{status} (not counted): {_names(names)}")
    if pool.busy_share is not None:
        loading = pool.loading_share or 0.0
        yield _line("", f"busy {pool.busy_share:.0%} of the window, loading weights {loading:.0%}")


def _policy(policy: PolicyReport) -> Iterator[str]:
    window = policy.window
    yield f"policy {policy.policy}{' (done)' if policy.done else ''}"
    if window.rollout_wait_fraction is None:
        yield _line("  step", f"{_plural(window.num_versions, 'version')}, no step measured yet")
    else:
        yield _line(
            "  step",
            f"{window.avg_step_time_s:.2f} s, of which {window.avg_batch_wait_s:.2f} s waiting "
            f"({window.rollout_wait_fraction:.1%}) · {_plural(window.num_versions, 'version')}, "
            f"{window.num_samples} measured",
        )
    queues = policy.queues
    yield _line(
        "  queues",
        f"{_plural(queues.issued_groups, 'group')} on nodes · {queues.ready_groups} ready · "
        f"{_plural(queues.sealed_batches, 'batch', 'batches')} sealed",
    )
    if window.staleness_histogram:
        total = sum(amount.tokens for amount in window.staleness_histogram.values()) or 1
        ages = window.staleness_histogram.items()
        parts = (f"{age}: {amount.tokens / total:.0%}" for age, amount in ages)
        yield _line("  staleness", " · ".join(parts) + "   of consumed tokens")
    yield from _production(window.production, policy.totals)


def _production(window: Production, totals: Production) -> Iterator[str]:
    heads = f"{'sequences':>14}{'tokens':>18}"
    yield f"{'':{NAME}}{'this window':>32} {'since the run started':>32}"
    yield f"{'':{NAME}}{heads} {heads}"
    rows = [
        ("produced", window.produced, totals.produced),
        ("entered", window.entered, totals.entered),
        ("consumed", window.consumed, totals.consumed),
    ]
    if totals.replayed.sequences:
        rows.append(("replayed", window.replayed, totals.replayed))
    nothing = Amount(sequences=0, tokens=0)
    for why in sorted(totals.wasted.keys() | window.wasted.keys()):
        pair = window.wasted.get(why, nothing), totals.wasted.get(why, nothing)
        rows.append((f"– {why}", *pair))
    for name, now, total in rows:
        yield f"  {name:<{NAME - 2}}{_pair(now)} {_pair(total)}"


def _pair(amount: Amount) -> str:
    return f"{amount.sequences:>14,}{amount.tokens:>18,}"


def _times(report: BalanceReport) -> Iterator[str]:
    yield f"time since {_at(report.since)}"
    for policy in report.policies:
        yield f"  trainer {policy.policy}: {_account(policy.trainer_time)}"
    if report.nodes:
        yield f"  all nodes: {_account(report.pool.node_time)}"


def _account(account: TimeAccount) -> str:
    parts = sorted(account.shares.items(), key=lambda item: -item[1])
    text = " · ".join(f"{name.replace('_', ' ')} {share:.1%}" for name, share in parts)
    return f"{text or 'nothing yet'}   of {_clock(account.total_s)}"


def _nodes(nodes: Sequence[NodeReport]) -> Iterator[str]:
    if not nodes:
        yield "no node has joined yet"
        return
    yield "nodes (tokens: this window; busy: since joining)"
    cells = [HEADS, *(_cells(node) for node in nodes[:MAX_NODES])]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADS))]
    for row in cells:
        left = "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False))
        right = "  ".join(
            cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)
        )
        yield f"  {left}  {right}"
    if len(nodes) > MAX_NODES:
        yield f"  … and {len(nodes) - MAX_NODES} more"


def _cells(node: NodeReport) -> tuple[str, ...]:
    busy = node.time.shares.get("rolling_out", 0.0)
    return (
        node.node_id,
        node.status,
        node.activity.replace("_", " "),
        str(node.gpus),
        f"{node.leases}/{node.capacity}",
        f"{node.produced.tokens:,}",
        f"{node.accepted.tokens:,}",
        "–" if node.accept_rate is None else f"{node.accept_rate:.0%}",
        f"{busy:.0%}",
    )


def _line(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def _names(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _plural(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _at(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
