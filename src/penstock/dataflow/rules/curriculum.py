# SPDX-License-Identifier: Apache-2.0
"""mix: curriculum. Most tasks from where success is neither rare nor certain.

p is a moving average of the mean reward, which should lie in [0, 1]; a source is picked with
probability proportional to weight · (p (1 − p) + floor). Sources with one declared difficulty share
one p."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any

from penstock.types import DropReason, JudgedGroup, RandomDraw, SourceShare

UNKNOWN = 0.5
"""Success of what was never tried: the most attractive value, so that it is tried."""


class Curriculum:
    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        decay: float = 0.9,
        floor: float = 0.05,
        difficulty: Mapping[str, str] | None = None,
    ) -> None:
        self._success = state
        self._decay = decay
        self._floor = floor
        self._difficulty = difficulty or {}

    def pick(self, sources: Sequence[SourceShare], draw: RandomDraw) -> str:
        bounds = list(accumulate(source.weight * self._priority(source.name) for source in sources))
        at = draw() * bounds[-1]
        chosen = (source for source, bound in zip(sources, bounds, strict=True) if at < bound)
        return next(chosen, sources[-1]).name

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        if not group.rows:
            return
        key = self._key(group.source)
        last = self._success.get(key, {"p": UNKNOWN, "group": ""})
        if last["group"] == group.group_id:  # another policy's view of the same rollouts
            return
        mean = sum(group.rewards) / len(group.rows)
        p = self._decay * last["p"] + (1 - self._decay) * min(1.0, max(0.0, mean))
        self._success[key] = {"p": p, "group": group.group_id}

    def _priority(self, source: str) -> float:
        p = self._success.get(self._key(source), {"p": UNKNOWN})["p"]
        return p * (1 - p) + self._floor

    def _key(self, source: str) -> str:
        level = self._difficulty.get(source)
        return f"source {source}" if level is None else f"difficulty {level}"
