# SPDX-License-Identifier: Apache-2.0
"""The figures of a fault campaign, and the table of all that ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Figures:
    """One kind of fault. The lists name each offender and why."""

    fault: str
    trials: int = 0
    acknowledged: int = 0
    """Deliveries and commits that were promised to be durable."""
    lost: list[str] = field(default_factory=list[str])
    """Promised, and missing or other than promised, or cut off without a word."""
    duplicated: list[str] = field(default_factory=list[str])
    """Counted twice, or accepted against a fence."""
    trained_twice: list[str] = field(default_factory=list[str])
    note: str = ""

    def require_clean(self) -> None:
        wrong = [*self.lost, *self.duplicated, *self.trained_twice]
        assert not wrong, f"{self.fault}: {len(wrong)} broken promises\n" + "\n".join(wrong[:10])
        assert self.acknowledged > 0, f"{self.fault}: nothing was promised, so nothing is proved"

    @property
    def cells(self) -> tuple[str, ...]:
        counts = (self.lost, self.duplicated, self.trained_twice)
        numbers = (self.trials, self.acknowledged, *map(len, counts))
        return (self.fault, *(f"{number:,}" for number in numbers), self.note)


HEAD = ("fault", "trials", "acknowledged", "lost", "duplicated", "trained twice", "note")
CAMPAIGNS: list[Figures] = []
"""Of the test that runs, in the order in which they began."""


def begin(fault: str) -> Figures:
    CAMPAIGNS.append(Figures(fault=fault))
    return CAMPAIGNS[-1]


def lines(cells: Sequence[Sequence[str]]) -> list[str]:
    rows = [HEAD, *cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return [
        " | ".join(
            cell.ljust(width) if i in (0, len(HEAD) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
