# SPDX-License-Identifier: Apache-2.0
"""Formats a simulation as text: recorded and simulated totals side by side."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.dataflow.simulate.figures import DataAmount, PolicyTotals, RunTotals
from penstock.types import PolicyName

NO_TOTALS = PolicyTotals(
    batches=0,
    trained=DataAmount(),
    replayed=DataAmount(),
    waiting=DataAmount(),
    wasted={},
    staleness_mean=0.0,
)


def lines(before: RunTotals, after: RunTotals, name: str, num_unfilled_batches: int) -> list[str]:
    rows = [("", "recorded", f"with {name}"), *_rows(before, after)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [
        f"{label:<{widths[0]}}  {old:>{widths[1]}}  {new:>{widths[2]}}".rstrip()
        for label, old, new in rows
    ]
    if after.unknown:
        table.append(
            f"\n{after.unknown:,} tasks were never rolled out in the recorded run, so their "
            "outcome is unknown; no other figure above includes them"
        )
    if num_unfilled_batches:
        table.append(
            f"\n{num_unfilled_batches:,} recorded batches are missing: under these rules, the "
            "recorded tasks did not fill them"
        )
    return table


def _rows(before: RunTotals, after: RunTotals) -> Iterator[tuple[str, str, str]]:
    yield "groups rolled out", f"{before.issued:,}", f"{after.issued:,}"
    for rule in sorted({*before.skipped, *after.skipped}):
        old, new = before.skipped.get(rule, 0), after.skipped.get(rule, 0)
        yield f"tasks skipped by {rule}", f"{old:,}", f"{new:,}"
    if after.unknown:
        yield "tasks with unknown outcome", "0", f"{after.unknown:,}"
    if before.rule_failures or after.rule_failures:
        yield "rule failures", f"{before.rule_failures:,}", f"{after.rule_failures:,}"
    for policy in sorted({*before.policies, *after.policies}):
        yield from _policy_rows(before, after, policy)


def _policy_rows(before: RunTotals, after: RunTotals, name: str) -> Iterator[tuple[str, str, str]]:
    old = before.policies.get(PolicyName(name), NO_TOTALS)
    new = after.policies.get(PolicyName(name), NO_TOTALS)
    yield "", "", ""
    yield f"policy {name}", "groups / rows / tokens", "groups / rows / tokens"
    yield "  batches sealed", f"{old.batches:,}", f"{new.batches:,}"
    yield "  trained", _shown(old.trained), _shown(new.trained)
    if old.replayed.groups or new.replayed.groups:
        yield "  replayed", _shown(old.replayed), _shown(new.replayed)
    yield "  mean staleness", f"{old.staleness_mean:.2f}", f"{new.staleness_mean:.2f}"
    yield "  waiting", _shown(old.waiting), _shown(new.waiting)
    yield "  wasted", _shown(old.total_wasted), _shown(new.total_wasted)
    for reason in sorted({*old.wasted, *new.wasted}):
        yield (
            f"    {reason}",
            _shown(old.wasted.get(reason, DataAmount())),
            _shown(new.wasted.get(reason, DataAmount())),
        )


def _shown(amount: DataAmount) -> str:
    return f"{amount.groups:,} / {amount.rows:,} / {amount.tokens:,}"
