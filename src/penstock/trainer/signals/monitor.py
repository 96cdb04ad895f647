# SPDX-License-Identifier: Apache-2.0
"""Judges a trainer's own metrics: reports nodes that drift, batches without a signal, engines far
from the trainer, and process scores that rise without the outcome.

Owns the state over batches (average mismatch by node, consecutive bad batches, roles that were
named), which survives a restart of the trainer; if a trainer of another version cannot read it, it
starts with empty state: a checkpoint stays usable without its alarms. Measures nothing itself: the
learner does, before the weights move.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from penstock.errors import BadRequest
from penstock.trainer.learner import Stats
from penstock.trainer.signals.alarms import DivergenceStreak, NoSignalStreak, cause_of
from penstock.trainer.signals.mismatch import (
    DriftingNode,
    MovingAverage,
    NodeMismatches,
)
from penstock.trainer.signals.process_scores import HackingWatch
from penstock.trainer.signals.role_names import RoleNames
from penstock.wire.codec import JSON, decode, encode_json

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """What a trainer keeps about past batches; part of its checkpoint, as plain JSON."""

    mismatches: NodeMismatches = field(default_factory=NodeMismatches)
    no_signal: NoSignalStreak = field(default_factory=NoSignalStreak)
    divergence: DivergenceStreak = field(default_factory=DivergenceStreak)
    hacking: HackingWatch = field(default_factory=HackingWatch)
    roles: RoleNames = field(default_factory=RoleNames)


def to_json(state: MonitorState) -> dict[str, Any]:
    """Without numbers that JSON cannot hold: a subject with such an average starts fresh."""
    known, streak = state.mismatches, state.divergence
    nodes = {
        name: {age: one for age, one in ages.items() if _is_finite(one)}
        for name, ages in known.nodes.items()
    }
    nodes = {name: ages for name, ages in nodes.items() if ages}
    k3 = streak.k3 if math.isfinite(streak.k3) else 0.0
    finite = replace(
        state, mismatches=replace(known, nodes=nodes), divergence=replace(streak, k3=k3)
    )
    return json.loads(encode_json(finite))


def from_json(found: Mapping[str, Any]) -> MonitorState:
    try:
        return decode(encode_json(found), MonitorState, media_type=JSON)
    except BadRequest as error:
        _log.warning(
            "monitor state in the checkpoint is unreadable; starting with empty state",
            why=str(error),
        )
        return MonitorState()


def _is_finite(average: MovingAverage) -> bool:
    sums = (average.sum_k3, average.sum_abs, average.sum_surprise, average.sum_surprise2)
    return all(map(math.isfinite, sums))


class SignalMonitor:
    def __init__(
        self,
        quarantine: Callable[[DriftingNode], None],
        state: MonitorState | None = None,
        roles: Collection[str] = (),
    ) -> None:
        """roles: of the run file."""
        self._quarantine = quarantine
        self.state = state or MonitorState()
        self._roles = roles

    def reported(self, stats: Stats) -> dict[str, float]:
        """The statistics of the next batch that the run keeps: of a bounded number of roles."""
        roles = self.state.roles.updated(stats.values, self._roles)
        self.state = replace(self.state, roles=roles)
        return roles.of_run(stats.values, self._roles)

    def observe(self, seq: int, stats: Stats) -> tuple[str, ...]:
        """Judge the metrics of batch `seq`; return all alarms to raise now."""
        mismatches = self.state.mismatches.updated(stats.mismatches, seq)
        drifting = mismatches.drifting()
        for node in drifting:
            _log.warning("node quarantined", node=node.subject, why=str(node))
            self._quarantine(node)
        values = stats.values
        self.state = replace(
            self.state,
            mismatches=mismatches.without_reported(drifting),
            no_signal=self.state.no_signal.updated(cause_of(stats)),
            divergence=self.state.divergence.updated(
                values.get("gap/k3", 0.0), values.get("gap/staleness", 0.0)
            ),
            hacking=self.state.hacking.updated(values),
        )
        state = self.state
        found = (state.no_signal.alarm, state.divergence.alarm, state.hacking.alarm)
        alarms = tuple(alarm for alarm in found if alarm is not None)
        for alarm in alarms:
            _log.error("training needs attention", why=alarm)
        return alarms
