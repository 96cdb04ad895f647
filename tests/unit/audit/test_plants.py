# SPDX-License-Identifier: Apache-2.0
"""A violation of each kind, planted in a sound ledger, fails the audit by its name and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.audit.plants import (
    Record,
    change,
    insert,
    ledger,
    manifest,
    one,
    payload,
    rewrite_manifest,
    rewrite_payload,
    row_in_batch,
    segment,
    store,
    whole,
)

from penstock.audit import AuditReport, audit

SEALED = "SELECT group_id FROM fates WHERE state = 'sealed' AND seq = 1"
UNSEALED = (
    "SELECT g.group_id FROM groups g JOIN fates f ON f.group_id = g.group_id "
    "WHERE g.state = 'closed' AND f.state = 'admitted'"
)


def failed(report: AuditReport) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


def first(report: AuditReport, name: str) -> str:
    return next(check.first[0] for check in report.checks if check.name == name)


# --- lost ---------------------------------------------------------------------------------------


def acknowledge_unknown(run_dir: Path) -> str:
    with (run_dir / "acks" / "node-0.txt").open("a") as log:
        log.write("p0-1.0.7\n")
    return "p0-1.0.7"


def flip_payload_byte(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 1)
    row = whole(run_dir, "rows", "row_id = ?", row_id)
    with segment(run_dir, row["segment"]).open("r+b") as file:
        file.seek(row["offset"] + 12 + row["length"] // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    return row_id


def cut_segment(run_dir: Path) -> str:
    row = whole(run_dir, "rows", "1 ORDER BY segment DESC, offset DESC")
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
    """A record with a fitting checksum that is not what was delivered."""
    row_id = row_in_batch(run_dir, 1)
    row = whole(run_dir, "rows", "row_id = ?", row_id)
    new = store(run_dir, row, {**payload(run_dir, row), "attempt": 9})
    change(
        run_dir,
        "UPDATE rows SET segment = ?, offset = ?, length = ? WHERE row_id = ?",
        *(new[name] for name in ("segment", "offset", "length", "row_id")),
    )
    return row_id


# --- rows ---------------------------------------------------------------------------------------


def damage_unacknowledged(run_dir: Path) -> str:
    row_id = flip_payload_byte(run_dir)
    for log in (run_dir / "acks").glob("*.txt"):
        log.write_text(log.read_text().replace(f"{row_id}\n", ""))
    return row_id


def expire_lease_of_failed_row(run_dir: Path) -> str:
    """Two ends for one lease: it expired, and its result was stored."""
    row = whole(run_dir, "rows", "outcome = 'failed'")
    where = "group_id = ? AND slot = ? AND epoch = ?"
    key = (row["group_id"], row["slot"], row["epoch"])
    change(run_dir, f"UPDATE leases SET ended = 'expired' WHERE {where}", *key)
    return row["row_id"]


def change_row_reward(run_dir: Path) -> str:
    (group_id,) = one(run_dir, UNSEALED)
    change(run_dir, "UPDATE rows SET reward = 1.0 WHERE group_id = ?", group_id)
    return group_id


def deliver_for_another_node(run_dir: Path) -> str:
    (group_id,) = one(run_dir, UNSEALED)
    row = whole(run_dir, "rows", "group_id = ?", group_id)
    other = "node-1" if row["node_id"] == "node-0" else "node-0"
    change(run_dir, "UPDATE rows SET node_id = ? WHERE row_id = ?", other, row["row_id"])
    rewrite_payload(run_dir, row["row_id"], lambda body: body.update(node_id=other))
    return row["row_id"]


# --- slots --------------------------------------------------------------------------------------


def next_lease(run_dir: Path, group_id: str, ended: str) -> Record:
    """One more lease for slot 0 of a closed group."""
    lease = whole(run_dir, "leases", "group_id = ? AND slot = 0 ORDER BY epoch DESC", group_id)
    lease |= {"epoch": lease["epoch"] + 1, "ended": ended}
    insert(run_dir, "leases", lease)
    return lease


def deliver_slot_twice(run_dir: Path) -> str:
    (group_id,) = one(run_dir, "SELECT group_id FROM fates WHERE reason = 'stale'")
    lease = next_lease(run_dir, group_id, "delivered")
    row = whole(run_dir, "rows", "group_id = ? AND slot = 0 ORDER BY epoch DESC", group_id)
    row_id = f"{group_id}.0.{lease['epoch']}"
    body = payload(run_dir, row) | {"row_id": row_id, "epoch": lease["epoch"]}
    insert(run_dir, "rows", store(run_dir, row | {"row_id": row_id, "epoch": body["epoch"]}, body))
    return f"{group_id}.0"


def end_slot_twice(run_dir: Path) -> str:
    (group_id,) = one(run_dir, SEALED)
    next_lease(run_dir, group_id, "delivered")
    return f"{group_id}.0"


def leave_lease_running(run_dir: Path) -> str:
    lease = whole(run_dir, "leases", "ended = 'cancelled' OR ended = 'expired'")
    (group_id,) = one(run_dir, "SELECT group_id FROM groups WHERE state = 'dropped'")
    key = (lease["node_id"], lease["session"])
    change(run_dir, "DELETE FROM leases WHERE group_id = ? AND slot = 3", group_id)
    change(run_dir, "DELETE FROM rows WHERE group_id = ? AND slot = 3", group_id)
    for log in (run_dir / "acks").glob("*.txt"):
        log.write_text(log.read_text().replace(f"{group_id}.3.1\n", ""))
    insert(
        run_dir,
        "leases",
        lease
        | {"group_id": group_id, "slot": 3, "epoch": 1, "attempt": 1, "ended": ""}
        | dict(zip(("node_id", "session"), key, strict=True)),
    )
    return group_id


def lose_an_epoch(run_dir: Path) -> str:
    lease = whole(run_dir, "leases", "ended = 'expired'")
    key = (lease["group_id"], lease["slot"], lease["epoch"])
    change(run_dir, "DELETE FROM leases WHERE group_id = ? AND slot = ? AND epoch = ?", *key)
    return f"{lease['group_id']}.{lease['slot']}"


def run_two_leases(run_dir: Path) -> str:
    lease = whole(run_dir, "leases", "ended = ''")
    insert(run_dir, "leases", lease | {"epoch": lease["epoch"] + 1})
    return f"{lease['group_id']}.{lease['slot']}"


def close_without_a_slot(run_dir: Path) -> str:
    """A group closed over a slot that expired, although its run demands every member."""
    (group_id,) = one(run_dir, UNSEALED)
    lease = whole(run_dir, "leases", "group_id = ? AND ended = 'delivered'", group_id)
    row_id = f"{group_id}.{lease['slot']}.{lease['epoch']}"
    change(
        run_dir,
        "UPDATE leases SET ended = 'expired' WHERE group_id = ? AND slot = ? AND epoch = ?",
        *(lease[name] for name in ("group_id", "slot", "epoch")),
    )
    change(run_dir, "DELETE FROM rows WHERE row_id = ?", row_id)
    for log in (run_dir / "acks").glob("*.txt"):
        log.write_text(log.read_text().replace(f"{row_id}\n", ""))
    return group_id


def miscount_attempts(run_dir: Path) -> str:
    lease = whole(run_dir, "leases", "attempt = 2")
    key = (lease["group_id"], lease["slot"], lease["epoch"])
    where = "group_id = ? AND slot = ? AND epoch = ?"
    change(run_dir, f"UPDATE leases SET attempt = 1 WHERE {where}", *key)
    return f"{lease['group_id']}.{lease['slot']}"


# --- groups -------------------------------------------------------------------------------------


def lose_group(run_dir: Path) -> str:
    (group_id,) = one(
        run_dir,
        "SELECT group_id FROM groups WHERE state = 'open' "
        "AND group_id NOT IN (SELECT group_id FROM leases) ORDER BY issue DESC",
    )
    change(run_dir, "DELETE FROM groups WHERE group_id = ?", group_id)
    return "train"


def lose_fate(run_dir: Path) -> str:
    (group_id,) = one(run_dir, UNSEALED)
    change(run_dir, "DELETE FROM fates WHERE group_id = ?", group_id)
    return group_id


def seal_into_nothing(run_dir: Path) -> str:
    (group_id,) = one(run_dir, UNSEALED)
    change(run_dir, "UPDATE fates SET state = 'sealed', seq = 99 WHERE group_id = ?", group_id)
    return group_id


def admit_dropped_group(run_dir: Path) -> str:
    (group_id,) = one(run_dir, "SELECT group_id FROM groups WHERE state = 'dropped'")
    statement = "UPDATE fates SET state = 'admitted', reason = '' WHERE group_id = ?"
    change(run_dir, statement, group_id)
    return group_id


def issue_task_twice(run_dir: Path) -> str:
    change(run_dir, "UPDATE groups SET ordinal = 0 WHERE issue = 5")
    return "train"


# --- batches ------------------------------------------------------------------------------------


def summary_of(run_dir: Path, group_id: str) -> Record:
    """A group as a manifest would name it."""
    group = whole(run_dir, "groups", "group_id = ?", group_id)
    with ledger(run_dir) as connection:
        rows = connection.execute(
            "SELECT row_id, digest, reward, outcome, sampled, oldest FROM rows "
            "WHERE group_id = ? AND reward IS NOT NULL ORDER BY slot",
            (group_id,),
        ).fetchall()
    names = ("row_id", "digest", "reward", "outcome", "sampled", "oldest")
    members = [dict(zip(names, row, strict=True)) for row in rows]
    for member in members:
        member["sampled"] = json.loads(member["sampled"])
        member["oldest"] = json.loads(member["oldest"])
    return {"group_id": group_id, "task_key": group["task_key"], "rows": members}


def reseal_with_another_group(run_dir: Path) -> str:
    """Batch 3 with a group that was declined while it was sealed, just as old as the others."""
    (group_id,) = one(run_dir, "SELECT group_id FROM fates WHERE reason = 'outpaced'")
    other = summary_of(run_dir, group_id)
    rewrite_manifest(run_dir, 3, lambda body: body["groups"].__setitem__(0, other))
    change(run_dir, "UPDATE batches SET staleness_mean = ? WHERE seq = 3", mean_age(run_dir, 3))
    return "policy.3"


def mean_age(run_dir: Path, seq: int) -> float:
    """Of a batch sealed before the first fork."""
    content = manifest(run_dir, seq)
    rows = [row for group in content["groups"] for row in group["rows"]]
    return sum(content["trains_from"] - row["oldest"]["policy"][1] for row in rows) / len(rows)


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
    def spoil(body: Record) -> None:
        body["groups"][0]["rows"][0]["reward"] = 0.9

    rewrite_manifest(run_dir, 4, spoil)
    return "policy.4"


# --- trained twice ------------------------------------------------------------------------------


def commit_twice_along_the_lineage(run_dir: Path) -> str:
    """The second life commits a batch that the checkpoint it restored already holds."""
    commit = whole(run_dir, "commits", "seq = 2 AND incarnation = 1")
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
    """The second life says that its checkpoint lacks a batch which the number counts."""
    statement = "UPDATE incarnations SET seq = 1 WHERE incarnation = 2"
    change(run_dir, statement)
    return "policy@2"


# --- sampled by policy --------------------------------------------------------------------------


def last_turn(spoil: Callable[[Record], Any]) -> Callable[[Record], None]:
    return lambda body: spoil(body["turns"][-1])


def sample_by_another_policy(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 1)
    rewrite_payload(run_dir, row_id, last_turn(lambda turn: turn.update(policy="judge")))
    return row_id


def sample_under_unpublished_version(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 2, 5)
    spoil = last_turn(lambda turn: turn["spans"][-1].update(number=77))
    rewrite_payload(run_dir, row_id, spoil)
    return row_id


def leave_a_token_without_version(run_dir: Path) -> str:
    row_id = row_in_batch(run_dir, 1)
    rewrite_payload(run_dir, row_id, last_turn(lambda turn: turn["spans"].pop()))
    return row_id


def sample_with_odd_log_prob(value: bytes) -> Callable[[Path], str]:
    def plant(run_dir: Path) -> str:
        row_id = row_in_batch(run_dir, 1)
        spoil = last_turn(lambda turn: turn.update(logprobs=turn["logprobs"][:8] + value))
        rewrite_payload(run_dir, row_id, spoil)
        return row_id

    return plant


def train_what_was_aborted(run_dir: Path) -> str:
    """Slot 0 has an aborted turn beside its good one; it must not count."""
    (row_id,) = one(run_dir, "SELECT row_id FROM rows WHERE slot = 0 AND reward IS NOT NULL")
    rewrite_payload(run_dir, row_id, lambda body: body["turns"][0].update(finish="stop"))
    return row_id


# --- staleness ----------------------------------------------------------------------------------


def sample_too_early(run_dir: Path) -> str:
    """Tokens of batch 4, which trains from number 3, by number 0."""
    spoil = last_turn(lambda turn: [span.update(number=0) for span in turn["spans"]])
    rewrite_payload(run_dir, row_in_batch(run_dir, 4), spoil)
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


# --- versions -----------------------------------------------------------------------------------


def publish_uncommitted(run_dir: Path) -> str:
    version = whole(run_dir, "versions", "incarnation = 1 AND number = 5")
    change(run_dir, "DELETE FROM commits WHERE incarnation = 1 AND seq = 5")
    return f"policy@1.{version['number']}"


def lose_weights(run_dir: Path) -> str:
    version = whole(run_dir, "versions", "incarnation = 1 AND number = 1")
    (run_dir / "weights" / "manifests" / f"{version['manifest_digest']}.json").unlink()
    return "policy@1.1"


def damage_weights(run_dir: Path) -> str:
    version = whole(run_dir, "versions", "incarnation = 1 AND number = 2")
    path = run_dir / "weights" / "manifests" / f"{version['manifest_digest']}.json"
    path.write_bytes(path.read_bytes() + b" ")
    return "policy@1.2"


def publish_other_weights(run_dir: Path) -> str:
    other = whole(run_dir, "versions", "incarnation = 1 AND number = 4")
    change(
        run_dir,
        "UPDATE versions SET manifest_digest = ? WHERE incarnation = 1 AND number = 3",
        other["manifest_digest"],
    )
    return "policy@1.3"


PLANTS: dict[str, tuple[Callable[[Path], str], ...]] = {
    "lost": (
        acknowledge_unknown,
        flip_payload_byte,
        cut_segment,
        delete_segment,
        change_row_digest,
        rewrite_behind_digest,
    ),
    "rows": (
        damage_unacknowledged,
        expire_lease_of_failed_row,
        change_row_reward,
        deliver_for_another_node,
    ),
    "slots": (
        deliver_slot_twice,
        end_slot_twice,
        leave_lease_running,
        lose_an_epoch,
        run_two_leases,
        close_without_a_slot,
        miscount_attempts,
    ),
    "groups": (lose_group, lose_fate, seal_into_nothing, admit_dropped_group, issue_task_twice),
    "batches": (
        reseal_with_another_group,
        reseal_without_a_row,
        flip_manifest_byte,
        lose_manifest,
        change_sealed_reward,
    ),
    "trained_twice": (
        commit_twice_along_the_lineage,
        commit_out_of_order,
        count_a_skipped_batch,
        fork_past_the_commits,
    ),
    "sampled_by_policy": (
        sample_by_another_policy,
        sample_under_unpublished_version,
        leave_a_token_without_version,
        train_what_was_aborted,
        sample_with_odd_log_prob(b"\x00\x00\xc0\x7f"),  # NaN
        sample_with_odd_log_prob(b"\x00\x00\x80\xff"),  # minus infinity
        sample_with_odd_log_prob(b"\x00\x00\x80\x3f"),  # 1.0
    ),
    "staleness": (
        sample_too_early,
        understate_staleness,
        overstate_mean_staleness,
        lower_the_bound,
        train_from_nowhere,
    ),
    "versions": (publish_uncommitted, lose_weights, damage_weights, publish_other_weights),
}


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        pytest.param(name, plant, id=f"{name}-{index}-{plant.__name__}")
        for name, plants in PLANTS.items()
        for index, plant in enumerate(plants)
    ],
)
def test_plant_fails_by_its_name(run_dir: Path, name: str, plant: Callable[[Path], str]) -> None:
    culprit = plant(run_dir)
    report = audit(run_dir)
    assert failed(report) == {name}, "\n".join(report.lines())
    assert culprit in first(report, name)
    assert not report.ok
    assert any(name in line and "FAILED" in line for line in report.lines())


def test_every_law_has_a_plant(original: Path) -> None:
    assert [check.name for check in audit(original).checks] == list(PLANTS)


def test_row_in_two_committed_batches(run_dir: Path) -> None:
    """It is a wrong batch as well: no honest sealing names a group twice."""
    double = manifest(run_dir, 1)["groups"][0]
    rewrite_manifest(run_dir, 2, lambda body: body["groups"].append(double))
    change(run_dir, "UPDATE batches SET staleness_mean = ? WHERE seq = 2", mean_age(run_dir, 2))
    report = audit(run_dir)
    assert failed(report) == {"batches", "trained_twice"}, "\n".join(report.lines())
    assert report.summary.trained_twice == len(double["rows"]) == 4


def test_row_deleted_from_the_ledger_is_lost(run_dir: Path) -> None:
    (group_id,) = one(run_dir, UNSEALED)
    row = whole(run_dir, "rows", "group_id = ?", group_id)
    change(run_dir, "DELETE FROM rows WHERE row_id = ?", row["row_id"])
    report = audit(run_dir)
    assert failed(report) == {"lost", "slots"}
    assert report.summary.lost == 1
    assert first(report, "lost") == f"{row['row_id']}: acknowledged, and not in the ledger"


def test_many_offenders_are_counted_and_few_are_shown(run_dir: Path) -> None:
    delete_segment(run_dir)
    report = audit(run_dir)
    lost = report.checks[0]
    assert lost.num_violations > 5 == len(lost.first)
    assert f"    and {lost.num_violations - 5:,} more" in report.lines()


def test_manifest_decodes_without_our_types(original: Path) -> None:
    """The plants above spoil what the service wrote; make sure they see the same bytes."""
    (body,) = one(original, "SELECT manifest FROM batches WHERE seq = 1")
    assert msgspec.msgpack.encode(manifest(original, 1)) == body
