# SPDX-License-Identifier: Apache-2.0
"""select: fifo. In order of admission."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.rules.rule import Rule
from penstock.types import Candidate, Hook


class Fifo(Rule):
    """First admitted first."""

    hook = Hook.SELECT
    name = "fifo"

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        return sorted(ready, key=lambda group: group.arrival)[:count]


RULE = Fifo
