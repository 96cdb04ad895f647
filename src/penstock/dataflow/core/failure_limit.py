# SPDX-License-Identifier: Apache-2.0
"""When a run whose attempts all fail has to end. A pure state machine.

Counts the groups that failed in a row: a slot ran out of attempts, and the closing policy dropped
the group. One group that closes starts the count again. Groups of external agents, and groups
dropped for other reasons, are never counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from penstock.dataflow.records import Journal, MetaRecord

MIN_GROUPS = 8
MIN_ATTEMPTS = 64
"""A run ends when at least MIN_GROUPS groups in a row failed without a single result, after at
least MIN_ATTEMPTS failed attempts."""
MIN_PARTIAL_GROUPS = 256
"""The number of groups in a row if some of their slots had results."""
OUTAGE_S = 1800.0
"""A run in which a group ever closed also waits this long, counted from the first of the failed
groups: an engine or a judge that is down may come back."""
MAX_CAUSES = 16
MAX_CAUSE_CHARS = 300
FAILURES_KEY = "failures_in_a_row"
"""Key of the count in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """Groups that failed in a row, up to now."""

    num_groups: int = 0
    num_attempts: int = 0
    """Failed attempts in them."""
    num_results: int = 0
    """Slots with a result in them; they were lost with their groups."""
    since: float = 0.0
    """When the first of them ended."""
    causes: dict[str, int] = field(default_factory=dict[str, int])
    """Number of groups by cause; only the first MAX_CAUSES causes are kept apart."""
    has_succeeded: bool = False
    """A group of this run closed, at any time."""

    def exceeds_limit(self, now: float) -> bool:
        min_groups = MIN_PARTIAL_GROUPS if self.num_results else MIN_GROUPS
        if self.num_groups < min_groups or self.num_attempts < MIN_ATTEMPTS:
            return False
        return not self.has_succeeded or now - self.since >= OUTAGE_S


class FailureLimit:
    def __init__(self, journal: Journal) -> None:
        self.count = FailureCount()
        self._journal = journal

    def group_failed(self, num_attempts: int, num_results: int, cause: str, now: float) -> None:
        """A group failed, after this many failed attempts and with this many results."""
        count, cause = self.count, summarise_cause(cause)
        causes = dict(count.causes)
        if cause in causes or len(causes) < MAX_CAUSES:
            causes[cause] = causes.get(cause, 0) + 1
        self._set(
            replace(
                count,
                num_groups=count.num_groups + 1,
                num_attempts=count.num_attempts + num_attempts,
                num_results=count.num_results + num_results,
                since=count.since if count.num_groups else now,
                causes=causes,
            )
        )

    def group_succeeded(self) -> None:
        """A group closed, or was dropped for a reason other than failure."""
        if self.count.num_groups or not self.count.has_succeeded:
            self._set(FailureCount(has_succeeded=True))

    def cause(self, now: float) -> str:
        """Why no more work may start and the run has to end; empty while it may go on."""
        count = self.count
        if not count.exceeds_limit(now):
            return ""
        causes = count.causes
        main = max(causes, key=lambda cause: causes[cause])
        since = f" for {OUTAGE_S / 60:.0f} minutes" if count.has_succeeded else ""
        results = f" and {count.num_results} results" if count.num_results else ""
        return (
            f"every group failed{since}: {count.num_groups} groups in a row, after "
            f"{count.num_attempts} failed attempts{results}. Most common cause, in {causes[main]} "
            f"of {count.num_groups} groups: {main}. No new work starts: fix that error, then "
            "restart the run"
        )

    def restore(self, value: str, now: float) -> None:
        """Continue a recorded count. A count that had ended the run starts at 0: a resumed run
        gets another try."""
        found = msgspec.json.decode(value, type=FailureCount)
        is_over = found.exceeds_limit(now)
        self.count = FailureCount(has_succeeded=found.has_succeeded) if is_over else found

    def _set(self, count: FailureCount) -> None:
        self.count = count
        value = msgspec.json.encode(count).decode()
        self._journal(MetaRecord(key=FAILURES_KEY, value=value))


def summarise_cause(cause: str) -> str:
    """What failed and, of a traceback, its last line only: the lines between differ by task."""
    lines = cause.strip().splitlines() or ["unknown"]
    kind = ": ".join(lines[0].split(": ", 2)[:2])
    return (f"{kind}: {lines[-1].strip()}" if lines[1:] else lines[0])[:MAX_CAUSE_CHARS]
