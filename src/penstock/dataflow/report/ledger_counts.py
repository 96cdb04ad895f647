# SPDX-License-Identifier: Apache-2.0
"""The same counts by SQL over the ledger's tables, independent of the live flow counter.

Used to verify a report against the ledger, and for ledgers without stored totals."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any, Protocol

from penstock.dataflow.report.figures import REFUSAL_REASONS, Flow
from penstock.dataflow.report.shape import ZERO, Amount
from penstock.types import SANDBOX_MS, UNTRUSTED_TAG

REFUSED = frozenset(str(reason) for reason in REFUSAL_REASONS)
ROWS = "SELECT group_id, outcome, sampled, \"values\" FROM rows WHERE space = 'train'"
UNTRUSTED_ROWS = (
    "SELECT sampled FROM rows JOIN nodes ON nodes.node_id = rows.node_id "
    "WHERE space = 'train' AND tags LIKE :tag"
)
FATES = "SELECT consumer, group_id, state, reason, tokens, uses FROM fates"


class SqlReader(Protocol):
    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]: ...


class _PolicySums:
    def __init__(self) -> None:
        self.produced = self.entered = self.consumed = self.replayed = ZERO
        self.wasted: dict[str, Amount] = defaultdict(lambda: ZERO)

    @property
    def flow(self) -> Flow:
        return Flow(
            produced=self.produced,
            entered=self.entered,
            consumed=self.consumed,
            replayed=self.replayed,
            wasted={str(why): counts for why, counts in self.wasted.items() if counts != ZERO},
        )


def count_untrusted_tokens(tables: SqlReader) -> int:
    """Sampled tokens that untrusted nodes delivered since the run started."""
    found = tables.rows(UNTRUSTED_ROWS, tag=f'%"{UNTRUSTED_TAG}"%')
    return sum(sum(json.loads(sampled).values()) for (sampled,) in found)


def count_from_ledger(tables: SqlReader) -> dict[str, Flow]:
    """Flow of every policy since the run started, by policy."""
    sums: dict[str, _PolicySums] = defaultdict(_PolicySums)
    scored: dict[tuple[str, str], Amount] = defaultdict(lambda: ZERO)
    tokenless: dict[str, Amount] = defaultdict(lambda: ZERO)
    for group_id, outcome, sampled, values in tables.rows(ROWS):
        sandbox_ms = int(json.loads(values or "{}").get(SANDBOX_MS, 0))
        by_policy = json.loads(sampled)
        if sandbox_ms and not any(by_policy.values()):
            fate = "absent" if outcome in ("completed", "truncated") else outcome
            tokenless[fate] += Amount(sequences=0, tokens=0, sandbox_ms=sandbox_ms)
        for policy, tokens in by_policy.items():
            one = Amount(sequences=1, tokens=tokens, sandbox_ms=sandbox_ms) if tokens else ZERO
            sums[policy].produced += one
            if outcome in ("completed", "truncated"):
                scored[policy, group_id] += one
            else:
                sums[policy].wasted[outcome] += one
    for policy, group_id, state, reason, tokens, uses in tables.rows(FATES):
        if not tokens:
            continue
        counts, total = replace(scored[policy, group_id], tokens=tokens), sums[policy]
        if state != "dropped" or reason not in REFUSED:
            total.entered += counts
        if state == "sealed":
            total.consumed += counts
            again = max(0, uses - 1)  # nothing ran again
            total.replayed += Amount(
                sequences=again * counts.sequences, tokens=again * counts.tokens
            )
        elif state == "dropped":
            total.wasted[reason] += counts
    for total in sums.values():
        for fate, counts in tokenless.items():
            total.produced += counts
            total.wasted[fate] += counts
    return {policy: total.flow for policy, total in sums.items()}
