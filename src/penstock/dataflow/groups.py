# SPDX-License-Identifier: Apache-2.0
"""Slots, open groups and nodes as a partition holds them, and the life-cycles they may follow."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.dataflow.protocol import LiveVersion, NodeState
from penstock.dataflow.records import GroupRecord, LeaseRecord, NodeRecord
from penstock.types import GroupId, RowSummary, Task


class ClosingKind(StrEnum):
    COMPLETE = "complete"
    """Every member must succeed within its attempts, or the group is dropped."""
    SURVIVORS = "survivors"
    """Members that failed for good are left out, if enough remain."""
    DROP = "drop"
    """The first failure drops the group; nothing is tried twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    kind: ClosingKind
    min_survivors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    ttl_s: float
    start_to_close_s: float
    max_attempts: int


class SlotState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    """Out of attempts; excluded, never scored."""


NEXT_SLOT = {
    SlotState.WAITING: frozenset({SlotState.LEASED, SlotState.DEAD}),
    SlotState.LEASED: frozenset({SlotState.WAITING, SlotState.DONE, SlotState.DEAD}),
    SlotState.DONE: frozenset[SlotState](),
    SlotState.DEAD: frozenset[SlotState](),
}


@dataclass(slots=True)
class Slot:
    state: SlotState = SlotState.WAITING
    attempt: int = 0
    """Attempts that cost one: failures and expiries, not hand-backs."""
    epoch: int = 0
    lease: LeaseRecord | None = None
    row: RowSummary | None = None

    def move(self, state: SlotState) -> None:
        assert state in NEXT_SLOT[self.state], f"slot cannot go from {self.state} to {state}"
        self.state = state


@dataclass(slots=True)
class OpenGroup:
    record: GroupRecord
    task: Task
    due: dict[str, int]
    slots: list[Slot]

    @property
    def rows(self) -> tuple[RowSummary, ...]:
        return tuple(slot.row for slot in self.slots if slot.row is not None)


@dataclass(slots=True)
class Node:
    record: NodeRecord
    last_seen: float
    state: NodeState = NodeState.STARTING
    live: tuple[LiveVersion, ...] = ()
    leases: set[tuple[GroupId, int]] = field(default_factory=set[tuple[GroupId, int]])
    asking: str = ""
    """Its newest lease request; only this one may be granted anything."""
    asked_before: deque[str] = field(default_factory=lambda: deque[str](maxlen=16))
    """Older ones, which may arrive again from a network that repeats."""
    granted: dict[str, set[tuple[GroupId, int]]] = field(
        default_factory=dict[str, set[tuple[GroupId, int]]]
    )
    """Held slots by the request that got them."""
    past_sessions: deque[str] = field(default_factory=lambda: deque[str](maxlen=16))
    """Lives of this node that were replaced."""
    num_delivered: int = 0
    is_silent: bool = False
    """Fell silent for a whole ttl; its leases are gone."""
