# SPDX-License-Identifier: Apache-2.0
"""replay: newest. Replays the last admitted groups first."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.rules.replay import ReplayRule
from penstock.types import Candidate, RandomDraw


class Newest(ReplayRule):
    """Replay the last admitted groups first."""

    name = "newest"

    def choose(
        self, pool: Sequence[Candidate], count: int, draw: RandomDraw
    ) -> Sequence[Candidate]:
        return sorted(pool, key=lambda group: -group.arrival)[:count]


RULE = Newest
