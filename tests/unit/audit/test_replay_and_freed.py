# SPDX-License-Identifier: Apache-2.0
"""Runs that replay groups and free payload pass the audit; the same ledgers fail with a config that
allows neither."""

from __future__ import annotations

from pathlib import Path

from tests.unit.audit.ledgers import Run, always_completed, small_config
from tests.unit.audit.tampering import one

from penstock.audit import AuditReport, audit
from penstock.config import RunConfig, dump
from penstock.config.rules import RuleConfig
from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.service.trainers.messages import CheckpointsRequest


def with_rules(*rules: RuleConfig) -> RunConfig:
    config = small_config()
    flow = config.dataflow.model_copy(update={"rules": (*config.dataflow.rules, *rules)})
    return config.model_copy(update={"dataflow": flow})


def failed(report: AuditReport) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


async def test_groups_may_be_replayed_as_often_as_the_rule_allows(tmp_path: Path) -> None:
    rule = {"replay": "newest", "ratio": 0.4, "max_uses": 2, "max_staleness": 3}
    config = with_rules(RuleConfig.model_validate(rule))
    run = Run(tmp_path, config, choose=always_completed)
    await run.start()
    for _ in range(5):
        await run.step()
    run.close()
    assert one(tmp_path, "SELECT sum(num_replayed) FROM batches")[0] >= 2
    report = audit(tmp_path)
    assert report.ok, "\n".join(report.lines())
    assert report.summary.trained_twice == 0
    (tmp_path / "config.yaml").write_text(dump(small_config()))
    report = audit(tmp_path)
    assert failed(report) >= {"batches", "trained_twice"}
    assert report.summary.trained_twice > 0


async def test_a_run_frees_payload_and_stays_intact(tmp_path: Path) -> None:
    """Everything older than its checkpoints is freed; after a restart the rest is served, byte for
    byte."""
    segments_folder = tmp_path / "ledger" / "segments"
    config = small_config()
    flow = config.dataflow.model_copy(update={"keep": "sample(1e-9)"})  # next to nothing
    run = Run(tmp_path, config.model_copy(update={"dataflow": flow}), choose=always_completed)
    await run.start()
    for seq in range(1, 7):
        await run.step()
        body = CheckpointsRequest(incarnation=1, retained=((seq - 1, seq - 1), (seq, seq)))
        await run.service.trainers.checkpoints("policy", body)
        run.restart_service()
        await Compactor(run.service.process.ledger, bytes_per_s=1e12).sweep()
    assert one(tmp_path, "SELECT count(*) FROM freed")[0] >= 5 * 3
    left = segments.sizes(segments_folder)
    assert len(left) <= 3, "six starts, each with a separate segment"
    rows = await run.service.trainers.rows("policy", 6)
    assert all(row.payload is not None for row in rows.rows)
    run.close()
    report = audit(tmp_path)
    assert report.ok, "\n".join(report.lines())
