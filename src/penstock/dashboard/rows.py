# SPDX-License-Identifier: Apache-2.0
"""Pages of trajectories, and one trajectory with its tokens.

A page looks at no more than SCAN_ROWS rows, whatever the filters, and reads no payload, except
that a search for text reads MAX_READ; its cursor
says where the next page starts. So a page of a run with a million rows costs what one of a small
run costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, pstdev
from typing import Any

import msgspec

from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.core.ids import partition_of
from penstock.dataflow.core.names import EVAL, TRAIN
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import GroupRecord, RowRecord
from penstock.errors import BadRequest, NotFound, PenstockError
from penstock.runs.history import Run
from penstock.runs.recorded_trajectory import PayloadState, RecordedTrajectory
from penstock.runs.samples import as_sample, within_bounds
from penstock.runs.token_view import TurnTokens, view_tokens
from penstock.runs.trajectories import REWARD
from penstock.types import OutcomeKind, RowSummary, Task

PAGE_ROWS = 50
SCAN_ROWS = 20_000
"""Arrivals that one page looks at, if the database can tell which match."""
DESCRIBED_ROWS = 4_000
"""Arrivals that one page looks at, if each must be described first: a fate, a text."""
READ_ROWS = 256
MAX_READ = 100
"""Payload that a search for text decodes for one page."""
NEWEST = 1 << 62
TASK_CHARS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """What a page shows, from the address in the browser."""

    outcome: str = ""
    policy: str = ""
    node: str = ""
    fate: str = ""
    """`trained`, `waits`, or `dropped`."""
    step: int | None = None
    text: str = ""
    """Part of an id, of a task or of what the model wrote."""
    order: str = "newest"
    """`newest`, or `best` or `worst` of the newest SCAN_ROWS."""
    evaluations: bool = False
    before: Mapping[int, int] = field(default_factory=dict[int, int])
    """Where the page starts: an arrival by partition."""

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> PageQuery:
        step, before = query.get("step", ""), query.get("before", "")
        outcome, order = query.get("outcome", ""), query.get("order", "newest")
        if outcome and outcome not in set(OutcomeKind):
            raise BadRequest(f"outcome {outcome[:40]!r}; known: {', '.join(OutcomeKind)}")
        if order not in ("newest", "best", "worst"):
            raise BadRequest(f"order {order[:40]!r}; known: newest, best, worst")
        try:
            number = int(step) if step else None
            if number is not None and not 0 <= number < NEWEST:
                raise ValueError
            places = {
                int(index): int(at)
                for index, _, at in (part.partition(":") for part in before.split(",") if part)
            }
            if not all(0 <= at <= NEWEST for at in places.values()):
                raise ValueError
            return cls(
                outcome=outcome,
                policy=query.get("policy", ""),
                node=query.get("node", ""),
                fate=query.get("fate", ""),
                step=number,
                text=query.get("text", "").strip(),
                order=order,
                evaluations=query.get("evaluations", "") == "1",
                before=places,
            )
        except ValueError:
            raise BadRequest("step and before are numbers; open the list again") from None

    def condition(self) -> tuple[str, dict[str, Any]]:
        """The part that the database decides."""
        where = "space = :space AND arrival < :before AND arrival >= :floor"
        values: dict[str, Any] = {"space": EVAL if self.evaluations else TRAIN}
        if self.outcome:
            where += " AND outcome = :outcome"
            values["outcome"] = self.outcome
        if self.node:
            where += " AND node_id = :node"
            values["node"] = self.node
        if self.policy:
            where += " AND instr(sampled, :policy) > 0"
            values["policy"] = f'"{self.policy}":'
        return where, values


def read_page(run: ShownRun, query: PageQuery) -> dict[str, Any]:
    """One page, and the cursor of the next; `searched` counts the rows that were looked at."""
    opened = run.open()
    if query.step is not None:
        rows = _rows_of_step(opened, query)
        return {"rows": rows, "next": "", "is_complete": True}
    finder = _Finder(opened, query)
    rows = [*finder.find()]
    return {"rows": rows, "next": finder.next_cursor(), "is_complete": not finder.is_cut}


class _Finder:
    """Looks for the rows of one page, the newest first."""

    def __init__(self, run: Run, query: PageQuery) -> None:
        self._run = run
        self._query = query
        self._num_read = 0
        self._at = {
            index: query.before.get(index, NEWEST) for index in (0, *run.recorded.partitions)
        }
        self.is_cut = False
        """There may be more beyond what this page looked at."""

    def next_cursor(self) -> str:
        return ",".join(f"{index}:{at}" for index, at in self._at.items()) if self.is_cut else ""

    def find(self) -> Iterator[dict[str, Any]]:
        num_found = 0
        for index in self._at:
            for row in self._in_partition(index, PAGE_ROWS - num_found):
                num_found += 1
                yield row
            if num_found >= PAGE_ROWS:
                return

    def _in_partition(self, index: int, num: int) -> Iterator[dict[str, Any]]:
        tables, query = self._run.recorded.at(index), self._query
        where, values = query.condition()
        before = min(self._at[index], _last_arrival(tables, values["space"]) + 1)
        floor = max(0, before - (DESCRIBED_ROWS if query.fate or query.text else SCAN_ROWS))
        order = "arrival DESC"
        if query.order != "newest":
            where += f" AND {REWARD} IS NOT NULL"
            order = f"{REWARD} {'DESC' if query.order == 'best' else 'ASC'}, arrival DESC"
        while num and before > floor:
            sql = f"{where} ORDER BY {order} LIMIT :num"
            rows = tables.read(
                RowRecord, sql, **values, before=before, floor=floor, num=max(num, READ_ROWS)
            )
            for row in describe_rows(self._run, tables, rows):
                before = self._at[index] = row["arrival"]
                if self.matches(row):
                    num -= 1
                    yield row
                    if not num:
                        break
            if query.order != "newest":
                return
            if num and len(rows) < READ_ROWS:
                before = self._at[index] = floor
        self.is_cut = self.is_cut or before > 1

    def matches(self, row: Mapping[str, Any]) -> bool:
        query = self._query
        if query.fate and not row["fate"].startswith(query.fate):
            return False
        if not query.text:
            return True
        wanted = query.text.lower()
        if wanted in f"{row['row_id']} {row['task_key']} {row['task']}".lower():
            return True
        if self._num_read >= MAX_READ:
            return False
        self._num_read += 1
        return wanted in _text_of(self._run, row["row_id"]).lower()


def _text_of(run: Run, row_id: str) -> str:
    """What the model saw and wrote; empty if it is not stored, or has no tokenizer."""
    try:
        found = run.reader.by_id(row_id)
        return "" if found is None else found.text
    except PenstockError:
        return ""


def _last_arrival(tables: Tables, space: str) -> int:
    query = "SELECT coalesce(max(arrival), 0) FROM rows WHERE space = :space"
    return int(tables.scalar(query, space=space))


def describe_rows(run: Run, tables: Tables, rows: Sequence[RowRecord]) -> Iterator[dict[str, Any]]:
    """A line of the list for each row: what the ledger knows without its payload."""
    group_ids = sorted({row.group_id for row in rows})
    groups = {
        one.group_id: one for one in tables.read(GroupRecord, "group_id IN :ids", ids=group_ids)
    }
    uses = run.reader.uses(group_ids)
    for row in rows:
        group = groups.get(row.group_id)
        summary = row.summary
        is_scored = summary.outcome in (OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED)
        used = uses[row.group_id] if is_scored else []
        dropped = [use.reason for use in used if use.fate == "dropped"]
        steps = [use.step for use in used if use.step is not None]
        yield {
            "row_id": row.row_id,
            "group_id": row.group_id,
            "arrival": row.arrival,
            "node": row.node_id,
            "source": "" if group is None else group.source,
            "task_key": "" if group is None else group.task_key,
            "task": _task_line(group),
            "reward": summary.reward,
            "outcome": summary.outcome,
            "tokens": sum(summary.sampled.values()),
            "versions": _versions(summary),
            "at": row.delivered_at,
            "steps": steps,
            "fate": _fate(steps, dropped, is_scored=is_scored, is_evaluation=row.space == EVAL),
        }


def _fate(
    steps: Sequence[int], dropped: Sequence[str], *, is_scored: bool, is_evaluation: bool
) -> str:
    if steps:
        return "trained"
    if is_evaluation:
        return "evaluation"
    if dropped:
        return f"dropped: {dropped[0]}"
    return "waits" if is_scored else "not scored"


def _task_line(group: GroupRecord | None) -> str:
    if group is None:
        return ""
    task = msgspec.json.decode(group.task, type=Task)
    text = msgspec.json.encode(task.payload).decode()
    return text if len(text) <= TASK_CHARS else text[: TASK_CHARS - 1] + "…"


def _versions(summary: RowSummary) -> list[str]:
    return [
        f"{policy}@{incarnation}.{number}"
        for policy, versions in summary.versions.items()
        for incarnation, number in versions
    ]


def _rows_of_step(run: Run, query: PageQuery) -> list[dict[str, Any]]:
    """All rows that one step trained: a batch is small enough for one page."""
    assert query.step is not None
    found: list[dict[str, Any]] = []
    ids = run.reader.row_ids_of_step(query.step, query.policy or None)
    finder = _Finder(run, query)
    for index in (0, *run.recorded.partitions):
        tables = run.recorded.at(index)
        rows = tables.read(RowRecord, "row_id IN :ids", ids=[*ids])
        found += (row for row in describe_rows(run, tables, rows) if _fits(finder, row, query))
    if query.order == "newest":
        return sorted(found, key=lambda row: -row["arrival"])
    sign = -1 if query.order == "best" else 1
    return sorted(found, key=lambda row: sign * (row["reward"] or 0.0))


def _fits(finder: _Finder, row: Mapping[str, Any], query: PageQuery) -> bool:
    is_wanted = query.outcome in ("", row["outcome"]) and query.node in ("", row["node"])
    return is_wanted and finder.matches(row)


# --- one trajectory ---------------------------------------------------------------------------


def read_group(run: ShownRun, group_id: str) -> dict[str, Any]:
    """All attempts at a group, side by side, with how each reward compares with the others."""
    opened = run.open()
    kinds = (opened.trajectories(group=group_id, evaluations=kind) for kind in (False, True))
    found = [*within_bounds(chain.from_iterable(kinds))]
    if not found:
        raise NotFound(f"no trajectory of group {group_id[:80]!r} is in this run")
    found.sort(key=lambda one: (one.slot, one.epoch))
    rewards = [one.reward for one in found if one.reward is not None]
    return {
        "group_id": group_id,
        "task": found[0].task_payload,
        "source": found[0].source,
        "mean": fmean(rewards) if rewards else None,
        "deviation": pstdev(rewards) if rewards else None,
        "rows": [_detail(one, rewards, with_tokens=False) for one in found],
    }


def read_trajectory(run: ShownRun, row_id: str) -> dict[str, Any]:
    """One trajectory with its text, tokens, tool calls and rewards."""
    opened = run.open()
    found = opened.reader.by_id(row_id)
    if found is None:
        raise NotFound(f"no trajectory {row_id[:80]!r} in this run; ids look like p0-17.2.1")
    tables = opened.recorded.at(partition_of(found.group_id))
    group = tables.read(RowRecord, "group_id = :id", id=found.group_id)
    rewards = [row.summary.reward for row in group if row.summary.reward is not None]
    siblings = [row.row_id for row in sorted(group, key=lambda row: (row.slot, row.epoch))]
    return {**_detail(found, rewards, with_tokens=True), "siblings": siblings}


def _detail(
    one: RecordedTrajectory, rewards: Sequence[float], *, with_tokens: bool
) -> dict[str, Any]:
    sample = as_sample(one)
    tokens: Sequence[TurnTokens] = ()
    if with_tokens and one.state is PayloadState.STORED:
        tokens = view_tokens(one)
    numbers = {name: value for name, value in one.columns.items() if isinstance(value, float)}
    return {
        "sample": sample,
        "tokens": tokens,
        "columns": numbers,
        "uses": one.uses,
        "reason": "" if one.payload is None else one.payload.outcome.reason,
        "started_at": None if one.payload is None else one.payload.started_at,
        "ended_at": None if one.payload is None else one.payload.ended_at,
        "relative": None if one.reward is None or not rewards else one.reward - fmean(rewards),
        "deviation": pstdev(rewards) if rewards else None,
    }
