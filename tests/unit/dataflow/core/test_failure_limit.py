# SPDX-License-Identifier: Apache-2.0
"""When a run whose attempts all fail has to end: the rule, its memory and its message."""

from __future__ import annotations

from penstock.dataflow.core.failure_limit import (
    MIN_ATTEMPTS,
    MIN_GROUPS,
    MIN_PARTIAL_GROUPS,
    OUTAGE_S,
    FailureLimit,
)
from penstock.dataflow.records import Deletion, MetaRecord, Record

CAUSE = "failed: workflow: ValueError: no such tool"


def make() -> tuple[FailureLimit, list[Record | Deletion]]:
    journal: list[Record | Deletion] = []

    def write(record: Record | Deletion) -> None:
        journal.append(record)

    return FailureLimit(write), journal


def fail(
    limit: FailureLimit, num_groups: int, *, at: float = 0.0, attempts: int = 8, results: int = 0
) -> None:
    for _ in range(num_groups):
        limit.group_failed(attempts, results, CAUSE, at)


def test_a_run_without_any_success_ends_after_enough_groups_and_attempts() -> None:
    limit, _ = make()
    fail(limit, MIN_GROUPS - 1, attempts=MIN_ATTEMPTS)
    assert limit.cause(0.0) == ""
    fail(limit, 1)
    assert CAUSE in limit.cause(0.0)
    small, _ = make()
    fail(small, MIN_ATTEMPTS - 1, attempts=1)
    assert small.cause(0.0) == ""
    fail(small, 1, attempts=1)
    assert small.cause(0.0)


def test_groups_that_lose_some_results_with_a_failed_slot_may_fail_longer() -> None:
    limit, _ = make()
    fail(limit, MIN_PARTIAL_GROUPS - 1, results=1)
    assert limit.cause(0.0) == ""
    fail(limit, 1)
    assert f"{MIN_PARTIAL_GROUPS - 1} results" in limit.cause(0.0)


def test_one_closed_group_starts_the_count_again_and_a_long_outage_is_survived() -> None:
    limit, _ = make()
    fail(limit, MIN_GROUPS - 1)
    limit.group_succeeded()
    fail(limit, 100 * MIN_GROUPS, at=50.0)
    assert limit.cause(50.0) == limit.cause(50.0 + OUTAGE_S - 1.0) == ""
    assert limit.cause(50.0 + OUTAGE_S)
    limit.group_succeeded()
    assert limit.cause(50.0 + 2 * OUTAGE_S) == ""


def test_the_message_names_the_most_common_cause_its_count_and_the_next_step() -> None:
    limit, _ = make()
    limit.group_failed(8, 0, "expired: its node fell silent", 0.0)
    fail(limit, MIN_GROUPS)
    text = limit.cause(0.0)
    assert f"{MIN_GROUPS + 1} groups" in text and "72 failed attempts" in text
    assert f"{MIN_GROUPS} of {MIN_GROUPS + 1} groups: {CAUSE}" in text
    assert text.endswith("No new work starts: fix that error, then restart the run")


def test_a_restart_remembers_the_count_and_a_resumed_run_starts_a_new_one() -> None:
    limit, journal = make()
    fail(limit, MIN_GROUPS - 1)
    again, _ = make()
    again.restore(_newest(journal), 0.0)
    fail(again, 1)
    assert again.cause(0.0)
    fail(limit, 1)
    resumed, _ = make()
    resumed.restore(_newest(journal), 0.0)
    assert resumed.cause(0.0) == ""
    fail(resumed, MIN_GROUPS)
    assert resumed.cause(0.0)


def test_a_success_is_remembered_and_written_once() -> None:
    limit, journal = make()
    for _ in range(5):
        limit.group_succeeded()
    assert len(journal) == 1
    again, _ = make()
    again.restore(_newest(journal), 0.0)
    fail(again, 10 * MIN_GROUPS)
    assert again.cause(0.0) == ""


def test_many_different_causes_stay_few() -> None:
    limit, journal = make()
    for number in range(1000):
        limit.group_failed(8, 0, f"failed: workflow: ValueError: {number}" + "x" * 400, 0.0)
    assert len(_newest(journal)) < 10_000


def _newest(journal: list[Record | Deletion]) -> str:
    record = journal[-1]
    assert isinstance(record, MetaRecord)
    return record.value
