# SPDX-License-Identifier: Apache-2.0
"""Violations of slots, leases and groups. Each returns what the audit must name."""

from __future__ import annotations

from pathlib import Path

from tests.unit.audit.tampering import (
    ADMITTED_GROUPS,
    LEASE_IS_RUNNING,
    Record,
    change,
    end_lease,
    fetch_record,
    forget_acknowledgement,
    insert,
    last_grant,
    one,
    payload,
    running_lease,
    store,
)

SEALED = "SELECT group_id FROM fates WHERE state = 'sealed' AND seq = 1"

# --- slots ----------------------------------------------------------------------------------------


def grant_again(run_dir: Path, group_id: str) -> Record:
    """One more grant of slot 0 of a closed group."""
    grant = last_grant(run_dir, group_id, 0)
    grant |= {"epoch": grant["epoch"] + 1}
    insert(run_dir, "grants", grant)
    return grant


def deliver_slot_twice(run_dir: Path) -> str:
    (group_id,) = one(run_dir, "SELECT group_id FROM fates WHERE reason = 'stale'")
    grant = grant_again(run_dir, group_id)
    row = fetch_record(run_dir, "rows", "group_id = ? AND slot = 0 ORDER BY epoch DESC", group_id)
    row_id = f"{group_id}.0.{grant['epoch']}"
    body = payload(run_dir, row) | {"row_id": row_id, "epoch": grant["epoch"]}
    insert(run_dir, "rows", store(run_dir, row | {"row_id": row_id, "epoch": body["epoch"]}, body))
    return f"{group_id}.0"


def end_slot_twice(run_dir: Path) -> str:
    (group_id,) = one(run_dir, SEALED)
    end_lease(run_dir, grant_again(run_dir, group_id), "released")
    return f"{group_id}.0"


def leave_lease_running(run_dir: Path) -> str:
    """A dropped group with a slot that is still leased."""
    (group_id,) = one(run_dir, "SELECT group_id FROM groups WHERE state = 'dropped'")
    change(run_dir, "DELETE FROM rows WHERE group_id = ? AND slot = 3", group_id)
    forget_acknowledgement(run_dir, f"{group_id}.3.1")
    return group_id


def lose_an_epoch(run_dir: Path) -> str:
    lease = fetch_record(run_dir, "leases", "ended = 'expired'")
    key = (lease["group_id"], lease["slot"], lease["epoch"])
    change(run_dir, "DELETE FROM leases WHERE group_id = ? AND slot = ? AND epoch = ?", *key)
    return f"{lease['group_id']}.{lease['slot']}"


def run_two_leases(run_dir: Path) -> str:
    lease = running_lease(run_dir)
    insert(run_dir, "grants", lease | {"epoch": lease["epoch"] + 1})
    return f"{lease['group_id']}.{lease['slot']}"


def grant_a_lease_twice(run_dir: Path) -> str:
    """The same epoch of a slot was granted twice."""
    grant = fetch_record(run_dir, "grants", f"{LEASE_IS_RUNNING} AND num_slots > 1")
    again = {"slot": grant["slot"] + 1, "num_slots": 1}
    insert(run_dir, "grants", grant | again)
    return f"{grant['group_id']}.{again['slot']}"


def close_without_a_slot(run_dir: Path) -> str:
    """A group closed with an expired slot, although its run requires every member."""
    (group_id,) = one(run_dir, ADMITTED_GROUPS)
    grant = last_grant(run_dir, group_id, 0)
    row_id = f"{group_id}.0.{grant['epoch']}"
    end_lease(run_dir, grant, "expired")
    change(run_dir, "DELETE FROM rows WHERE row_id = ?", row_id)
    forget_acknowledgement(run_dir, row_id)
    return group_id


def miscount_attempts(run_dir: Path) -> str:
    lease = fetch_record(run_dir, "leases", "attempt = 2")
    key = (lease["group_id"], lease["slot"], lease["epoch"])
    where = "group_id = ? AND slot = ? AND epoch = ?"
    change(run_dir, f"UPDATE leases SET attempt = 1 WHERE {where}", *key)
    return f"{lease['group_id']}.{lease['slot']}"


# --- groups ---------------------------------------------------------------------------------------


def lose_group(run_dir: Path) -> str:
    (group_id,) = one(
        run_dir,
        "SELECT group_id FROM groups WHERE state = 'open' "
        "AND group_id NOT IN (SELECT group_id FROM grants) ORDER BY issue DESC",
    )
    change(run_dir, "DELETE FROM groups WHERE group_id = ?", group_id)
    return "train"


def lose_fate(run_dir: Path) -> str:
    (group_id,) = one(run_dir, ADMITTED_GROUPS)
    change(run_dir, "DELETE FROM fates WHERE group_id = ?", group_id)
    return group_id


def seal_into_nothing(run_dir: Path) -> str:
    (group_id,) = one(run_dir, ADMITTED_GROUPS)
    change(run_dir, "UPDATE fates SET state = 'sealed', seq = 99 WHERE group_id = ?", group_id)
    return group_id


def admit_dropped_group(run_dir: Path) -> str:
    (group_id,) = one(run_dir, "SELECT group_id FROM groups WHERE state = 'dropped'")
    statement = "UPDATE fates SET state = 'admitted', reason = '' WHERE group_id = ?"
    change(run_dir, statement, group_id)
    change(run_dir, "DELETE FROM freed WHERE group_id = ?", group_id)
    return group_id


def issue_task_twice(run_dir: Path) -> str:
    change(run_dir, "UPDATE groups SET ordinal = 0 WHERE issue = 5")
    return "train"


def issue_another_task(run_dir: Path) -> str:
    group = fetch_record(run_dir, "groups", "state = 'open'")
    change(run_dir, "UPDATE groups SET ordinal = 999 WHERE group_id = ?", group["group_id"])
    return "train"


def skip_an_issue(run_dir: Path) -> str:
    """A task that rules skipped but that was issued."""
    change(run_dir, "UPDATE sources SET skipped = 1")
    return "train"
