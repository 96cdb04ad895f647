# SPDX-License-Identifier: Apache-2.0
"""The trajectories of a recorded run: what the ledger knows of each, and its payload if it is on
disk.

Reads pages, so memory does not grow with the run. A trajectory whose payload was freed is returned
without it; nothing is skipped. Never writes, and never disturbs a service that does.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from penstock.bounds import MAX_ROW_BYTES
from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.core.names import TRAIN
from penstock.dataflow.ledger.blobs import MAX_BLOB_BYTES, read_blob
from penstock.dataflow.ledger.objects import ObjectPayloads
from penstock.dataflow.ledger.recorded import RecordedRun
from penstock.dataflow.ledger.sealed_batches import partition_folder
from penstock.dataflow.ledger.segments import Location, SegmentReader
from penstock.dataflow.ledger.store import location_of
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import (
    FORGOTTEN_PREFIX,
    CommitRecord,
    FateRecord,
    GroupRecord,
    RowRecord,
    gone_key,
)
from penstock.errors import NotFound, PenstockError, StoreError
from penstock.redaction import for_people, hide_secrets
from penstock.runs.decoded import Decoder
from penstock.runs.recorded_trajectory import PayloadState, RecordedTrajectory, TrainingUse
from penstock.types import (
    GroupId,
    Manifest,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    Task,
    Trajectory,
)
from penstock.wire.codec import decode

PAGE_ROWS = 256
OLDEST, NEWEST, BEST, WORST = "oldest", "newest", "best", "worst"
REWARD = (
    "coalesce(reward, (SELECT c.value FROM columns c WHERE c.space = rows.space "
    "AND c.row_id = rows.row_id AND c.name = 'reward'))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which trajectories to read, and in which order."""

    policy: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    outcome: OutcomeKind | None = None
    group: str | None = None
    node: str | None = None
    order: str = OLDEST
    space: str = TRAIN
    """TRAIN, or EVAL for answers to questions of evaluations."""

    @property
    def has_steps(self) -> bool:
        return self.first_step is not None or self.last_step is not None

    def matches(self, outcome: OutcomeKind, node: str) -> bool:
        return self.outcome in (None, outcome) and self.node in (None, node)

    def condition(self) -> tuple[str, dict[str, Any]]:
        """As SQL over `rows`."""
        where, values = "space = :space", dict[str, Any](space=self.space)
        if self.outcome is not None:
            where += " AND outcome = :outcome"
            values["outcome"] = self.outcome.value
        if self.group is not None:
            where += " AND group_id = :group"
            values["group"] = self.group
        if self.node is not None:
            where += " AND node_id = :node"
            values["node"] = self.node
        if self.policy is not None:
            where += " AND instr(sampled, :policy) > 0"
            values["policy"] = f'"{self.policy}":'
        if self.order in (BEST, WORST):
            where += f" AND {REWARD} IS NOT NULL"
        return where, values


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupFacts:
    task: Task | None
    source: str
    uses: tuple[TrainingUse, ...]


_FoundPayload = tuple[Trajectory | None, PayloadState, str]
"""The payload, its state, and why it is not readable."""
_GONE: _FoundPayload = (None, PayloadState.FORGOTTEN, "an operator erased this session")


class _Payloads:
    """Reads payload of one partition from where the run stores it."""

    def __init__(self, folder: Path, store: str) -> None:
        self._folder = folder
        self._segments = SegmentReader(folder / "segments")
        self._objects = ObjectPayloads(store) if "://" in store else None

    def read(self, record: RowRecord | ColumnRecord) -> bytes:
        if record.blob:
            return read_blob(self._folder / "blobs", record.blob)
        location: Location = location_of(record)
        if self._objects is not None:
            return self._objects.read(location)
        try:
            return self._segments.read(location)
        except StoreError:
            self._segments.forget(location.segment)  # a running service may have replaced it
            raise


class TrajectoryReader:
    def __init__(
        self,
        recorded: RecordedRun,
        ledger_folder: Path,
        policies: Sequence[PolicyName],
        payload_store: str,
        decoder: Decoder,
    ) -> None:
        self._recorded = recorded
        self._policies = policies
        self.decoder = decoder
        self._tables: dict[int, Tables] = {0: recorded.coordinator, **recorded.partitions}
        self._payloads = {
            index: _Payloads(
                partition_folder(ledger_folder, index) if index else ledger_folder, payload_store
            )
            for index in self._tables
        }

    # --- selecting ----------------------------------------------------------------------------

    def read(self, selection: Selection) -> Iterator[RecordedTrajectory]:
        if selection.has_steps:
            yield from self._read_steps(selection)
        elif selection.order in (BEST, WORST):
            yield from self._read_ranked(selection)
        else:
            sign = -1 if selection.order == NEWEST else 1
            parts = [self._read_arrivals(index, selection) for index in self._tables]
            yield from heapq.merge(*parts, key=lambda one: sign * one.delivered_at)

    def last_arrivals(self) -> dict[int, int]:
        """Arrival of the newest trajectory, by partition: where to continue later."""
        query = "SELECT coalesce(max(arrival), 0) FROM rows WHERE space = :space"
        return {i: int(tables.scalar(query, space=TRAIN)) for i, tables in self._tables.items()}

    def after(
        self, arrivals: Mapping[int, int], limit: int
    ) -> tuple[list[RecordedTrajectory], dict[int, int]]:
        """The next `limit` of each partition that arrived after these, and where to continue."""
        reached, found = dict(arrivals), list[RecordedTrajectory]()
        query = "space = :space AND arrival > :at ORDER BY arrival LIMIT :num"
        for index, tables in self._tables.items():
            at = arrivals.get(index, 0)
            rows = tables.read(RowRecord, query, space=TRAIN, at=at, num=limit)
            found += self._load(index, rows)
            reached[index] = rows[-1].arrival if rows else at
        return found, reached

    def newest_between(
        self, after: Mapping[int, int], upto: Mapping[int, int], selection: Selection, limit: int
    ) -> tuple[list[RecordedTrajectory], int]:
        """The newest `limit` of those that arrived in between, oldest first, and their number."""
        where, values = selection.condition()
        where += " AND arrival > :after AND arrival <= :upto"
        found: list[RecordedTrajectory] = []
        num_found = 0
        for index, tables in self._tables.items():
            between = {**values, "after": after.get(index, 0), "upto": upto[index]}
            num_found += int(tables.scalar(f"SELECT count(*) FROM rows WHERE {where}", **between))
            query = f"{where} ORDER BY arrival DESC LIMIT :num"
            found += self._load(index, tables.read(RowRecord, query, **between, num=limit))
        found.sort(key=lambda one: one.delivered_at)
        return found[-limit:], num_found

    def _read_arrivals(self, index: int, selection: Selection) -> Iterator[RecordedTrajectory]:
        """In order of arrival, or the other way round."""
        where, values = selection.condition()
        is_newest = selection.order == NEWEST
        side, order = ("<", "DESC") if is_newest else (">", "ASC")
        at = (1 << 62) if is_newest else -1
        query = f"{where} AND arrival {side} :at ORDER BY arrival {order} LIMIT :num"
        while True:
            rows = self._tables[index].read(RowRecord, query, **values, at=at, num=PAGE_ROWS)
            yield from self._load(index, rows)
            if len(rows) < PAGE_ROWS:
                return
            at = rows[-1].arrival

    def _read_ranked(self, selection: Selection) -> Iterator[RecordedTrajectory]:
        sign = -1 if selection.order == BEST else 1
        parts = [self._read_ranks(index, selection) for index in self._tables]
        yield from heapq.merge(*parts, key=lambda one: sign * (one.reward or 0.0))

    def _read_ranks(self, index: int, selection: Selection) -> Iterator[RecordedTrajectory]:
        where, values = selection.condition()
        order = "DESC" if selection.order == BEST else "ASC"
        query = f"{where} ORDER BY {REWARD} {order}, arrival DESC LIMIT :num OFFSET :skip"
        for skip in range(0, 1 << 62, PAGE_ROWS):
            page = {**values, "num": PAGE_ROWS, "skip": skip}
            rows = self._tables[index].read(RowRecord, query, **page)
            yield from self._load(index, rows)
            if len(rows) < PAGE_ROWS:
                return

    def _read_steps(self, selection: Selection) -> Iterator[RecordedTrajectory]:
        """Batch by batch: a trajectory that several batches contain is returned for each."""
        found = self._step_rows(selection)
        if selection.order in (BEST, WORST):
            scored = [(reward, row_id) for row_id, reward in found if reward is not None]
            scored.sort(reverse=selection.order == BEST)
            found = ((row_id, reward) for reward, row_id in scored)
        ids = (row_id for row_id, _ in found)
        while page := [*islice(ids, PAGE_ROWS)]:
            by_id = self._by_id(page)
            wanted = (by_id[row_id] for row_id in page if row_id in by_id)
            yield from (one for one in wanted if selection.matches(one.outcome, one.node_id))

    def _step_rows(self, selection: Selection) -> Iterator[tuple[RowId, float | None]]:
        tables = self._recorded.coordinator
        policies = [selection.policy] if selection.policy else self._policies
        order = "DESC" if selection.order == NEWEST else "ASC"
        for policy in policies:
            values = {
                "policy": policy,
                "first": selection.first_step or 0,
                "last": 1 << 62 if selection.last_step is None else selection.last_step,
            }
            query = "SELECT b.manifest FROM batches b WHERE b.consumer = :policy AND b.seq = :seq"
            seqs = tables.rows(
                "SELECT DISTINCT seq FROM commits WHERE consumer = :policy AND skipped = '' "
                f"AND number BETWEEN :first AND :last ORDER BY seq {order}",
                **values,
            )
            for (seq,) in seqs:
                for (data,) in tables.rows(query, policy=policy, seq=seq):
                    for group in decode(data, Manifest).groups:
                        if selection.group in (None, group.group_id):
                            yield from ((row.row_id, row.reward) for row in group.rows)

    def by_id(self, row_id: str) -> RecordedTrajectory | None:
        """The trajectory with this id, of training or of an evaluation."""
        return self._by_id([RowId(row_id)]).get(RowId(row_id))

    def row_ids_of_step(self, step: int, policy: str | None = None) -> list[RowId]:
        """The rows that this step trained, of one policy or of all."""
        selection = Selection(policy=policy, first_step=step, last_step=step)
        return [row_id for row_id, _ in self._step_rows(selection)]

    def _by_id(self, ids: Sequence[RowId]) -> dict[RowId, RecordedTrajectory]:
        found: dict[RowId, RecordedTrajectory] = {}
        for index, tables in self._tables.items():
            rows = tables.read(RowRecord, "row_id IN :ids", ids=[*ids])
            found |= {one.row_id: one for one in self._load(index, rows)}
        return found

    # --- one page -----------------------------------------------------------------------------

    def _load(self, index: int, rows: Sequence[RowRecord]) -> Iterator[RecordedTrajectory]:
        """Payload is read one by one: it may be large."""
        if not rows:
            return
        tables = self._tables[index]
        ids = [row.row_id for row in rows]
        group_ids = sorted({row.group_id for row in rows})
        groups = {
            one.group_id: one for one in tables.read(GroupRecord, "group_id IN :ids", ids=group_ids)
        }
        tasks = {one.group_id: msgspec.json.decode(one.task, type=Task) for one in groups.values()}
        uses = self.uses(group_ids)
        gone = self._forgotten(tables, ids)
        columns: defaultdict[RowId, list[ColumnRecord]] = defaultdict(list)
        where = "space = :space AND row_id IN :ids AND failed = '' AND name != 'admitted'"
        for column in tables.read(ColumnRecord, where, space=TRAIN, ids=ids):
            columns[column.row_id].append(column)
        for row in rows:
            facts = _GroupFacts(
                task=tasks.get(row.group_id),
                source=groups[row.group_id].source if row.group_id in groups else "",
                uses=tuple(uses[row.group_id]) if _is_scored(row) else (),
            )
            payload = _GONE if row.row_id in gone else self._payload(index, row)
            yield self._make(index, row, facts, payload, columns[row.row_id])

    def uses(self, group_ids: Sequence[GroupId]) -> defaultdict[GroupId, list[TrainingUse]]:
        """What each policy did with these groups."""
        tables = self._recorded.coordinator
        fates = tables.read(
            FateRecord,
            "consumer IN :policies AND group_id IN :ids",
            policies=[*self._policies],
            ids=[*group_ids],
        )
        steps = self._steps(fates)
        uses: defaultdict[GroupId, list[TrainingUse]] = defaultdict(list)
        for fate in fates:
            uses[fate.group_id].append(
                TrainingUse(
                    policy=fate.consumer,
                    fate=fate.state,
                    reason=fate.reason,
                    rule=fate.rule,
                    batch=fate.seq,
                    step=steps.get((fate.consumer, fate.seq)),
                )
            )
        return uses

    def _steps(self, fates: Sequence[FateRecord]) -> dict[tuple[PolicyName, int], int]:
        """The step that trained each batch; the newest trainer's commit counts."""
        steps: dict[tuple[PolicyName, int], int] = {}
        for policy in {fate.consumer for fate in fates}:
            seqs = sorted({fate.seq for fate in fates if fate.consumer == policy and fate.seq})
            where = "consumer = :policy AND seq IN :seqs AND skipped = '' ORDER BY incarnation"
            commits = self._recorded.coordinator.read(CommitRecord, where, policy=policy, seqs=seqs)
            steps |= {(policy, commit.seq): commit.number for commit in commits}
        return steps

    def _make(
        self,
        index: int,
        row: RowRecord,
        facts: _GroupFacts,
        found: _FoundPayload,
        columns: Sequence[ColumnRecord],
    ) -> RecordedTrajectory:
        payload, state, detail = found
        summary = row.summary
        values = self._values(index, columns) if state is PayloadState.STORED else _numbers(columns)
        reward = summary.reward
        scored = values.get("reward")
        if reward is None and isinstance(scored, float):
            reward = scored
        return RecordedTrajectory(
            row_id=row.row_id,
            group_id=row.group_id,
            slot=row.slot,
            epoch=row.epoch,
            node_id=row.node_id,
            source=facts.source,
            task=facts.task,
            reward=reward,
            outcome=OutcomeKind(summary.outcome),
            versions=tuple(
                f"{policy}@{incarnation}.{number}"
                for policy, versions in summary.versions.items()
                for incarnation, number in versions
            ),
            num_tokens=sum(summary.sampled.values()),
            delivered_at=row.delivered_at,
            uses=facts.uses,
            columns=values,
            state=state,
            detail=detail if payload is None else payload.outcome.detail,
            payload=payload,
            decoder=self.decoder,
        )

    def _payload(self, index: int, row: RowRecord) -> _FoundPayload:
        try:
            _check_length(row.length)
            data = self._read_bytes(index, row)
            _check_length(len(data))  # of a blob, the ledger may name any
            return _without_secrets(decode(data, Trajectory)), PayloadState.STORED, ""
        except (PenstockError, OSError) as error:
            query = "SELECT count(*) FROM freed WHERE group_id = :id"
            if self._tables[index].scalar(query, id=row.group_id):
                return None, PayloadState.FREED, ""
            return None, PayloadState.UNREADABLE, str(error)

    def _forgotten(self, tables: Tables, ids: Sequence[RowId]) -> set[RowId]:
        keys = [gone_key(row_id) for row_id in ids]
        found = tables.rows("SELECT key FROM meta WHERE key IN :keys", keys=keys)
        return {RowId(key.removeprefix(FORGOTTEN_PREFIX)) for (key,) in found}

    def _read_bytes(self, index: int, row: RowRecord) -> bytes:
        try:
            return self._payloads[index].read(row)
        except (StoreError, NotFound):  # compaction may have moved it since the page was read
            found = self._tables[index].read(RowRecord, "row_id = :id", id=row.row_id)
            if not found or location_of(found[0]) == location_of(row):
                raise
            return self._payloads[index].read(found[0])

    def _values(self, index: int, columns: Sequence[ColumnRecord]) -> dict[str, float | bytes]:
        """Together about as long as one may be: the ledger of another user can name the same bytes
        for any number of them."""
        values: dict[str, float | bytes] = _numbers(columns)
        room = MAX_BLOB_BYTES
        for column in columns:
            if column.value is None and column.length and room > 0:
                try:
                    values[column.name] = found = self._payloads[index].read(column)
                except (PenstockError, OSError):
                    continue  # freed, or moved a moment ago
                room -= len(found)
        return values

    # --- counting -----------------------------------------------------------------------------

    def count(self, measure: Callable[[Tables], int]) -> int:
        """The sum over the ledgers of all partitions."""
        return sum(map(measure, self._tables.values()))


def _without_secrets(one: Trajectory) -> Trajectory:
    """What is written for people only: nodes of strangers hide nothing. Tokens stay."""
    is_named = any(turn.agent for turn in one.turns)
    if not (is_named or one.tool_uses or one.outcome.reason or one.outcome.detail):
        return one
    outcome = replace(
        one.outcome, reason=for_people(one.outcome.reason), detail=for_people(one.outcome.detail)
    )
    turns = tuple(
        replace(turn, agent=for_people(turn.agent)) if turn.agent else turn for turn in one.turns
    )
    uses = tuple(
        replace(
            use,
            name=for_people(use.name),
            agent=for_people(use.agent),
            arguments=hide_secrets(use.arguments),
            result=hide_secrets(use.result),
        )
        for use in one.tool_uses
    )
    return replace(one, outcome=outcome, turns=turns, tool_uses=uses)


def _check_length(num_bytes: int) -> None:
    if num_bytes > MAX_ROW_BYTES:
        raise StoreError(
            f"a payload of {num_bytes:,} bytes: no row is so long, the ledger is damaged"
        )


def _is_scored(row: RowRecord) -> bool:
    """Groups are judged and trained without the attempts that failed or were cancelled."""
    return Outcome(kind=OutcomeKind(row.summary.outcome)).has_reward


def _numbers(columns: Sequence[ColumnRecord]) -> dict[str, float | bytes]:
    return {column.name: column.value for column in columns if column.value is not None}
