# SPDX-License-Identifier: Apache-2.0
"""Time limits on slots and groups of one partition, nearest first. Uses the partition's own clock,
which may differ from the coordinator's by any amount. Pure.

Knows when a limit is due, not what happens then. Timers of ended slots and groups stay until they
are due; the caller skips them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from penstock.dataflow.core.groups import LeaseSpec
from penstock.dataflow.records import GrantRecord
from penstock.types import GroupId

SCHEDULE_TO_START, SCHEDULE_TO_CLOSE = -1, -2
"""Used in place of a slot index: limits on a complete group, schedule-to-start and
schedule-to-close."""


class Timer(NamedTuple):
    """One limit: start-to-close of slots granted together, or a limit on a complete group."""

    at: float
    group_id: GroupId
    slot: int
    epoch: int = 0
    num_slots: int = 1
    limit_s: float = 0.0
    """The full limit."""


class Timers:
    def __init__(self, terms: LeaseSpec) -> None:
        self._limit_s = {
            SCHEDULE_TO_START: terms.schedule_to_start_s,
            SCHEDULE_TO_CLOSE: terms.schedule_to_close_s,
        }
        # One ttl of grace: the node itself cuts at start-to-close and needs time to deliver.
        self._slot_limit_s = terms.start_to_close_s + terms.ttl_s
        self._session_limit_s = terms.session_start_to_close_s + terms.ttl_s
        self._heap: list[Timer] = []
        self._is_extended = False

    def start_wait_timer(self, group_id: GroupId, since: float) -> None:
        """Start schedule-to-start: its slots can be leased from `since` on."""
        self._start_group_timer(group_id, SCHEDULE_TO_START, since)

    def start_close_timer(self, group_id: GroupId, since: float) -> None:
        self._start_group_timer(group_id, SCHEDULE_TO_CLOSE, since)

    def _start_group_timer(self, group_id: GroupId, kind: int, since: float) -> None:
        limit_s = self._limit_s[kind]
        if limit_s is not None:
            timer = Timer(since + limit_s, group_id, kind, limit_s=limit_s)
            heapq.heappush(self._heap, timer)

    def start_slot_timers(
        self, grant: GrantRecord, since: float, *, is_session: bool = False
    ) -> None:
        limit_s = self._session_limit_s if is_session else self._slot_limit_s
        at = since + limit_s
        timer = Timer(at, grant.group_id, grant.slot, grant.epoch, grant.num_slots, limit_s)
        heapq.heappush(self._heap, timer)

    def due(self, now: float) -> Iterator[Timer]:
        if self._is_extended:
            self._cap(now)
        while self._heap and self._heap[0].at <= now:
            yield heapq.heappop(self._heap)

    def extend_deadlines(self, gap_s: float) -> None:
        """The service stalled for gap_s: extend all limits by that much, since none could be
        met."""
        self._heap = [timer._replace(at=timer.at + gap_s) for timer in self._heap]
        self._is_extended = True

    def _cap(self, now: float) -> None:
        """Cap each timer at its full limit from now: timers started between the stall and
        extend_deadlines() were not delayed by it."""
        self._heap = [timer._replace(at=min(timer.at, now + timer.limit_s)) for timer in self._heap]
        heapq.heapify(self._heap)
        self._is_extended = False
