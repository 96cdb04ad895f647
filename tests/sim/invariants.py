# SPDX-License-Identifier: Apache-2.0
"""What must hold of issue, fates, batches, lineages and payload, record by record as they become
durable, and that nothing vanishes between processes.

Knows what a record may follow, from the promises alone; shares no code with the core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from tests.sim.disk import Disk
from tests.sim.plans import MAX_USES, Plan
from tests.sim.slot_invariants import SlotInvariants, require

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.records import (
    BatchRecord,
    CheckpointRecord,
    CommitRecord,
    CompletionRecord,
    FateRecord,
    FreedRecord,
    GroupRecord,
    IncarnationRecord,
    InstalmentRecord,
    MessageRecord,
    PartitionRecord,
    RowRecord,
    SourceRecord,
    VersionRecord,
)
from penstock.types import GroupId, Manifest, PolicyName
from penstock.wire.codec import decode


class PolicyModel:
    """One policy as the durable records tell it, by brute force."""

    def __init__(self) -> None:
        self.forks: list[tuple[int, int]] = [(0, 0)]
        """(number, seq) of each incarnation; 0 is before the first."""
        self.path: dict[int, int] = {0: 0}
        self.weights: dict[tuple[int, int], str] = {}
        self.last_sealed = 0
        self.floor = 0
        """Batches up to here nobody may ask for."""
        self.oldest: int | None = None

    @property
    def seq(self) -> int:
        return max(self.path)

    @property
    def number(self) -> int:
        return self.path[self.seq]

    def effective_number(self, incarnation: int, number: int) -> int:
        """A version, cut at every fork that abandoned it."""
        for life in range(incarnation + 1, len(self.forks)):
            shared = self.forks[life][0]
            while (life, shared + 1) in self.weights and self.weights.get(
                (life - 1, shared + 1)
            ) == self.weights[life, shared + 1]:
                shared += 1
            number = min(number, shared)
        return number

    def let_go(self, retain: int) -> None:
        floor = self.seq - retain if self.oldest is None else self.oldest
        self.floor = max(self.floor, min(floor, self.seq))


class Invariants(SlotInvariants):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.branches = {policy: PolicyModel() for policy in plan.policies}
        self.open_issued: dict[GroupId, None] = {}
        self.admitted: dict[PolicyName, dict[GroupId, None]] = {p: {} for p in plan.policies}
        self.judged: dict[PolicyName, set[GroupId]] = {p: set() for p in plan.policies}
        self.in_batches: dict[PolicyName, dict[GroupId, list[int]]] = {p: {} for p in plan.policies}
        self.served_as: dict[tuple[str, int], bytes] = {}
        self.instalments: dict[tuple[PolicyName, int], list[InstalmentRecord]] = {}
        """Of streamed batches."""
        self.lost: set[str] = set()
        """Partitions that were declared so."""
        self._watches |= {
            FateRecord: self._fate,
            BatchRecord: self._batch,
            InstalmentRecord: self._instalment,
            CommitRecord: self._commit,
            IncarnationRecord: self._incarnation,
            VersionRecord: self._version,
            CheckpointRecord: self._checkpoint,
            FreedRecord: self._freed,
            PartitionRecord: self._partition,
        }

    # --- home: issue, fates, batches (G3, G8) -------------------------------------------------

    def _partition(self, disk: Disk, new: PartitionRecord) -> None:
        old = disk.of(PartitionRecord).get((new.index,))
        may = {
            None: ("serving",),
            "serving": ("draining", "lost"),
            "draining": ("gone", "lost"),
        }.get(None if old is None else old.state, ())
        require(new.state in may, f"p{new.index}: {old and old.state} then {new.state}")
        if new.state == "lost":
            self.lost.add(f"p{new.index}")

    def _group(self, disk: Disk, new: GroupRecord) -> None:
        super()._group(disk, new)
        if disk is self.disks["home"] and (new.group_id,) not in disk.of(GroupRecord):
            self.open_issued[new.group_id] = None

    def _fate(self, disk: Disk, new: FateRecord) -> None:
        old = disk.of(FateRecord).get((new.consumer, new.group_id))
        name = f"fate of {new.group_id} for {new.consumer}"
        require(new.group_id in self.open_issued or old is not None, f"{name}: never issued")
        if old is None:
            self.judged[new.consumer].add(new.group_id)
            if all(new.group_id in judged for judged in self.judged.values()):
                del self.open_issued[new.group_id]
        may = {
            None: ("admitted", "dropped"),
            "admitted": ("admitted", "sealed", "dropped"),
            "sealed": ("sealed",),
            "dropped": (),
        }[old.state if old is not None else None]
        require(new.state in may, f"{name}: {old and old.state} then {new.state}")
        if old is not None and old.state == new.state == "admitted":
            require(not old.is_complete and new.is_complete, f"{name}: admitted twice")
        if old is not None:
            require(new.arrival == old.arrival, f"{name}: it arrived twice")
        uses = len(self.in_batches[new.consumer].get(new.group_id, ()))
        require(new.uses == uses, f"{name}: {new.uses} uses, and it is in {uses} batches")
        admitted = self.admitted[new.consumer]
        admitted.pop(new.group_id, None)
        if new.state == "admitted":
            admitted[new.group_id] = None

    def _batch(self, disk: Disk, new: BatchRecord) -> None:
        policy, branch = new.consumer, self.branches[new.consumer]
        name = f"batch {policy}.{new.seq}"
        require((policy, new.seq) not in disk.of(BatchRecord), f"{name} is sealed twice")
        require(new.seq == branch.last_sealed + 1, f"{name} after {branch.last_sealed}")
        parts = self.instalments.get((policy, new.seq), [])
        require(bool(parts) is self.plan.stream, f"{name} has {len(parts)} instalments")
        trains_from = branch.number + branch.last_sealed - branch.seq
        if parts:  # a fork between two of them may have moved the cursor
            trains_from = parts[0].trains_from
            require(parts[-1].is_last, f"{name} is sealed before its last instalment")
        require(new.trains_from == trains_from, f"{name} trains from {trains_from}")
        branch.last_sealed = new.seq
        manifest = decode(new.manifest, Manifest)
        names = [group.group_id for group in manifest.groups]
        if parts:
            found = [g for part in parts for g in decode(part.manifest, Manifest).groups]
            require(list(manifest.groups) == found, f"{name} is not its instalments")
        require(len(set(names)) == len(names) == new.num_groups, f"{name}: groups repeat")
        uses = self.in_batches[policy]
        num_again = sum(len(uses.get(group_id, ())) > bool(parts) for group_id in names)
        require(num_again == new.num_replayed, f"{name}: {num_again} groups came again")
        require(num_again <= int(self.plan.replay * self.plan.groups_per_batch), f"{name}: replay")
        is_short = len(names) < self.plan.groups_per_batch
        if is_short:
            source = disk.of(SourceRecord).get(("train",))
            over = source is not None and source.next_ordinal == self.plan.limit
            waits = [g for g in self.open_issued if g not in self.judged[policy]]
            require(over and not waits, f"{name} is short and more was to come")
        for group in () if parts else manifest.groups:
            self._sealed_group(disk, name, new, group)

    def _instalment(self, disk: Disk, new: InstalmentRecord) -> None:
        """Judged when it is sealed, and by itself."""
        policy, branch = new.consumer, self.branches[new.consumer]
        before = self.instalments.setdefault((policy, new.seq), [])
        name = f"instalment {new.instalment} of {policy}.{new.seq}"
        require(new.instalment == len(before) + 1, f"{name} after {len(before)}")
        require(new.seq == branch.last_sealed + 1, f"{name} after {branch.last_sealed}")
        trains_from = branch.number + branch.last_sealed - branch.seq
        trains_from = before[0].trains_from if before else trains_from
        require(new.trains_from == trains_from, f"{name} trains from {trains_from}")
        groups = decode(new.manifest, Manifest).groups
        require(bool(groups) or new.is_last, f"{name} is empty")
        for group in groups:
            self._sealed_group(disk, name, new, group)
        before.append(new)

    def _sealed_group(
        self, disk: Disk, name: str, new: BatchRecord | InstalmentRecord, group: Any
    ) -> None:
        policy = new.consumer
        is_lost = group.group_id.partition("-")[0] in self.lost
        require(not is_lost, f"{name}: {group.group_id} is of a lost partition")
        fate = disk.of(FateRecord).get((policy, group.group_id))
        require(fate is not None and fate.state != "dropped", f"{name}: {group.group_id}")
        require(fate is not None and fate.is_complete, f"{name}: columns are missing")
        seqs = self.in_batches[policy].setdefault(group.group_id, [])
        seqs.append(new.seq)
        allowed = MAX_USES if self.plan.replay else 1
        require(len(seqs) <= allowed, f"{group.group_id} is in batches {seqs} of {policy}")
        self._sealed_rows(name, policy, self.branches[policy], new.trains_from, group)

    def _sealed_rows(
        self, name: str, policy: PolicyName, branch: PolicyModel, trains_from: int, group: Any
    ) -> None:
        disk = self.disk_of(group.group_id)
        record = disk.of(GroupRecord).get((group.group_id,))
        require(record is not None and record.state == "closed", f"{name}: {group.group_id} runs")
        freed = (group.group_id,) in disk.of(FreedRecord)
        require(not freed, f"{name}: the payload of {group.group_id} is freed")
        need = self.plan.needs.get(policy)
        for row in group.rows:
            stored = disk.of(RowRecord).get((row.row_id,))
            known = stored is not None and stored.summary.digest == row.digest
            require(known, f"{name}: row {row.row_id} is not durable")
            born = min(branch.effective_number(*version) for version in row.versions[policy])
            age = trains_from - born
            require(
                age <= self.plan.max_staleness,
                f"{name}: row {row.row_id} is {age} versions old",
            )
            require(row.reward is not None, f"{name}: row {row.row_id} has no reward")
            if need is not None:
                for column in need.judge | need.train:
                    found = disk.of(ColumnRecord).get(("train", row.row_id, column))
                    good = found is not None and not found.failed
                    require(good, f"{name}: row {row.row_id} lacks its column {column}")

    # --- trainers (G3, G4, G13) ---------------------------------------------------------------

    def _commit(self, disk: Disk, new: CommitRecord) -> None:
        if disk is not self.disks["home"]:
            return
        branch = self.branches[new.consumer]
        name = f"commit {new.consumer}.{new.seq}"
        require(
            new.incarnation == len(branch.forks) - 1, f"{name} by incarnation {new.incarnation}"
        )
        require(new.seq == branch.seq + 1, f"{name} after {branch.seq}")
        require(new.seq <= branch.last_sealed, f"{name} was never sealed")
        due = branch.number + (not new.skipped)
        require(new.number == due, f"{name} leads to {new.number}, not {due}")
        branch.path[new.seq] = new.number
        branch.let_go(self.plan.retain_batches)

    def _incarnation(self, disk: Disk, new: IncarnationRecord) -> None:
        if disk is not self.disks["home"]:
            return
        branch = self.branches[new.policy]
        name = f"incarnation {new.incarnation} of {new.policy}"
        require(new.incarnation == len(branch.forks), f"{name} is not the next")
        require(branch.path.get(new.seq) == new.number, f"{name} forks off the lineage")
        require(new.seq >= branch.floor, f"{name} forks at {new.seq}, before {branch.floor}")
        branch.forks.append((new.number, new.seq))
        branch.path = {seq: number for seq, number in branch.path.items() if seq <= new.seq}
        branch.let_go(self.plan.retain_batches)

    def _version(self, disk: Disk, new: VersionRecord) -> None:
        if disk is not self.disks["home"]:
            return
        branch = self.branches[new.policy]
        key = (new.incarnation, new.number)
        require(key not in branch.weights, f"version {new.policy}@{key} is published twice")
        require(new.number <= branch.number, f"version {new.policy}@{key} is not committed")
        branch.weights[key] = new.weights_digest

    def _checkpoint(self, disk: Disk, new: CheckpointRecord) -> None:
        branch = self.branches[new.policy]
        retained: list[tuple[int, int]] = msgspec.json.decode(new.retained)
        branch.oldest = min((seq for _, seq in retained), default=None)
        branch.let_go(self.plan.retain_batches)

    # --- payload ------------------------------------------------------------------------------

    def _freed(self, disk: Disk, new: FreedRecord) -> None:
        name = f"payload of {new.group_id}"
        require((new.group_id,) not in disk.of(FreedRecord), f"{name} is freed twice")
        coordinator = self.disks["home"]
        if disk is not coordinator:
            require((new.group_id,) in coordinator.of(FreedRecord), f"{name}: home never said so")
            return
        for policy, branch in self.branches.items():
            fate = coordinator.of(FateRecord).get((policy, new.group_id))
            require(fate is not None, f"{name} is freed before {policy} judged it")
            assert fate is not None
            require(fate.state != "admitted", f"{name} is freed and {policy} may seal it")
            require(not fate.packed_rows, f"{name} is freed and in the replay pool of {policy}")
            last = max(self.in_batches[policy].get(new.group_id, [0]))
            require(last <= branch.floor, f"{name} is freed; batch {policy}.{last} is kept")

    def free(self) -> None:
        """What nobody can ask for any more is freed; read when home has nothing in flight."""
        coordinator = self.disks["home"]
        for group_id in (group_id for (group_id,) in coordinator.of(GroupRecord)):
            if group_id in self.open_issued or (group_id,) in coordinator.of(FreedRecord):
                continue
            holders = [
                policy
                for policy, branch in self.branches.items()
                if self._holds(policy, branch, group_id)
            ]
            require(bool(holders), f"nobody needs {group_id} and its payload is kept for ever")

    def _holds(self, policy: PolicyName, branch: PolicyModel, group_id: GroupId) -> bool:
        fate = self.disks["home"].of(FateRecord)[policy, group_id]
        last = max(self.in_batches[policy].get(group_id, [0]))
        return fate.state == "admitted" or bool(fate.packed_rows) or last > branch.floor

    # --- answers that trainers got ------------------------------------------------------------

    def served(self, policy: PolicyName, record: BatchRecord, plan: Plan) -> None:
        before = self.served_as.setdefault((policy, record.seq), record.manifest)
        require(before == record.manifest, f"batch {policy}.{record.seq} was served differently")
        stored = self.disks["home"].of(BatchRecord).get((policy, record.seq))
        same = stored is not None and stored.manifest == record.manifest
        require(same, f"batch {policy}.{record.seq} was served before it was durable")

    def served_instalment(self, record: InstalmentRecord) -> None:
        key = (record.consumer, record.seq, record.instalment)
        stored = self.disks["home"].of(InstalmentRecord).get(key)
        require(stored == record, f"instalment {key} was served otherwise than it is on disk")

    def committed(self, policy: PolicyName, seq: int, incarnation: int, number: int) -> None:
        found = self.disks["home"].of(CommitRecord).get((policy, seq, incarnation))
        same = found is not None and found.number == number
        require(same, f"commit {policy}.{seq} was acknowledged and is not durable")

    # --- nothing vanishes ---------------------------------------------------------------------

    def undecided(self) -> Iterator[tuple[GroupId, PolicyName]]:
        for group_id in self.open_issued:
            for policy in self.plan.policies:
                if group_id not in self.judged[policy]:
                    yield group_id, policy

    def check_conservation(self) -> None:
        """Every group that somebody has not judged is somewhere: on its way to its partition, open
        there, waiting for columns, or on its way back."""
        coordinator = self.disks["home"]
        for group_id, policy in self.undecided():
            disk = self.disk_of(group_id)
            group = disk.of(GroupRecord).get((group_id,))
            if group is not None and group.state == "open":
                continue
            if disk is coordinator:
                waits = disk.of(CompletionRecord).get((group_id, policy))
                judging = waits is not None and waits.state == "judging"
                require(judging, f"{group_id} ended and {policy} never heard of it")
                continue
            link = f"coordinator>{disk.name}" if group is None else f"{disk.name}>coordinator"
            waits = disk.of(CompletionRecord).get((group_id, policy))
            if group is not None and waits is not None and waits.state == "judging":
                continue
            sender = coordinator if group is None else disk
            on_its_way = any(
                message.number > self.received[link] and group_id.encode() in message.body
                for message in sender.of(MessageRecord).values()
                if message.link == link
            )
            require(on_its_way, f"{group_id} vanished between home and {disk.name} for {policy}")
