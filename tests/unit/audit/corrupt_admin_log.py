# SPDX-License-Identifier: Apache-2.0
"""Violations of the log of operators' actions; each function returns what the audit must name."""

from __future__ import annotations

from pathlib import Path

from tests.unit.audit.tampering import change

from penstock.observe.admin_log import HEAD, LOG, AdminAction, AdminLog


def _write(run_dir: Path) -> AdminLog:
    log = AdminLog(run_dir)
    for name in ("a", "b", "c"):
        log.append(AdminAction.TOKEN_ISSUED, who="operator", name=name)
    return log


def change_a_line(run_dir: Path) -> str:
    _write(run_dir)
    path = run_dir / LOG
    path.write_bytes(path.read_bytes().replace(b'"name":"b"', b'"name":"x"'))
    return "line 3"


def cut_the_end(run_dir: Path) -> str:
    _write(run_dir)
    path = run_dir / LOG
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    return "the end was cut off"


def delete_it(run_dir: Path) -> str:
    head = _write(run_dir).head()
    change(run_dir, "INSERT INTO meta (key, value) VALUES (?, ?)", "admin_log", str(head))
    (run_dir / LOG).unlink()
    (run_dir / HEAD).unlink()
    return "the ledger"
