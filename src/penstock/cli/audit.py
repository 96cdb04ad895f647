# SPDX-License-Identifier: Apache-2.0
"""`penstock audit`: an independent reader verifies a run from its files."""

from __future__ import annotations

from pathlib import Path


def audit(run: Path, /, *, json: bool = False) -> int:
    """Verify from a run's files that no data was lost, trained twice or too stale.

    Args:
        run: Run folder, or its config file; running, stopped or finished.
        json: Print one JSON object as the last line.
    """
    from penstock.audit import audit as read_and_check
    from penstock.cli.output import print_json, print_text
    from penstock.runs.target import find_run_folder

    report = read_and_check(find_run_folder(run).path if run.is_file() else run)
    print_text("\n".join(report.lines()))
    if json:
        print_json({"ok": report.ok, "checks": report.checks, "summary": report.summary})
    return 0 if report.ok else 1
