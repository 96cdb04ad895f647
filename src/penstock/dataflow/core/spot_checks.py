# SPDX-License-Identifier: Apache-2.0
"""Rows of untrusted credentials that were generated again, and when they differ too often.

Owns the counts by subject and the verdict. Pure: a stage generates, this decides.

Two sequential tests, each valid however often it is looked at: with n results so far, a verdict
needs a chance below ALPHA / (n (n + 1)), which adds up to ALPHA over all n. *Tokens*: rows
with other tokens (of the first prompt, where the engine does not repeat itself), against the share
that rounding may cause. *Rewards*:
rows that earned more than their repetition, against a fair coin; a node that picks its best answers
fails it with any engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import msgspec

from penstock.bounds import Count, Finite, Seconds
from penstock.dataflow.records import Journal, MetaRecord

ALPHA = 1e-4
"""Chance that an honest credential is ever quarantined by one of the two tests."""
TOLERATED_SHARE = 0.02
"""Share of rows in which honest engines may differ by rounding, unless the run says otherwise."""
CHECKS_PREFIX = "checks/"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotCheck:
    """One row that was generated again."""

    has_same_tokens: bool | None
    """Of an engine that does not repeat itself, the tokens of the first prompt alone. None: nothing
    was compared."""
    reward_change: Finite
    """Reward of the row minus the reward of its repetition."""
    num_tokens: Count
    """Tokens that the check generated."""
    seconds: Seconds
    """Time that the check took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCounts:
    """Of one subject."""

    num_checked: int = 0
    num_compared: int = 0
    """Checks in which tokens could be compared."""
    num_different: int = 0
    """Of those, with other tokens."""
    num_better: int = 0
    """Rows that earned more than their repetition."""
    num_worse: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def updated(self, check: SpotCheck) -> CheckCounts:
        return CheckCounts(
            num_checked=self.num_checked + 1,
            num_compared=self.num_compared + (check.has_same_tokens is not None),
            num_different=self.num_different + (check.has_same_tokens is False),
            num_better=self.num_better + (check.reward_change > 0),
            num_worse=self.num_worse + (check.reward_change < 0),
            num_tokens=self.num_tokens + check.num_tokens,
            seconds=self.seconds + check.seconds,
        )

    def verdict(self, tolerated_share: float) -> str:
        """Why the subject is not believed; empty if it is."""
        n, k = self.num_compared, self.num_different
        if k and binomial_tail(k, n, tolerated_share) < ALPHA / (n * (n + 1)):
            return (
                f"{k} of {n} of its rows have other tokens when they are generated again from the "
                f"same task, seed and version; honest engines differ in at most {tolerated_share:g}"
            )
        n, k = self.num_better + self.num_worse, self.num_better
        if k and binomial_tail(k, n, 0.5) < ALPHA / (n * (n + 1)):
            return (
                f"{k} of {n} of its rows earned more than their repetition elsewhere, and only "
                f"{n - k} less"
            )
        return ""


def binomial_tail(k: int, n: int, p: float) -> float:
    """Chance of at least k successes in n tries of chance p; an upper bound for large n."""
    if k <= n * p:
        return 1.0
    share = k / n
    # Chernoff's bound; exact enough, and no sum over thousands of terms.
    rest = (1 - share) * math.log((1 - share) / (1 - p)) if share < 1 else 0.0
    return math.exp(-n * (share * math.log(share / p) + rest))


class SpotChecks:
    """All subjects of a run; its facts survive a restart as `checks/SUBJECT`."""

    def __init__(self, journal: Journal) -> None:
        self.counts: dict[str, CheckCounts] = {}
        self.tolerated_share = TOLERATED_SHARE
        self._journal = journal

    def record(self, subject: str, check: SpotCheck) -> str:
        """Count one check; returns why the subject must be quarantined, or nothing."""
        counts = self.counts[subject] = self.counts.get(subject, CheckCounts()).updated(check)
        rounded = replace(counts, seconds=round(counts.seconds, 3))
        value = msgspec.json.encode(rounded).decode()
        self._journal(MetaRecord(key=f"{CHECKS_PREFIX}{subject}", value=value))
        return counts.verdict(self.tolerated_share)

    def restore(self, record: MetaRecord) -> None:
        subject = record.key.removeprefix(CHECKS_PREFIX)
        self.counts[subject] = msgspec.json.decode(record.value, type=CheckCounts)
