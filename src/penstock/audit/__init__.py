# SPDX-License-Identifier: Apache-2.0
"""Independent audit: verifies from a run's files that nothing was lost or trained twice.

Reads the files with its own parsers (`records`, `ledger`, `evidence`, `payloads`), reconstructs who
trained what (`lineage`), and has one function per check. Imports nothing from the services it
verifies, so a bug in their types cannot hide here. Writes nothing. Works on finished, stopped and
running runs.
"""

from __future__ import annotations

from pathlib import Path

from penstock.audit.admin_log import check_admin_log
from penstock.audit.batches import check_batches, check_staleness
from penstock.audit.evaluations import check_evaluations
from penstock.audit.evidence import Evidence
from penstock.audit.freed_groups import check_freed
from penstock.audit.groups import check_groups, check_slots
from penstock.audit.instalments import check_instalments
from penstock.audit.lineage import read_lineages
from penstock.audit.partition_links import check_messages, check_partitions
from penstock.audit.report import AuditReport, Check, Summary
from penstock.audit.rows import check_lost, check_rows, check_sampled
from penstock.audit.training import check_trained_twice, check_versions, summarise

__all__ = ["AuditReport", "Check", "Summary", "audit"]


def audit(run_dir: Path) -> AuditReport:
    """Run every check on the run in this folder; raises StoreError without a ledger."""
    evidence = Evidence(run_dir)
    lineages = read_lineages(evidence)
    checks = (
        check_lost(evidence),
        check_rows(evidence),
        check_slots(evidence),
        check_groups(evidence),
        check_freed(evidence),
        check_evaluations(evidence),
        check_batches(evidence),
        check_instalments(evidence),
        check_trained_twice(evidence, lineages),
        check_sampled(evidence),
        check_staleness(evidence, lineages),
        check_versions(evidence, lineages),
        check_admin_log(evidence.run_dir, evidence.tables.admin_log),
        check_partitions(evidence),
        check_messages(evidence),
    )
    return AuditReport(checks=checks, summary=summarise(evidence, lineages, checks[0]))
