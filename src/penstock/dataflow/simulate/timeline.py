# SPDX-License-Identifier: Apache-2.0
"""The recorded actions of trainers, with their dependencies; used instead of real trainers.

An action is due at its recorded time, or later if its predecessors were late. Knows times and
order; the simulation carries the actions out."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import BatchRecord, CommitRecord, IncarnationRecord, VersionRecord
from penstock.types import PolicyName


class ActionKind(IntEnum):
    """Ordered as actions at the same time are carried out."""

    INCARNATE = 0
    COMMIT = 1
    PUBLISH = 2
    SEAL = 3


@dataclass(slots=True, kw_only=True)
class TrainerAction:
    policy: PolicyName
    kind: ActionKind
    at: float
    incarnation: int
    """Incarnation of the trainer; for a seal, the one in which the batch was sealed."""
    number: int = 0
    seq: int = 0
    skipped: str = ""
    weights_digest: str = ""
    manifest_digest: str = ""
    successors: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Indexes of the actions that depend on this one, and their minimum delay after it."""
    num_predecessors: int = 0
    due: float = 0.0
    is_done: bool = False


class Timeline:
    """The actions of all policies, by due time."""

    def __init__(self, actions: list[TrainerAction]) -> None:
        self._actions = actions
        self._due: list[tuple[float, int]] = []
        for index, action in enumerate(actions):
            action.due = action.at
            if not action.num_predecessors:
                heapq.heappush(self._due, (action.due, index))

    @property
    def times(self) -> list[float]:
        """Recorded times of all actions."""
        return [action.at for action in self._actions]

    @property
    def next_at(self) -> float | None:
        return self._due[0][0] if self._due else None

    def pop_due(self, now: float) -> Iterator[TrainerAction]:
        while self._due and self._due[0][0] <= now:
            action = self._actions[heapq.heappop(self._due)[1]]
            if not action.is_done:
                yield action

    def complete(self, action: TrainerAction, now: float) -> None:
        """Mark an action as done and schedule its successors."""
        action.is_done = True
        is_late = now != action.at
        for index, gap_s in action.successors:
            successor = self._actions[index]
            if is_late:
                successor.due = max(successor.due, now + gap_s)
            successor.num_predecessors -= 1
            if not successor.num_predecessors:
                heapq.heappush(self._due, (max(successor.due, now), index))

    def cancel_older(self, policy: PolicyName, incarnation: int, now: float) -> None:
        """A new incarnation took over: skip the open commits and publications of older ones."""
        for action in self._actions:
            is_old = action.policy == policy and action.incarnation < incarnation
            if (
                is_old
                and not action.is_done
                and action.kind in (ActionKind.COMMIT, ActionKind.PUBLISH)
            ):
                self.complete(action, now)

    @property
    def left(self) -> list[TrainerAction]:
        return [action for action in self._actions if not action.is_done]


def read_timeline(tables: Tables, policies: list[PolicyName]) -> Timeline:
    actions: list[TrainerAction] = []
    for policy in policies:
        own = sorted(_actions(tables, policy), key=lambda action: (action.at, action.kind))
        _link(own, len(actions))
        actions += own
    return Timeline(actions)


def _actions(tables: Tables, policy: PolicyName) -> Iterator[TrainerAction]:
    for incarnation_record in tables.read(IncarnationRecord, "policy = :p", p=policy):
        yield TrainerAction(
            policy=policy,
            kind=ActionKind.INCARNATE,
            at=incarnation_record.at,
            incarnation=incarnation_record.incarnation,
            number=incarnation_record.number,
            seq=incarnation_record.seq,
        )
    for batch in tables.read(BatchRecord, "consumer = :p", p=policy):
        yield TrainerAction(
            policy=policy,
            kind=ActionKind.SEAL,
            at=batch.sealed_at,
            incarnation=batch.incarnation,
            seq=batch.seq,
        )
    for commit in tables.read(CommitRecord, "consumer = :p", p=policy):
        yield TrainerAction(
            policy=policy,
            kind=ActionKind.COMMIT,
            at=commit.at,
            incarnation=commit.incarnation,
            number=commit.number,
            seq=commit.seq,
            skipped=commit.skipped,
        )
    for version in tables.read(VersionRecord, "policy = :p", p=policy):
        yield TrainerAction(
            policy=policy,
            kind=ActionKind.PUBLISH,
            at=version.at,
            incarnation=version.incarnation,
            number=version.number,
            weights_digest=version.weights_digest,
            manifest_digest=version.manifest_digest,
        )


def _link(actions: list[TrainerAction], offset: int) -> None:
    """Add dependencies: batches are sealed in order and after the commits that preceded them; a
    commit follows the seal of its batch after the recorded training time."""
    last_seal: TrainerAction | None = None
    last_move: TrainerAction | None = None
    seals: dict[int, TrainerAction] = {}
    for index, action in enumerate(actions):
        waits_for: list[tuple[TrainerAction | None, float]] = []
        if action.kind is ActionKind.SEAL:
            waits_for = [(last_seal, 0.0), (last_move, 0.0)]
            last_seal = seals[action.seq] = action
        elif action.kind is ActionKind.COMMIT:
            seal = seals.get(action.seq)
            is_same_trainer = seal is not None and seal.incarnation == action.incarnation
            took_s = action.at - seal.at if seal is not None and is_same_trainer else 0.0
            waits_for = [(seal, took_s), (last_move, 0.0)]
            last_move = action
        elif action.kind is ActionKind.PUBLISH and last_move is not None:
            waits_for = [(last_move, action.at - last_move.at)]
        elif action.kind is ActionKind.INCARNATE:
            last_move = action
        for before, gap_s in waits_for:
            if before is not None:
                before.successors.append((offset + index, gap_s))
                action.num_predecessors += 1
