# SPDX-License-Identifier: Apache-2.0
"""Slots, open groups and nodes as a partition holds them, and the life-cycles they may follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

import msgspec

from penstock.dataflow.core.leasing import LiveVersion, NodeState
from penstock.dataflow.records import GrantRecord, GroupRecord, NodeRecord
from penstock.types import SESSION_TAG, RowId, RowSummary, Task

_task = msgspec.json.Decoder(Task)
_due = msgspec.json.Decoder(dict[str, int])


class ClosingKind(StrEnum):
    COMPLETE = "complete"
    """Every member must succeed within its attempts, or the group is dropped."""
    SURVIVORS = "survivors"
    """Members that failed for good are left out, if enough remain."""
    DROP = "drop"
    """The first failure drops the group; nothing is tried twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingPolicy:
    kind: ClosingKind
    min_survivors: int = 0

    def accepts(self, num_good: int, num_lost: int) -> bool:
        """Does a group with so many good and lost members still count?"""
        if self.kind is ClosingKind.SURVIVORS:
            return num_good >= max(1, self.min_survivors)
        return num_lost == 0 and num_good > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpec:
    ttl_s: float
    """Heartbeat: a silent node's leases end after this."""
    start_to_close_s: float
    """One attempt, from grant to result."""
    max_attempts: int
    schedule_to_start_s: float | None = None
    """From the moment a slot could be leased until somebody takes it."""
    schedule_to_close_s: float | None = None
    """The whole group, from its issue."""
    session_source: str = ""
    """Slots of this source are for agents from outside: only nodes tagged for them get any, and
    those get no others."""
    session_start_to_close_s: float = 0.0
    """One attempt at such a slot."""


class SlotState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    """Out of attempts or of time to start; excluded, never scored."""
    TRUNCATED = "truncated"
    """Cut before it had a result: its group had to close now."""


NEXT_SLOT: Mapping[SlotState, frozenset[SlotState]] = MappingProxyType(
    {
        SlotState.WAITING: frozenset({SlotState.LEASED, SlotState.DEAD, SlotState.TRUNCATED}),
        SlotState.LEASED: frozenset(
            {SlotState.WAITING, SlotState.DONE, SlotState.DEAD, SlotState.TRUNCATED}
        ),
        SlotState.DONE: frozenset(),
        SlotState.DEAD: frozenset(),
        SlotState.TRUNCATED: frozenset(),
    }
)


class Slot(msgspec.Struct, gc=False):
    """A Struct that the collector of cycles need not look at: there may be a million of them, and
    none is part of a cycle."""

    state: SlotState = SlotState.WAITING
    attempt: int = 0
    """Attempts that cost one: failures and expiries, not hand-backs."""
    epoch: int = 0
    grant: GrantRecord | None = None
    """Under which it is leased."""
    row: RowSummary | None = None
    reasons: tuple[str, ...] = ()
    """Why each attempt came to nothing."""

    def move(self, state: SlotState) -> None:
        assert state in NEXT_SLOT[self.state], f"slot cannot go from {self.state} to {state}"
        self.state = state


@dataclass(slots=True)
class OpenGroup:
    """A group that runs. Slots nobody touched yet exist only as a number, so a million waiting
    ones cost little."""

    record: GroupRecord
    known_slots: dict[int, Slot] = field(default_factory=dict[int, Slot])
    next_fresh: int = 0
    """Slots from this index on were never leased."""
    retry_slots: list[int] = field(default_factory=list[int])
    """Slots to be leased again, before any fresh one."""
    waiting_since: float = 0.0
    """When the oldest of its waiting slots could have been leased."""
    decoded_task: Task | None = None

    @property
    def task(self) -> Task:
        if self.decoded_task is None:
            self.decoded_task = _task.decode(self.record.task)
        return self.decoded_task

    @property
    def due(self) -> dict[str, int]:
        return _due.decode(self.record.due)

    def slot(self, index: int) -> Slot:
        slot = self.known_slots.get(index)
        if slot is None:
            slot = self.known_slots[index] = Slot()
        return slot

    def lease(self, grant: GrantRecord) -> None:
        """All slots of the grant; they were taken before."""
        leased = SlotState.LEASED
        for index in grant.slots:
            slot = self.known_slots.get(index)
            if slot is None:  # born waiting, like all slots
                self.known_slots[index] = Slot(leased, epoch=grant.epoch, grant=grant)
                continue
            slot.move(leased)
            slot.epoch, slot.grant = grant.epoch, grant

    @property
    def num_waiting(self) -> int:
        return len(self.retry_slots) + self.record.num_slots - self.next_fresh

    def pop_waiting(self, max_slots: int) -> range:
        """Waiting slots, which wait no more: one to be leased again, or fresh ones, which are all
        alike."""
        if self.retry_slots:
            index = self.retry_slots.pop()
            return range(index, index + 1)
        first = self.next_fresh
        self.next_fresh = min(first + max_slots, self.record.num_slots)
        return range(first, self.next_fresh)

    @property
    def rows(self) -> tuple[RowSummary, ...]:
        slots = (self.known_slots[index] for index in sorted(self.known_slots))
        return tuple(slot.row for slot in slots if slot.row is not None)

    def running(self) -> Iterator[tuple[int, Slot]]:
        for index, slot in self.known_slots.items():
            if slot.state is SlotState.LEASED:
                yield index, slot

    def count(self, *states: SlotState) -> int:
        return sum(slot.state in states for slot in self.known_slots.values())


@dataclass(slots=True)
class HeldLeases:
    """What one request of a node got."""

    grants: list[GrantRecord] = field(default_factory=list[GrantRecord])
    """Those of which anything ran when they were added."""
    num_running: int = 0
    """Leases among them that run."""


@dataclass(slots=True)
class Node:
    record: NodeRecord
    last_seen: float
    state: NodeState = NodeState.STARTING
    live: tuple[LiveVersion, ...] = ()
    num_leases: int = 0
    current_request: str = ""
    """Its newest lease request; only this one may be granted anything."""
    past_requests: deque[str] = field(default_factory=lambda: deque[str](maxlen=16))
    """Older ones, which may arrive again from a network that repeats."""
    granted: dict[str, HeldLeases] = field(default_factory=dict[str, HeldLeases])
    """Held slots by the request that got them."""
    past_boot_ids: deque[str] = field(default_factory=lambda: deque[str](maxlen=16))
    """Lives of this node that were replaced."""
    num_delivered: int = 0
    num_tokens: int = 0
    mean_attempt_s: float = 0.0
    """Moving average from grant to result; 0 until the first."""
    is_expired: bool = False
    """Fell silent for a whole ttl; its leases are gone."""
    is_quarantined: bool = False
    """A trainer found that its engine disagrees; until it begins a new life."""
    joined_at: float = 0.0
    revoked: list[RowId] = field(default_factory=list[RowId])
    """Its leases that were cut or cancelled, until it is told."""

    @property
    def is_session_gateway(self) -> bool:
        """A gateway for agents from outside, which works on nothing else."""
        return f'"{SESSION_TAG}"' in self.record.tags
