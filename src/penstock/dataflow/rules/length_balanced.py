# SPDX-License-Identifier: Apache-2.0
"""select: length-balanced. The groups of `edf`, ordered so that minibatches carry equal tokens.

The batch is cut into `parts` runs of equal numbers of groups, as the trainer cuts it; longest
first, each group goes to the lightest run that has a place left."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import Candidate


class LengthBalanced:
    def __init__(self, state: MutableMapping[str, Any], *, parts: int = 8) -> None:
        self._parts = parts

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        by_deadline = sorted(ready, key=lambda group: (group.oldest, group.arrival))
        chosen = sorted(by_deadline[:count], key=lambda group: -group.tokens)
        each, extra = divmod(len(chosen), self._parts)
        places = [each + (part < extra) for part in range(self._parts)]
        runs: list[list[Candidate]] = [[] for _ in places]
        tokens = [0] * self._parts
        for group in chosen:
            open_parts = (part for part, num in enumerate(places) if len(runs[part]) < num)
            lightest = min(open_parts, key=lambda part: tokens[part])
            runs[lightest].append(group)
            tokens[lightest] += group.tokens
        return [group for run in runs for group in run]
