# SPDX-License-Identifier: Apache-2.0
"""Payload freed too early. Each returns what the audit must name."""

from __future__ import annotations

from pathlib import Path

from tests.unit.audit.tampering import ADMITTED_GROUPS, change, insert, manifest, one


def free(run_dir: Path, group_id: str) -> str:
    insert(run_dir, "freed", {"group_id": group_id, "at": 0.0})
    return group_id


def free_batch(run_dir: Path, seq: int, *, checkpoint: int) -> str:
    """Free a full batch, its rows in a segment that is already deleted."""
    keep_checkpoint(run_dir, checkpoint)
    group_ids = [group["group_id"] for group in manifest(run_dir, seq)["groups"]]
    for group_id in group_ids:
        move_away(run_dir, free(run_dir, group_id))
    return group_ids[0]


def move_away(run_dir: Path, group_id: str) -> None:
    change(run_dir, "UPDATE rows SET segment = 77 WHERE group_id = ?", group_id)


def keep_checkpoint(run_dir: Path, seq: int) -> None:
    retained = {"policy": "policy", "incarnation": 1, "retained": f"[[{seq},{seq}],[9,9]]", "at": 0}
    insert(run_dir, "checkpoints", retained)


def free_admitted_group(run_dir: Path) -> str:
    (group_id,) = one(run_dir, ADMITTED_GROUPS)
    return free(run_dir, group_id)


def free_open_group(run_dir: Path) -> str:
    (group_id,) = one(run_dir, "SELECT group_id FROM groups WHERE state = 'open'")
    return free(run_dir, group_id)


def free_unknown_group(run_dir: Path) -> str:
    return free(run_dir, "p0-999999")


def free_uncommitted_batch(run_dir: Path) -> str:
    (seq,) = one(run_dir, "SELECT max(seq) FROM commits")
    made = "SELECT incarnation, number FROM commits WHERE seq = ?"
    change(run_dir, f"DELETE FROM versions WHERE (incarnation, number) IN ({made})", seq)
    change(run_dir, "DELETE FROM commits WHERE seq = ?", seq)
    return free_batch(run_dir, seq, checkpoint=seq)


def free_batch_after_a_checkpoint(run_dir: Path) -> str:
    return free_batch(run_dir, 2, checkpoint=1)
