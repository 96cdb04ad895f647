# SPDX-License-Identifier: Apache-2.0
"""Results of an audit, as records and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NUM_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check."""

    name: str
    num_examined: int
    num_violations: int
    first: tuple[str, ...]
    """The first few violations, `ID: why`."""

    @property
    def ok(self) -> bool:
        return self.num_violations == 0


class Violations:
    """Collects the violations of one check."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num = 0
        self._first: list[str] = []

    def add(self, where: str, why: str) -> None:
        self._num += 1
        if len(self._first) < NUM_SHOWN:
            self._first.append(f"{where}: {why}")

    def extend(self, where: str, whys: Iterable[str]) -> None:
        for why in whys:
            self.add(where, why)

    def result(self, num_examined: int) -> Check:
        return Check(
            name=self._name,
            num_examined=num_examined,
            num_violations=self._num,
            first=tuple(self._first),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Key figures of a run, along the surviving lineage."""

    reward_first: float | None
    """Mean over all rows of the first 2 trained batches; None if there are none."""
    reward_last: float | None
    """Mean over all rows of the last 5 trained batches."""
    steps: int
    """Batches that changed the weights; if there are several policies, of the slowest."""
    trajectories: int
    lost: int
    """Acknowledged rows that are missing or unreadable."""
    trained_twice: int
    """Times that rows were trained more often than allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    checks: tuple[Check, ...]
    summary: Summary

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def lines(self) -> list[str]:
        """One line per check, followed by its first violations, then the verdict."""
        width = max(len(check.name) for check in self.checks)
        lines: list[str] = []
        for check in self.checks:
            verdict = "ok" if check.ok else f"FAILED {check.num_violations:,} times"
            lines.append(f"{check.name:<{width}}  {check.num_examined:>9,} checked  {verdict}")
            lines += [f"    {offender}" for offender in check.first]
            if check.num_violations > len(check.first):
                lines.append(f"    and {check.num_violations - len(check.first):,} more")
        return [*lines, self._verdict()]

    def _verdict(self) -> str:
        broken = [check.name for check in self.checks if not check.ok]
        if broken:
            return f"audit failed: {', '.join(broken)}"
        summary = self.summary
        return (
            f"audit passed: {summary.trajectories:,} trajectories, {summary.steps:,} steps, "
            f"{summary.lost} lost, {summary.trained_twice} trained twice"
        )
