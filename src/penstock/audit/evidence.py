# SPDX-License-Identifier: Apache-2.0
"""Reads a run folder once: the config, the acknowledgement logs and all ledgers.

Owns the order of reading, which determines how the ledgers of a running run may differ:
acknowledgements, the coordinator, every partition, then again the coordinator's replicated tables.
So everything that the first read of the coordinator depends on is in the partitions, and everything
that partitions replicate is in the second read. Checks nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from penstock.audit.config import REWARD, read_config
from penstock.audit.ledger import CoordinatorTables, PartitionTables, ReplicatedTables, open_ledger
from penstock.audit.payloads import PayloadSummary, SegmentReader
from penstock.audit.records import Column, Instalment, Partition, Row, decode_manifest
from penstock.durable import open_regular
from penstock.errors import StoreError

MAX_LOG_BYTES = 256 << 20
"""Of the acknowledged rows of all nodes."""
MAX_ID_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePartition:
    """The ledger of a partition other than the coordinator's own."""

    index: int
    state: str
    folder: Path
    tables: PartitionTables
    replicated: ReplicatedTables
    """Its replica of the coordinator's facts, and its end of the link."""


class Evidence:
    """Everything read. The coordinator's tables are from one moment, the partitions' from a later
    one."""

    def __init__(self, run_dir: Path) -> None:
        self.config = read_config(run_dir / "config.yaml")
        self.run_dir = run_dir
        self.weights = run_dir / "weights"
        self.acknowledged = frozenset(_read_acknowledged(run_dir / "acks"))
        folder = run_dir / "ledger"
        with open_ledger(folder) as ledger:
            own_tables = PartitionTables(ledger, "partition = 0")
            self.coordinator = ReplicatedTables(ledger)
            self.tables = CoordinatorTables(ledger)
        self.remote = {one.index: one for one in _read_remote(folder, self.tables.partitions)}
        """By index: partitions with a readable ledger, other than the coordinator's own."""
        self.coordinator_after = self.coordinator
        """The coordinator's tables, read after all partitions; same as `coordinator` if there are
        none."""
        if self.remote:
            with open_ledger(folder) as ledger:
                self.coordinator_after = ReplicatedTables(ledger)
        self.missing = {
            p.index: p.state for p in self.tables.partitions if p.index not in self.remote
        }
        """State by index: partitions that were declared lost, or drained and removed."""
        self.manifests = {
            b.name: m for b in self.tables.batches if (m := decode_manifest(b)) is not None
        }
        """By the batch's name; damaged ones are missing."""
        self.instalments = _by_batch(self.tables.instalments)
        """By the batch's name, in their order; none of batches that were sealed at once."""
        self.contents = read_contents(folder, own_tables.rows, self.coordinator_after.freed)
        """Payload summaries by row id, of all partitions like the next five."""
        for one in self.remote.values():
            self.contents |= read_contents(
                one.folder, one.tables.rows, self.coordinator_after.freed
            )
        partitions = [own_tables, *(one.tables for one in self.remote.values())]
        self.groups = {group.group_id: group for work in partitions for group in work.groups}
        self.leases = [lease for work in partitions for lease in work.leases]
        """In order of group, slot and epoch within each partition."""
        self.rows = {row.row_id: row for work in partitions for row in work.rows}
        self.columns = _by_row(column for work in partitions for column in work.columns)
        """By row and name."""
        self.awaiting_columns = {
            (one.group_id, one.policy)
            for work in partitions
            for one in work.completions
            if one.state == "judging"
        }
        """(group, policy): closed, but its rows lack columns that the policy requires."""

    def is_exempt(self, group_id: str) -> bool:
        """Whether its rows need not exist: its partition is lost, or removed after freeing them."""
        state = self.missing.get(partition_of(group_id))
        return state == "lost" or (state is not None and group_id in self.coordinator.freed)

    def reward(self, row: Row) -> float | None:
        """The reward that rules and trainers use: as delivered, or as written by a stage."""
        if row.reward is not None or REWARD not in self.config.required_columns:
            return row.reward
        column = self.columns.get(row.row_id, {}).get(REWARD)
        return None if column is None else column.value


def partition_of(name: str) -> int:
    """The partition in the name of a group or row; -1 if there is none."""
    index = name.partition("-")[0].removeprefix("p")
    return int(index) if index.isdecimal() and len(index) < 10 else -1


def _read_remote(folder: Path, partitions: Iterable[Partition]) -> Iterator[RemotePartition]:
    """Every partition that must have a ledger. Lost partitions are ignored; drained ones may have
    been removed."""
    for partition in partitions:
        path = folder / f"p{partition.index}"
        is_removed = partition.state == "gone" and not (path / "ledger.db").exists()
        if partition.state != "lost" and not is_removed:
            with open_ledger(path) as ledger:
                yield RemotePartition(
                    index=partition.index,
                    state=partition.state,
                    folder=path,
                    tables=PartitionTables(ledger),
                    replicated=ReplicatedTables(ledger),
                )


def _by_batch(records: Iterable[Instalment]) -> dict[str, list[Instalment]]:
    found: defaultdict[str, list[Instalment]] = defaultdict(list)
    for record in records:
        found[record.batch_name].append(record)
    return dict(found)


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
    left = MAX_LOG_BYTES
    for path in sorted(folder.glob("*")):  # one file per node
        with open_regular(path) as lines:
            # A node killed while writing leaves an incomplete last line.
            while (line := lines.readline(MAX_ID_BYTES)).endswith(b"\n"):
                left -= len(line)
                if left < 0:
                    raise StoreError(f"{folder} has more than {MAX_LOG_BYTES:,} bytes")
                if name := line.rstrip(b"\n").decode(errors="replace"):
                    yield name
            if len(line) == MAX_ID_BYTES:
                raise StoreError(f"{path} is damaged: a line is not the id of a row")
