# SPDX-License-Identifier: Apache-2.0
"""Slots, open groups and nodes as a partition holds them, and the state transitions they may
make."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

import msgspec

from penstock.dataflow.core.ids import is_evaluation
from penstock.dataflow.core.leasing import Activity, LiveVersion, NodeState
from penstock.dataflow.records import GrantRecord, GroupRecord, NodeRecord
from penstock.types import EVALUATION_TAG, SESSION_TAG, PolicyName, RowId, RowSummary, Task

_task = msgspec.json.Decoder(Task)
_due = msgspec.json.Decoder(dict[str, int])
MAX_PAUSES = 64
"""Pauses of a node that are kept: attempts that ran through more look slow."""
_policies = msgspec.json.Decoder(frozenset[str])


class ClosingKind(StrEnum):
    COMPLETE = "complete"
    """Every member must succeed within its attempts, or the group is dropped."""
    SURVIVORS = "survivors"
    """Members that failed permanently are left out, if enough remain."""
    DROP = "drop"
    """The first failure drops the group; there are no retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingPolicy:
    kind: ClosingKind
    min_survivors: int = 0

    def accepts(self, num_good: int, num_lost: int) -> bool:
        """Does a group with this many good and lost members still count?"""
        if self.kind is ClosingKind.SURVIVORS:
            return num_good >= max(1, self.min_survivors)
        return num_lost == 0 and num_good > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSpec:
    ttl_s: float
    """A node without a heartbeat for this long loses its leases."""
    start_to_close_s: float
    """Limit for one attempt, from grant to result."""
    max_attempts: int
    schedule_to_start_s: float | None = None
    """Limit from the time a slot can be leased until a node takes it."""
    schedule_to_close_s: float | None = None
    """Limit for the complete group, from its issue."""
    session_source: str = ""
    """Slots from this source are for external agents: only nodes tagged for them get any, and those
    nodes get no others."""
    session_start_to_close_s: float = 0.0
    """start_to_close_s for such a slot."""
    policies: Mapping[str, frozenset[PolicyName]] = field(
        default_factory=dict[str, frozenset[PolicyName]]
    )
    """Policies that a slot calls, by source; a source that is not listed calls all of the run."""
    evaluation_share: float = 0.0
    """Most of a node's capacity that evaluations take while a policy is trained; 0: only nodes that
    do nothing else evaluate."""


class SlotState(StrEnum):
    WAITING = "waiting"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    """Out of attempts, or not started in time; excluded, never scored."""
    TRUNCATED = "truncated"
    """Cut off before it had a result, because its group had to close."""


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
    """A gc=False Struct: there may be a million, and none is in a reference cycle."""

    state: SlotState = SlotState.WAITING
    attempt: int = 0
    """Attempts used up: failures and expiries count, hand-backs do not."""
    epoch: int = 0
    grant: GrantRecord | None = None
    """The grant it is leased under."""
    row: RowSummary | None = None
    reasons: tuple[str, ...] = ()
    """Why each attempt failed."""
    is_excused: bool = False
    """An untrusted node failed one of its attempts."""

    def move(self, state: SlotState) -> None:
        assert state in NEXT_SLOT[self.state], f"slot cannot go from {self.state} to {state}"
        self.state = state


@dataclass(slots=True)
class OpenGroup:
    """An open group. Slots that were never leased exist only as a number, so a million waiting
    slots cost little memory."""

    record: GroupRecord
    known_slots: dict[int, Slot] = field(default_factory=dict[int, Slot])
    next_fresh: int = 0
    """Slots from this index on were never leased."""
    retry_slots: list[int] = field(default_factory=list[int])
    """Slots to lease again, before any fresh one."""
    waiting_since: float = 0.0
    """When its longest-waiting slot became available."""
    decoded_task: Task | None = None

    @property
    def task(self) -> Task:
        if self.decoded_task is None:
            self.decoded_task = _task.decode(self.record.task)
        return self.decoded_task

    @property
    def due(self) -> dict[str, int]:
        return _due.decode(self.record.due)

    @property
    def is_evaluation(self) -> bool:
        return is_evaluation(self.record.group_id)

    @property
    def failures(self) -> dict[str, str]:
        """Why slots have no result, by slot."""
        ended = (SlotState.DEAD, SlotState.TRUNCATED)
        return {
            str(index): slot.reasons[-1] if slot.reasons else str(slot.state)
            for index, slot in sorted(self.known_slots.items())
            if slot.state in ended
        }

    def slot(self, index: int) -> Slot:
        slot = self.known_slots.get(index)
        if slot is None:
            slot = self.known_slots[index] = Slot()
        return slot

    def lease(self, grant: GrantRecord) -> None:
        """Lease all slots of the grant; they were popped before."""
        leased = SlotState.LEASED
        for index in grant.slots:
            slot = self.known_slots.get(index)
            if slot is None:  # slots start as waiting
                self.known_slots[index] = Slot(leased, epoch=grant.epoch, grant=grant)
                continue
            slot.move(leased)
            slot.epoch, slot.grant = grant.epoch, grant

    @property
    def num_waiting(self) -> int:
        return len(self.retry_slots) + self.record.num_slots - self.next_fresh

    def pop_waiting(self, max_slots: int) -> range:
        """Remove and return waiting slots: one slot to retry, or a range of fresh ones, which are
        interchangeable."""
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

    @property
    def last_cause(self) -> str:
        """Why a slot of this group ran out of attempts; empty if none did."""
        dead = [s for s in self.known_slots.values() if s.state is SlotState.DEAD and s.reasons]
        return dead[-1].reasons[-1] if dead else ""

    @property
    def is_excused(self) -> bool:
        """Untrusted nodes had a hand in every slot that ran out of attempts."""
        dead = [slot for slot in self.known_slots.values() if slot.state is SlotState.DEAD]
        return bool(dead) and all(slot.is_excused for slot in dead)

    def running(self) -> Iterator[tuple[int, Slot]]:
        for index, slot in self.known_slots.items():
            if slot.state is SlotState.LEASED:
                yield index, slot

    def count_ended(self) -> tuple[int, int]:
        """Slots that were given up, and those that have a result."""
        found = [slot.state for slot in self.known_slots.values()]
        return found.count(SlotState.DEAD), found.count(SlotState.DONE)

    def count(self, *states: SlotState) -> int:
        found = [slot.state for slot in self.known_slots.values()]
        return sum(map(found.count, states))


@dataclass(slots=True)
class HeldLeases:
    """Leases granted to one lease request."""

    grants: list[GrantRecord] = field(default_factory=list[GrantRecord])
    """Grants that had running leases when they were added."""
    num_running: int = 0
    """How many of these leases are running."""
    live: tuple[LiveVersion, ...] = ()
    """Versions that the node served then; unknown after a restart."""


@dataclass(slots=True)
class Node:
    record: NodeRecord
    last_seen: float
    state: NodeState = NodeState.STARTING
    live: tuple[LiveVersion, ...] = ()
    pinned: tuple[LiveVersion, ...] = ()
    """Versions it has loaded for evaluations."""
    num_leases: int = 0
    num_evaluations: int = 0
    """How many of its leases are for evaluations."""
    current_request: str = ""
    """Its newest lease request; only this one may be granted anything."""
    past_requests: deque[str] = field(default_factory=lambda: deque[str](maxlen=16))
    """Older requests, which the network may deliver again."""
    granted: dict[str, HeldLeases] = field(default_factory=dict[str, HeldLeases])
    """Held leases by the request that got them."""
    past_boot_ids: deque[str] = field(default_factory=lambda: deque[str](maxlen=16))
    """Earlier processes of this node, which were replaced."""
    num_delivered: int = 0
    num_tokens: int = 0
    mean_attempt_s: float = 0.0
    """Moving average from grant to result; 0 until the first result."""
    is_expired: bool = False
    """No heartbeat for a full ttl; its leases have ended."""
    is_quarantined: bool = False
    """A trainer found that the outputs of its subject's nodes disagree; lasts as long as the
    run."""
    joined_at: float = 0.0
    policies: frozenset[PolicyName] = frozenset()
    """Policies it serves, from its record; empty: all of the run."""
    work: tuple[Activity, ...] = ()
    """What it is busy with, by its last heartbeat."""
    num_done: int = 0
    """What it has finished, by its last heartbeat."""
    paused_since: float | None = None
    pauses: deque[tuple[float, float]] = field(
        default_factory=lambda: deque[tuple[float, float]](maxlen=MAX_PAUSES)
    )
    """The newest times in which it generated nothing because it was ordered to."""
    revoked: list[RowId] = field(default_factory=list[RowId])
    """Its leases that were cut or cancelled, until they are reported to it."""

    def __post_init__(self) -> None:
        self.policies = frozenset(map(PolicyName, _policies.decode(self.record.policies)))

    def paused_s(self, since: float, now: float) -> float:
        """How long it has been paused since then."""
        running = [] if self.paused_since is None else [(self.paused_since, now)]
        spells = (*self.pauses, *running)
        return sum(max(0.0, end - max(begin, since)) for begin, end in spells)

    @property
    def is_session_gateway(self) -> bool:
        """A gateway for external agents, which runs no other slots."""
        return f'"{SESSION_TAG}"' in self.record.tags

    @property
    def is_evaluator(self) -> bool:
        """It does nothing but evaluate."""
        return f'"{EVALUATION_TAG}"' in self.record.tags

    @property
    def is_untrusted(self) -> bool:
        """Its credential is: what it reports is checked again on the trusted side."""
        return self.record.is_untrusted
