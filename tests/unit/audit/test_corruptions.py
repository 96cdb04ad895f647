# SPDX-License-Identifier: Apache-2.0
"""A violation of each kind, planted in a sound ledger, fails the audit by its name and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.unit.audit import (
    corrupt_flow as spoil_flow,
)
from tests.unit.audit import (
    corrupt_freed as spoil_freed,
)
from tests.unit.audit import (
    corrupt_partitions as spoil_partitions,
)
from tests.unit.audit import (
    corrupt_rows as spoil_rows,
)
from tests.unit.audit import (
    corrupt_training as spoil_training,
)
from tests.unit.audit.tampering import UNSEALED, change, manifest, one, rewrite_manifest, whole

from penstock.audit import AuditReport, audit


def failed(report: AuditReport) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


def first(report: AuditReport, name: str) -> str:
    return next(check.first[0] for check in report.checks if check.name == name)


PLANTS: dict[str, tuple[Callable[[Path], str], ...]] = {
    "lost": (
        spoil_rows.acknowledge_unknown,
        spoil_rows.flip_payload_byte,
        spoil_rows.cut_segment,
        spoil_rows.delete_segment,
        spoil_rows.change_row_digest,
        spoil_rows.rewrite_behind_digest,
    ),
    "rows": (
        spoil_rows.damage_unacknowledged,
        spoil_rows.expire_lease_of_failed_row,
        spoil_rows.change_row_reward,
        spoil_rows.deliver_for_another_node,
    ),
    "slots": (
        spoil_flow.deliver_slot_twice,
        spoil_flow.end_slot_twice,
        spoil_flow.leave_lease_running,
        spoil_flow.lose_an_epoch,
        spoil_flow.run_two_leases,
        spoil_flow.grant_a_lease_twice,
        spoil_flow.close_without_a_slot,
        spoil_flow.miscount_attempts,
    ),
    "groups": (
        spoil_flow.lose_group,
        spoil_flow.lose_fate,
        spoil_flow.seal_into_nothing,
        spoil_flow.admit_dropped_group,
        spoil_flow.issue_task_twice,
        spoil_flow.issue_another_task,
        spoil_flow.skip_an_issue,
        spoil_flow.judge_without_saying_so,
    ),
    "freed": (
        spoil_freed.free_admitted_group,
        spoil_freed.free_open_group,
        spoil_freed.free_unknown_group,
        spoil_freed.free_uncommitted_batch,
        spoil_freed.free_batch_after_a_checkpoint,
    ),
    "batches": (
        spoil_training.reseal_with_another_group,
        spoil_training.reseal_without_a_row,
        spoil_training.flip_manifest_byte,
        spoil_training.lose_manifest,
        spoil_training.change_sealed_reward,
        spoil_training.change_sealed_work,
    ),
    "trained_twice": (
        spoil_training.commit_twice_along_the_lineage,
        spoil_training.commit_out_of_order,
        spoil_training.count_a_skipped_batch,
        spoil_training.fork_past_the_commits,
    ),
    "sampled_by_policy": (
        spoil_rows.sample_by_another_policy,
        spoil_rows.sample_under_unpublished_version,
        spoil_rows.leave_a_token_without_version,
        spoil_rows.train_what_was_aborted,
        spoil_rows.sample_with_odd_log_prob(b"\x00\x00\xc0\x7f"),  # NaN
        spoil_rows.sample_with_odd_log_prob(b"\x00\x00\x80\xff"),  # minus infinity
        spoil_rows.sample_with_odd_log_prob(b"\x00\x00\x80\x3f"),  # 1.0
    ),
    "staleness": (
        spoil_training.sample_too_early,
        spoil_training.understate_staleness,
        spoil_training.overstate_mean_staleness,
        spoil_training.lower_the_bound,
        spoil_training.train_from_nowhere,
    ),
    "versions": (
        spoil_training.publish_uncommitted,
        spoil_training.lose_weights,
        spoil_training.damage_weights,
        spoil_training.publish_other_weights,
    ),
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
    planted = dict.fromkeys([*PLANTS, *spoil_partitions.IN_QUIET])
    assert [check.name for check in audit(original).checks] == list(planted)


def test_row_in_two_committed_batches(run_dir: Path) -> None:
    """It is a wrong batch as well: no honest sealing names a group twice."""
    double = manifest(run_dir, 1)["groups"][0]
    rewrite_manifest(run_dir, 2, lambda body: body["groups"].append(double))
    change(
        run_dir,
        "UPDATE batches SET staleness_mean = ? WHERE seq = 2",
        spoil_training.mean_age(run_dir, 2),
    )
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
    spoil_rows.delete_segment(run_dir)
    report = audit(run_dir)
    lost = report.checks[0]
    assert lost.num_violations > 5 == len(lost.first)
    assert f"    and {lost.num_violations - 5:,} more" in report.lines()


def test_manifest_decodes_without_our_types(original: Path) -> None:
    """The plants above spoil what the service wrote; make sure they see the same bytes."""
    (body,) = one(original, "SELECT manifest FROM batches WHERE seq = 1")
    assert msgspec.msgpack.encode(manifest(original, 1)) == body
