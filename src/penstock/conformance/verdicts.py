# SPDX-License-Identifier: Apache-2.0
"""What was seen of each rule: how often it was kept, and how it was first broken. Judges nothing
itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    meaning: str


class Verdict(StrEnum):
    OK = "ok"
    FAIL = "FAIL"
    UNSEEN = "none"
    """It never came to that; the party ended, or stopped, before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    rule: str
    meaning: str
    verdict: Verdict
    seen: str

    def __str__(self) -> str:
        head = f"{self.verdict:<4} {self.rule:<23} {self.meaning}"
        return head if self.verdict is Verdict.OK else f"{head}: {self.seen}"


class Findings:
    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._num_kept = dict.fromkeys(self._rules, 0)
        self._broken: dict[str, str] = {}

    def kept(self, rule: str) -> None:
        self._num_kept[rule] += 1

    def broke(self, rule: str, seen: str) -> None:
        assert rule in self._rules
        self._broken.setdefault(rule, seen)

    def check(self, rule: str, is_kept: bool, seen: str) -> None:
        if is_kept:
            self.kept(rule)
        else:
            self.broke(rule, seen)

    def has_seen(self, rule: str) -> bool:
        return rule in self._broken or self._num_kept[rule] > 0

    def all(self) -> tuple[Finding, ...]:
        return tuple(self._finding(rule) for rule in self._rules.values())

    def _finding(self, rule: Rule) -> Finding:
        num_kept = self._num_kept[rule.name]
        verdict, seen = Verdict.UNSEEN, "it never came to that"
        if num_kept:
            verdict, seen = Verdict.OK, f"kept {num_kept} times"
        if rule.name in self._broken:
            verdict, seen = Verdict.FAIL, self._broken[rule.name]
        return Finding(rule=rule.name, meaning=rule.meaning, verdict=verdict, seen=seen)
