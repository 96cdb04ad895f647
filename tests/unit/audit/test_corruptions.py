# SPDX-License-Identifier: Apache-2.0
"""Each kind of violation, planted in an intact ledger, fails exactly its check of the audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.unit.audit import (
    corrupt_admin_log,
    corrupt_evaluations,
    corrupt_flow,
    corrupt_freed,
    corrupt_partitions,
    corrupt_rows,
    corrupt_training,
)
from tests.unit.audit.tampering import (
    ADMITTED_GROUPS,
    change,
    fetch_record,
    manifest,
    one,
    rewrite_manifest,
)

from penstock.audit import AuditReport, audit


def failed(report: AuditReport) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


def first(report: AuditReport, name: str) -> str:
    return next(check.first[0] for check in report.checks if check.name == name)


CORRUPTIONS: dict[str, tuple[Callable[[Path], str], ...]] = {
    "lost": (
        corrupt_rows.acknowledge_unknown,
        corrupt_rows.flip_payload_byte,
        corrupt_rows.cut_segment,
        corrupt_rows.delete_segment,
        corrupt_rows.change_row_digest,
        corrupt_rows.rewrite_behind_digest,
    ),
    "rows": (
        corrupt_rows.damage_unacknowledged,
        corrupt_rows.expire_lease_of_failed_row,
        corrupt_rows.change_row_reward,
        corrupt_rows.deliver_for_another_node,
    ),
    "slots": (
        corrupt_flow.deliver_slot_twice,
        corrupt_flow.end_slot_twice,
        corrupt_flow.leave_lease_running,
        corrupt_flow.lose_an_epoch,
        corrupt_flow.run_two_leases,
        corrupt_flow.grant_a_lease_twice,
        corrupt_flow.close_without_a_slot,
        corrupt_flow.miscount_attempts,
    ),
    "groups": (
        corrupt_flow.lose_group,
        corrupt_flow.lose_fate,
        corrupt_flow.seal_into_nothing,
        corrupt_flow.admit_dropped_group,
        corrupt_flow.issue_task_twice,
        corrupt_flow.issue_another_task,
        corrupt_flow.skip_an_issue,
    ),
    "freed": (
        corrupt_freed.free_admitted_group,
        corrupt_freed.free_open_group,
        corrupt_freed.free_unknown_group,
        corrupt_freed.free_uncommitted_batch,
        corrupt_freed.free_batch_after_a_checkpoint,
    ),
    "evaluations": (
        corrupt_evaluations.end_without_a_question,
        corrupt_evaluations.ask_a_question_twice,
        corrupt_evaluations.answer_without_evaluation,
        corrupt_evaluations.lose_an_answer,
    ),
    "batches": (
        corrupt_training.reseal_with_another_group,
        corrupt_training.reseal_without_a_row,
        corrupt_training.flip_manifest_byte,
        corrupt_training.lose_manifest,
        corrupt_training.change_sealed_reward,
        corrupt_training.change_sealed_work,
    ),
    "instalments": (
        corrupt_training.seal_without_a_last_instalment,
        corrupt_training.damage_an_instalment,
        corrupt_training.leave_an_instalment_behind,
    ),
    "trained_twice": (
        corrupt_training.commit_twice_along_the_lineage,
        corrupt_training.commit_out_of_order,
        corrupt_training.count_a_skipped_batch,
        corrupt_training.fork_past_the_commits,
    ),
    "sampled_by_policy": (
        corrupt_rows.sample_by_another_policy,
        corrupt_rows.sample_under_unpublished_version,
        corrupt_rows.leave_a_token_without_version,
        corrupt_rows.train_what_was_aborted,
        corrupt_rows.sample_with_odd_log_prob(b"\x00\x00\xc0\x7f"),  # NaN
        corrupt_rows.sample_with_odd_log_prob(b"\x00\x00\x80\xff"),  # minus infinity
        corrupt_rows.sample_with_odd_log_prob(b"\x00\x00\x80\x3f"),  # 1.0
    ),
    "staleness": (
        corrupt_training.sample_too_early,
        corrupt_training.understate_staleness,
        corrupt_training.overstate_mean_staleness,
        corrupt_training.lower_the_bound,
        corrupt_training.train_from_nowhere,
    ),
    "versions": (
        corrupt_training.publish_uncommitted,
        corrupt_training.lose_weights,
        corrupt_training.damage_weights,
        corrupt_training.publish_other_weights,
    ),
    "admin_log": (
        corrupt_admin_log.change_a_line,
        corrupt_admin_log.cut_the_end,
        corrupt_admin_log.delete_it,
    ),
}


@pytest.mark.parametrize(
    ("name", "corrupt"),
    [
        pytest.param(name, corrupt, id=f"{name}-{index}-{corrupt.__name__}")
        for name, corruptions in CORRUPTIONS.items()
        for index, corrupt in enumerate(corruptions)
    ],
)
def test_corruption_is_named(run_dir: Path, name: str, corrupt: Callable[[Path], str]) -> None:
    culprit = corrupt(run_dir)
    report = audit(run_dir)
    assert failed(report) == {name}, "\n".join(report.lines())
    assert culprit in first(report, name)
    assert not report.ok
    assert any(name in line and "FAILED" in line for line in report.lines())


def test_every_check_has_a_corruption(original: Path) -> None:
    planted = dict.fromkeys([*CORRUPTIONS, *corrupt_partitions.IN_QUIET])
    assert [check.name for check in audit(original).checks] == list(planted)


def test_row_in_two_committed_batches(run_dir: Path) -> None:
    """The batch is wrong as well: sealing never repeats a group."""
    double = manifest(run_dir, 1)["groups"][0]
    rewrite_manifest(run_dir, 2, lambda body: body["groups"].append(double))
    change(
        run_dir,
        "UPDATE batches SET staleness_mean = ? WHERE seq = 2",
        corrupt_training.mean_age(run_dir, 2),
    )
    report = audit(run_dir)
    assert failed(report) == {"batches", "trained_twice"}, "\n".join(report.lines())
    assert report.summary.trained_twice == len(double["rows"]) == 4


def test_row_deleted_from_the_ledger_is_lost(run_dir: Path) -> None:
    (group_id,) = one(run_dir, ADMITTED_GROUPS)
    row = fetch_record(run_dir, "rows", "group_id = ?", group_id)
    change(run_dir, "DELETE FROM rows WHERE row_id = ?", row["row_id"])
    report = audit(run_dir)
    assert failed(report) == {"lost", "slots"}
    assert report.summary.lost == 1
    offender = first(report, "lost")
    assert offender.startswith(f"{row['row_id']}: acknowledged") and "not in the ledger" in offender


def test_many_offenders_are_counted_and_few_are_shown(run_dir: Path) -> None:
    corrupt_rows.delete_segment(run_dir)
    report = audit(run_dir)
    lost = report.checks[0]
    assert lost.num_violations > 5 == len(lost.first)
    assert f"    and {lost.num_violations - 5:,} more" in report.lines()


def test_manifest_decodes_without_our_types(original: Path) -> None:
    """The corruptions above edit the service's bytes; make sure they decode them correctly."""
    (body,) = one(original, "SELECT manifest FROM batches WHERE seq = 1")
    assert msgspec.msgpack.encode(manifest(original, 1)) == body
