# SPDX-License-Identifier: Apache-2.0
"""What a trainer did in the record, as actions that wait for each other: it stands in for the
trainer.

An action happens at its recorded time, or later by as much as those it follows were late. Knows
times and order; does nothing itself."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import BatchRecord, CommitRecord, IncarnationRecord, VersionRecord
from penstock.types import PolicyName


class Kind(IntEnum):
    """In the order in which actions of one moment happen."""

    INCARNATE = 0
    COMMIT = 1
    PUBLISH = 2
    SEAL = 3


@dataclass(slots=True, kw_only=True)
class Action:
    policy: PolicyName
    kind: Kind
    at: float
    incarnation: int
    """Of a seal, the life in which the batch was sealed."""
    number: int = 0
    seq: int = 0
    skipped: str = ""
    weights_digest: str = ""
    manifest_digest: str = ""
    followed_by: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Indices of actions that wait for this one, and how long after it each comes at least."""
    num_awaited: int = 0
    due: float = 0.0
    is_done: bool = False


class Script:
    """The actions of all policies, handed out when they are due."""

    def __init__(self, actions: list[Action]) -> None:
        self._actions = actions
        self._due: list[tuple[float, int]] = []
        for index, action in enumerate(actions):
            action.due = action.at
            if not action.num_awaited:
                heapq.heappush(self._due, (action.due, index))

    @property
    def times(self) -> list[float]:
        """When all of this happened in the record."""
        return [action.at for action in self._actions]

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> Iterator[Action]:
        while self._due and self._due[0][0] <= now:
            action = self._actions[heapq.heappop(self._due)[1]]
            if not action.is_done:
                yield action

    def done(self, action: Action, now: float) -> None:
        action.is_done = True
        is_late = now != action.at
        for index, gap_s in action.followed_by:
            follower = self._actions[index]
            if is_late:
                follower.due = max(follower.due, now + gap_s)
            follower.num_awaited -= 1
            if not follower.num_awaited:
                heapq.heappush(self._due, (max(follower.due, now), index))

    def give_up(self, policy: PolicyName, incarnation: int, now: float) -> None:
        """A new life of the trainer: what the old one had not done it never will."""
        for action in self._actions:
            is_old = action.policy == policy and action.incarnation < incarnation
            if is_old and not action.is_done and action.kind in (Kind.COMMIT, Kind.PUBLISH):
                self.done(action, now)

    @property
    def left(self) -> list[Action]:
        return [action for action in self._actions if not action.is_done]


def read_script(tables: Tables, policies: list[PolicyName]) -> Script:
    actions: list[Action] = []
    for policy in policies:
        own = sorted(_actions(tables, policy), key=lambda action: (action.at, action.kind))
        _link(own, len(actions))
        actions += own
    return Script(actions)


def _actions(tables: Tables, policy: PolicyName) -> Iterator[Action]:
    for life in tables.read(IncarnationRecord, "policy = :p", p=policy):
        yield Action(
            policy=policy,
            kind=Kind.INCARNATE,
            at=life.at,
            incarnation=life.incarnation,
            number=life.number,
            seq=life.seq,
        )
    for batch in tables.read(BatchRecord, "consumer = :p", p=policy):
        yield Action(
            policy=policy,
            kind=Kind.SEAL,
            at=batch.sealed_at,
            incarnation=batch.incarnation,
            seq=batch.seq,
        )
    for commit in tables.read(CommitRecord, "consumer = :p", p=policy):
        yield Action(
            policy=policy,
            kind=Kind.COMMIT,
            at=commit.at,
            incarnation=commit.incarnation,
            number=commit.number,
            seq=commit.seq,
            skipped=commit.skipped,
        )
    for version in tables.read(VersionRecord, "policy = :p", p=policy):
        yield Action(
            policy=policy,
            kind=Kind.PUBLISH,
            at=version.at,
            incarnation=version.incarnation,
            number=version.number,
            weights_digest=version.weights_digest,
            manifest_digest=version.manifest_digest,
        )


def _link(actions: list[Action], offset: int) -> None:
    """Who waits for whom: batches are sealed in order and after the commits they came after; a
    commit follows its own batch by the time that training took."""
    last_seal: Action | None = None
    last_move: Action | None = None
    seals: dict[int, Action] = {}
    for index, action in enumerate(actions):
        waits_for: list[tuple[Action | None, float]] = []
        if action.kind is Kind.SEAL:
            waits_for = [(last_seal, 0.0), (last_move, 0.0)]
            last_seal = seals[action.seq] = action
        elif action.kind is Kind.COMMIT:
            seal = seals.get(action.seq)
            is_same_life = seal is not None and seal.incarnation == action.incarnation
            took_s = action.at - seal.at if seal is not None and is_same_life else 0.0
            waits_for = [(seal, took_s), (last_move, 0.0)]
            last_move = action
        elif action.kind is Kind.PUBLISH and last_move is not None:
            waits_for = [(last_move, action.at - last_move.at)]
        elif action.kind is Kind.INCARNATE:
            last_move = action
        for before, gap_s in waits_for:
            if before is not None:
                before.followed_by.append((offset + index, gap_s))
                action.num_awaited += 1
