# SPDX-License-Identifier: Apache-2.0
"""mix: weights. Stride scheduling over declared weights: deterministic, and never further off a
source's share than there are sources."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import RandomDraw, SourceShare


class Weights:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def pick(self, sources: Sequence[SourceShare], draw: RandomDraw) -> str:
        return min(sources, key=lambda source: (source.served + 1) / source.weight).name
