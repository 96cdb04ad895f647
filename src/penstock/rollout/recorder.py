# SPDX-License-Identifier: Apache-2.0
"""Sends finished turns of running attempts to the dataflow, in case this node is lost.

Sends turns that have waited for an interval, a fraction of a second; attempts never wait for it.
Turns of an attempt that ends first are only delivered. Turns that were not sent are generated again
by the next holder of the slot.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import RecordedTurn, RecordRequest
from penstock.gateway.session import TurnCallback
from penstock.types import NodeId, RowId, Turn
from penstock.wire.codec import encoded_bytes

RECORD_S = 0.2
MAX_BYTES = 1 << 20
"""Approximate limit per call; the rest waits for the next one."""


class TurnApi(Protocol):
    async def record(self, body: RecordRequest) -> None: ...
    async def recorded(self, node_id: NodeId, row_id: RowId, secret: str) -> tuple[Turn, ...]: ...


@dataclass(slots=True)
class Recorder:
    _api: TurnApi
    _node_id: NodeId
    _running: dict[RowId, list[RecordedTurn]] = field(
        default_factory=dict[RowId, list[RecordedTurn]]
    )
    """Turns of running attempts that were not sent yet."""
    _num_ripe: dict[RowId, int] = field(default_factory=dict[RowId, int])
    """How many of them waited at the last interval, by row."""

    def track(self, grant: Grant) -> TrackedAttempt:
        """Record the turns of an attempt, until the block ends."""
        return TrackedAttempt(self._running, self._api, self._node_id, grant)

    async def run(self) -> None:
        """consumes: finished turns · produces: copies at the dataflow
        waits for: the next interval (`RECORD_S`) · woken by: the timer only"""
        while True:
            await asyncio.sleep(RECORD_S)
            if batch := self.take():
                await self._api.record(RecordRequest(node_id=self._node_id, turns=batch))

    def take(self) -> tuple[RecordedTurn, ...]:
        """The turns to send at this interval: those that waited at the last one. Most attempts
        that end after a single answer are over by then, so theirs are never sent."""
        batch: list[RecordedTurn] = []
        num_bytes = 0
        for row_id, num_ripe in self._num_ripe.items():
            turns = self._running.get(row_id, [])
            while turns and num_ripe and num_bytes <= MAX_BYTES:
                recorded, num_ripe = turns.pop(0), num_ripe - 1
                batch.append(recorded)
                num_bytes += encoded_bytes(recorded.turn)
        self._num_ripe = {row_id: len(turns) for row_id, turns in self._running.items() if turns}
        return tuple(batch)


class TrackedAttempt:
    """A block in which the turns of an attempt are recorded. Gives the turns recorded by earlier
    attempts at the slot, and the callback for finished turns."""

    __slots__ = ("_api", "_grant", "_node_id", "_row_id", "_running", "_turns")

    def __init__(
        self,
        running: dict[RowId, list[RecordedTurn]],
        api: TurnApi,
        node_id: NodeId,
        grant: Grant,
    ) -> None:
        self._running, self._api, self._node_id, self._grant = running, api, node_id, grant
        self._row_id = grant.row_id
        self._turns: list[RecordedTurn] = []

    async def __aenter__(self) -> tuple[tuple[Turn, ...], TurnCallback]:
        salvaged_turns: tuple[Turn, ...] = ()
        if self._grant.num_recorded:
            secret = self._grant.secret
            salvaged_turns = await self._api.recorded(self._node_id, self._row_id, secret)
        self._running[self._row_id] = self._turns
        return salvaged_turns, self._add

    async def __aexit__(self, *_: object) -> None:
        del self._running[self._row_id]

    def _add(self, index: int, turn: Turn, is_reused: bool) -> None:
        self._turns.append(
            RecordedTurn(
                row_id=self._row_id,
                index=index,
                turn=turn,
                is_reused=is_reused,
                secret=self._grant.secret,
            )
        )
