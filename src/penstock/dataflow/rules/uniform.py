# SPDX-License-Identifier: Apache-2.0
"""replay: uniform. Serves any group again, each with the same chance."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import Candidate, RandomDraw


class Uniform:
    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        ratio: float = 0.3,
        max_uses: int = 4,
        max_staleness: int | None = None,
    ) -> None:
        self.ratio = ratio
        self.max_uses = max_uses
        self.max_staleness = max_staleness

    def choose(
        self, pool: Sequence[Candidate], count: int, draw: RandomDraw
    ) -> Sequence[Candidate]:
        left = list(pool)
        return [left.pop(int(draw() * len(left))) for _ in range(min(count, len(left)))]
