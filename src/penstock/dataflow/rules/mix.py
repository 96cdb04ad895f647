# SPDX-License-Identifier: Apache-2.0
"""Which source next? Stride scheduling: deterministic, never more than one task off its share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Mix = Callable[[Sequence[tuple[str, float, int]]], str]
"""(name, weight, tasks served so far) of every source with tasks left, in declared order."""


def weights(sources: Sequence[tuple[str, float, int]]) -> str:
    return min(sources, key=lambda source: (source[2] + 1) / source[1])[0]


MIX: Mapping[str, Mix] = {"weights": weights}
