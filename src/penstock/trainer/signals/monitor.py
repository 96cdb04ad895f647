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
        self, quarantine: Callable[[DriftingNode], None], monitor_state: MonitorState | None = None
    ) -> None:
        monitor_state = monitor_state or MonitorState()
        self._quarantine = quarantine
        self._mismatches = monitor_state.mismatches
        self._no_signal = monitor_state.no_signal
        self._divergence = monitor_state.divergence

    @property
    def monitor_state(self) -> MonitorState:
        return MonitorState(
            mismatches=self._mismatches, no_signal=self._no_signal, divergence=self._divergence
        )

    def observe(self, seq: int, stats: Stats) -> str | None:
        """Judge the metrics of batch `seq`; return the alarms to raise now, if any."""
        self._mismatches = self._mismatches.updated(stats.mismatches, seq)
        drifting = self._mismatches.drifting()
        for node in drifting:
            _log.warning("node quarantined", node=node.node_id, boot_id=node.boot_id, why=str(node))
            self._quarantine(node)
        self._mismatches = self._mismatches.without_reported(drifting)
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
        self._no_signal = self._no_signal.updated(cause)
        self._divergence = self._divergence.updated(
            values.get("gap/k3", 0.0), values.get("gap/staleness", 0.0)
        )
        alarm = self._no_signal.alarm or self._divergence.alarm
        if alarm is not None:
            _log.error("run may have no learning signal", why=alarm)
        return alarm
