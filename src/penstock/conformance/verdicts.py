# SPDX-License-Identifier: Apache-2.0
"""Verdicts per rule: how often it was kept, and how it was first broken."""

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
    UNTESTED = "none"
    """Not exercised: the peer exited or stalled first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleVerdict:
    rule: str
    meaning: str
    verdict: Verdict
    detail: str

    def __str__(self) -> str:
        head = f"{self.verdict:<4} {self.rule:<23} {self.meaning}"
        return head if self.verdict is Verdict.OK else f"{head}: {self.detail}"


class RuleVerdicts:
    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._num_kept = dict.fromkeys(self._rules, 0)
        self._broken: dict[str, str] = {}

    def mark_kept(self, rule: str) -> None:
        self._num_kept[rule] += 1

    def mark_broken(self, rule: str, detail: str) -> None:
        assert rule in self._rules
        self._broken.setdefault(rule, detail)

    def check(self, rule: str, is_kept: bool, detail: str) -> None:
        if is_kept:
            self.mark_kept(rule)
        else:
            self.mark_broken(rule, detail)

    def has_result(self, rule: str) -> bool:
        return rule in self._broken or self._num_kept[rule] > 0

    def all(self) -> tuple[RuleVerdict, ...]:
        return tuple(self._rule_verdict(rule) for rule in self._rules.values())

    def _rule_verdict(self, rule: Rule) -> RuleVerdict:
        num_kept = self._num_kept[rule.name]
        verdict, detail = Verdict.UNTESTED, "not tested, the peer exited or stalled first"
        if num_kept:
            verdict, detail = Verdict.OK, f"kept {num_kept} times"
        if rule.name in self._broken:
            verdict, detail = Verdict.FAIL, self._broken[rule.name]
        return RuleVerdict(rule=rule.name, meaning=rule.meaning, verdict=verdict, detail=detail)
