# SPDX-License-Identifier: Apache-2.0
"""What must hold of slots, leases, rows, columns and links, record by record as they become
durable, and of every answer that a node got.

Knows what a record may follow, from the promises alone; shares no code with the core.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.sim.disk import Disk

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.core.leasing import DeliveryStatus, Grant
from penstock.dataflow.records import (
    CompletionRecord,
    DecisionRecord,
    GrantRecord,
    GroupRecord,
    LeaseRecord,
    LinkRecord,
    MessageRecord,
    Record,
    RowRecord,
    SourceRecord,
)
from penstock.types import GroupId, NodeId, RowId

GOOD = ("completed", "truncated")
DROPPED = b"\x83\xa4type\xa9DropGroup"
"""How a message that ends a group begins on the wire."""
COLUMN_ORDER = ("judging", "reported", "training", "done")


class InvariantViolated(AssertionError):
    """One of the promises is broken."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise InvariantViolated(text)


class SlotInvariants:
    def __init__(self) -> None:
        self.disks: dict[str, Disk] = {}
        self.bodies: dict[str, dict[int, bytes]] = {}
        """Every message ever sent on a link."""
        self.received: Counter[str] = Counter()
        self.orders: Counter[bytes] = Counter()
        self.lives = 0
        """Of home: each may say once more what it wants."""
        self.running: dict[tuple[GroupId, int], GrantRecord] = {}
        self.leases: set[tuple[GroupId, int, int]] = set()
        """Every one that was granted, durably."""
        self.results: dict[tuple[GroupId, int], RowId] = {}
        self.acked: dict[RowId, str] = {}
        self.fenced: set[RowId] = set()
        self.holders: dict[tuple[GroupId, int, int], NodeId] = {}
        self._watches: dict[type[Record], Any] = {
            GroupRecord: self._group,
            GrantRecord: self._grant,
            LeaseRecord: self._lease,
            RowRecord: self._row,
            MessageRecord: self._message,
            LinkRecord: self._link,
            ColumnRecord: self._column,
            CompletionRecord: self._completion,
            SourceRecord: self._source,
            DecisionRecord: self._decision,
        }

    def watch(self, disk: Disk, record: Record) -> None:
        watch = self._watches.get(type(record))
        if watch is not None:
            watch(disk, record)

    def disk_of(self, group_id: GroupId) -> Disk:
        index = int(group_id[1:].partition("-")[0])
        return self.disks[f"p{index}"]

    # --- groups, leases, rows (G1, G2, G5, G6) ------------------------------------------------

    def _group(self, disk: Disk, new: GroupRecord) -> None:
        old = disk.of(GroupRecord).get((new.group_id,))
        if old is None:
            require(new.state == "open", f"{new.group_id} is born {new.state}")
            places = (self.disks["home"], self.disk_of(new.group_id))
            require(disk in places, f"{new.group_id} at {disk.name}")
            return
        if disk is not self.disk_of(new.group_id) or new.state == "open":
            require(new == old, f"{new.group_id} is issued again as another")
            return
        require(old.state == "open", f"{new.group_id} ends twice: {old.state}, {new.state}")
        require(old.task == new.task and old.issue == new.issue, f"{new.group_id} changed")
        running = [slot for (group, slot) in self.running if group == new.group_id]
        require(not running, f"{new.group_id} ends and slots {running} still run")

    def _grant(self, disk: Disk, new: GrantRecord) -> None:
        group = disk.of(GroupRecord).get((new.group_id,))
        require(group is not None and group.state == "open", f"{new}: it has no open group")
        num_slots = 0 if group is None else group.num_slots
        for index in range(new.slot, new.slot + new.num_slots):
            slot, lease = (new.group_id, index), (new.group_id, index, new.epoch)
            name = f"lease {new.group_id}.{index}.{new.epoch}"
            require(0 <= index < num_slots, f"{name}: its group has no such slot")
            require(lease not in self.leases, f"{name} is granted twice")
            require(slot not in self.running, f"{name}: two leases on one slot")
            require(slot not in self.results, f"{name}: the slot has its result")
            before = (new.group_id, index, new.epoch - 1)
            is_next = new.epoch == 1 or before in disk.of(LeaseRecord)
            require(is_next, f"{name}: an epoch is missing")
            self.running[slot] = new
            self.leases.add(lease)

    def _lease(self, disk: Disk, new: LeaseRecord) -> None:
        slot, lease = (new.group_id, new.slot), (new.group_id, new.slot, new.epoch)
        name = f"lease {new.group_id}.{new.slot}.{new.epoch}"
        require(lease in self.leases, f"{name} ends before it began")
        require(lease not in disk.of(LeaseRecord), f"{name} ends twice")
        require(bool(new.ended), f"{name} has no end")
        grant = self.running.pop(slot)
        require(grant.epoch == new.epoch, f"{name} is not the running one")
        held = (grant.node_id, grant.boot_id, grant.request_id, grant.attempt)
        ended = (new.node_id, new.boot_id, new.request_id, new.attempt)
        require(held == ended, f"{name} ended as another than was granted")
        require(new.ended != "delivered", f"{name}: its row says that")

    def _row(self, disk: Disk, new: RowRecord) -> None:
        require((new.row_id,) not in disk.of(RowRecord), f"row {new.row_id} is written twice")
        require(new.row_id not in self.fenced, f"row {new.row_id} was refused and is stored")
        running = self.running.get((new.group_id, new.slot))
        holds = running is not None and (running.epoch, running.node_id) == (new.epoch, new.node_id)
        require(holds, f"row {new.row_id} of {new.node_id} stands under no running lease")
        if new.summary.outcome in GOOD:
            slot = (new.group_id, new.slot)
            require(slot not in self.results, f"slot {slot} has two results")
            self.results[slot] = new.row_id
            self.running.pop(slot)

    # --- links --------------------------------------------------------------------------------

    def _message(self, disk: Disk, new: MessageRecord) -> None:
        bodies = self.bodies.setdefault(new.link, {})
        require(new.number == len(bodies) + 1, f"{new.link}: {new.number} after {len(bodies)}")
        bodies[new.number] = new.body
        if new.body.startswith(DROPPED):
            self.orders[new.body] += 1
            said = self.orders[new.body]
            require(said <= self.lives, f"{new.link}: the same order {said} times")

    def _link(self, disk: Disk, new: LinkRecord) -> None:
        is_home = disk is self.disks["home"]
        is_out = new.link.startswith("coordinator>") == is_home
        if is_out:
            reached = self.received[new.link]
            require(new.number <= reached, f"{new.link}: {new.number} was never received")
            return
        require(new.number == self.received[new.link] + 1, f"{new.link}: {new.number} out of turn")
        sent = len(self.bodies.get(new.link, {}))
        require(new.number <= sent, f"{new.link}: {new.number} was never durable at its sender")
        self.received[new.link] = new.number

    def takes(self, link: str, number: int, body: bytes) -> None:
        """A message arrives: the one that its sender has on disk."""
        require(
            self.bodies.get(link, {}).get(number) == body,
            f"{link}: message {number} is not the one its sender remembers",
        )

    # --- columns, sources, decisions ----------------------------------------------------------

    def _column(self, disk: Disk, new: ColumnRecord) -> None:
        key = (new.space, new.row_id, new.name)
        require(key not in disk.of(ColumnRecord), f"column {key} is written twice")

    def _completion(self, disk: Disk, new: CompletionRecord) -> None:
        old = disk.of(CompletionRecord).get((new.group_id, new.policy))
        before = -1 if old is None else COLUMN_ORDER.index(old.state)
        step = COLUMN_ORDER.index(new.state)
        require(step == before + 1, f"columns of {new.group_id}: {old and old.state}, {new.state}")

    def _source(self, disk: Disk, new: SourceRecord) -> None:
        old = disk.of(SourceRecord).get((new.name,))
        require(new.next_ordinal == (old.next_ordinal if old else 0) + 1, "a task came twice")

    def _decision(self, disk: Disk, new: DecisionRecord) -> None:
        require(new.verdict != "error", f"a rule raised: {new.detail}")
        require(new.number == len(disk.of(DecisionRecord)) + 1, f"decision {new.number}")

    # --- answers that nodes got ---------------------------------------------------------------

    def granted(self, grant: Grant, node_id: NodeId) -> None:
        lease = (grant.group_id, grant.slot, grant.epoch)
        require(lease in self.leases, f"{lease} is not durable")
        holder = self.holders.setdefault(lease, node_id)
        require(holder == node_id, f"{lease} is held by {holder} and {node_id}")

    def answered(self, row: RowRecord, status: Any, *, is_repeated: bool = False) -> None:
        """What a node was told of its delivery."""
        stored = self.disk_of(row.group_id).of(RowRecord).get((row.row_id,))
        require(status is not DeliveryStatus.CONFLICT, f"{row.row_id} conflicts with itself")
        require(status is not DeliveryStatus.INVALID, f"{row.row_id} is sound and was refused")
        if status in (DeliveryStatus.STORED, DeliveryStatus.DUPLICATE):
            same = stored is not None and stored.summary.digest == row.summary.digest
            require(same, f"{row.row_id} was acknowledged and is not durable")
            self.acked[row.row_id] = row.summary.digest
        elif status is DeliveryStatus.FENCED:
            require(stored is None, f"{row.row_id} was refused and is stored")
            self.fenced.add(row.row_id)
        known = row.row_id in self.acked
        require(not is_repeated or not known or status != "fenced", f"{row.row_id} is forgotten")
