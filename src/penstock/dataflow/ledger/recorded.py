# SPDX-License-Identifier: Apache-2.0
"""Read-only access to the ledger of a running or finished run.

Finds the tables of the coordinator and of additional partitions, and single records in them.
Interprets nothing."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.ledger.restore import restore_lineage
from penstock.dataflow.ledger.sqlite import RecordedDatabase
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import (
    BatchRecord,
    CommitRecord,
    FateRecord,
    GrantRecord,
    GroupRecord,
    LeaseEnd,
    LeaseRecord,
    RowRecord,
)
from penstock.errors import StoreError
from penstock.types import GroupId, PolicyName

PARTITION = re.compile(r"p[1-9][0-9]{0,2}")
"""Folder of an additional partition; a run has at most some hundred."""
MAX_PARTITION = 999
MAX_LEASES = 1 << 16
"""Of one group: all attempts at all of its slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The ledgers of one run."""

    coordinator: Tables
    partitions: Mapping[int, Tables] = field(default_factory=dict[int, Tables])
    """Partitions with their own ledger; the others write into the coordinator's."""
    held: ExitStack = field(default_factory=ExitStack)
    """Resources closed together with the run."""

    def at(self, partition: int) -> Tables:
        """Tables with the groups, leases and rows of this partition."""
        return self.partitions.get(partition, self.coordinator)

    def groups(self, where: str = "", **values: Any) -> list[GroupRecord]:
        """These groups, as their partitions know them; as issued, if they have not arrived yet."""
        found = {one.group_id: one for one in self.coordinator.read(GroupRecord, where, **values)}
        for tables in self.partitions.values():
            found |= {one.group_id: one for one in tables.read(GroupRecord, where, **values)}
        return sorted(found.values(), key=lambda group: group.issue)

    def leases(self, group: GroupRecord) -> list[LeaseRecord]:
        """Leases of all its slots: running ones, those with a result, and those that ended without
        one."""
        tables = self.at(group.partition)
        grants = tables.read(GrantRecord, "group_id = :id", id=group.group_id)
        ended = tables.read(LeaseRecord, "group_id = :id", id=group.group_id)
        rows = tables.read(RowRecord, "group_id = :id", id=group.group_id)
        results = {(row.epoch, row.slot): row.delivered_at for row in rows if row.is_result}
        found: dict[tuple[int, int], LeaseRecord] = {}
        number = sum(max(0, grant.num_slots) for grant in grants)
        if number > MAX_LEASES:
            raise StoreError(f"group {group.group_id} of the ledger has {number:,} leases")
        for grant in grants:
            for slot in grant.slots:
                key = (grant.epoch, slot)
                end = LeaseEnd.DELIVERED if key in results else ""
                found[key] = grant.lease(slot, end, results.get(key, 0.0))
        found |= {(lease.epoch, lease.slot): lease for lease in ended}
        return [found[key] for key in sorted(found)]

    def fates(self, group_id: GroupId) -> list[FateRecord]:
        where = "consumer IN :policies AND group_id = :id"
        return self.coordinator.read(FateRecord, where, policies=self._consumers(), id=group_id)

    def _consumers(self) -> list[str]:
        """Those that judged groups, each found by its place in the key: a scan for one group would
        read the fates of all."""
        found: list[str] = []
        query = "SELECT min(consumer) FROM fates WHERE consumer > :last"
        while (
            consumer := self.coordinator.scalar(query, last=found[-1] if found else "")
        ) is not None:
            found.append(consumer)
        return found

    def batch(self, policy: PolicyName, seq: int) -> BatchRecord | None:
        where = "consumer = :policy AND seq = :seq"
        found = self.coordinator.read(BatchRecord, where, policy=policy, seq=seq)
        return found[0] if found else None

    def commits(self, policy: PolicyName, seq: int) -> list[CommitRecord]:
        """Commits of one batch, one for each trainer incarnation that received it."""
        where = "consumer = :policy AND seq = :seq"
        found = self.coordinator.read(CommitRecord, where, policy=policy, seq=seq)
        return sorted(found, key=lambda commit: commit.incarnation)

    def lineage(self, policy: PolicyName, incarnation: int) -> Lineage:
        """The lineage as of this trainer incarnation, without later forks."""
        lineage = Lineage(policy)
        restore_lineage(lineage, self.coordinator)
        lineage.incarnation = incarnation
        return lineage

    def close(self) -> None:
        self.held.close()


def open_recorded_run(ledger_folder: Path) -> RecordedRun:
    """Open the ledger in this folder; does not disturb a service that writes it."""
    with ExitStack() as opened:
        partitions = {
            int(folder.name[1:]): _open_tables(folder / "ledger.db", opened)
            for folder in sorted(ledger_folder.glob("p[0-9]*"))
            if PARTITION.fullmatch(folder.name) and (folder / "ledger.db").is_file()
        }
        coordinator = _open_tables(ledger_folder / "ledger.db", opened)
        return RecordedRun(coordinator=coordinator, partitions=partitions, held=opened.pop_all())


def _open_tables(path: Path, opened: ExitStack) -> Tables:
    if not path.is_file():
        raise StoreError(
            f"there is no ledger at {path}; give the folder of a run that was started, "
            "OUTPUT_DIR/NAME of its config (a run on PostgreSQL answers GET /v1/explain/ID itself)"
        )
    try:
        tables = Tables(RecordedDatabase(path))
    except (StoreError, sqlite3.DatabaseError) as error:
        raise StoreError(
            f"the ledger at {path} cannot be read: {error}; restore it from a backup, or start the "
            "run again if its first start was interrupted"
        ) from error
    opened.callback(tables.close)
    return tables
