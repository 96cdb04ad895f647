# SPDX-License-Identifier: Apache-2.0
"""The six hooks at which a rule decides, and the one at which it may learn.

A custom rule is built as `Class(state, **options)`. `state` is its entire memory: text keys, JSON
values. To change a value, assign it (`state[key] = value`); never modify it in place or delete it:
assigned keys are stored in the same commit as the fact that changed them. Keys that start with #
are reserved.

Rules of mix and curate exist once per run; rules of the other hooks once per policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from penstock.types import (
    Candidate,
    DropReason,
    JudgedGroup,
    PolicyName,
    RandomDraw,
    SourceShare,
    Task,
)


class Mix(Protocol):
    """A rule that chooses the source of the next task: `mix`."""

    def pick(self, sources: Sequence[SourceShare], draw: RandomDraw) -> str:
        """Which source next? `sources` have tasks left, and are in declared order."""
        ...


class Curate(Protocol):
    """A rule that decides which tasks are rolled out: `curate`."""

    def wants(self, task: Task, draw: RandomDraw) -> bool:
        """Is this task worth rolling out now?"""
        ...


class Admit(Protocol):
    """A rule that decides which closed groups may be trained: `admit`."""

    def judge(self, group: JudgedGroup) -> DropReason | None:
        """May this closed group enter? None admits it. Remember nothing here: another rule may
        still refuse; `learn` receives the verdict."""
        ...


class Select(Protocol):
    """A rule that chooses the groups of the next batch: `select`."""

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        """The min(count, len(ready)) groups of the next batch, each once, in training order."""
        ...


class Replay(Protocol):
    """A rule that chooses trained groups to train again: `replay`."""

    @property
    def ratio(self) -> float:
        """Share of a batch that may be replayed, in groups, rounded down."""
        ...

    @property
    def max_uses(self) -> int:
        """Batches that one group may be in, including the first."""
        ...

    @property
    def max_staleness(self) -> int | None:
        """Versions a replayed group may be behind; None for the policy's bound."""
        ...

    def choose(
        self, pool: Sequence[Candidate], count: int, draw: RandomDraw
    ) -> Sequence[Candidate]:
        """Up to `count` groups of the pool, each once. Groups that are too old or used up are
        already removed."""
        ...


class Route(Protocol):
    """A rule that decides whose turns a policy's trainer sees: `route`."""

    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        """Does this policy's trainer see turns that `turn_policy` sampled in this role?"""
        ...


@runtime_checkable
class LearningRule(Protocol):
    """Any rule may also learn."""

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        """Called once per judged group and policy, whatever the verdict (None: admitted)."""
        ...
