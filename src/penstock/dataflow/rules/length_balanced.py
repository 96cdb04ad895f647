# SPDX-License-Identifier: Apache-2.0
"""select: length-balanced. The groups of `edf`, ordered so that minibatches have equal tokens.

The batch is cut into `parts` runs with equal numbers of groups, as the trainer cuts it; longest
first, each group goes to the lightest run that has room."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.types import Candidate, Hook


class LengthBalanced(Rule):
    """Earliest deadline first, balanced by length."""

    hook = Hook.SELECT
    name = "length-balanced"

    parts: int = Field(default=8, ge=1, le=4096)
    """Number of parts of a batch: the trainer's minibatches, or a multiple of them."""

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        by_deadline = sorted(ready, key=lambda group: (group.oldest, group.arrival))
        chosen = sorted(by_deadline[:count], key=lambda group: -group.tokens)
        each, extra = divmod(len(chosen), self.parts)
        places = [each + (part < extra) for part in range(self.parts)]
        runs: list[list[Candidate]] = [[] for _ in places]
        tokens = [0] * self.parts
        for group in chosen:
            open_parts = (part for part, num in enumerate(places) if len(runs[part]) < num)
            lightest = min(open_parts, key=lambda part: tokens[part])
            runs[lightest].append(group)
            tokens[lightest] += group.tokens
        return [group for run in runs for group in run]


RULE = LengthBalanced
