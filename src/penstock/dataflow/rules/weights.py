# SPDX-License-Identifier: Apache-2.0
"""mix: weights. Stride scheduling over the declared weights: deterministic, and each source's share
is off by at most the number of sources."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.rules.rule import Rule
from penstock.types import Hook, RandomDraw, SourceShare


class Weights(Rule):
    """Pick sources in proportion to their weights."""

    hook = Hook.MIX
    name = "weights"

    def pick(self, sources: Sequence[SourceShare], draw: RandomDraw) -> str:
        return min(sources, key=lambda source: (source.served + 1) / source.weight).name


RULE = Weights
