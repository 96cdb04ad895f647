# SPDX-License-Identifier: Apache-2.0
"""Violations between the coordinator and partition 1. Each returns what the audit must name. Some
need a quiet run, with no messages in flight; others a cut run, with messages in flight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from tests.unit.audit.tampering import (
    LEASE_IS_RUNNING,
    Record,
    change,
    fetch_record,
    insert,
    ledger,
    one,
    partition_1,
    running_lease,
    segment,
)

DOWN, UP = "coordinator>p1", "p1>coordinator"


def undelivered(run_dir: Path, kind: str) -> tuple[int, Record]:
    """Number and body of the last message of a kind that its receiver lacks, in this ledger."""
    with ledger(run_dir) as connection:
        found = connection.execute("SELECT number, body FROM messages ORDER BY number DESC")
        messages = [(number, msgspec.msgpack.decode(body)) for number, body in found]
    return next((number, message) for number, message in messages if message["type"] == kind)


def forget_message(run_dir: Path, number: int) -> None:
    """As if it had never been sent: later messages move up."""
    change(run_dir, "DELETE FROM messages WHERE number = ?", number)
    with ledger(run_dir) as connection:
        connection.execute("UPDATE messages SET number = number - 1 WHERE number > ?", (number,))


# --- partitions, in a quiet run -------------------------------------------------------------------


def know_a_version_of_the_future(run_dir: Path) -> str:
    version = fetch_record(partition_1(run_dir), "versions", "1")
    insert(partition_1(run_dir), "versions", version | {"number": 77})
    return "version policy@1.77"


def know_another_fork(run_dir: Path) -> str:
    change(partition_1(run_dir), "UPDATE incarnations SET seq = 1, number = 1")
    return "incarnation policy@1 from 1, 1"


def forget_a_commit(run_dir: Path) -> str:
    change(partition_1(run_dir), "DELETE FROM commits WHERE seq = 2")
    return "lacks commit policy.2"


def hold_a_group_of_another(run_dir: Path) -> str:
    group = fetch_record(run_dir, "groups", "state = 'open' AND partition = 0")
    insert(partition_1(run_dir), "groups", group)
    return group["group_id"]


def free_by_itself(run_dir: Path) -> str:
    query = "SELECT group_id FROM groups WHERE group_id NOT IN (SELECT group_id FROM freed)"
    (group_id,) = one(partition_1(run_dir), query)
    insert(partition_1(run_dir), "freed", {"group_id": group_id, "at": 0.0})
    return group_id


# --- messages, in a quiet run ---------------------------------------------------------------------


def receive_what_was_never_sent(run_dir: Path) -> str:
    change(partition_1(run_dir), "UPDATE links SET number = number + 1 WHERE link = ?", DOWN)
    return DOWN


def hear_what_was_never_reported(run_dir: Path) -> str:
    change(run_dir, "UPDATE links SET number = number + 1 WHERE link = ?", UP)
    return UP


def acknowledge_what_never_arrived(run_dir: Path) -> str:
    change(partition_1(run_dir), "UPDATE links SET number = number - 1 WHERE link = ?", DOWN)
    return DOWN


def forget_what_was_reported(run_dir: Path) -> str:
    change(run_dir, "UPDATE links SET number = number - 1 WHERE link = ?", UP)
    return UP


# --- messages, in a cut run -----------------------------------------------------------------------


def lose_a_message(run_dir: Path) -> str:
    number, _ = undelivered(run_dir, "Committed")
    change(run_dir, "DELETE FROM messages WHERE number = ?", number)
    return DOWN


def damage_a_message(run_dir: Path) -> str:
    number, _ = undelivered(run_dir, "Published")
    change(run_dir, "UPDATE messages SET body = x'c1' WHERE number = ?", number)
    return DOWN


# --- groups, in a cut run -------------------------------------------------------------------------


def never_send_an_issue(run_dir: Path) -> str:
    number, message = undelivered(run_dir, "IssueGroup")
    forget_message(run_dir, number)
    return message["record"]["group_id"]


def never_send_a_report(run_dir: Path) -> str:
    number, message = undelivered(partition_1(run_dir), "GroupEnded")
    forget_message(partition_1(run_dir), number)
    return message["group_id"]


def report_for_another_policy(run_dir: Path) -> str:
    number, message = undelivered(partition_1(run_dir), "GroupEnded")
    body = msgspec.msgpack.encode(message | {"policies": ["judge"]})
    change(partition_1(run_dir), "UPDATE messages SET body = ? WHERE number = ?", body, number)
    return message["group_id"]


def receive_an_issue_and_not_run_it(run_dir: Path) -> str:
    number, message = undelivered(run_dir, "IssueGroup")
    change(partition_1(run_dir), "UPDATE links SET number = ? WHERE link = ?", number, DOWN)
    return message["record"]["group_id"]


def hear_a_report_and_not_judge_it(run_dir: Path) -> str:
    number, message = undelivered(partition_1(run_dir), "GroupEnded")
    change(run_dir, "UPDATE links SET number = ? WHERE link = ?", number, UP)
    return message["group_id"]


# --- what a partition keeps, in a quiet run -------------------------------------------------------


def invent_a_group(run_dir: Path) -> str:
    group = fetch_record(partition_1(run_dir), "groups", "state = 'open'")
    insert(partition_1(run_dir), "groups", group | {"group_id": "p1-999", "issue": 999})
    return "p1-999"


def run_another_task(run_dir: Path) -> str:
    """The partition runs another task than the coordinator issued."""
    group = fetch_record(partition_1(run_dir), "groups", "state = 'open'")
    statement = "UPDATE groups SET ordinal = 999 WHERE group_id = ?"
    change(partition_1(run_dir), statement, group["group_id"])
    return group["group_id"]


def reopen_a_judged_group(run_dir: Path) -> str:
    (group_id,) = one(run_dir, "SELECT group_id FROM fates WHERE group_id LIKE 'p1-%'")
    change(partition_1(run_dir), "UPDATE groups SET state = 'dropped' WHERE group_id = ?", group_id)
    return group_id


def flip_far_payload(run_dir: Path) -> str:
    row = fetch_record(partition_1(run_dir), "rows", "group_id NOT IN (SELECT group_id FROM freed)")
    path = segment(partition_1(run_dir), row["segment"])
    data = bytearray(path.read_bytes())
    data[row["offset"] + 12 + row["length"] // 2] ^= 1
    path.write_bytes(data)
    return row["row_id"]


def lose_a_far_lease(run_dir: Path) -> str:
    lease = running_lease(partition_1(run_dir))
    change(partition_1(run_dir), f"UPDATE grants SET epoch = epoch + 1 WHERE {LEASE_IS_RUNNING}")
    return f"{lease['group_id']}.{lease['slot']}"


IN_QUIET: dict[str, tuple[Callable[[Path], str], ...]] = {
    "partitions": (
        know_a_version_of_the_future,
        know_another_fork,
        forget_a_commit,
        hold_a_group_of_another,
        free_by_itself,
    ),
    "messages": (
        receive_what_was_never_sent,
        hear_what_was_never_reported,
        acknowledge_what_never_arrived,
        forget_what_was_reported,
    ),
    "groups": (invent_a_group, run_another_task, reopen_a_judged_group),
    "lost": (flip_far_payload,),
    "slots": (lose_a_far_lease,),
}
IN_CUT: dict[str, tuple[Callable[[Path], str], ...]] = {
    "messages": (lose_a_message, damage_a_message),
    "groups": (
        never_send_an_issue,
        never_send_a_report,
        report_for_another_policy,
        receive_an_issue_and_not_run_it,
        hear_a_report_and_not_judge_it,
    ),
}
