# SPDX-License-Identifier: Apache-2.0
"""mix: round-robin. One task of each source in turn, whatever their weights.

Least recently picked rather than next in the list, so a source that ends or comes back disturbs
no other."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import RandomDraw, SourceShare


class RoundRobin:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state

    def pick(self, sources: Sequence[SourceShare], draw: RandomDraw) -> str:
        chosen = min(sources, key=lambda source: self._state.get(f"picked {source.name}", 0)).name
        turn = self._state.get("turns", 0) + 1
        self._state["turns"] = turn
        self._state[f"picked {chosen}"] = turn
        return chosen
