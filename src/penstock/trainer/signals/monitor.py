# SPDX-License-Identifier: Apache-2.0
"""Judges a trainer's own metrics: reports nodes that drift, batches without a signal, and engines
far from the trainer.

Owns the state over batches (average mismatch by node, consecutive bad batches), which survives a
restart of the trainer. Measures nothing itself: the learner does, before the weights move.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from penstock.trainer.learner import SkipReason, Stats
from penstock.trainer.signals.alarms import EXCLUDED, cause_of
from penstock.trainer.signals.mismatch import DriftingNode, pool_mismatch
from penstock.trainer.signals.monitor_state import MonitorState

_log = structlog.get_logger(__name__)


class SignalMonitor:
    def __init__(
        self, quarantine: Callable[[DriftingNode], None], state: MonitorState | None = None
    ) -> None:
        self._quarantine = quarantine
        self.state = state or MonitorState()

    def observe(self, seq: int, stats: Stats) -> str | None:
        """Judge the metrics of batch `seq`; return the alarms to raise now, if any."""
        mismatches = self.state.mismatches.updated(stats.mismatches, seq)
        drifting = mismatches.drifting()
        for node in drifting:
            _log.warning("node quarantined", node=node.node_id, boot_id=node.boot_id, why=str(node))
            self._quarantine(node)
        values = stats.values
        cause = cause_of(
            num_tokens=values.get("tokens/trained", 0.0),
            informative=values.get("signal/informative_groups", 1.0),
            clipped=values.get("signal/clipped", 0.0),
            gap=pool_mismatch(stats.mismatches).mean_abs,
            is_skipped=stats.skipped is not None,
            is_rejected=stats.skipped is SkipReason.REJECTED,
            num_excluded=values.get(EXCLUDED, 0.0),
        )
        self.state = MonitorState(
            mismatches=mismatches.without_reported(drifting),
            no_signal=self.state.no_signal.updated(cause),
            divergence=self.state.divergence.updated(
                values.get("gap/k3", 0.0), values.get("gap/staleness", 0.0)
            ),
        )
        alarm = self.state.no_signal.alarm or self.state.divergence.alarm
        if alarm is not None:
            _log.error("run may have no learning signal", why=alarm)
        return alarm
