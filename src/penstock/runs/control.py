# SPDX-License-Identifier: Apache-2.0
"""Reads and controls a run through its folder: status, report, versions in use, forget, stop."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.dataflow.client.dataflow import StatusClient
from penstock.errors import LaunchError
from penstock.wire.auth import Role

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.dataflow.report.shape import BalanceReport
    from penstock.dataflow.service.operators.messages import ForgetSessionAnswer, Status
    from penstock.dataflow.service.trainers.messages import VersionInUse
    from penstock.fleet.run_folder import RunFolder

TOKEN_TTL_S = 60.0
FORGET_DEADLINE_S = 20.0
STOP_POLL_S = 0.1


def make_status_client(folder: RunFolder, run: str, *, ttl_s: float = TOKEN_TTL_S) -> StatusClient:
    """A reader of this run's dataflow; the caller closes it."""
    token = folder.token(run, Role.READER, ttl_s=ttl_s)
    return StatusClient(folder.endpoints().dataflow, token)


def _status_client(folder: RunFolder) -> closing[StatusClient]:
    return closing(make_status_client(folder, folder.read_config().name))


def read_status(folder: RunFolder) -> Status:
    """The state of a running run. WireError if its dataflow does not answer."""
    with _status_client(folder) as client:
        return client.status()


def read_report(folder: RunFolder) -> BalanceReport:
    """The balance report of a running run. WireError if its dataflow does not answer."""
    with _status_client(folder) as client:
        return client.report()


def versions_in_use(folder: RunFolder, config: RunConfig) -> list[VersionInUse]:
    """Versions that must be kept: from the service, which knows the nodes, while the run is
    running; otherwise from its ledger."""
    from penstock.dataflow.ledger.recorded import open_recorded_run
    from penstock.dataflow.service.trainers.version_use import versions_in_use_on_disk
    from penstock.types import PolicyName

    if folder.launcher_pid() is not None:
        with _status_client(folder) as client:
            return list(client.versions_in_use().versions)
    bounds = {
        PolicyName(name): config.for_policy(name).training.max_staleness for name in config.models
    }
    with closing(open_recorded_run(folder.path / "ledger")) as recorded:
        return list(versions_in_use_on_disk(recorded, bounds))


def forget_session(folder: RunFolder, session: str) -> ForgetSessionAnswer:
    """Exclude an agent's session from all future batches; the run must be running."""
    from penstock.dataflow.service.operators.messages import ForgetSessionAnswer
    from penstock.wire.client import ServiceClient

    token = folder.token(folder.read_config().name, Role.ADMIN, ttl_s=TOKEN_TTL_S)
    with closing(ServiceClient(folder.endpoints().dataflow, token)) as client:
        path = f"/v1/sessions/{session}"
        return client.call("DELETE", path, None, ForgetSessionAnswer, deadline_s=FORGET_DEADLINE_S)


def stop_run(folder: RunFolder, *, timeout_s: float) -> bool:
    """Stop a run gracefully and wait for its launcher to exit; False if it was not running."""
    pid = folder.launcher_pid()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    give_up_at = time.monotonic() + timeout_s
    while folder.launcher_pid() == pid:
        if time.monotonic() > give_up_at:
            raise LaunchError(
                f"the launcher of {folder.path} (pid {pid}) is still running after "
                f"{timeout_s:g} s. Wait longer with --timeout-s, or run `kill -9 {pid}`: it ends "
                "all services immediately and no data is lost"
            )
        time.sleep(STOP_POLL_S)
    return True
