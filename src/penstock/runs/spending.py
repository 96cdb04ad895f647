# SPDX-License-Identifier: Apache-2.0
"""Watches what a run uses, and says when its budget is spent. What untrusted nodes do costs their
owners, and must not end a run.

Owns the sums on disk, which outlive a start of the run. They come from the status of the run: what
a data partition counts between the last status and its death is missing in them.
"""

from __future__ import annotations

from contextlib import suppress

from penstock.config.limits import BudgetConfig
from penstock.dataflow.core.budget import Usage, UsageMeter, spent
from penstock.fleet.run_folder import RunFolder, UsageRecord
from penstock.runs.monitor import RunView

WRITE_S = 10.0
"""How often the sums are written."""
GONE = ("silent",)
"""States of nodes that cost nothing, as far as the run knows."""


class BudgetGuard:
    def __init__(self, folder: RunFolder, budget: BudgetConfig) -> None:
        known = folder.usage()
        self._folder = folder
        self._budget = budget
        self._meter = UsageMeter(Usage(tokens=known.tokens, node_s=known.node_s))
        self._written_at = 0.0

    def spent(self) -> str:
        """Which budget is spent; empty while there is some left."""
        tokens, node_hours = self._budget.tokens, self._budget.node_hours
        return spent(self._meter.usage, tokens=tokens, node_hours=node_hours)

    def check(self, now: float, view: RunView) -> str:
        """The same, with what the run has used until now."""
        self._observe(now, view)
        found = self.spent()
        if found or now - self._written_at >= WRITE_S:
            self._written_at = now
            self._write()
        return found

    def close(self, now: float, view: RunView) -> None:
        """Write what the run has used to its end."""
        self._observe(now, view)
        self._write()

    def _observe(self, now: float, view: RunView) -> None:
        if view.status is not None:
            status = view.status
            nodes = [n for n in status.nodes if n.state not in GONE and not n.is_untrusted]
            tokens = status.sampled_tokens - status.untrusted_tokens
            self._meter.observe(now, tokens=tokens, num_nodes=len(nodes))

    def _write(self) -> None:
        usage = self._meter.usage
        with suppress(OSError):  # a full disk; the next one may fit
            self._folder.write_usage(UsageRecord(tokens=usage.tokens, node_s=usage.node_s))
