# SPDX-License-Identifier: Apache-2.0
"""Violations of single trajectories. Each returns what the audit must name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.unit.audit.tampering import (
    ADMITTED_GROUPS,
    change,
    fetch_record,
    forget_acknowledgement,
    last_turn,
    one,
    payload,
    rewrite_payload,
    row_in_batch,
    segment,
    store,
)

# --- lost -----------------------------------------------------------------------------------------


def acknowledge_unknown(run_dir: Path) -> str:
    with (run_dir / "acks" / "node-0.txt").open("a") as log:
        log.write("p0-1.0.7\n")
    return "p0-1.0.7"


def flip_payload_byte(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 1)
    row = fetch_record(run_dir, "rows", "row_id = ?", row_id)
    with segment(run_dir, row["segment"]).open("r+b") as file:
        file.seek(row["offset"] + 12 + row["length"] // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    return row_id


def cut_segment(run_dir: Path) -> str:
    row = fetch_record(run_dir, "rows", "1 ORDER BY segment DESC, offset DESC")
    path = segment(run_dir, row["segment"])
    path.write_bytes(path.read_bytes()[:-1])
    return row["row_id"]


def delete_segment(run_dir: Path) -> str:
    segment(run_dir, 1).unlink()
    return ""


def change_row_digest(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 2)
    change(run_dir, "UPDATE rows SET digest = ? WHERE row_id = ?", "ab" * 32, row_id)
    return row_id


def rewrite_behind_digest(run_dir: Path) -> str:
    """A record with a valid checksum but other bytes than were delivered."""
    row_id = row_in_batch(run_dir, 1)
    row = fetch_record(run_dir, "rows", "row_id = ?", row_id)
    new = store(run_dir, row, {**payload(run_dir, row), "attempt": 9})
    change(
        run_dir,
        "UPDATE rows SET segment = ?, offset = ?, length = ? WHERE row_id = ?",
        *(new[name] for name in ("segment", "offset", "length", "row_id")),
    )
    return row_id


# --- rows -----------------------------------------------------------------------------------------


def damage_unacknowledged(run_dir: Path) -> str:
    row_id = flip_payload_byte(run_dir)
    forget_acknowledgement(run_dir, row_id)
    return row_id


def expire_lease_of_failed_row(run_dir: Path) -> str:
    """Two ends of one lease: it expired, but its result was stored."""
    row = fetch_record(run_dir, "rows", "outcome = 'failed'")
    where = "group_id = ? AND slot = ? AND epoch = ?"
    key = (row["group_id"], row["slot"], row["epoch"])
    change(run_dir, f"UPDATE leases SET ended = 'expired' WHERE {where}", *key)
    return row["row_id"]


def change_row_reward(run_dir: Path) -> str:
    (group_id,) = one(run_dir, ADMITTED_GROUPS)
    change(run_dir, "UPDATE rows SET reward = 1.0 WHERE group_id = ?", group_id)
    return group_id


def deliver_for_another_node(run_dir: Path) -> str:
    (group_id,) = one(run_dir, ADMITTED_GROUPS)
    row = fetch_record(run_dir, "rows", "group_id = ?", group_id)
    other = "node-1" if row["node_id"] == "node-0" else "node-0"
    change(run_dir, "UPDATE rows SET node_id = ? WHERE row_id = ?", other, row["row_id"])
    rewrite_payload(run_dir, row["row_id"], lambda body: body.update(node_id=other))
    return row["row_id"]


# --- sampled by policy ----------------------------------------------------------------------------


def sample_by_another_policy(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 1)
    rewrite_payload(run_dir, row_id, last_turn(lambda turn: turn.update(policy="judge")))
    return row_id


def sample_under_unpublished_version(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 2, 5)
    edit = last_turn(lambda turn: turn["spans"][-1].update(number=77))
    rewrite_payload(run_dir, row_id, edit)
    return row_id


def leave_a_token_without_version(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 1)
    rewrite_payload(run_dir, row_id, last_turn(lambda turn: turn["spans"].pop()))
    return row_id


def sample_with_odd_log_prob(value: bytes) -> Callable[[Path], str]:
    def corrupt(run_dir: Path) -> str:
        row_id = row_in_batch(run_dir, 1)
        edit = last_turn(lambda turn: turn.update(logprobs=turn["logprobs"][:8] + value))
        rewrite_payload(run_dir, row_id, edit)
        return row_id

    return corrupt


def train_what_was_aborted(run_dir: Path) -> str:
    """Slot 0 has an aborted turn next to its good one; it must not count."""
    (row_id,) = one(run_dir, "SELECT row_id FROM rows WHERE slot = 0 AND reward IS NOT NULL")
    rewrite_payload(run_dir, row_id, lambda body: body["turns"][0].update(finish="stop"))
    return row_id
