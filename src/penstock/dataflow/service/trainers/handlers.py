# SPDX-License-Identifier: Apache-2.0
"""Commands of trainers at the coordinator: take over, get a batch, fetch its rows, commit, publish.
No HTTP here."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import msgspec
import structlog
from blake3 import blake3

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.leasing import LiveVersion
from penstock.dataflow.core.manifests import ManifestCache
from penstock.dataflow.core.messages import IncarnationStarted, Published, Quarantined
from penstock.dataflow.core.sealing import Sealing
from penstock.dataflow.core.spot_checks import SpotCheck
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.ledger.restore import read_instalments
from penstock.dataflow.records import (
    BatchRecord,
    CheckpointRecord,
    InstalmentRecord,
    quarantine_record,
)
from penstock.dataflow.report.balance import BalanceMonitor
from penstock.dataflow.service.process import Process
from penstock.dataflow.service.resource_sharing import ResourceSharing
from penstock.dataflow.service.row_payloads import RowPayloads, RowsQuery
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    CheckpointsRequest,
    CommitRequest,
    IncarnationAnswer,
    IncarnationRequest,
    PolicyState,
    ProgressRequest,
    PublishRequest,
    QuarantineRequest,
    RowsAnswer,
    VersionsInUse,
)
from penstock.dataflow.service.trainers.version_use import (
    NO_CHECKPOINT,
    retained_checkpoints,
    versions_in_use,
)
from penstock.errors import BadRequest, Conflict, NotFound, StoreError
from penstock.types import NodeId, PolicyName, RowId, subject_of_node

log = structlog.get_logger(__name__)
OnQuarantine = Callable[[str, str, str], Awaitable[None]]


async def _not_logged(subject: str, policy: str, why: str) -> None:
    """A service without a run folder has no log of actions."""


class TrainerHandlers:
    def __init__(
        self,
        process: Process,
        coordinator: Coordinator,
        sealing: Sealing,
        manifests: ManifestCache,
        payloads: RowPayloads,
        balance: BalanceMonitor,
        address_of: Callable[[RowId], str | None],
        sharing: ResourceSharing,
    ) -> None:
        self.seen: dict[PolicyName, float] = {}
        """Time of the last call of each policy's trainer."""
        self.progress: dict[PolicyName, int] = {}
        """Micro-batches that each policy's trainer has reported."""
        self._process = process
        self._coordinator = coordinator
        self._sealing = sealing
        self._manifests = manifests
        self.payloads = payloads
        self._durable: dict[PolicyName, int] = {}
        """Newest batch known to be on disk, by policy."""
        self._balance = balance
        self._address_of = address_of
        self._sharing = sharing
        self.on_quarantine: OnQuarantine = _not_logged
        """Called with the subject, the policy of the trainer that found it, if one did, and why."""

    def policy_state(self, policy: str) -> PolicyState:
        """For readers too: no sign of life of the trainer."""
        self._process.run_deferred()
        lineage, steps = self._frozen(policy), 0
        if lineage is None:
            consumer = self._coordinator.consumer(policy)
            lineage, steps = consumer.lineage, consumer.terms.steps
        return PolicyState(
            policy=lineage.policy,
            incarnation=lineage.incarnation,
            number=lineage.number,
            seq=lineage.seq,
            published=lineage.published,
            steps=steps,
        )

    def _frozen(self, policy: str) -> Lineage | None:
        """The lineage of a policy without a trainer, which a service publishes once."""
        return self._coordinator.frozen.get(PolicyName(policy))

    def _seen(self, policy: str) -> Consumer:
        consumer = self._coordinator.consumer(policy)
        self.seen[consumer.terms.policy] = self._process.clock()
        self._process.run_deferred()
        return consumer

    async def incarnate(self, policy: str, body: IncarnationRequest) -> IncarnationAnswer:
        frozen = self._frozen(policy)
        consumer = None if frozen else self._seen(policy)
        lineage = frozen or self._seen(policy).lineage
        now = self._process.clock()
        record = lineage.incarnate(
            expected=body.expected,
            number=body.number,
            seq=body.seq,
            request_id=body.request_id,
            now=now,
        )
        if record.incarnation != lineage.incarnation:
            if consumer is not None:
                self._require_servable(consumer, body.seq)
            self._process.journal(record)
            lineage.apply_incarnation(record)
            self._coordinator.broadcast(IncarnationStarted(record=record))
            if consumer is not None:
                self._coordinator.cursor_moved(consumer, self._sealed_after(consumer), now)
            log.info("incarnation", policy=policy, incarnation=record.incarnation, at=record.number)
        await self._process.make_all_durable()
        steps = 0 if consumer is None else consumer.terms.steps
        return IncarnationAnswer(incarnation=record.incarnation, steps=steps)

    def _require_servable(self, consumer: Consumer, seq: int) -> None:
        oldest = self._coordinator.retention.oldest_servable(consumer.terms.policy)
        if seq < oldest:
            raise Conflict(
                f"batches of {consumer.terms.policy} before {oldest + 1} were freed, so a trainer "
                f"cannot fork at batch {seq}; restore a newer checkpoint, and list those you "
                "keep with PUT /v1/policies/{policy}/checkpoints"
            )

    def _sealed_after(self, consumer: Consumer) -> dict[int, int]:
        rows = self._process.ledger.tables.rows(
            "SELECT seq, num_groups - num_replayed FROM batches "
            "WHERE consumer = :policy AND seq > :seq",
            policy=consumer.terms.policy,
            seq=consumer.lineage.seq,
        )
        # A batch sealed a moment ago may not be on disk yet; it is in memory.
        return {int(seq): int(groups) for seq, groups in rows} | consumer.sealed

    # --- batches ------------------------------------------------------------------------------

    async def batch(self, body: BatchRequest) -> BatchAnswer:
        process, consumer = self._process, self._seen(body.consumer)
        give_up_at = process.poll_deadline(body.wait_s)
        key = (f"trainer {body.consumer}", "batch")
        self._balance.batch_requested(
            consumer.terms.policy, body.seq, process.clock(), instalment=body.instalment
        )
        try:
            while True:
                change = process.changed
                consumer.lineage.require(body.incarnation)
                may_ask = self._coordinator.has_ended(consumer) or self._sharing.may_train(
                    consumer, body.seq
                )
                answer = (
                    await self._try(consumer, body.seq, body.instalment)
                    if may_ask
                    else BatchAnswer(manifest=None)
                )
                if answer.manifest:
                    self._balance.served(consumer.terms.policy, body.seq, process.clock())
                if answer.manifest or answer.end or process.clock() >= give_up_at:
                    # Allowed when the disk is full: a checkpoint frees rows.
                    return replace(answer, checkpoint_now=not process.has_room)
                process.waiting_since.setdefault(key, process.clock())
                await process.wait_for(change, give_up_at)
        finally:
            process.waiting_since.pop(key, None)

    async def _try(self, consumer: Consumer, seq: int, instalment: int) -> BatchAnswer:
        if instalment:
            return await self._try_instalment(consumer, seq, instalment)
        if seq <= consumer.last_sealed:
            return self._serve(await self._sealed(consumer, seq))
        if self._coordinator.has_ended(consumer):
            return BatchAnswer(manifest=None, end=True)
        self._process.run_deferred()
        record = self._sealing.seal(consumer, seq, self._process.clock())
        await self._process.make_durable()
        return BatchAnswer(manifest=None) if record is None else self._serve(record)

    async def _try_instalment(self, consumer: Consumer, seq: int, instalment: int) -> BatchAnswer:
        if not consumer.terms.is_streamed:
            raise BadRequest(
                f"instalment {instalment} of batch {consumer.terms.policy}.{seq} was requested, "
                "but this policy is not streamed; set training.stream: true, or request the "
                "complete batch"
            )
        if found := await self._sealed_instalment(consumer, seq, instalment):
            return self._serve(found)
        if self._coordinator.has_ended(consumer):
            return BatchAnswer(manifest=None, end=True)
        if (seq, instalment) != (consumer.last_sealed + 1, len(consumer.instalments) + 1):
            raise Conflict(
                f"instalment {instalment} of batch {consumer.terms.policy}.{seq} was requested, but"
                f" the next one is {len(consumer.instalments) + 1} of {consumer.last_sealed + 1}"
            )
        self._process.run_deferred()
        record = self._sealing.seal_instalment(consumer, seq, self._process.clock())
        await self._process.make_durable()
        return BatchAnswer(manifest=None) if record is None else self._serve(record)

    async def _sealed_instalment(
        self, consumer: Consumer, seq: int, instalment: int
    ) -> InstalmentRecord | BatchRecord | None:
        """An instalment that is on disk; None: not sealed yet. A batch that was sealed at once is
        its only instalment."""
        found = consumer.instalments
        if seq >= consumer.last_sealed:
            await self._process.ledger.flush()
        if seq <= consumer.last_sealed:
            tables = self._process.ledger.tables
            found = read_instalments(tables, consumer.terms.policy, seq)
            if not found and instalment == 1:
                return await self._sealed(consumer, seq)
            if instalment > len(found):
                name = f"{consumer.terms.policy}.{seq}"
                raise NotFound(f"batch {name} has {len(found)} instalments, not {instalment}")
        return found[instalment - 1] if instalment <= len(found) else None

    async def _sealed(self, consumer: Consumer, seq: int) -> BatchRecord:
        newest = consumer.newest_batch
        if newest is not None and newest.seq == seq:
            if self._durable.get(consumer.terms.policy) != seq:
                await self._process.ledger.flush()
                self._durable[consumer.terms.policy] = seq
            return newest
        where = "consumer = :policy AND seq = :seq"
        tables = self._process.ledger.tables
        found = tables.read(BatchRecord, where, policy=consumer.terms.policy, seq=seq)
        if not found:
            raise NotFound(f"batch {consumer.terms.policy}.{seq} does not exist")
        return found[0]

    async def rows(self, policy: str, seq: int, indexes: Sequence[int] | None = None) -> RowsAnswer:
        """Rows of a sealed batch, all in memory."""
        return await self.payloads.answer(await self.wanted(policy, seq, indexes))

    async def wanted(
        self,
        policy: str,
        seq: int,
        indexes: Sequence[int] | None = None,
        instalment: int = 0,
    ) -> RowsQuery:
        """Rows at these positions of the manifest, or of an instalment's; None for all."""
        manifest = self._manifests.decode(
            (await self._sealed_record(self._seen(policy), seq, instalment)).manifest
        )
        row_ids = _at(indexes, [row.row_id for row in manifest.rows], f"{policy}.{seq}")
        places = {
            row_id: None if row_id in self._coordinator.gone else self._address_of(row_id)
            for row_id in row_ids
        }
        return RowsQuery(
            row_ids=row_ids,
            columns=sorted({name for row in manifest.rows for name in row.columns}),
            remote_urls={row_id: at or "" for row_id, at in places.items() if at != ""},
        )

    async def _sealed_record(
        self, consumer: Consumer, seq: int, instalment: int
    ) -> InstalmentRecord | BatchRecord:
        name = f"batch {consumer.terms.policy}.{seq}"
        if not instalment:
            if not 0 < seq <= consumer.last_sealed:
                raise NotFound(f"{name} is not sealed yet")
            return await self._sealed(consumer, seq)
        found = None
        if 0 < seq <= consumer.last_sealed + 1:
            found = await self._sealed_instalment(consumer, seq, instalment)
        if found is None:
            raise NotFound(f"instalment {instalment} of {name} is not sealed yet")
        return found

    async def commit(self, policy: str, seq: int, body: CommitRequest) -> None:
        consumer = self._seen(policy)
        if seq > consumer.last_sealed:
            raise Conflict(f"batch {policy}.{seq} was never sealed")
        now = self._process.clock()
        record = consumer.lineage.commit(
            seq=seq,
            incarnation=body.incarnation,
            number=body.number,
            skipped=body.skipped,
            stats=msgspec.json.encode(_finite(body.stats)).decode(),
            now=now,
        )
        if seq > consumer.lineage.seq:
            self._process.journal(record)
            consumer.lineage.apply_commit(record)
            self._coordinator.committed(record)
            self._coordinator.cursor_moved(consumer, consumer.sealed, now)
        await self._process.make_all_durable()

    def record_progress(self, policy: str, body: ProgressRequest) -> None:
        """For people and the launcher only: it is not stored, and any trainer may send it."""
        self.progress[self._seen(policy).terms.policy] = body.num_done

    async def quarantine(self, node_id: NodeId, body: QuarantineRequest) -> None:
        """Quarantine the subject of a node, and so all its nodes, at every partition, also at those
        that join later."""
        self._seen(body.policy).lineage.require(body.incarnation)
        await self._quarantine(node_id, policy=body.policy, why=body.why)

    async def record_check(self, subject: str, check: SpotCheck) -> None:
        """Count a row that was generated again; quarantine who differs too often."""
        if why := self._coordinator.spot_checks.record(subject, check):
            await self._quarantine(NodeId(subject), policy="", why=why)
        await self._process.make_durable()

    async def _quarantine(self, node_id: NodeId, *, policy: str, why: str) -> None:
        subject, is_new = subject_of_node(node_id), False
        if subject not in self._coordinator.quarantined:
            self._process.journal(quarantine_record(subject))
            self._coordinator.quarantined.add(subject)
            self._coordinator.broadcast(Quarantined(node_id=node_id))
            is_new = True
            log.warning(
                "credential quarantined",
                subject=subject,
                node=node_id,
                policy=policy,
                why=why[:1000],
            )
        await self._process.make_all_durable()
        if is_new:
            await self.on_quarantine(subject, policy, why)

    # --- versions and checkpoints -------------------------------------------------------------

    async def publish(self, policy: str, body: PublishRequest) -> None:
        lineage = self._frozen(policy) or self._seen(policy).lineage
        record = lineage.publish(
            incarnation=body.incarnation,
            number=body.number,
            manifest_digest=body.manifest_digest,
            weights_digest=body.weights_digest,
            now=self._process.clock(),
        )
        if not lineage.has(record.incarnation, record.number):
            self._process.journal(record)
            lineage.apply_version(record)
            self._coordinator.broadcast(Published(record=record))
        await self._process.make_all_durable()

    def versions_in_use(self, live: Collection[LiveVersion]) -> VersionsInUse:
        """live: versions that nodes serve."""
        retained = retained_checkpoints(self._process.ledger.tables)
        evaluations = self._coordinator.evaluations
        evaluated = (
            set[tuple[PolicyName, int, int]]() if evaluations is None else evaluations.in_use()
        )
        bounds = {p: found.terms.max_staleness for p, found in self._coordinator.consumers.items()}
        found = (
            versions_in_use(
                lineage,
                live=live,
                retained=retained.get(policy, NO_CHECKPOINT),
                max_staleness=bounds.get(policy, 0),
                evaluated=evaluated,
            )
            for policy, lineage in self._coordinator.lineages.items()
        )
        return VersionsInUse(versions=tuple(chain.from_iterable(found)))

    async def checkpoints(self, policy: str, body: CheckpointsRequest) -> None:
        consumer = self._seen(policy)
        consumer.lineage.require(body.incarnation)
        now, policy_name = self._process.clock(), consumer.terms.policy
        # Rows freed before a checkpoint was listed are gone: no trainer could resume from it.
        floor = self._coordinator.retention.oldest_servable(policy_name)
        retained = [(number, seq) for number, seq in body.retained if seq >= floor]
        self._process.journal(
            CheckpointRecord(
                policy=policy_name,
                incarnation=body.incarnation,
                retained=msgspec.json.encode(retained).decode(),
                at=now,
            )
        )
        oldest = min((seq for _, seq in retained), default=None)
        self._coordinator.free(self._coordinator.retention.retained(policy_name, oldest), now)
        await self._process.make_durable()

    def _serve(self, record: BatchRecord | InstalmentRecord) -> BatchAnswer:
        if blake3(record.manifest).hexdigest() != record.digest:
            name = f"{record.consumer}.{record.seq}"
            raise StoreError(
                f"the manifest of batch {name} is damaged; restore the ledger from a backup"
            )
        manifest = self._manifests.decode(record.manifest)
        is_last = isinstance(record, BatchRecord) or record.is_last
        return BatchAnswer(manifest=manifest, digest=record.digest, is_last=is_last)


def _at(indexes: Sequence[int] | None, row_ids: Sequence[RowId], batch: str) -> Sequence[RowId]:
    if indexes is None:
        return row_ids
    if len({*indexes} & {*range(len(row_ids))}) != len(indexes):
        raise BadRequest(
            f"batch {batch} has {len(row_ids)} rows; indexes must be unique and between 0 and "
            f"{len(row_ids) - 1}"
        )
    return [row_ids[index] for index in indexes]


def _finite(stats: Mapping[str, float]) -> dict[str, float]:
    """Leave out values that are not finite, which JSON cannot represent."""
    return {name: value for name, value in stats.items() if math.isfinite(value)}
