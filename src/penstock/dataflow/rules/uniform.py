# SPDX-License-Identifier: Apache-2.0
"""replay: uniform. Replays any group, each with the same probability."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.rules.replay import ReplayRule
from penstock.types import Candidate, RandomDraw


class Uniform(ReplayRule):
    """Replay groups at random."""

    name = "uniform"

    def choose(
        self, pool: Sequence[Candidate], count: int, draw: RandomDraw
    ) -> Sequence[Candidate]:
        left = list(pool)
        return [left.pop(int(draw() * len(left))) for _ in range(min(count, len(left)))]


RULE = Uniform
