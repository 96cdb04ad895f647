# SPDX-License-Identifier: Apache-2.0
"""select: freshest. Youngest tokens first; the rest may expire."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.rules.rule import Rule
from penstock.types import Candidate, Hook


class Freshest(Rule):
    """Youngest tokens first."""

    hook = Hook.SELECT
    name = "freshest"

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        return sorted(ready, key=lambda group: (-group.oldest, group.arrival))[:count]


RULE = Freshest
