# SPDX-License-Identifier: Apache-2.0
"""Runs the rules of a run: calls them in declared order, makes their state durable and contains
their failures.

If a rule raises, or returns an invalid answer, nothing is lost: the hook's default decides instead,
and the failure is recorded and shown in the status. Knows the hooks, not what any rule does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.dataflow.records import DecisionRecord, Journal, RuleStateRecord
from penstock.dataflow.rules import make_rule
from penstock.dataflow.sources import derive_seed
from penstock.types import (
    Candidate,
    DropReason,
    JudgedGroup,
    PolicyName,
    RowSummary,
    SourceShare,
    Task,
)

T = TypeVar("T")
CandidateT = TypeVar("CandidateT", bound=Candidate)
DEFAULT_ROUTE = "by-policy"
"""The route rule that never needs to be called."""
_DRAWS = "#draws"
"""Key for the number of random draws a rule has used; no rule's own key starts with #."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSpec:
    """One rule as configured."""

    hook: str
    name: str
    options: Mapping[str, Any]
    policy: PolicyName | None
    """None: shared by all policies."""
    position: int
    """Position among the rules of its hook."""

    @property
    def id(self) -> str:
        return f"{self.policy or ''}/{self.hook}/{self.position}:{self.name}"


class RuleState(dict[str, Any]):
    """A rule's memory, which tracks the entries changed since it was last saved."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        self.changed: set[str] = set()

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.changed.add(key)


class _BoundRule:
    """One rule with its memory and its own stream of random numbers."""

    def __init__(self, terms: RuleSpec, known: Mapping[str, Any], seed: int) -> None:
        self.terms = terms
        self.memory = RuleState(known)
        self.rule: Any = make_rule(terms.hook, terms.name, terms.options, self.memory)
        self._seed = seed
        self.drawn: list[float] = []
        """Random numbers used by the current decision."""

    def draw(self) -> float:
        count = int(self.memory.get(_DRAWS, 0))
        self.memory[_DRAWS] = count + 1
        number = derive_seed(self._seed, self.terms.id, count) / (1 << 63)
        self.drawn.append(number)
        return number


class RuleRunner:
    def __init__(
        self,
        rules: Iterable[RuleSpec],
        journal: Journal,
        *,
        seed: int,
        known: Mapping[str, Mapping[str, Any]] | None = None,
        num_decisions: int = 0,
    ) -> None:
        memories = known or {}
        bound = [_BoundRule(terms, memories.get(terms.id, {}), seed) for terms in rules]
        self._at: dict[tuple[PolicyName | None, str], list[_BoundRule]] = {}
        for rule in bound:
            self._at.setdefault((rule.terms.policy, rule.terms.hook), []).append(rule)
        self._all = bound
        self._learners = [rule for rule in bound if hasattr(rule.rule, "learn")]
        self._journal = journal
        self._num_decisions = num_decisions
        self.errors: dict[str, str] = {}
        """The last error of each rule."""

    def _rules(self, policy: PolicyName | None, hook: str) -> list[_BoundRule]:
        return self._at.get((policy, hook), [])

    # --- one method per hook ------------------------------------------------------------------

    def pick(self, sources: Sequence[SourceShare], now: float) -> tuple[str, str]:
        """The source of the next task, and the rule that chose it."""
        [rule] = self._rules(None, "mix")
        names = {source.name for source in sources}

        def ask() -> str:
            return _expect(rule.rule.pick(sources, rule.draw), names.__contains__)

        return self._call_rule(rule, "source", now, ask, sources[0].name), rule.terms.name

    def wants(self, task: Task, now: float) -> tuple[bool, str]:
        """Is this task worth rolling out now? If the rule fails, yes."""
        for rule in self._rules(None, "curate"):

            def ask(rule: _BoundRule = rule) -> bool:
                return bool(rule.rule.wants(task, rule.draw))

            if not self._call_rule(rule, task.key, now, ask, True):
                detail = {"ordinal": task.ordinal, "source": task.source, "draws": rule.drawn}
                self._decide(rule, task.key, "skipped", detail, now)
                return False, rule.terms.name
        return True, ""

    def judge(self, group: JudgedGroup, now: float) -> tuple[str, DropReason | None]:
        """The first rule that refuses and its reason, or the last rule that admitted the group."""
        name = "all"
        for rule in self._rules(group.policy, "admit"):

            def ask(rule: _BoundRule = rule) -> DropReason | None:
                reason = rule.rule.judge(group)
                return None if reason is None else DropReason(reason)

            name = rule.terms.name
            reason = self._call_rule(rule, group.group_id, now, ask, None)
            if reason is not None:
                return name, reason
        return name, None

    def learn(self, group: JudgedGroup, verdict: DropReason | None, now: float) -> None:
        for rule in self._learners:
            if rule.terms.policy not in (None, group.policy):
                continue

            def ask(rule: _BoundRule = rule) -> None:
                rule.rule.learn(group, verdict)

            self._call_rule(rule, group.group_id, now, ask, None)

    def choose(
        self, policy: PolicyName, ready: Sequence[CandidateT], count: int, now: float
    ) -> tuple[str, list[CandidateT]]:
        [rule] = self._rules(policy, "select")
        wanted = min(count, len(ready))

        def ask() -> list[CandidateT]:
            return _expect_groups(rule.rule.choose(ready, count), ready, wanted)

        in_order = sorted(ready, key=lambda candidate: candidate.arrival)[:wanted]
        return rule.terms.name, self._call_rule(rule, f"{policy} batch", now, ask, in_order)

    # --- replay and route ---------------------------------------------------------------------

    def replay(self, policy: PolicyName) -> ReplaySpec | None:
        for rule in self._rules(policy, "replay"):
            ratio = float(rule.rule.ratio)
            if ratio > 0:
                return ReplaySpec(
                    ratio=ratio,
                    max_uses=int(rule.rule.max_uses),
                    max_staleness=rule.rule.max_staleness,
                )
        return None

    def choose_replayed(
        self, policy: PolicyName, pool: Sequence[CandidateT], count: int, now: float
    ) -> list[CandidateT]:
        if not pool or count <= 0:
            return []
        [rule] = self._rules(policy, "replay")
        wanted = min(count, len(pool))

        def ask() -> list[CandidateT]:
            return _expect_groups(rule.rule.choose(pool, wanted, rule.draw), pool, wanted)

        return self._call_rule(rule, f"{policy} batch", now, ask, [])

    def visible_turns(
        self, policy: PolicyName, rows: Iterable[RowSummary], now: float
    ) -> frozenset[tuple[PolicyName, str]] | None:
        """The (policy, role) pairs in these rows that the policy's trainer sees; None: only the
        policy's own turns. If a rule fails, the trainer sees those."""
        rules = self._rules(policy, "route")
        if not rules or rules[0].terms.name == DEFAULT_ROUTE:
            return None
        [rule] = rules

        def ask(pair: tuple[PolicyName, str]) -> bool:
            return self._call_rule(
                rule,
                f"turns of {pair[0]} as {pair[1]!r}",
                now,
                lambda: bool(rule.rule.sees(policy, *pair)),
                pair[0] == policy,
            )

        return frozenset(filter(ask, sorted({pair for row in rows for pair, _ in row.parts})))

    # --- failures and state -------------------------------------------------------------------

    def _call_rule(
        self, rule: _BoundRule, subject: str, now: float, ask: Callable[[], T], default: T
    ) -> T:
        rule.drawn = []
        try:
            return ask()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:500]
            self.errors[rule.terms.id] = text
            self._decide(rule, subject, "error", {"error": text}, now)
            return default

    def _decide(
        self, rule: _BoundRule, subject: str, verdict: str, detail: Mapping[str, Any], now: float
    ) -> None:
        self._num_decisions += 1
        self._journal(
            DecisionRecord(
                number=self._num_decisions,
                hook=rule.terms.hook,
                rule=rule.terms.name,
                subject=subject,
                verdict=verdict,
                detail=json.dumps(detail),
                at=now,
            )
        )

    def save_state(self) -> None:
        """Journal the rules' state changes, together with the facts that caused them."""
        for rule in self._all:
            for key in sorted(rule.memory.changed):
                value = json.dumps(rule.memory[key])
                self._journal(RuleStateRecord(rule=rule.terms.id, key=key, value=value))
            rule.memory.changed.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpec:
    """How much of a batch may be replayed, and within which limits."""

    ratio: float
    max_uses: int
    max_staleness: int | None


def _expect(value: T, is_known: Callable[[T], bool]) -> T:
    if not is_known(value):
        raise ValueError(f"the rule returned {value!r}, which was not offered")
    return value


def _expect_groups(
    chosen: Sequence[Candidate], offered: Sequence[CandidateT], count: int
) -> list[CandidateT]:
    known = {candidate.group_id: candidate for candidate in offered}
    names = [candidate.group_id for candidate in chosen]
    if len(names) != count or len(set(names)) != count or not known.keys() >= set(names):
        raise ValueError(f"the rule chose {len(names)} groups; expected {count} of those offered")
    return [known[name] for name in names]
