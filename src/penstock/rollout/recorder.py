# SPDX-License-Identifier: Apache-2.0
"""Sends finished turns of running attempts to the dataflow, in case this node is lost.

Sends a few times a second; attempts never wait for it. Turns of an attempt that ends first are only
delivered. Turns that were not sent are generated again by the next holder of the slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import RecordedTurn, RecordRequest
from penstock.gateway.session import TurnCallback
from penstock.types import NodeId, RowId, Turn

RECORD_S = 0.2
MAX_BYTES = 4 << 20
"""Approximate limit per call; the rest waits for the next one."""


class TurnApi(Protocol):
    async def record(self, body: RecordRequest) -> None: ...
    async def recorded(self, node_id: NodeId, row_id: RowId, secret: str) -> tuple[Turn, ...]: ...


@dataclass(slots=True)
class Recorder:
    _api: TurnApi
    _node_id: NodeId
    _waiting: list[RecordedTurn] = field(default_factory=list[RecordedTurn])
    _running: set[RowId] = field(default_factory=set[RowId])

    @asynccontextmanager
    async def track(self, grant: Grant) -> AsyncGenerator[tuple[tuple[Turn, ...], TurnCallback]]:
        """Record the turns of an attempt. Yields the turns recorded by earlier attempts at the
        slot, and the callback for finished turns."""
        row_id, secret = grant.row_id, grant.secret

        def on_turn(index: int, turn: Turn, is_reused: bool) -> None:
            self._waiting.append(
                RecordedTurn(
                    row_id=row_id, index=index, turn=turn, is_reused=is_reused, secret=secret
                )
            )

        salvaged_turns: tuple[Turn, ...] = ()
        if grant.num_recorded:
            salvaged_turns = await self._api.recorded(self._node_id, row_id, secret)
        self._running.add(row_id)
        try:
            yield salvaged_turns, on_turn
        finally:
            self._running.discard(row_id)

    async def run(self) -> None:
        """consumes: finished turns · produces: copies at the dataflow
        waits for: the next interval (`RECORD_S`) · woken by: the timer only"""
        while True:
            await asyncio.sleep(RECORD_S)
            if batch := self._next():
                await self._api.record(RecordRequest(node_id=self._node_id, turns=batch))

    def _next(self) -> tuple[RecordedTurn, ...]:
        waiting = [turn for turn in self._waiting if turn.row_id in self._running]
        num_bytes = 0
        for num, batch in enumerate(waiting):
            if num_bytes > MAX_BYTES:
                self._waiting = waiting[num:]
                return tuple(waiting[:num])
            num_bytes += len(batch.turn.prompt_ids) + 2 * len(batch.turn.sampled_ids)
        self._waiting = []
        return tuple(waiting)
