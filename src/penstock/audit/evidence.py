# SPDX-License-Identifier: Apache-2.0
"""Reads a run folder once: the config, the acknowledgement logs and all ledgers.

Owns the order of reading, which determines how the ledgers of a running run may differ:
acknowledgements, the coordinator, every partition, then again the coordinator's replicated tables.
So everything that the first read of the coordinator depends on is in the partitions, and everything
that partitions replicate is in the second read. Checks nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from penstock.audit.config import REWARD, AuditedConfig, read_config
from penstock.audit.ledger import CoordinatorTables, PartitionTables, ReplicatedTables, open_ledger
from penstock.audit.payloads import PayloadSummary, SegmentReader
from penstock.audit.records import (
    Column,
    Fate,
    Group,
    Lease,
    Manifest,
    Row,
    decode_manifest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePartition:
    """The ledger of a partition other than the coordinator's own."""

    index: int
    state: str
    tables: PartitionTables
    replicated: ReplicatedTables
    """Its replica of the coordinator's facts, and its end of the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything read. The coordinator's tables are from one moment, the partitions' from a later
    one."""

    config: AuditedConfig
    acknowledged: frozenset[str]
    issued: dict[str, Group]
    groups: dict[str, Group]
    """Of all partitions, like the next five."""
    leases: list[Lease]
    """In order of group, slot and epoch within each partition."""
    rows: dict[str, Row]
    columns: dict[str, dict[str, Column]]
    """By row and name."""
    awaiting_columns: frozenset[tuple[str, str]]
    """(group, policy): closed, but its rows lack columns that the policy requires."""
    contents: dict[str, PayloadSummary]
    """Payload summaries by row id."""
    fates: list[Fate]
    manifests: dict[str, Manifest]
    """By the batch's name; damaged ones are missing."""
    tables: CoordinatorTables
    coordinator: ReplicatedTables
    remote: dict[int, RemotePartition]
    """By index: partitions with a readable ledger, other than the coordinator's own."""
    coordinator_after: ReplicatedTables
    """The coordinator's tables, read after all partitions; same as `coordinator` if there are
    none."""
    missing: Mapping[int, str]
    """State by index: partitions that were declared lost, or drained and removed."""
    weights: Path

    def is_exempt(self, group_id: str) -> bool:
        """Whether its rows need not exist: its partition is lost, or removed after freeing them."""
        state = self.missing.get(partition_of(group_id))
        return state == "lost" or (state is not None and group_id in self.coordinator.freed)

    def reward(self, row: Row) -> float | None:
        """The reward that rules and trainers use: as delivered, or as written by a stage."""
        if REWARD not in self.config.required_columns:
            return row.reward
        column = self.columns.get(row.row_id, {}).get(REWARD)
        return None if column is None else column.value


def partition_of(name: str) -> int:
    """The partition in the name of a group or row; -1 if there is none."""
    index = name.partition("-")[0].removeprefix("p")
    return int(index) if index.isdecimal() else -1


def read(run_dir: Path) -> Evidence:
    config = read_config(run_dir / "config.yaml")
    acknowledged = frozenset(_read_acknowledged(run_dir / "acks"))
    folder = run_dir / "ledger"
    with open_ledger(folder) as ledger:
        own_tables, coordinator = ledger.work("partition = 0"), ledger.replicated()
        tables = ledger.coordinator_tables()
    folders = _folders(folder, tables)
    remote = {index: _read_remote(index, state, path) for index, (state, path) in folders.items()}
    coordinator_after = coordinator
    if remote:
        with open_ledger(folder) as ledger:
            coordinator_after = ledger.replicated()
    partitions = [
        (folder, own_tables),
        *((folders[index][1], one.tables) for index, one in remote.items()),
    ]
    return Evidence(
        config=config,
        acknowledged=acknowledged,
        issued=coordinator.issued,
        groups={group.group_id: group for _, work in partitions for group in work.groups},
        leases=[lease for _, work in partitions for lease in work.leases],
        rows={row.row_id: row for _, work in partitions for row in work.rows},
        columns=_by_row(column for _, work in partitions for column in work.columns),
        awaiting_columns=frozenset(
            (one.group_id, one.policy)
            for _, work in partitions
            for one in work.completions
            if one.state == "judging"
        ),
        contents={
            row_id: content
            for path, work in partitions
            for row_id, content in read_contents(path, work.rows, coordinator_after.freed).items()
        },
        fates=coordinator.fates,
        manifests={b.name: m for b in tables.batches if (m := decode_manifest(b)) is not None},
        tables=tables,
        coordinator=coordinator,
        remote=remote,
        coordinator_after=coordinator_after,
        missing={p.index: p.state for p in tables.partitions if p.index not in remote},
        weights=run_dir / "weights",
    )


def _folders(folder: Path, tables: CoordinatorTables) -> dict[int, tuple[str, Path]]:
    """State and folder of each partition that must have a ledger. Lost partitions are ignored;
    drained ones may have been removed."""
    found: dict[int, tuple[str, Path]] = {}
    for partition in tables.partitions:
        path = folder / f"p{partition.index}"
        is_removed = partition.state == "gone" and not (path / "ledger.db").exists()
        if partition.state != "lost" and not is_removed:
            found[partition.index] = (partition.state, path)
    return found


def _read_remote(index: int, state: str, folder: Path) -> RemotePartition:
    with open_ledger(folder) as ledger:
        return RemotePartition(
            index=index, state=state, tables=ledger.work(), replicated=ledger.replicated()
        )


def _by_row(columns: Iterable[Column]) -> dict[str, dict[str, Column]]:
    found: defaultdict[str, dict[str, Column]] = defaultdict(dict)
    for column in columns:
        found[column.row_id][column.name] = column
    return dict(found)


def read_contents(folder: Path, rows: Iterable[Row], freed: Set[str]) -> dict[str, PayloadSummary]:
    """Payload summaries of these rows, even if the payload was moved in the meantime."""
    with SegmentReader(folder / "segments") as segments:
        found = {row.row_id: _content(segments, row, freed) for row in rows}
        if not any(content.damage for content in found.values()):
            return found
        # A running service may have moved or deleted payload since its tables were read.
        with open_ledger(folder) as ledger:
            now, freed_by_now = ledger.rows(), ledger.freed()
        for row in now:
            if row.row_id in found and found[row.row_id].damage:
                found[row.row_id] = _content(segments, row, freed_by_now)
    return found


def _content(segments: SegmentReader, row: Row, freed: Set[str]) -> PayloadSummary:
    if row.group_id in freed:
        return PayloadSummary(is_freed=True)
    return segments.content(row.segment, row.offset, row.length, row.digest, row.blob)


def _read_acknowledged(folder: Path) -> Iterable[str]:
    for path in sorted(folder.glob("*")):  # one file per node
        # A node killed while writing leaves an incomplete last line.
        complete, _, _ = path.read_bytes().rpartition(b"\n")
        yield from filter(None, complete.decode(errors="replace").split("\n"))
