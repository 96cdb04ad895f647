# SPDX-License-Identifier: Apache-2.0
"""`ControlClient`: one run, read and controlled from Python through its folder.

Owns the choice of calls; they are in `runs.control`. Starts nothing; `penstock.run` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from penstock.observe.admin_log import local_user
from penstock.runs import control
from penstock.runs.target import find_run_folder
from penstock.wire.auth import Role

if TYPE_CHECKING:
    from penstock.dataflow.report.shape import BalanceReport
    from penstock.dataflow.service.operators.messages import ForgetSessionAnswer, Status

RoleName = Literal["admin", "trainer", "rollout", "stage", "gateway", "session", "relay", "reader"]
TOKEN_TTL_S = 24 * 3600.0


class ControlClient:
    """Reads and controls one run: `ControlClient("outputs/my-run").status()`."""

    def __init__(self, run: str | Path) -> None:
        """`run`: the run folder, or the config file that describes it."""
        self._folder = find_run_folder(Path(run))

    @property
    def url(self) -> str:
        """URL of the run's dataflow, for clients of rows and versions."""
        return self._folder.trusted_endpoints().dataflow

    def token(self, role: RoleName, *, ttl_s: float = TOKEN_TTL_S) -> str:
        """An access token with this role: `stage` for a RowsClient, `trainer` for a
        VersionsClient. Needs the signing key in the run folder."""
        return self._folder.token(self._folder.read_config().name, Role(role), ttl_s=ttl_s)

    def status(self) -> Status:
        """The state of the run: services, policies, rows, alarms."""
        return control.read_status(self._folder)

    def report(self) -> BalanceReport:
        """Whether trainers or nodes are the bottleneck, and where time goes."""
        return control.read_report(self._folder)

    def forget_session(self, session: str) -> ForgetSessionAnswer:
        """Exclude the session of an external agent from all future batches."""
        return control.forget_session(self._folder, session)

    def scale(
        self, to: int | None = None, *, mode: Literal["act", "recommend"] | None = None
    ) -> None:
        """Ask for a rollout pool of `to` GPUs, or for another mode of the autoscaler. Returns at
        once; `report` shows what becomes of it."""
        from penstock.fleet.autoscaler import ScaleMode
        from penstock.runs.scaling import request_scale

        chosen = None if mode is None else ScaleMode(mode)
        request_scale(self._folder, gpus=to, mode=chosen)

    def drain(self, node: str, *, why: str = "", timeout_s: float = 60.0) -> bool:
        """Tell a node to return its work and leave for good; False if it is still there after
        `timeout_s`."""
        return control.drain_node(
            self._folder, node, who=local_user(), why=why, timeout_s=timeout_s
        )

    def stop(self, *, timeout_s: float = 60.0) -> bool:
        """Stop the run gracefully and wait until it has ended; False if it was not running.
        `penstock.run` resumes it."""
        return control.stop_run(self._folder, timeout_s=timeout_s)
