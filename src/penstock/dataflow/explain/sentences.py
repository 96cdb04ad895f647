# SPDX-License-Identifier: Apache-2.0
"""The sentences of `penstock explain`, one per ledger record.

Owns the wording and the figures shown. Reads no tables and decides nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.dataflow.core.evaluations import suite_name
from penstock.dataflow.core.ids import is_evaluation
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import (
    BatchRecord,
    CommitRecord,
    DeadSlotRecord,
    DecisionRecord,
    FateRecord,
    FateState,
    FreedRecord,
    GroupRecord,
    GroupState,
    IncarnationRecord,
    LeaseEnd,
    LeaseRecord,
    RowRecord,
    RuleStateRecord,
    VersionRecord,
)
from penstock.types import DropReason, Manifest, RowId, SealedGroup

MAX_NAMED = 8
"""Maximum number of groups listed by id; the rest are counted."""

_DROP_REASON_TEXT: Mapping[str, str] = {
    DropReason.STALE: "its oldest token exceeds max_staleness for every remaining batch",
    DropReason.FAILED_SLOTS: "too few members had a result after all attempts",
    DropReason.ABSENT: "the group has no trainable turn of this policy",
    DropReason.UNIFORM_REWARD: "all members earned the same reward, so no advantage exists",
    DropReason.OUTPACED: "the policy already has as many groups as its staleness bound allows",
    DropReason.REMAINDER: "the run ended before a batch could use it",
    DropReason.COLUMN_FAILED: "a required column failed or missed its deadline",
    DropReason.OVERLONG: "too many answers were truncated at the length limit",
    DropReason.OUTCOME: "a rule rejects the outcomes of its rows",
    DropReason.PARTNER_LAG: "another policy in it has moved on by more than max_partner_lag",
    DropReason.REWARD_RANGE: "its mean reward is outside the accepted range",
    DropReason.DUPLICATE: "the same task was admitted recently",
    DropReason.RULE: "a custom rule rejected it",
    DropReason.OVERDUE: "it waited or ran longer than schedule_to_close_s",
    DropReason.PARTITION_LOST: "its partition was declared lost",
    DropReason.FORGOTTEN: "it was deleted on request",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainStep:
    """One event or fact."""

    at: float
    """Unix time; 0 if it has none."""
    what: str
    """`issued`, `skipped`, `leased`, `given up`, `closed`, `dropped`, `admitted`, `sealed`,
    `trained`, `published`, `freed`, `rule failed` or `remembered`."""
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


# --- before a group runs ----------------------------------------------------------------------


def issued(record: GroupRecord, skipped: Sequence[DecisionRecord]) -> ExplainStep:
    why = json.loads(record.why or "{}")
    if is_evaluation(record.group_id):
        pins = ", ".join(f"{p}@{inc}.{number}" for p, (inc, number) in why["pins"].items())
        text = f"asked as group {record.group_id}: question {record.ordinal} of suite "
        text += f"{suite_name(record.source)}, to be answered by {pins}"
        return ExplainStep(at=record.issued_at, what="issued", text=text, facts=why)
    text = (
        f"issued as group {record.group_id}: task {record.task_key}, number {record.ordinal} of "
        f"source {record.source}, chosen by mix rule {why.get('mix', '?')}"
    )
    if why.get("skipped"):
        rules = sorted({one.rule for one in skipped})
        by = f" by {', '.join(rules)}" if rules else ""
        text += f"; {_plural(why['skipped'], 'task')} just before it skipped{by}"
    if why.get("forced_over"):
        text += (
            f"; rule {why['forced_over']} would skip it too, but the limit of consecutive skips "
            "was reached"
        )
    due: dict[str, int] = json.loads(record.due)
    if due:
        text += "; expected to train " + ", ".join(f"{p} from version {n}" for p, n in due.items())
    return ExplainStep(at=record.issued_at, what="issued", text=text, facts={**why, "due": due})


def decision(record: DecisionRecord) -> ExplainStep:
    detail = json.loads(record.detail or "{}")
    if record.verdict == "error":
        text = (
            f"{record.hook} rule {record.rule} failed on {record.subject}: "
            f"{detail.get('error', '?')}; the default behaviour was used instead"
        )
        return ExplainStep(at=record.at, what="rule failed", text=text, facts=detail)
    text = f"{record.verdict} by {record.hook} rule {record.rule}"
    if "ordinal" in detail:
        text += f" as number {detail['ordinal']} of source {detail.get('source', '?')}"
    if detail.get("draws"):
        text += f"; it drew {', '.join(f'{draw:.4f}' for draw in detail['draws'])}"
    return ExplainStep(at=record.at, what=record.verdict, text=text, facts=detail)


def rule_state(record: RuleStateRecord) -> ExplainStep:
    text = f"current state of rule {record.rule} for {record.key!r}: {record.value}"
    return ExplainStep(
        at=0.0, what="remembered", text=text, facts={"value": json.loads(record.value)}
    )


# --- slots ------------------------------------------------------------------------------------


def lease(record: LeaseRecord, row: RowRecord | None) -> ExplainStep:
    text = f"slot {record.slot}, attempt {record.attempt}: leased to {record.node_id}, "
    if not record.ended:
        text += "still running"
    else:
        text += f"{record.ended} after {record.ended_at - record.granted_at:.1f} s"
    if detail := record.detail.strip(": "):
        text += f" ({detail})"
    facts: dict[str, Any] = {"slot": record.slot, "node": record.node_id, "ended": record.ended}
    if row is not None and record.ended == LeaseEnd.DELIVERED:
        text += f"; {_result(row)}"
        facts |= {"row": row.row_id, "reward": row.summary.reward, "outcome": row.summary.outcome}
    return ExplainStep(at=record.granted_at, what="leased", text=text, facts=facts)


def _result(row: RowRecord) -> str:
    summary = row.summary
    tokens = ", ".join(
        f"{_plural(num, 'token')} of "
        + " and ".join(f"{policy}@{i}.{n}" for i, n in summary.versions.get(policy, ()))
        for policy, num in summary.sampled.items()
    )
    reward = "no reward yet" if summary.reward is None else f"reward {summary.reward:g}"
    return f"row {row.row_id} {summary.outcome}, {reward}, {tokens or 'no trainable tokens'}"


def dead_slot(record: DeadSlotRecord) -> ExplainStep:
    reasons: list[str] = json.loads(record.reasons)
    text = f"slot {record.slot} failed for good: {'; '.join(reasons) or 'no reason recorded'}"
    return ExplainStep(at=record.at, what="given up", text=text, facts={"reasons": reasons})


def group_end(group: GroupRecord, num_good: int) -> ExplainStep:
    members = f"{num_good} of {group.num_slots} members have a result"
    if group.state == GroupState.CLOSED:
        return ExplainStep(at=group.ended_at, what="closed", text=f"group closed: {members}")
    text = f"group dropped by its partition, {members}: {_reason(group.reason)}"
    return ExplainStep(at=group.ended_at, what="dropped", text=text, facts={"reason": group.reason})


def freed(record: FreedRecord) -> ExplainStep:
    text = "no longer needed by any policy; its payload may be deleted"
    return ExplainStep(at=record.at, what="freed", text=text)


# --- verdicts ---------------------------------------------------------------------------------


def fate(record: FateRecord, rows: Sequence[RowRecord]) -> ExplainStep:
    facts = {"policy": record.consumer, "rule": record.rule, "reason": record.reason}
    if record.state == FateState.ADMITTED:
        waits = "" if record.is_complete else " and columns that stages still have to write"
        text = (
            f"{record.consumer} admitted {record.group_id} (rule {record.rule}); "
            f"waiting for a batch{waits}"
        )
        return ExplainStep(at=record.at, what="admitted", text=text, facts=facts)
    text = (
        f"{record.consumer} dropped {record.group_id} by rule {record.rule}: "
        f"{_reason(record.reason)}"
    )
    rewards = [row.summary.reward for row in rows if row.summary.reward is not None]
    if rewards:
        text += f"; rewards {', '.join(f'{reward:g}' for reward in rewards)}"
    if record.tokens:
        text += f"; {_plural(record.tokens, 'token')} wasted"
    facts |= {"tokens": record.tokens, "rewards": rewards}
    return ExplainStep(at=record.at, what="dropped", text=text, facts=facts)


def sealed_group(
    fate: FateRecord, batch: BatchRecord, manifest: Manifest, lineage: Lineage, row: RowId | None
) -> ExplainStep:
    """How this group, or one row of it, went into one of its batches."""
    place, group = next(
        (n, g) for n, g in enumerate(manifest.groups, 1) if g.group_id == fate.group_id
    )
    num_fresh = batch.num_groups - batch.num_replayed
    by = f"rule {fate.rule}" if place <= num_fresh and fate.uses <= 1 else "the replay rule"
    if place <= num_fresh and fate.uses > 1:
        by = "the select rule"
    name = f"{fate.consumer}.{batch.seq}"
    text = (
        f"{fate.group_id} sealed into batch {name} by {by}, as group {place} of {batch.num_groups}"
    )
    facts: dict[str, Any] = {"batch": name, "uses": fate.uses}
    if row is not None and all(member.row_id != row for member in group.rows):
        text += f", without this row: it has no trainable tokens of {fate.consumer}"
        return ExplainStep(at=batch.sealed_at, what="sealed", text=text, facts=facts)
    oldest = _oldest(group, lineage, row, batch)
    text += (
        f"; the batch trains from version {batch.trains_from}, its oldest token is from version "
        f"{oldest}: staleness {batch.trains_from - oldest}"
    )
    if fate.uses > 1:
        text += f" (used in {fate.uses} batches in total)"
    facts |= {"staleness": batch.trains_from - oldest}
    return ExplainStep(at=batch.sealed_at, what="sealed", text=text, facts=facts)


def _oldest(group: SealedGroup, lineage: Lineage, row_id: RowId | None, batch: BatchRecord) -> int:
    """Tokens that only other policies sampled do not count."""
    numbers = (
        lineage.effective_number(*version)
        for row in group.rows
        if row_id is None or row.row_id == row_id
        for version in row.versions.get(lineage.policy, ())
    )
    return min(numbers, default=batch.trains_from)


def commit(record: CommitRecord) -> ExplainStep:
    name = f"{record.consumer}.{record.seq}"
    if record.skipped:
        text = f"batch {name} skipped by incarnation {record.incarnation}: {record.skipped}"
        return ExplainStep(
            at=record.at, what="trained", text=text, facts={"skipped": record.skipped}
        )
    version = f"{record.consumer}@{record.incarnation}.{record.number}"
    text = f"batch {name} trained, producing version {version}"
    return ExplainStep(at=record.at, what="trained", text=text, facts={"version": version})


def published(record: VersionRecord) -> ExplainStep:
    name = f"{record.policy}@{record.incarnation}.{record.number}"
    text = f"version {name} published, weights {record.weights_digest[:12]}"
    return ExplainStep(at=record.at, what="published", text=text, facts={"version": name})


# --- batches and versions ---------------------------------------------------------------------


def sealed_batch(
    batch: BatchRecord,
    manifest: Manifest,
    select_rule: str,
    lineage: Lineage,
    passed_over: Sequence[FateRecord],
) -> ExplainStep:
    num_fresh = len(manifest.groups) - batch.num_replayed
    fresh, again = manifest.groups[:num_fresh], manifest.groups[num_fresh:]
    text = f"sealed to train from version {batch.trains_from}: {select_rule} took {_listed(fresh)}"
    if again:
        text += f"; the replay rule added {_listed(again)}, already trained before"
    if passed_over:
        ends = ", ".join(_left_over(one) for one in passed_over[:MAX_NAMED])
        text += f"; {_plural(len(passed_over), 'older group')} not selected: {ends}"
        text += ", …" if len(passed_over) > MAX_NAMED else ""
    groups = [
        {
            "group": group.group_id,
            "task": group.task_key,
            "staleness": batch.trains_from - _oldest(group, lineage, None, batch),
            "rewards": [row.reward for row in group.rows],
            "served_before": group in again,
        }
        for group in manifest.groups
    ]
    return ExplainStep(at=batch.sealed_at, what="sealed", text=text, facts={"groups": groups})


def _listed(groups: Sequence[SealedGroup]) -> str:
    names = ", ".join(group.group_id for group in groups[:MAX_NAMED])
    more = f" and {len(groups) - MAX_NAMED} more" if len(groups) > MAX_NAMED else ""
    return f"{_plural(len(groups), 'group')} ({names}{more})" if groups else "no groups"


def _left_over(fate: FateRecord) -> str:
    if fate.state == FateState.SEALED:
        return f"{fate.group_id} (batch {fate.consumer}.{fate.seq})"
    end = "still waiting" if fate.state == FateState.ADMITTED else fate.reason
    return f"{fate.group_id} ({end})"


def version_steps(
    version: VersionRecord,
    commits: Sequence[CommitRecord],
    batch: BatchRecord | None,
    incarnation_record: IncarnationRecord,
) -> Iterator[ExplainStep]:
    text = (
        f"incarnation {incarnation_record.incarnation} of {incarnation_record.policy} started from "
        f"version {incarnation_record.number}, after batch {incarnation_record.seq}"
    )
    yield ExplainStep(at=incarnation_record.at, what="incarnated", text=text)
    if batch is not None:
        text = (
            f"batch {batch.consumer}.{batch.seq} sealed: {_plural(batch.num_groups, 'group')}, "
            f"{_plural(batch.num_rows, 'row')}, mean reward {batch.reward_mean:.3f}, "
            f"staleness mean {batch.staleness_mean:.2f}, max {batch.staleness_max}"
        )
        yield ExplainStep(at=batch.sealed_at, what="sealed", text=text)
    for one in commits:
        yield commit(one)
    yield published(version)


# --- summaries --------------------------------------------------------------------------------


def group_summary(group: GroupRecord, fates: Sequence[FateRecord]) -> str:
    if not fates:
        is_open = group.state == "open"
        state = "is still running" if is_open else "has ended and is not judged yet"
        if is_evaluation(group.group_id) and not is_open:
            state = "is a question of an evaluation and has its answers; it trains no policy"
        return f"group {group.group_id} {state}"
    return f"group {group.group_id} " + ", ".join(_end(fate) for fate in fates)


def _end(fate: FateRecord) -> str:
    if fate.state == FateState.SEALED:
        times = "" if fate.uses <= 1 else f" (and {_plural(fate.uses - 1, 'earlier batch')})"
        return f"went into batch {fate.consumer}.{fate.seq}{times}"
    if fate.state == FateState.ADMITTED:
        return f"is waiting for a batch of {fate.consumer}"
    return f"was dropped by {fate.consumer}: {fate.reason}, decided by {fate.rule}"


def row_summary(lease: LeaseRecord, row: RowRecord | None, fates: Sequence[FateRecord]) -> str:
    name = f"{lease.group_id}.{lease.slot}.{lease.epoch}"
    if row is None or lease.ended != LeaseEnd.DELIVERED:
        end = f"its lease ended as {lease.ended}" if lease.ended else "it is still running"
        why = lease.detail.strip(": ")
        return f"row {name} has no result: {end}" + (f" ({why})" if why else "")
    ends = ", ".join(_end(fate) for fate in fates) or "is not judged yet"
    if is_evaluation(lease.group_id):
        ends = "is a question of an evaluation, which trains no policy"
    return f"row {name} was delivered; its group {ends}"


def batch_summary(batch: BatchRecord, commits: Sequence[CommitRecord]) -> str:
    versions = [f"{c.consumer}@{c.incarnation}.{c.number}" for c in commits if not c.skipped]
    skipped = [c.skipped for c in commits if c.skipped]
    end = f"produced version {', '.join(versions)}" if versions else "not trained yet"
    if skipped:
        end = f"{end + ', ' if versions else ''}skipped: {'; '.join(skipped)}"
    again = f" ({batch.num_replayed} replayed)" if batch.num_replayed else ""
    return (
        f"batch {batch.consumer}.{batch.seq} has {_plural(batch.num_groups, 'group')}{again}, "
        f"{_plural(batch.num_rows, 'row')}, mean reward {batch.reward_mean:.3f}, max staleness "
        f"{batch.staleness_max}; {end}"
    )


def version_summary(
    version: VersionRecord,
    commits: Sequence[CommitRecord],
    incarnation_record: IncarnationRecord,
    sampled: int,
    *,
    is_complete: bool = True,
) -> str:
    """is_complete: whether `sampled` counts all rows that came after it."""
    name = f"{version.policy}@{version.incarnation}.{version.number}"
    origin = "is the initial model"
    if commits:
        origin = f"came from batch {version.policy}.{commits[0].seq}"
    elif version.number or incarnation_record.incarnation > 1:
        origin = f"is the restore point of incarnation {incarnation_record.incarnation}"
    least = "" if is_complete else "at least "
    return f"version {name} {origin}; it sampled tokens in {least}{_plural(sampled, 'row')}"


def task_summary(
    key: str, skipped: Sequence[DecisionRecord], num_issues: int, last_end: str
) -> str:
    num_skipped = sum(one.verdict == "skipped" for one in skipped)
    text = f"task {key} was issued {_plural(num_issues, 'time')}"
    if num_skipped:
        rules = ", ".join(sorted({one.rule for one in skipped if one.verdict == "skipped"}))
        text += f" and skipped {_plural(num_skipped, 'time')} by {rules}"
    return f"{text}; {last_end}" if last_end else text


def describe_drop(reason: str) -> str:
    """A DropReason in plain English."""
    return _DROP_REASON_TEXT.get(reason, reason)


def _reason(reason: str) -> str:
    return f"{reason}, {describe_drop(reason)}" if reason in _DROP_REASON_TEXT else reason


def _plural(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"
