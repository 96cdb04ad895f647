# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a run: which version is due, which questions are open, and what they found. A pure
state machine beside the consumers.

Each evaluation is of one version, pinned when it begins; one is in progress at a time. Its groups
are issued like others, but no consumer sees them: they count for no pacing, no staleness, no
failure limit and no batch. Seeds depend on suite, question and slot only, so that a restart changes
no result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from penstock.dataflow.core.ids import evaluation_group, partition_of
from penstock.dataflow.core.messages import GroupEnded, IssueGroup, SendToPartition
from penstock.dataflow.core.partition import encode_pins
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import (
    EvaluatedRecord,
    EvaluationRecord,
    EvaluationState,
    GroupRecord,
    GroupState,
    Journal,
    VersionRecord,
)
from penstock.dataflow.sources import Source
from penstock.types import DropReason, GroupId, PolicyName, RowSummary, Task

MAX_OPEN = 256
"""Questions that are open at a time; the others wait in the suite."""
LAST_VERSION_S = 600.0
"""How long a finished policy may take to publish its last version; then it is not evaluated."""
SOURCE_PREFIX = "eval."


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    policy: PolicyName
    """The one whose versions are evaluated."""
    calls: frozenset[PolicyName]
    """Every policy that the workflow calls."""
    every: int
    """Versions between evaluations."""
    samples: int
    temperature: float
    suites: tuple[tuple[Source, str], ...]
    """Each suite as a source called `eval.NAME`, and its digest."""
    best: str
    """The suite whose score names the best version."""
    workflow: str
    seed: int

    @property
    def digests(self) -> dict[str, str]:
        return {suite_name(source.name): digest for source, digest in self.suites}

    @property
    def num_questions(self) -> int:
        return sum(source.limit or 0 for source, _ in self.suites)

    def task(self, index: int) -> Task:
        """The question at this position, counted over all suites."""
        for source, _ in self.suites:
            limit = source.limit or 0
            if index < limit:
                return source.task(index, seed=self.seed, workflow=self.workflow)
            index -= limit
        raise IndexError(f"the suites have {self.num_questions} questions")


def suite_name(source: str) -> str:
    return source.removeprefix(SOURCE_PREFIX)


class Evaluations:
    def __init__(
        self,
        spec: EvaluationSpec,
        lineages: Mapping[PolicyName, Lineage],
        has_trained: Callable[[], bool],
        journal: Journal,
        send: SendToPartition,
    ) -> None:
        """`has_trained`: will the policy get no more versions?"""
        self.spec = spec
        self.records: dict[tuple[int, int], EvaluationRecord] = {}
        """All ever begun, by incarnation and number."""
        self.current: EvaluationRecord | None = None
        self.open: dict[GroupId, GroupRecord] = {}
        """Issued questions of the current one that have not ended."""
        self.ended: list[EvaluatedRecord] = []
        """Ended questions of the current one."""
        self._lineages = lineages
        self._lineage = lineages[spec.policy]
        self._has_trained = has_trained
        self._journal = journal
        self._send = send
        self._num_issued = 0
        """Questions of the current one."""
        self._due: tuple[object, list[VersionRecord]] = (None, [])
        """The answer of `due`, and what it depends on."""
        self._trained_at: float | None = None
        self._has_given_up = False
        """The last version was not published in time."""

    # --- what is due --------------------------------------------------------------------------

    def due(self) -> list[VersionRecord]:
        """Versions to evaluate, oldest first: the initial one, the first published one after every
        `every` versions, and the last. Those that a rewind abandoned are not."""
        lineage, newest = self._lineage, self._lineage.newest
        moment = (newest, lineage.incarnation, lineage.number, self._has_trained(), {*self.records})
        if self._due[0] != moment:  # asked at every command, so cached
            self._due = (moment, self._find_due())
        return self._due[1]

    def _find_due(self) -> list[VersionRecord]:
        lineage, has_trained = self._lineage, self._has_trained()
        known = {
            number: version
            for version in lineage.versions()
            if (number := version.number)
            == lineage.effective_number(version.incarnation, version.number)
        }
        evaluated = {
            number
            for inc, number in self.records
            if lineage.effective_number(inc, number) == number
        }
        found: list[VersionRecord] = []
        last = -1
        for number in sorted(known):
            is_last = has_trained and number == lineage.number
            if number // self.spec.every > last or is_last:
                last = number // self.spec.every
                found += [known[number]] if number not in evaluated else []
        return found

    @property
    def is_done(self) -> bool:
        """Nothing is in progress, and nothing will be due once the policy is trained."""
        if self.current is not None or self.due():
            return False
        return self._has_given_up or self._lineage.published >= self._lineage.number

    def in_use(self) -> set[tuple[PolicyName, int, int]]:
        """Versions that the weight store must keep: to be evaluated, and the best."""
        found = {(self.spec.policy, one.incarnation, one.number) for one in self.due()}
        if self.current is not None:
            found |= {(policy, *pin) for policy, pin in self.current.pins.items()}
        if (best := self.best) is not None:
            found.add((self.spec.policy, best.incarnation, best.number))
        return found

    @property
    def best(self) -> EvaluationRecord | None:
        """The one with the highest score so far; of equal ones the oldest."""
        return best_of(self.records.values(), self.spec.best)

    @property
    def last(self) -> EvaluationRecord | None:
        """The newest done one."""
        done = [one for one in self.records.values() if one.state == EvaluationState.DONE]
        return max(done, key=lambda one: one.ended_at, default=None)

    # --- progress -----------------------------------------------------------------------------

    def advance(self, serving: Sequence[int], now: float) -> None:
        """Begin the evaluation that is due, if none is in progress, and open its questions, all at
        one of these partitions: each enforces the share of a node by itself."""
        self._watch_last_version(now)
        if self.current is None:
            due = self.due()
            if not due or not self._has_all_policies():
                return
            self._begin(due[0], now)
        assert self.current is not None
        partition = serving[self.current.number % len(serving)] if serving else None
        while len(self.open) < MAX_OPEN and self._num_issued < self.current.num_groups:
            if partition is None:
                return
            self._issue(self.current, partition, now)

    def _watch_last_version(self, now: float) -> None:
        if not self._has_trained():
            self._trained_at, self._has_given_up = None, False
        elif self._trained_at is None:
            self._trained_at = now
        else:
            self._has_given_up = now - self._trained_at >= LAST_VERSION_S

    def _has_all_policies(self) -> bool:
        return all(self._lineages[policy].newest is not None for policy in self.spec.calls)

    def _begin(self, version: VersionRecord, now: float) -> None:
        pins: dict[PolicyName, tuple[int, int]] = {}
        for policy in sorted(self.spec.calls):
            newest = self._lineages[policy].newest
            assert newest is not None, "every policy has a version"
            pins[policy] = (newest.incarnation, newest.number)
        pins[self.spec.policy] = (version.incarnation, version.number)
        self.current = EvaluationRecord(
            policy=self.spec.policy,
            incarnation=version.incarnation,
            number=version.number,
            pins=pins,
            suites=self.spec.digests,
            num_groups=self.spec.num_questions,
            samples=self.spec.samples,
            temperature=self.spec.temperature,
            state=EvaluationState.OPEN,
            scores={},
            started_at=now,
            ended_at=0.0,
        )
        self.records[version.incarnation, version.number] = self.current
        self._num_issued, self.ended = 0, []
        self._journal(self.current)

    def _issue(self, current: EvaluationRecord, partition: int, now: float) -> None:
        task = self.spec.task(self._num_issued)
        record = GroupRecord(
            group_id=evaluation_group(
                partition, current.incarnation, current.number, self._num_issued
            ),
            partition=partition,
            issue=0,
            source=task.source,
            ordinal=task.ordinal,
            task_key=task.key,
            task=msgspec.json.encode(task).decode(),
            num_slots=current.samples,
            due="{}",
            why=encode_pins(current.pins),
            state=GroupState.OPEN,
            reason="",
            issued_at=now,
            ended_at=0.0,
        )
        self._num_issued += 1
        self._journal(record)
        self.open[record.group_id] = record
        self._send(partition, IssueGroup(record=record))

    def group_ended(self, report: GroupEnded, now: float) -> list[GroupId]:
        """Record the answers to a question. Returns the groups whose payload may be deleted: all,
        once the evaluation is done."""
        record, current = self.open.pop(report.group_id, None), self.current
        if record is None or current is None:
            return []
        task = msgspec.json.decode(record.task, type=Task)
        found = EvaluatedRecord(
            group_id=record.group_id,
            policy=current.policy,
            incarnation=current.incarnation,
            number=current.number,
            suite=suite_name(record.source),
            ordinal=record.ordinal,
            question=str(task.payload.get("question", record.ordinal)),
            seed=task.seed,
            num_slots=record.num_slots,
            packed_rows=msgspec.msgpack.encode(report.rows),
            failures=report.failures or _lost(record, report.rows, report.dropped),
            at=now,
        )
        self._journal(found)
        self.ended.append(found)
        return self._close_if_done(current, now)

    def _close_if_done(self, current: EvaluationRecord, now: float) -> list[GroupId]:
        if self.open or self._num_issued < current.num_groups:
            return []
        done = replace(
            current, state=EvaluationState.DONE, scores=_scores(self.ended), ended_at=now
        )
        self._journal(done)
        self.records[current.incarnation, current.number] = done
        self.current = None
        return [one.group_id for one in self.ended]

    def partition_lost(self, index: int, now: float) -> list[GroupId]:
        """The partition is lost, and with it the answers to its open questions."""
        freed: list[GroupId] = []
        for group_id in [one for one in self.open if partition_of(one) == index]:
            lost = GroupEnded(
                group_id=group_id, policies=(), rows=(), dropped=DropReason.PARTITION_LOST
            )
            freed += self.group_ended(lost, now)
        return freed

    def is_empty(self, index: int) -> bool:
        """Has this partition no open question?"""
        return not any(partition_of(group_id) == index for group_id in self.open)

    # --- restart ------------------------------------------------------------------------------

    def restore(
        self,
        records: Iterable[EvaluationRecord],
        issued: Callable[[EvaluationRecord], Iterable[GroupRecord]],
        ended: Callable[[EvaluationRecord], Iterable[EvaluatedRecord]],
    ) -> None:
        """`issued`, `ended`: the questions of an evaluation in progress."""
        for record in records:
            if record.policy != self.spec.policy:
                continue
            if record.state == EvaluationState.OPEN and record.suites != self.spec.digests:
                record = replace(record, state=EvaluationState.ABANDONED)
                self._journal(record)
            self.records[record.incarnation, record.number] = record
            if record.state == EvaluationState.OPEN:
                self._restore_current(record, issued(record), ended(record))

    def _restore_current(
        self,
        record: EvaluationRecord,
        issued: Iterable[GroupRecord],
        ended: Iterable[EvaluatedRecord],
    ) -> None:
        self.current, self.ended = record, [*ended]
        groups = {group.group_id: group for group in issued}
        self._num_issued = len(groups)
        over = {one.group_id for one in self.ended}
        self.open = {group_id: group for group_id, group in groups.items() if group_id not in over}


def best_of(records: Iterable[EvaluationRecord], suite: str) -> EvaluationRecord | None:
    """The one with the highest score, of equal ones the oldest; None if none is done."""
    done = [one for one in records if suite in one.scores]
    by_number = sorted(done, key=lambda one: (one.number, one.incarnation))
    return max(by_number, key=lambda one: one.scores[suite], default=None)


def in_use_by_evaluations(
    records: Sequence[EvaluationRecord],
) -> set[tuple[PolicyName, int, int]]:
    """Versions that a run without a running service must keep: of an evaluation that would go on,
    and the best by each suite."""
    found: set[tuple[PolicyName, int, int]] = set()
    for record in records:
        if record.state == EvaluationState.OPEN:
            found |= {(policy, *pin) for policy, pin in record.pins.items()}
    for policy in {record.policy for record in records}:
        own = [record for record in records if record.policy == policy]
        for suite in {suite for record in own for suite in record.scores}:
            if (best := best_of(own, suite)) is not None:
                found.add((policy, best.incarnation, best.number))
    return found


def _lost(
    record: GroupRecord, rows: Sequence[RowSummary], dropped: DropReason | None
) -> dict[str, str]:
    """Why slots without an answer have none, where the partition has not said."""
    answered = {int(row.row_id.split(".")[1]) for row in rows}
    why = str(dropped or "failed")
    return {str(slot): why for slot in range(record.num_slots) if slot not in answered}


def _scores(ended: Iterable[EvaluatedRecord]) -> dict[str, float]:
    """Mean score by suite; an attempt that failed counts as 0."""
    total: dict[str, tuple[float, int]] = {}
    for one in ended:
        score, num = total.get(one.suite, (0.0, 0))
        total[one.suite] = (score + sum(row.reward or 0.0 for row in one.rows), num + one.num_slots)
    return {suite: score / num for suite, (score, num) in sorted(total.items())}
