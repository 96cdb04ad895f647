# SPDX-License-Identifier: Apache-2.0
"""select: edf. Earliest deadline first: the groups that expire next are trained next, so a long
answer does not expire behind short ones."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.rules.rule import Rule
from penstock.types import Candidate, Hook


class EarliestDeadline(Rule):
    """Earliest deadline first."""

    hook = Hook.SELECT
    name = "edf"

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        return sorted(ready, key=lambda group: (group.oldest, group.arrival))[:count]


RULE = EarliestDeadline
