# SPDX-License-Identifier: Apache-2.0
"""Which ready groups go into the next batch? A rule is a sort key: (oldest number, order of
arrival) in."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Select = Callable[[int, int], tuple[int, ...]]


def edf(oldest: int, arrival: int) -> tuple[int, ...]:
    """Earliest deadline first: a long answer does not expire behind short ones."""
    return (oldest, arrival)


def fifo(oldest: int, arrival: int) -> tuple[int, ...]:
    return (arrival,)


SELECT: Mapping[str, Select] = {"edf": edf, "fifo": fifo}
