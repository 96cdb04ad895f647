# SPDX-License-Identifier: Apache-2.0
"""One ledger database, read as of one moment.

Opens it without writing a byte. Checks no invariants.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.audit.records import (
    SCORED,
    Batch,
    Checkpoints,
    Column,
    Commit,
    Completion,
    EvaluatedGroup,
    EvaluationRow,
    Fate,
    Fork,
    Freed,
    Grant,
    Group,
    Instalment,
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
from penstock.foreign_ledger import ForeignLedger, open_foreign

FORMAT = "4"
"""The ledger format this auditor reads."""
RecordT = TypeVar("RecordT", bound=TableRecord)


class LedgerReader:
    """An open ledger; all reads see the same moment."""

    def __init__(self, connection: ForeignLedger) -> None:
        self._connection = connection

    def leases(self, rows: Iterable[Row]) -> list[Lease]:
        """Leases that ended without a result, and one for every other slot of a grant: delivered if
        there is a scored row of it, else running. A slot granted twice under one epoch appears
        twice."""
        found = self.table(Lease, "leases", "group_id")
        ended = {(lease.group_id, lease.slot, lease.epoch) for lease in found}
        scored = {(row.group_id, row.slot, row.epoch) for row in rows if row.outcome in SCORED}
        grants = self.table(Grant, "grants", "group_id")
        self._connection.require_few(sum(max(0, one.num_slots) for one in grants), "slots")
        for grant in grants:
            for slot in range(grant.slot, grant.slot + grant.num_slots):
                lease = (grant.group_id, slot, grant.epoch)
                if lease in ended:
                    ended.remove(lease)
                else:
                    end = "delivered" if lease in scored else ""
                    found.append(Lease(*lease, grant.attempt, grant.node_id, ended=end))
        return sorted(found, key=lambda lease: (lease.group_id, lease.slot, lease.epoch))

    def groups(self, where: str = "1") -> list[Group]:
        found = self.table(Group, "groups", "issue", where)
        self._connection.require_few(sum(max(0, one.num_slots) for one in found), "slots")
        return found

    def rows(self) -> list[Row]:
        return self.table(Row, "rows", 'segment, "offset"')

    def freed(self) -> frozenset[str]:
        return frozenset(one.group_id for one in self.table(Freed, "freed", "group_id"))

    def meta(self, key: str) -> str:
        """A single value; empty if there is none."""
        found = self._connection.rows("SELECT value FROM meta WHERE key = ?", (key,))
        return str(found[0][0]) if found else ""

    def table(self, kind: type[RecordT], name: str, order: str, where: str = "1") -> list[RecordT]:
        columns = ", ".join(f'"{field}"' for field in kind.__struct_fields__)
        try:
            query = f"SELECT {columns} FROM {name} WHERE {where} ORDER BY {order}"
            return msgspec.convert(self._connection.rows(query), list[kind])
        except (StoreError, msgspec.ValidationError) as error:
            raise StoreError(f"table {name} of the ledger is damaged: {error}") from error


class PartitionTables:
    """A partition's own work; the coordinator's ledger holds this for partition 0."""

    def __init__(self, ledger: LedgerReader, groups: str = "1") -> None:
        """groups: an SQL condition, since the coordinator's ledger has the groups of others too."""
        self.groups = ledger.groups(groups)
        self.rows = ledger.rows()
        self.leases = ledger.leases(self.rows)
        self.columns = ledger.table(Column, "columns", "row_id, name", "space = 'train'")
        self.completions = ledger.table(Completion, "completions", "group_id, policy")


class ReplicatedTables:
    """The coordinator's decisions that partitions replicate, and the messages that carry them.
    Append-only, except for messages that were received."""

    def __init__(self, ledger: LedgerReader) -> None:
        self.issued = {one.group_id: one for one in ledger.groups()}
        """By group, in order of issue. The coordinator's ledger has all groups, a partition's only
        its own; a group's state is only known in the ledger of its partition."""
        self.fates = ledger.table(Fate, "fates", "consumer, group_id")
        self.freed = ledger.freed()
        self.commits = ledger.table(Commit, "commits", "consumer, incarnation, seq")
        self.forks = ledger.table(Fork, "incarnations", "policy, incarnation")
        self.versions = ledger.table(Version, "versions", "policy, incarnation, number")
        self.progress = {one.link: one.number for one in ledger.table(Progress, "links", "link")}
        """By direction of a link: acknowledged at the sender, received at the other end."""
        self.messages = ledger.table(Message, "messages", "link, number")
        """Kept for the other side."""

    def sent(self, link: str) -> int:
        """The newest message in this direction, according to the sender's own ledger."""
        kept = [message.number for message in self.messages if message.link == link]
        return max([self.progress.get(link, 0), *kept])


class CoordinatorTables:
    """Tables that only the coordinator keeps."""

    def __init__(self, ledger: LedgerReader) -> None:
        self.batches = ledger.table(Batch, "batches", "consumer, seq")
        self.instalments = ledger.table(Instalment, "instalments", "consumer, seq, instalment")
        self.evaluations = ledger.table(EvaluationRow, "evaluations", "policy, incarnation, number")
        self.evaluated = ledger.table(EvaluatedGroup, "evaluated", "group_id")
        self.sources = ledger.table(Source, "sources", "name")
        self.checkpoints = ledger.table(Checkpoints, "checkpoints", "policy")
        self.partitions = ledger.table(Partition, "partitions", '"index"')
        self.admin_log = ledger.meta("admin_log")
        """Number and hash of a line in the log of operators; empty for none."""


@contextmanager
def open_ledger(folder: Path) -> Generator[LedgerReader]:
    """The ledger in this folder, as of now."""
    path = folder / "ledger.db"
    if not path.is_file():
        raise StoreError(
            f"there is no ledger at {path}; give the folder of a run that was started, "
            "OUTPUT_DIR/NAME of its config, with the folders of all its partitions"
        )
    connection = open_foreign(path)
    try:
        connection.execute("BEGIN")
        _check_format(connection)
        _check_pages(connection)
        yield LedgerReader(connection)
    finally:
        connection.close()


def _check_format(connection: ForeignLedger) -> None:
    try:
        found = connection.rows("SELECT value FROM meta WHERE key = 'format'")
    except StoreError as error:
        raise StoreError(f"the ledger cannot be read: {error}; is this a run folder?") from error
    if found != [(FORMAT,)]:
        raise StoreError(
            f"this ledger has format {found and found[0][0]}, this auditor reads {FORMAT}; "
            "audit it with the penstock that wrote it"
        )


def _check_pages(connection: ForeignLedger) -> None:
    """Detect page damage: a record lost with its page would look as if it had never existed."""
    [(found,)] = connection.rows("PRAGMA quick_check(1)")
    if found != "ok":
        raise StoreError(f"the ledger's database is damaged: {found}")
