# SPDX-License-Identifier: Apache-2.0
"""What the model said: a few trajectories of a run, chosen and decoded for people.

Owns the choice and its account: what was freed is counted, never silently skipped. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from penstock.dataflow.core.ids import is_evaluation
from penstock.errors import PenstockError
from penstock.runs.decoded import DecodedTurn
from penstock.runs.history import Order, Run
from penstock.runs.recorded_trajectory import PayloadState, RecordedTrajectory
from penstock.runs.trajectories import NEWEST, Selection
from penstock.types import GroupId, JsonObject, OutcomeKind, ToolUse
from penstock.wire.codec import encoded_bytes

FOLLOW_S = 1.0
"""Seconds between two looks at a running run."""
MAX_SCANNED = 100_000
"""A choice of the best or worst looks at no more trajectories than this."""
MAX_GROUP_ROWS = 1024
"""Attempts of a group that are shown together; further ones are left out."""
MAX_GROUP_BYTES = 64 << 20
"""Of their payload and columns, encoded; 100,000 tokens are about 1 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory as text."""

    row_id: str
    group_id: str
    source: str
    task: JsonObject
    reward: float | None
    outcome: str
    detail: str
    """Why the rollout failed, or why its text is missing."""
    steps: tuple[int, ...]
    """The steps that trained it."""
    fate: str
    """What became of its group: `trained`, `dropped: REASON`, `waits`, `evaluation`."""
    versions: tuple[str, ...]
    node: str
    delivered_at: float
    num_tokens: int
    state: str
    """`stored`, or why there are no turns: `freed`, `forgotten`, `unreadable`."""
    turns: tuple[DecodedTurn, ...]
    role_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Rewards of the roles that have their own."""
    tool_uses: tuple[ToolUse, ...] = ()
    """Calls of tools, in order; `turn` is the last turn before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleList:
    samples: tuple[Sample, ...]
    num_without_text: int
    """Matching trajectories that were passed over, because their payload is gone."""


def choose(
    run: Run,
    *,
    count: int,
    steps: tuple[int | None, int | None] | None = None,
    outcome: OutcomeKind | None = None,
    node: str | None = None,
    order: Order = NEWEST,
    evaluations: bool = False,
) -> SampleList:
    """The first `count` readable trajectories in this order, of training or of evaluations."""
    found: list[Sample] = []
    num_without_text = 0
    matching = run.trajectories(
        steps=steps, outcome=outcome, node=node, order=order, evaluations=evaluations
    )
    for one in islice(matching, MAX_SCANNED):
        if one.state is not PayloadState.STORED:
            num_without_text += 1
            continue
        found.append(as_sample(one))
        if len(found) >= count:
            break
    return SampleList(samples=tuple(found), num_without_text=num_without_text)


def follow(
    run: Run,
    *,
    count: int,
    outcome: OutcomeKind | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[list[Sample], int]]:
    """New trajectories while the run is running: at each look the newest `count`, and how many
    others arrived. Ends with the run."""
    selection = Selection(outcome=outcome)
    seen = run.reader.last_arrivals()
    is_running = True
    while is_running:
        is_running = run.is_running  # before the last look, so that nothing is missed
        now = run.reader.last_arrivals()
        if now != seen:
            found, num_found = run.reader.newest_between(seen, now, selection, count)
            yield [as_sample(one) for one in found], num_found - len(found)
            seen = now
        elif is_running:
            sleep(FOLLOW_S)


def of_group(run: Run, group_id: str) -> tuple[Sample, ...]:
    """The readable trajectories of one group, in order of their slots."""
    members = within_bounds(run.trajectories(group=group_id))
    found = [one for one in members if one.state is PayloadState.STORED]
    return tuple(as_sample(one) for one in sorted(found, key=lambda one: (one.slot, one.epoch)))


def within_bounds(group: Iterable[RecordedTrajectory]) -> Iterator[RecordedTrajectory]:
    """The attempts of a group, for who holds them all at once; those beyond MAX_GROUP_BYTES have no
    payload. The ledger of another user can name one payload for any number of rows."""
    room = MAX_GROUP_BYTES
    for one in islice(group, MAX_GROUP_ROWS):
        room -= 0 if one.payload is None else encoded_bytes([one.payload, one.columns])
        yield one if room >= 0 or one.payload is None else _without_payload(one)


def _without_payload(one: RecordedTrajectory) -> RecordedTrajectory:
    return replace(
        one,
        payload=None,
        columns={name: value for name, value in one.columns.items() if isinstance(value, float)},
        state=PayloadState.UNREADABLE,
        detail=f"the attempts of its group have more than {MAX_GROUP_BYTES >> 20} MiB together",
    )


def as_sample(one: RecordedTrajectory) -> Sample:
    detail, turns = one.detail, tuple[DecodedTurn, ...]()
    try:
        turns = one.decode()
    except PenstockError as error:
        detail = detail or str(error)
    return Sample(
        row_id=one.row_id,
        group_id=one.group_id,
        source=one.source,
        task=one.task_payload,
        reward=one.reward,
        outcome=one.outcome.value,
        detail=detail,
        steps=one.steps,
        fate=_fate(one),
        versions=one.versions,
        node=one.node_id,
        delivered_at=one.delivered_at,
        num_tokens=one.num_tokens,
        state=one.state.value,
        turns=turns,
        role_rewards={} if one.payload is None else one.payload.role_rewards,
        tool_uses=() if one.payload is None else one.payload.tool_uses,
    )


def _fate(one: RecordedTrajectory) -> str:
    if one.steps:
        return "trained"
    if is_evaluation(GroupId(one.group_id)):
        return "evaluation"
    dropped = [use for use in one.uses if use.fate == "dropped"]
    if dropped:
        return f"dropped: {dropped[0].reason}"
    return "waits" if one.outcome in (OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED) else ""


def explain_freed(run: Run) -> str:
    """What was freed in this run and how to keep more; empty if nothing was."""
    num_freed = run.num_freed()
    if not num_freed:
        return ""
    flow = run.config.dataflow
    return (
        f"{num_freed:,} of {run.num_trajectories():,} trajectories of this run were freed after "
        f"training and have no text any more (dataflow.keep: {flow.keep}, keep_mb: "
        f"{flow.keep_mb}); to keep more, set dataflow.keep=all and a larger dataflow.keep_mb "
        "before the run starts or resumes"
    )
