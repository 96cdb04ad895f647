# SPDX-License-Identifier: Apache-2.0
"""Violations of batches, commits and versions. Each returns what the audit must name."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.audit.tampering import (
    Record,
    change,
    fetch_record,
    insert,
    last_turn,
    ledger,
    manifest,
    one,
    rewrite_manifest,
    rewrite_payload,
    row_in_batch,
)

# --- batches --------------------------------------------------------------------------------------


def summary_of(run_dir: Path, group_id: str) -> Record:
    """A group as a manifest would name it."""
    group = fetch_record(run_dir, "groups", "group_id = ?", group_id)
    with ledger(run_dir) as connection:
        rows = connection.execute(
            "SELECT row_id, digest, reward, outcome, sampled, versions, compute_cost FROM rows "
            "WHERE group_id = ? AND reward IS NOT NULL ORDER BY slot",
            (group_id,),
        ).fetchall()
    names = ("row_id", "digest", "reward", "outcome", "sampled", "versions", "compute_cost")
    members = [dict(zip(names, row, strict=True)) for row in rows]
    for member in members:
        for name in ("sampled", "versions", "compute_cost"):
            member[name] = json.loads(member[name])
    return {"group_id": group_id, "task_key": group["task_key"], "rows": members}


def reseal_with_another_group(run_dir: Path) -> str:
    """Batch 3 with a group that was dropped while it was sealed, as old as the others."""
    (group_id,) = one(run_dir, "SELECT group_id FROM fates WHERE reason = 'outpaced'")
    other = summary_of(run_dir, group_id)
    rewrite_manifest(run_dir, 3, lambda body: body["groups"].__setitem__(0, other))
    change(run_dir, "UPDATE batches SET staleness_mean = ? WHERE seq = 3", mean_age(run_dir, 3))
    return "policy.3"


def mean_age(run_dir: Path, seq: int) -> float:
    """Of a batch sealed before the first fork."""
    content = manifest(run_dir, seq)
    rows = [row for group in content["groups"] for row in group["rows"]]
    return sum(content["trains_from"] - row["versions"]["policy"][0][1] for row in rows) / len(rows)


def reseal_without_a_row(run_dir: Path) -> str:
    rewrite_manifest(run_dir, 1, lambda body: body["groups"][0]["rows"].pop())
    return "policy.1"


def flip_manifest_byte(run_dir: Path) -> str:
    (body,) = one(run_dir, "SELECT manifest FROM batches WHERE seq = 3")
    at = body.index(b"task_key") + 10
    spoilt = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
    change(run_dir, "UPDATE batches SET manifest = ? WHERE seq = 3", spoilt)
    return "policy.3"


def lose_manifest(run_dir: Path) -> str:
    change(run_dir, "UPDATE batches SET manifest = x'00' WHERE seq = 2")
    return "policy.2"


def change_sealed_reward(run_dir: Path) -> str:
    def edit(body: Record) -> None:
        body["groups"][0]["rows"][0]["reward"] = 0.9

    rewrite_manifest(run_dir, 4, edit)
    return "policy.4"


def change_sealed_work(run_dir: Path) -> str:
    def edit(body: Record) -> None:
        body["groups"][0]["rows"][0]["compute_cost"]["policy"][0] += 1

    rewrite_manifest(run_dir, 4, edit)
    return "policy.4"


# --- instalments ----------------------------------------------------------------------------------


def _stream(run_dir: Path, **changed: object) -> str:
    """Batch 2 as if it had come in one instalment, but for what is changed."""
    batch = fetch_record(run_dir, "batches", "seq = 2")
    names = ("consumer", "seq", "incarnation", "trains_from", "num_groups", "num_rows")
    record = {name: batch[name] for name in (*names, "digest", "manifest", "sealed_at")}
    record |= {"instalment": 1, "staleness_sum": 0, "staleness_max": 0, "is_last": 1, **changed}
    insert(run_dir, "instalments", record)
    return f"{record['consumer']}.{record['seq']}"


def seal_without_a_last_instalment(run_dir: Path) -> str:
    return _stream(run_dir, is_last=0)


def damage_an_instalment(run_dir: Path) -> str:
    return _stream(run_dir, digest="0" * 64)


def leave_an_instalment_behind(run_dir: Path) -> str:
    """Of a batch that was never sealed, far ahead."""
    return _stream(run_dir, seq=99)


# --- trained twice --------------------------------------------------------------------------------


def commit_twice_along_the_lineage(run_dir: Path) -> str:
    """The second incarnation commits a batch that its checkpoint already includes."""
    commit = fetch_record(run_dir, "commits", "seq = 2 AND incarnation = 1")
    insert(run_dir, "commits", commit | {"incarnation": 2})
    return "policy.2"


def commit_out_of_order(run_dir: Path) -> str:
    for seq, number in ((1, 2), (2, 1)):
        change(
            run_dir,
            "UPDATE commits SET number = ? WHERE seq = ? AND incarnation = 1",
            number,
            seq,
        )
    return "policy.1"


def count_a_skipped_batch(run_dir: Path) -> str:
    change(run_dir, "UPDATE commits SET skipped = '' WHERE skipped <> ''")
    return "policy.4"


def fork_past_the_commits(run_dir: Path) -> str:
    """The second incarnation claims a checkpoint without a batch that its number counts."""
    statement = "UPDATE incarnations SET seq = 1 WHERE incarnation = 2"
    change(run_dir, statement)
    return "policy@2"


# --- staleness ------------------------------------------------------------------------------------


def sample_too_early(run_dir: Path) -> str:
    """Tokens of batch 4, which trains from number 3, by number 0."""
    edit = last_turn(lambda turn: [span.update(number=0) for span in turn["spans"]])
    rewrite_payload(run_dir, row_in_batch(run_dir, 4), edit)
    return "policy.4"


def understate_staleness(run_dir: Path) -> str:
    change(run_dir, "UPDATE batches SET staleness_max = 0, staleness_mean = 0 WHERE seq = 3")
    return "policy.3"


def overstate_mean_staleness(run_dir: Path) -> str:
    change(run_dir, "UPDATE batches SET staleness_mean = 0.9 WHERE seq = 2")
    return "policy.2"


def lower_the_bound(run_dir: Path) -> str:
    path = run_dir / "config.yaml"
    text = path.read_text()
    assert "max_staleness: 1" in text
    path.write_text(text.replace("max_staleness: 1", "max_staleness: 0"))
    return "policy.2"


def train_from_nowhere(run_dir: Path) -> str:
    change(run_dir, "UPDATE batches SET trains_from = 9 WHERE seq = 5")
    rewrite_manifest(run_dir, 5, lambda body: body.update(trains_from=9))
    return "policy.5"


# --- versions -------------------------------------------------------------------------------------


def publish_uncommitted(run_dir: Path) -> str:
    version = fetch_record(run_dir, "versions", "incarnation = 1 AND number = 5")
    change(run_dir, "DELETE FROM commits WHERE incarnation = 1 AND seq = 5")
    return f"policy@1.{version['number']}"


def lose_weights(run_dir: Path) -> str:
    version = fetch_record(run_dir, "versions", "incarnation = 1 AND number = 1")
    (run_dir / "weights" / "manifests" / f"{version['manifest_digest']}.json").unlink()
    return "policy@1.1"


def damage_weights(run_dir: Path) -> str:
    version = fetch_record(run_dir, "versions", "incarnation = 1 AND number = 2")
    path = run_dir / "weights" / "manifests" / f"{version['manifest_digest']}.json"
    path.write_bytes(path.read_bytes() + b" ")
    return "policy@1.2"


def publish_other_weights(run_dir: Path) -> str:
    other = fetch_record(run_dir, "versions", "incarnation = 1 AND number = 4")
    change(
        run_dir,
        "UPDATE versions SET manifest_digest = ? WHERE incarnation = 1 AND number = 3",
        other["manifest_digest"],
    )
    return "policy@1.3"
