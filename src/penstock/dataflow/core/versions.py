# SPDX-License-Identifier: Apache-2.0
"""Incarnations, commits and published versions of one policy: which trainer may act, and how old a
token is.

Pure state. An incarnation is one trainer process. Each forks from its predecessor at a checkpoint,
so they form a chain. A version on an abandoned branch counts as the fork below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.dataflow.records import CommitRecord, IncarnationRecord, VersionRecord
from penstock.errors import BadRequest, Conflict, Fenced, UnknownCommit
from penstock.types import PolicyName


class Lineage:
    """One policy's chain of incarnations."""

    def __init__(self, policy: PolicyName) -> None:
        self.policy = policy
        self.incarnation: int = 0
        self.number: int = 0
        """Newest committed number on the surviving lineage."""
        self.seq: int = 0
        """Last committed batch on the surviving lineage."""
        self._forks: dict[int, IncarnationRecord] = {}
        self._shared_until: dict[int, int] = {}
        """By incarnation, the highest number up to which it equals its predecessor bit for bit; at
        least its fork."""
        self._versions: dict[tuple[int, int], VersionRecord] = {}
        self._published: dict[int, int] = {}
        """Newest published number by incarnation."""
        self._path: dict[int, int] = {0: 0}
        """Number after each batch of the surviving lineage: the points where a trainer may fork."""
        self.last_commit: CommitRecord | None = None
        self.last_skip = ""
        """Why the newest skipped batch was skipped; empty if none was."""
        self.repeats_to = 0
        """Newest number that the newest incarnation left behind at its fork; 0 if it went on where
        the one before had ended."""
        self._commits: list[CommitRecord] = []
        """Every commit ever applied, without its stats."""
        self.is_deterministic = False
        """Every incarnation must publish the same versions as the earlier ones, bit for bit."""

    # --- facts --------------------------------------------------------------------------------

    @property
    def newest(self) -> VersionRecord | None:
        """The version nodes should serve: the newest of this incarnation, or of the last one that
        published."""
        if not self._published:
            return None
        incarnation = max(self._published)
        return self._versions[incarnation, self._published[incarnation]]

    @property
    def num_skipped(self) -> int:
        """Batches of the surviving lineage that were not trained: every other one added one."""
        return self.seq - self.number

    @property
    def resumed_at(self) -> int:
        """The number that the newest incarnation started from."""
        fork = self._forks.get(self.incarnation)
        return 0 if fork is None else fork.number

    @property
    def published(self) -> int:
        """Newest number published by the current incarnation; -1 for none."""
        return self._published.get(self.incarnation, -1)

    def versions(self) -> Iterator[VersionRecord]:
        """All published versions, oldest first."""
        yield from (self._versions[key] for key in sorted(self._versions))

    def version(self, incarnation: int, number: int) -> VersionRecord | None:
        return self._versions.get((incarnation, number))

    def has(self, incarnation: int, number: int) -> bool:
        return (incarnation, number) in self._versions

    def effective_number(self, incarnation: int, number: int) -> int:
        """The number this version counts as now: capped at every fork that abandoned it, unless the
        run is deterministic and a later incarnation has reproduced the version."""
        cut = self._cut(incarnation, number)
        if cut == number or not self.is_deterministic:
            return cut
        made = self._versions.get((incarnation, number))
        for later in range(incarnation + 1, self.incarnation + 1):
            again = self._versions.get((later, number))
            if made and again and again.weights_digest == made.weights_digest:
                cut = max(cut, self._cut(later, number))
        return cut

    def _cut(self, incarnation: int, number: int) -> int:
        for later in range(incarnation + 1, self.incarnation + 1):
            number = min(number, self._shared_until[later])
        return number

    def number_after(self, seq: int) -> int | None:
        """Number after this batch on the surviving lineage; None if the lineage has not reached the
        batch or was rewound to before it."""
        return self._path.get(seq)

    def first_version(self, number: int) -> VersionRecord | None:
        """The version first published under this number. In a deterministic run every incarnation
        reproduces it bit for bit, so nodes may hold this one."""
        incarnations = [life for life, known in self._versions if known == number]
        return self._versions[min(incarnations), number] if incarnations else None

    def history(self) -> Iterator[IncarnationRecord | CommitRecord | VersionRecord]:
        """Every fact, in an order in which a replica can apply it."""
        for incarnation, fork in self._forks.items():
            yield fork
            yield from (c for c in self._commits if c.incarnation == incarnation)
        yield from self.versions()

    # --- decisions: each returns the record that applies it, or raises ------------------------

    def incarnate(
        self, *, expected: int, number: int, seq: int, request_id: str, now: float
    ) -> IncarnationRecord:
        repeated = self._forks.get(self.incarnation)
        if repeated is not None and repeated.request_id == request_id:
            return repeated
        if expected != self.incarnation:
            raise Conflict(
                f"{self.policy} is at incarnation {self.incarnation}, not {expected}: "
                "another trainer took over; read the policy's state and decide again"
            )
        if self._path.get(seq) != number:
            raise UnknownCommit(
                f"number {number} after batch {seq} was never committed on the surviving lineage "
                f"(it ends at number {self.number}, batch {self.seq}); "
                "restore a checkpoint of this run"
            )
        return IncarnationRecord(
            policy=self.policy,
            incarnation=expected + 1,
            number=number,
            seq=seq,
            request_id=request_id,
            at=now,
        )

    def commit(
        self, *, seq: int, incarnation: int, number: int, skipped: str, stats: str, now: float
    ) -> CommitRecord:
        self.require(incarnation)
        record = CommitRecord(
            consumer=self.policy,
            seq=seq,
            incarnation=incarnation,
            number=number,
            skipped=skipped,
            stats=stats,
            at=now,
        )
        last = self.last_commit
        if last is not None and (last.seq, last.incarnation) == (seq, incarnation):
            if (last.number, last.skipped) == (number, skipped):
                return last
            raise Conflict(f"batch {seq} is already committed as number {last.number}")
        if seq != self.seq + 1:
            raise Conflict(f"batch {seq} cannot be committed directly after batch {self.seq}")
        due = self.number if skipped else self.number + 1
        if number != due:
            raise BadRequest(
                f"batch {seq} leads to number {due}, not {number}: a trained batch adds one, "
                "a skipped one adds none"
            )
        return record

    def publish(
        self,
        *,
        incarnation: int,
        number: int,
        manifest_digest: str,
        weights_digest: str,
        now: float,
    ) -> VersionRecord:
        self.require(incarnation)
        known = self._versions.get((incarnation, number))
        if known is not None:
            if known.manifest_digest == manifest_digest:
                return known
            raise Conflict(
                f"{self.policy}@{incarnation}.{number} is already published with other content"
            )
        if number > self.number:
            raise Conflict(f"number {number} is not committed yet (committed: {self.number})")
        if number < max(self.published, self._forks[incarnation].number):
            raise Conflict(f"number {number} is older than the fork of this incarnation")
        counterpart = self.first_version(number) if self.is_deterministic else None
        if counterpart is not None and counterpart.weights_digest != weights_digest:
            raise Conflict(
                f"{self.policy}: number {number} differs from the same number in incarnation "
                f"{counterpart.incarnation}, but the run is deterministic: find what differs with "
                "`penstock replay`, or set deterministic: false"
            )
        return VersionRecord(
            policy=self.policy,
            incarnation=incarnation,
            number=number,
            manifest_digest=manifest_digest,
            weights_digest=weights_digest,
            at=now,
        )

    def require(self, incarnation: int) -> None:
        if self.incarnation == 0:
            raise Conflict(f"no trainer of {self.policy} has taken over yet; incarnate first")
        if incarnation != self.incarnation:
            raise Fenced(
                f"incarnation {incarnation} of {self.policy} was replaced by {self.incarnation}; "
                "this trainer must exit"
            )

    # --- changes: the same records, live or restored ------------------------------------------

    def apply_incarnation(self, record: IncarnationRecord) -> None:
        self.repeats_to = self.number if self.number > record.number else 0
        self.incarnation = record.incarnation
        self.number, self.seq = record.number, record.seq
        self._path = {seq: number for seq, number in self._path.items() if seq <= record.seq}
        self._forks[record.incarnation] = record
        self._shared_until[record.incarnation] = record.number
        self.last_commit = None

    def apply_commit(self, record: CommitRecord) -> None:
        if record.incarnation == self.incarnation and record.seq == self.seq + 1:
            self.number, self.seq = record.number, record.seq
            self._path[record.seq] = record.number
            self.last_commit = record
            self.last_skip = record.skipped or self.last_skip
            self._commits.append(replace(record, stats="{}"))

    def apply_version(self, record: VersionRecord) -> None:
        key = (record.incarnation, record.number)
        self._versions[key] = record
        newest = self._published.get(record.incarnation, -1)
        self._published[record.incarnation] = max(newest, record.number)
        counterpart = self._versions.get((record.incarnation - 1, record.number))
        meets = self._shared_until.get(record.incarnation)
        if (
            meets is None
            or counterpart is None
            or counterpart.weights_digest != record.weights_digest
        ):
            return
        if record.number == meets + 1:  # a bit-equal replay moves the fork point up
            self._shared_until[record.incarnation] = record.number
