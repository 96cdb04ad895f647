# SPDX-License-Identifier: Apache-2.0
"""What partitions in other processes, and the people who run them, ask of home. No HTTP here.

A partition joins, pushes what home lacks and pulls what it lacks itself. Joining a running service
adds a partition; a person drains one or declares it lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

import structlog

from penstock.dataflow.core.home import Home, Shard
from penstock.dataflow.core.links import home_end
from penstock.dataflow.core.messages import (
    Committed,
    Horizon,
    Incarnated,
    Published,
    Quarantined,
    ToPartition,
)
from penstock.dataflow.core.switchboard import Switchboard
from penstock.dataflow.records import (
    CommitRecord,
    IncarnationRecord,
    Journal,
    PartitionRecord,
    VersionRecord,
)
from penstock.dataflow.service.messages import Done
from penstock.dataflow.service.nodes.messages import PartitionAddress
from penstock.dataflow.service.operators.messages import (
    PartitionFigures,
    PartitionStatus,
)
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPulled,
    LinkPush,
    LinkPushed,
    PartitionJoin,
    PartitionLife,
)
from penstock.dataflow.service.process import Process
from penstock.errors import BadRequest, Conflict, Fenced, NotFound
from penstock.types import RowId

log = structlog.get_logger(__name__)

MAX_PARTITIONS = 1024
UNFREED = (
    "SELECT count(*) FROM issued i LEFT JOIN freed f ON f.group_id = i.group_id "
    "WHERE i.partition = :index AND f.group_id IS NULL"
)


@dataclass(slots=True)
class _Far:
    """A partition elsewhere, as home knows it."""

    record: PartitionRecord
    seen_at: float
    figures: PartitionFigures


class PartitionSide:
    def __init__(self, process: Process, home: Home, board: Switchboard) -> None:
        self._process = process
        self._home = home
        self._board = board
        now = process.clock()
        self._far = {
            record.index: _Far(record, now, PartitionFigures())
            for record in process.ledger.tables.read(PartitionRecord)
        }
        self._news: dict[int, asyncio.Event] = {}
        """Set when there is something for the partition whose poll is held open."""
        process.on_wake.append(self._woken)

    # --- what partitions ask ------------------------------------------------------------------

    async def join(self, index: int, body: PartitionJoin) -> Done:
        """A partition begins a life: the first one is added, a later one replaces its last."""
        if not 0 < index < MAX_PARTITIONS:
            raise BadRequest(f"partition {index}: give 1 to {MAX_PARTITIONS - 1}; 0 is home's own")
        known = self._far.get(index)
        if known is not None:
            _require_newer(known.record, body.life)
        record = PartitionRecord(
            index=index,
            url=body.url,
            epoch=body.life.epoch,
            state=Shard.SERVING if known is None else known.record.state,
            at=self._process.clock(),
            session=body.life.session,
        )
        self._process.journal(record)
        self._far[index] = _Far(record, self._process.clock(), PartitionFigures())
        if known is None:
            welcome(index, self._home, self._board, self._process.journal)
        await self._process.settle()
        log.info("partition joined", index=index, url=body.url, epoch=body.life.epoch)
        return Done()

    async def push(self, index: int, body: LinkPush) -> LinkPushed:
        far = self._require(index, body.life)
        far.figures = body.figures
        link = self._board.links[index]
        for message in link.receive(body.messages):
            self._board.call(partial(self._home.apply, message))
        received = link.num_received  # a later call may receive more, durable later
        await self._process.repeat()
        return LinkPushed(received=received)

    async def pull(self, index: int, body: LinkPull) -> LinkPulled:
        process = self._process
        give_up_at = process.hold_until(body.wait_s)
        self._require(index, body.life)
        link = self._board.links[index]
        link.acknowledged(body.received)  # written with whatever comes next
        while True:
            news = self._news.setdefault(index, asyncio.Event())
            self._require(index, body.life)
            messages = link.unacknowledged(body.received)
            finished = self._home.is_finished
            if messages or finished or process.clock() >= give_up_at:
                await process.repeat()  # what leaves here must be durable here
                return LinkPulled(messages=messages, finished=finished)
            await process.wait_for(news, give_up_at)

    def _woken(self) -> None:
        """A command changed something: wake the polls that it concerns."""
        finished = self._home.is_finished
        for index in [*self._news]:
            if finished or self._board.links[index].has_news:
                self._news.pop(index).set()

    def _require(self, index: int, life: PartitionLife) -> _Far:
        far = self._far.get(index)
        if far is None:
            raise NotFound(f"partition {index} is not known here; PUT /v1/partitions/{index} first")
        if (far.record.epoch, far.record.session) != (life.epoch, life.session):
            raise Fenced(
                f"partition {index} lives in another process (epoch {far.record.epoch}, this one "
                f"has {life.epoch}); this copy must end"
            )
        _require_not_lost(far.record)
        far.seen_at = self._process.clock()
        return far

    # --- what people ask ----------------------------------------------------------------------

    async def drain(self, index: int) -> Done:
        """No new group goes there; it can be switched off when its status says `gone`."""
        self._mark(index, Shard.DRAINING)
        await self._process.settle()
        return Done()

    async def lose(self, index: int) -> Done:
        """Declared lost: open groups there end, sealed rows are gone, its process is fenced."""
        self._mark(index, Shard.LOST)
        self._home.lose_partition(index, self._process.clock())
        await self._process.settle()
        return Done()

    def _mark(self, index: int, state: Shard) -> None:
        far = self._far.get(index)
        if far is None:
            known = ", ".join(map(str, sorted(self._far))) or "none besides home's own"
            raise NotFound(f"no partition {index} to {state}; there are: {known}")
        if far.record.state == Shard.LOST:
            raise Conflict(f"partition {index} was declared lost before; that is final")
        far.record = replace(far.record, state=state, at=self._process.clock())
        self._process.journal(far.record)
        self._home.shards[index] = state
        self._news.pop(index, asyncio.Event()).set()

    def tick(self) -> None:
        """A draining partition whose rows nobody needs any more is gone."""
        for index, far in self._far.items():
            if far.record.state != Shard.DRAINING or not self._home.is_empty(index):
                continue
            if not self._process.ledger.tables.scalar(UNFREED, index=index):
                self._mark(index, Shard.GONE)

    # --- what home tells others ---------------------------------------------------------------

    @property
    def addresses(self) -> tuple[PartitionAddress, ...]:
        """Partitions that nodes should serve."""
        return tuple(
            PartitionAddress(index=index, url=far.record.url)
            for index, far in self._far.items()
            if far.record.state in (Shard.SERVING, Shard.DRAINING)
        )

    def address_of(self, row_id: RowId) -> str | None:
        """Where a row lies: "" for here, None when its partition is lost."""
        far = self._far.get(int(row_id[1:].partition("-")[0]))
        if far is None:
            return ""
        return None if far.record.state == Shard.LOST else far.record.url

    def lacking(self) -> set[str]:
        """Stages that have no live worker at some partition elsewhere."""
        return {
            stage
            for far in self._far.values()
            if far.record.state in (Shard.SERVING, Shard.DRAINING)
            for stage in far.figures.lacks
        }

    def status(self, now: float) -> tuple[PartitionStatus, ...]:
        return tuple(
            PartitionStatus(
                index=index,
                url=far.record.url,
                state=far.record.state,
                num_open=len(self._home.open_at.get(index, ())),
                silent_s=round(now - far.seen_at, 1),
                figures=far.figures,
            )
            for index, far in self._far.items()
        )


def welcome(index: int, home: Home, board: Switchboard, journal: Journal) -> None:
    """A new partition must know every version before it judges a node or a delivery, and which
    lives of nodes get no work."""
    board.links[index] = link = home_end(index, journal)
    for policy, consumer in home.consumers.items():
        for record in consumer.lineage.history():
            link.send(_fact(record))
        link.send(Horizon(policy=policy, number=consumer.next_number))
    for node_id, session in sorted(home.quarantined):
        link.send(Quarantined(node_id=node_id, session=session))
    home.add_partition(index)


def _fact(record: IncarnationRecord | CommitRecord | VersionRecord) -> ToPartition:
    if isinstance(record, IncarnationRecord):
        return Incarnated(record=record)
    return (
        Committed(record=record) if isinstance(record, CommitRecord) else Published(record=record)
    )


def _require_newer(known: PartitionRecord, life: PartitionLife) -> None:
    _require_not_lost(known)
    if (known.epoch, known.session) == (life.epoch, life.session):
        return
    if life.epoch <= known.epoch:
        raise Fenced(
            f"partition {known.index} already lives with epoch {known.epoch}; this process has "
            f"{life.epoch}: two were started from one ledger folder, or from an old copy of it"
        )


def _require_not_lost(known: PartitionRecord) -> None:
    if known.state == Shard.LOST:
        raise Fenced(
            f"partition {known.index} was declared lost and is fenced for ever; "
            "start a new one under another number"
        )
