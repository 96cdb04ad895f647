# SPDX-License-Identifier: Apache-2.0
"""Coordinator commands for partitions in other processes and for their operators. No HTTP here.

A partition joins, pushes new messages and pulls new orders. Joining a running service adds a
partition; an operator drains one or declares it lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import structlog

from penstock.dataflow.core.coordinator import Coordinator, PartitionState
from penstock.dataflow.core.links import link_to_partition
from penstock.dataflow.core.message_router import MessageRouter
from penstock.dataflow.core.messages import (
    Committed,
    GroupEnded,
    HorizonMoved,
    IncarnationStarted,
    Published,
    Quarantined,
    ToCoordinator,
    ToPartition,
)
from penstock.dataflow.records import (
    CommitRecord,
    IncarnationRecord,
    Journal,
    PartitionRecord,
    VersionRecord,
)
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import PartitionAddress
from penstock.dataflow.service.operators.messages import PartitionMetrics, PartitionStatus
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPullAnswer,
    LinkPush,
    LinkPushAnswer,
    PartitionBoot,
    PartitionJoin,
)
from penstock.dataflow.service.process import Process
from penstock.errors import BadRequest, ConfigError, Conflict, Fenced, Forbidden, NotFound
from penstock.types import NodeId, RowId
from penstock.wire.trust import refuse_clear_text

log = structlog.get_logger(__name__)

MAX_PARTITIONS = 1024
CALLS_PER_S = 50.0
"""In each direction, of all partitions together while all of them are busy: every call has its
cost in bytes and in time of the coordinator, which so depends on the work alone."""
MAX_PAUSE_S = 1.0
UNFREED = (
    "SELECT count(*) FROM groups g LEFT JOIN freed f ON f.group_id = g.group_id "
    "WHERE g.partition = :index AND f.group_id IS NULL"
)


@dataclass(slots=True)
class _RemotePartition:
    """The coordinator's state of a partition in another process."""

    record: PartitionRecord
    seen_at: float
    figures: PartitionMetrics


class PartitionHandlers:
    def __init__(self, process: Process, coordinator: Coordinator, router: MessageRouter) -> None:
        self._process = process
        self._coordinator = coordinator
        self._router = router
        now = process.clock()
        self._remote = {
            record.index: _RemotePartition(record, now, PartitionMetrics())
            for record in process.ledger.tables.read(PartitionRecord)
        }
        self._wake_events: dict[int, asyncio.Event] = {}
        """By partition, set when there are orders for its open poll."""
        self.own_urls: Mapping[int, str] = {}
        """Addresses of the run's own partitions; no other address is accepted for these."""

    # --- calls of partitions ------------------------------------------------------------------

    async def join(self, index: int, body: PartitionJoin, *, may_move: bool = False) -> Ack:
        """Register a partition's process: the first adds the partition, a later one replaces the
        previous process.

        may_move: an operator says so; else it stays at its address, since nodes and trainers send
        their tokens there."""
        if not 0 < index < MAX_PARTITIONS:
            raise BadRequest(
                f"partition {index} is out of range; use 1 to {MAX_PARTITIONS - 1}"
                " (0 is in the coordinator's process)"
            )
        try:
            refuse_clear_text(body.url)
        except ConfigError as error:
            raise BadRequest(f"partition {index}: nodes would be {error}") from None
        known = self._remote.get(index)
        if known is not None:
            _require_newer(known.record, body.boot)
        if not may_move:
            self._require_address(index, body.url)
        record = PartitionRecord(
            index=index,
            url=body.url,
            epoch=body.boot.epoch,
            state=PartitionState.SERVING if known is None else known.record.state,
            at=self._process.clock(),
            boot_id=body.boot.boot_id,
        )
        self._process.journal(record)
        self._remote[index] = _RemotePartition(record, self._process.clock(), PartitionMetrics())
        if known is None:
            add_remote_partition(index, self._coordinator, self._router, self._process.journal)
        await self._process.make_durable()
        log.info("partition joined", index=index, url=body.url, epoch=body.boot.epoch)
        return Ack()

    def _require_address(self, index: int, url: str) -> None:
        """The address of the run's own partition, or else the one it first joined with."""
        known = self._remote.get(index)
        pinned = self.own_urls.get(index) or (url if known is None else known.record.url)
        if url.rstrip("/") != pinned.rstrip("/"):
            raise Forbidden(
                f"partition {index} is at {pinned}, not at {url[:200]}; nodes and trainers would "
                "send their tokens there. If it has moved, start it with an operator's token "
                "(`penstock token RUN --role admin`)"
            )

    async def push(self, index: int, body: LinkPush) -> LinkPushAnswer:
        remote = self._require(index, body.boot)
        remote.figures = body.figures
        link = self._router.links[index]
        for message in link.receive(body.messages, partial(self._require_own, index)):
            self._router.call(partial(self._coordinator.apply, message))
        received = link.num_received  # a later call may receive more, which is durable later
        await self._process.make_all_durable()
        return LinkPushAnswer(received=received, pause_s=self._pause_s)

    def _require_own(self, index: int, message: ToCoordinator) -> None:
        """Raise BadRequest for a group or row that was not issued to this partition."""
        group_id = message.group_id
        policies = message.policies if isinstance(message, GroupEnded) else (message.policy,)
        is_own = group_id.startswith(f"p{index}-") and all(
            row.row_id.startswith(f"{group_id}.") for row in message.rows
        )
        if not is_own or not self._coordinator.consumers.keys() >= {*policies}:
            raise BadRequest(
                f"partition {index} reports on {group_id[:80]!r} for {policies[:8]}: the group, a "
                "row or a policy is not one that it was given; start both ends with the same "
                "version of penstock"
            )

    async def pull(self, index: int, body: LinkPull) -> LinkPullAnswer:
        process = self._process
        give_up_at = process.poll_deadline(body.wait_s)
        self._require(index, body.boot)
        link = self._router.links[index]
        if body.received > link.num_sent:  # it would be stored, and counted on from
            raise BadRequest(
                f"partition {index} acknowledges order {body.received}, and {link.num_sent} were "
                "sent: its ledger is of another run, or newer than the coordinator's; restore both "
                "from backups of one moment"
            )
        link.acknowledged(body.received)  # written with the next commit
        while True:
            news = self._wake_events.setdefault(index, asyncio.Event())
            self._require(index, body.boot)
            messages = link.unacknowledged(body.received)
            finished = self._coordinator.may_nodes_leave(process.clock())
            if messages or finished or process.clock() >= give_up_at:
                await process.make_all_durable()  # orders must be durable before they are sent
                return LinkPullAnswer(messages=messages, finished=finished, pause_s=self._pause_s)
            await process.wait_for(news, give_up_at)

    @property
    def _pause_s(self) -> float:
        return min(MAX_PAUSE_S, len(self.addresses) / CALLS_PER_S)

    def on_wake(self) -> None:
        """Wake the polls that a command affects."""
        finished = self._coordinator.may_nodes_leave(self._process.clock())
        for index in [*self._wake_events]:
            if finished or self._router.links[index].has_unacknowledged:
                self._wake_events.pop(index).set()

    def _require(self, index: int, boot: PartitionBoot) -> _RemotePartition:
        remote = self._remote.get(index)
        if remote is None:
            raise NotFound(f"partition {index} is not registered; PUT /v1/partitions/{index} first")
        if (remote.record.epoch, remote.record.boot_id) != (boot.epoch, boot.boot_id):
            raise Fenced(
                f"partition {index} runs in another process (epoch {remote.record.epoch}, this one "
                f"has {boot.epoch}); this process must exit"
            )
        _require_not_lost(remote.record)
        remote.seen_at = self._process.clock()
        return remote

    # --- calls of operators ----------------------------------------------------------------------

    async def drain(self, index: int) -> Ack:
        """Send no new group there; the partition can be stopped once its status is `gone`."""
        self._mark(index, PartitionState.DRAINING)
        await self._process.make_durable()
        return Ack()

    async def lose(self, index: int) -> Ack:
        """Declare it lost: its open groups end, its sealed rows are unavailable, its process is
        fenced."""
        self._mark(index, PartitionState.LOST)
        self._coordinator.declare_lost(index, self._process.clock())
        await self._process.make_durable()
        return Ack()

    def _mark(self, index: int, state: PartitionState) -> None:
        remote = self._remote.get(index)
        if remote is None:
            known = ", ".join(map(str, sorted(self._remote))) or "only the coordinator's own"
            raise NotFound(f"no partition {index} to {state}; known partitions: {known}")
        if remote.record.state == PartitionState.LOST:
            raise Conflict(f"partition {index} was already declared lost; that is final")
        remote.record = replace(remote.record, state=state, at=self._process.clock())
        self._process.journal(remote.record)
        self._coordinator.partition_states[index] = state
        self._wake_events.pop(index, asyncio.Event()).set()

    def tick(self) -> None:
        """Mark a draining partition as gone once none of its rows is needed."""
        for index, remote in self._remote.items():
            if (
                remote.record.state == PartitionState.DRAINING
                and self._coordinator.is_empty(index)
                and not self._process.ledger.tables.scalar(UNFREED, index=index)
            ):
                self._mark(index, PartitionState.GONE)

    # --- for other handlers ---------------------------------------------------------------

    @property
    def addresses(self) -> tuple[PartitionAddress, ...]:
        """Partitions that nodes should work for."""
        return tuple(
            PartitionAddress(index=index, url=remote.record.url)
            for index, remote in self._remote.items()
            if remote.record.state in (PartitionState.SERVING, PartitionState.DRAINING)
        )

    def address_of(self, row_id: RowId) -> str | None:
        """URL of a row's partition: "" for this process, None when the partition is lost."""
        remote = self._remote.get(int(row_id[1:].partition("-")[0]))
        if remote is None:
            return ""
        return None if remote.record.state == PartitionState.LOST else remote.record.url

    def stages_without_worker(self) -> set[str]:
        """Stages that lack a live worker at some partition in another process."""
        return {
            stage
            for remote in self._remote.values()
            if remote.record.state in (PartitionState.SERVING, PartitionState.DRAINING)
            for stage in remote.figures.missing_stages
        }

    def status(self, now: float) -> tuple[PartitionStatus, ...]:
        return tuple(
            PartitionStatus(
                index=index,
                url=remote.record.url,
                state=remote.record.state,
                num_open=len(self._coordinator.open_by_partition.get(index, ())),
                silent_s=round(now - remote.seen_at, 1),
                figures=remote.figures,
            )
            for index, remote in self._remote.items()
        )


def partition_subject(index: int) -> str:
    """Who the token of a partition is for: the name of its service."""
    return f"partition-{index}"


def add_remote_partition(
    index: int, coordinator: Coordinator, router: MessageRouter, journal: Journal
) -> None:
    """Queue everything a new partition must know before it judges a node or a delivery: all
    versions, and who is in quarantine."""
    router.links[index] = link = link_to_partition(index, journal)
    for lineage in coordinator.lineages.values():
        for record in lineage.history():
            link.send(_as_message(record))
    for policy, consumer in coordinator.consumers.items():
        link.send(HorizonMoved(policy=policy, number=consumer.next_number))
    for subject in sorted(coordinator.quarantined):
        link.send(Quarantined(node_id=NodeId(subject)))
    coordinator.add_partition(index)


def _as_message(record: IncarnationRecord | CommitRecord | VersionRecord) -> ToPartition:
    if isinstance(record, IncarnationRecord):
        return IncarnationStarted(record=record)
    return (
        Committed(record=record) if isinstance(record, CommitRecord) else Published(record=record)
    )


def _require_newer(known: PartitionRecord, boot: PartitionBoot) -> None:
    _require_not_lost(known)
    if (known.epoch, known.boot_id) == (boot.epoch, boot.boot_id):
        return
    if boot.epoch <= known.epoch:
        raise Fenced(
            f"partition {known.index} already runs with epoch {known.epoch}; this process has "
            f"{boot.epoch}: two were started from one ledger folder, or from an old copy of it"
        )


def _require_not_lost(known: PartitionRecord) -> None:
    if known.state == PartitionState.LOST:
        raise Fenced(
            f"partition {known.index} was already declared lost and cannot rejoin; "
            "start a partition with a new index"
        )
