# SPDX-License-Identifier: Apache-2.0
"""The six hooks at which a rule decides, and the one at which it may learn.

A rule is built as `Rule(state, **options)`. `state` is its whole memory: text keys, JSON values.
A changed value is assigned anew (`state[key] = value`), never altered in place and never deleted:
the host stores assigned keys in the same commit as the fact that changed them. Keys that begin
with # are the host's.

Rules of mix and curate exist once per run; those of the other hooks once per policy."""

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
    def pick(self, sources: Sequence[SourceShare], draw: RandomDraw) -> str:
        """Which source next? `sources` are those with tasks left, in declared order."""
        ...


class Curate(Protocol):
    def wants(self, task: Task, draw: RandomDraw) -> bool:
        """Is this task worth rolling out now?"""
        ...


class Admit(Protocol):
    def judge(self, group: JudgedGroup) -> DropReason | None:
        """May this closed group enter? None lets it in. Remember nothing here: another rule may
        still refuse; `learn` tells the verdict."""
        ...


class Select(Protocol):
    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        """The min(count, len(ready)) groups of the next batch, each once, in training order."""
        ...


class Replay(Protocol):
    @property
    def ratio(self) -> float:
        """Share of a batch that may be served again, in groups, rounded down."""
        ...

    @property
    def max_uses(self) -> int:
        """Batches that one group may be in, its first one included."""
        ...

    @property
    def max_staleness(self) -> int | None:
        """Bound for what is served again; None for the policy's own."""
        ...

    def choose(
        self, pool: Sequence[Candidate], count: int, draw: RandomDraw
    ) -> Sequence[Candidate]:
        """Up to `count` groups of the pool, each once. The host has left out what is too old or
        used up."""
        ...


class Route(Protocol):
    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        """Does this policy's trainer see turns that `turn_policy` sampled in this role?"""
        ...


@runtime_checkable
class LearningRule(Protocol):
    """Any rule may have this too."""

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        """Told once per judged group and policy, whatever the verdict (None: admitted)."""
        ...
