# SPDX-License-Identifier: Apache-2.0
"""What a trainer keeps about past batches, and its form in the checkpoint.

Owns that form: plain JSON. If a trainer of another version cannot read it, it starts with empty
state: a checkpoint stays usable without its alarms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from penstock.errors import BadRequest
from penstock.trainer.signals.alarms import DivergenceStreak, NoSignalStreak
from penstock.trainer.signals.mismatch import MovingAverage, NodeMismatches
from penstock.wire.codec import JSON, decode, encode_json

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    mismatches: NodeMismatches = field(default_factory=NodeMismatches)
    no_signal: NoSignalStreak = field(default_factory=NoSignalStreak)
    divergence: DivergenceStreak = field(default_factory=DivergenceStreak)


def to_json(state: MonitorState) -> dict[str, Any]:
    """Without numbers that JSON cannot hold: a node with such an average starts fresh."""
    known, streak = state.mismatches, state.divergence
    nodes = {name: one for name, one in known.nodes.items() if _is_finite(one)}
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
    return math.isfinite(average.sum_k3) and math.isfinite(average.sum_abs)
