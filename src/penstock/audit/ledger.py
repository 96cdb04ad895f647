# SPDX-License-Identifier: Apache-2.0
"""One ledger database, read as of one moment.

Opens it without writing a byte. Checks no invariants.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.audit.records import (
    Batch,
    Checkpoints,
    Column,
    Commit,
    Completion,
    Fate,
    Fork,
    Freed,
    Grant,
    Group,
    Lease,
    Message,
    Partition,
    Progress,
    Row,
    Source,
    TableRecord,
    Version,
)
from penstock.errors import StoreError

FORMAT = "1"
"""The ledger format this auditor reads."""
RecordT = TypeVar("RecordT", bound=TableRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTables:
    """A partition's own work; the coordinator's ledger holds this for partition 0."""

    groups: list[Group]
    leases: list[Lease]
    """In order of group, slot and epoch."""
    rows: list[Row]
    """In order of location."""
    columns: list[Column]
    """Columns of rollout rows."""
    completions: list[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedTables:
    """The coordinator's decisions that partitions replicate, and the messages that carry them.
    Append-only, except for messages that were received."""

    issued: dict[str, Group]
    """By group, in order of issue. The coordinator's ledger has all groups, a partition's only its
    own; a group's state is only known in the ledger of its partition."""
    fates: list[Fate]
    freed: frozenset[str]
    commits: list[Commit]
    """In order of consumer, incarnation and seq."""
    forks: list[Fork]
    versions: list[Version]
    progress: dict[str, int]
    """By direction of a link: acknowledged at the sender, received at the other end."""
    messages: list[Message]
    """Kept for the other side, in order of link and number."""

    def sent(self, link: str) -> int:
        """The newest message in this direction, according to the sender's own ledger."""
        kept = [message.number for message in self.messages if message.link == link]
        return max([self.progress.get(link, 0), *kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorTables:
    """Tables that only the coordinator keeps."""

    batches: list[Batch]
    """In order of consumer and seq."""
    sources: list[Source]
    checkpoints: list[Checkpoints]
    partitions: list[Partition]


class LedgerReader:
    """An open ledger; all reads see the same moment."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def work(self, groups: str = "1") -> PartitionTables:
        """groups: an SQL condition, since the coordinator's ledger has the groups of others too."""
        return PartitionTables(
            groups=self._table(Group, "groups", "issue", groups),
            leases=self._leases(),
            rows=self.rows(),
            columns=self._table(Column, "columns", "row_id, name", "space = 'train'"),
            completions=self._table(Completion, "completions", "group_id, policy"),
        )

    def _leases(self) -> list[Lease]:
        """Ended leases, and a running lease for every other slot of a grant. A slot granted twice
        under one epoch appears twice."""
        found = self._table(Lease, "leases", "group_id")
        ended = {(lease.group_id, lease.slot, lease.epoch) for lease in found}
        for grant in self._table(Grant, "grants", "group_id"):
            for slot in range(grant.slot, grant.slot + grant.num_slots):
                lease = (grant.group_id, slot, grant.epoch)
                if lease in ended:
                    ended.remove(lease)
                else:
                    found.append(Lease(*lease, grant.attempt, grant.node_id, ended=""))
        return sorted(found, key=lambda lease: (lease.group_id, lease.slot, lease.epoch))

    def rows(self) -> list[Row]:
        return self._table(Row, "rows", 'segment, "offset"')

    def freed(self) -> frozenset[str]:
        return frozenset(one.group_id for one in self._table(Freed, "freed", "group_id"))

    def replicated(self) -> ReplicatedTables:
        return ReplicatedTables(
            issued={one.group_id: one for one in self._table(Group, "groups", "issue")},
            fates=self._table(Fate, "fates", "consumer, group_id"),
            freed=self.freed(),
            commits=self._table(Commit, "commits", "consumer, incarnation, seq"),
            forks=self._table(Fork, "incarnations", "policy, incarnation"),
            versions=self._table(Version, "versions", "policy, incarnation, number"),
            progress={one.link: one.number for one in self._table(Progress, "links", "link")},
            messages=self._table(Message, "messages", "link, number"),
        )

    def coordinator_tables(self) -> CoordinatorTables:
        return CoordinatorTables(
            batches=self._table(Batch, "batches", "consumer, seq"),
            sources=self._table(Source, "sources", "name"),
            checkpoints=self._table(Checkpoints, "checkpoints", "policy"),
            partitions=self._table(Partition, "partitions", '"index"'),
        )

    def _table(self, kind: type[RecordT], name: str, order: str, where: str = "1") -> list[RecordT]:
        columns = ", ".join(f'"{field}"' for field in kind.__struct_fields__)
        try:
            query = f"SELECT {columns} FROM {name} WHERE {where} ORDER BY {order}"
            return msgspec.convert(self._connection.execute(query).fetchall(), list[kind])
        except (sqlite3.DatabaseError, msgspec.ValidationError) as error:
            raise StoreError(f"table {name} of the ledger is damaged: {error}") from error


@contextmanager
def open_ledger(folder: Path) -> Generator[LedgerReader]:
    """The ledger in this folder, as of now."""
    path = folder / "ledger.db"
    if not path.is_file():
        raise StoreError(
            f"there is no ledger at {path}; give the folder of a run that was started, "
            "OUTPUT_DIR/NAME of its config, with the folders of all its partitions"
        )
    # Without a write-ahead log no process has the ledger open; reading it must not create one.
    is_open = path.with_name(path.name + "-wal").exists()
    mode = "mode=ro" if is_open else "mode=ro&immutable=1"
    uri = f"{path.absolute().as_uri()}?{mode}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    try:
        connection.execute("BEGIN")
        _check_format(connection)
        _check_pages(connection)
        yield LedgerReader(connection)
    finally:
        connection.close()


def _check_format(connection: sqlite3.Connection) -> None:
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"the ledger cannot be read: {error}; is this a run folder?") from error
    if found is None or found[0] != FORMAT:
        raise StoreError(
            f"this ledger has format {found and found[0]}, this auditor reads {FORMAT}; "
            "audit it with the penstock that wrote it"
        )


def _check_pages(connection: sqlite3.Connection) -> None:
    """Detect page damage: a record lost with its page would look as if it had never existed."""
    [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StoreError(f"the ledger's database is damaged: {found}")
