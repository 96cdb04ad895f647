# SPDX-License-Identifier: Apache-2.0
"""mix: curriculum. Most tasks from sources where success is neither rare nor certain.

p is a moving average of the mean reward, which should lie in [0, 1]; a source is picked with
probability proportional to weight · (p (1 − p) + floor)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.types import DropReason, Hook, JudgedGroup, RandomDraw, SourceShare

UNKNOWN = 0.5
"""p of an untried source: the most attractive value, so that it is tried."""


class Curriculum(Rule):
    """Prefer sources of medium difficulty."""

    hook = Hook.MIX
    name = "curriculum"

    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of p that remains after a judged group."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """Priority of a source that always or never succeeds."""
    difficulty: Mapping[str, str | int] | None = None
    """Level of each source; sources with the same level share p. Null: one p per source."""

    def pick(self, sources: Sequence[SourceShare], draw: RandomDraw) -> str:
        bounds = list(accumulate(source.weight * self._priority(source.name) for source in sources))
        at = draw() * bounds[-1]
        chosen = (source for source, bound in zip(sources, bounds, strict=True) if at < bound)
        return next(chosen, sources[-1]).name

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        if not group.rows:
            return
        key = self._key(group.source)
        last = self._state.get(key, {"p": UNKNOWN, "group": ""})
        if last["group"] == group.group_id:  # another policy's view of the same rollouts
            return
        mean = sum(group.rewards) / len(group.rows)
        p = self.decay * last["p"] + (1 - self.decay) * min(1.0, max(0.0, mean))
        self._state[key] = {"p": p, "group": group.group_id}

    def _priority(self, source: str) -> float:
        p = self._state.get(self._key(source), {"p": UNKNOWN})["p"]
        return p * (1 - p) + self.floor

    def _key(self, source: str) -> str:
        level = (self.difficulty or {}).get(source)
        return f"source {source}" if level is None else f"difficulty {level}"


RULE = Curriculum
