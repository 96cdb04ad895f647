# SPDX-License-Identifier: Apache-2.0
"""mix: round-robin. One task of each source in turn, whatever their weights.

Picks the least recently picked source, not the next in the list, so a source that ends or returns
does not affect the others."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.rules.rule import Rule
from penstock.types import Hook, RandomDraw, SourceShare


class RoundRobin(Rule):
    """Pick each source in turn."""

    hook = Hook.MIX
    name = "round-robin"

    def pick(self, sources: Sequence[SourceShare], draw: RandomDraw) -> str:
        chosen = min(sources, key=lambda source: self._state.get(f"picked {source.name}", 0)).name
        turn = self._state.get("turns", 0) + 1
        self._state["turns"] = turn
        self._state[f"picked {chosen}"] = turn
        return chosen


RULE = RoundRobin
