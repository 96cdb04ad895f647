# SPDX-License-Identifier: Apache-2.0
"""Reads and controls a run through its folder: status, report, versions in use, forget, drain,
stop."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing, suppress
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from penstock.dataflow.client.dataflow import StatusClient
from penstock.errors import BadRequest, ConfigError, LaunchError, WireError
from penstock.fleet.process_state import owner_of
from penstock.observe.admin_log import AdminAction
from penstock.wire.auth import Role
from penstock.wire.client import REQUEST_TIMEOUT_S, ServiceClient
from penstock.wire.held_token import HeldToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.config import RunConfig
    from penstock.dataflow.report.shape import BalanceReport
    from penstock.dataflow.service.operators.messages import (
        ForgetSessionAnswer,
        NodeTags,
        Status,
    )
    from penstock.dataflow.service.trainers.messages import VersionInUse
    from penstock.fleet.run_folder import RunFolder

TOKEN_TTL_S = 60.0
PATIENCE_S = 2.0
"""Retry an unreachable service for this long: a person is waiting."""
FORGET_DEADLINE_S = 20.0
MAX_ANSWER_BYTES = 16 << 20
DRAIN_POLL_S = 0.2
STOP_POLL_S = 0.1


def make_status_client(
    folder: RunFolder, run: str, *, patience_s: float = PATIENCE_S
) -> StatusClient:
    """A reader of this run's dataflow; the caller closes it."""
    token = HeldToken(lambda: folder.token(run, Role.READER, ttl_s=TOKEN_TTL_S))
    return StatusClient(folder.endpoints().dataflow, token, patience_s=patience_s)


def _status_client(
    folder: RunFolder, *, run: str = "", patience_s: float = PATIENCE_S
) -> closing[StatusClient]:
    name = run or folder.read_config().name
    return closing(make_status_client(folder, name, patience_s=patience_s))


def read_status(folder: RunFolder, *, run: str = "", patience_s: float = PATIENCE_S) -> Status:
    """The state of a running run. WireError if its dataflow does not answer. `run`: its name, if
    the caller knows it."""
    with _status_client(folder, run=run, patience_s=patience_s) as client:
        return client.status()


def read_report(folder: RunFolder, *, patience_s: float = PATIENCE_S) -> BalanceReport:
    """The balance report of a running run. WireError if its dataflow does not answer."""
    with _status_client(folder, patience_s=patience_s) as client:
        return client.report()


def read_stored_report(folder: RunFolder) -> BalanceReport:
    """The last report that the dataflow service stored: of a run that is not running."""
    from penstock.dataflow.report.shape import BalanceReport
    from penstock.durable import read_own
    from penstock.fleet.run_folder import MAX_RECORD_BYTES
    from penstock.wire.codec import JSON, decode

    try:
        content = read_own(folder.report, MAX_RECORD_BYTES)
        return decode(content, BalanceReport, media_type=JSON)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder.path} has no report: its dataflow service stores the first one after "
            f"some seconds. Start the run with `penstock run {folder.path}`"
        ) from None
    except (BadRequest, OSError) as error:
        raise ConfigError(
            f"{folder.report} cannot be read: {error}; the next start of the run replaces it"
        ) from None


def _operator_client(folder: RunFolder, token: str) -> ServiceClient:
    return ServiceClient(
        folder.endpoints().dataflow,
        token,
        max_response_bytes=MAX_ANSWER_BYTES,
        answer_s=REQUEST_TIMEOUT_S,
    )


def drain_node(folder: RunFolder, node: str, *, who: str, why: str, timeout_s: float) -> bool:
    """Tell a node to return its work and leave for good, and wait until it has left; False if it is
    still there after `timeout_s`. `who`: name of the operator, for the log of actions. NotFound if
    the run has no such node."""
    from penstock.dataflow.service.messages import Ack

    run = folder.read_config().name
    token = folder.token(run, Role.ADMIN, ttl_s=TOKEN_TTL_S, subject=who)
    with closing(_operator_client(folder, token)) as client:
        path = f"/v1/nodes/{quote(node, safe='')}/drain?why={quote(why)}"
        client.call("POST", path, None, Ack, deadline_s=FORGET_DEADLINE_S)
    give_up_at = time.monotonic() + timeout_s
    with _status_client(folder) as reader:
        while any(str(one.node_id) == node for one in reader.status().nodes):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(DRAIN_POLL_S)
    return True


def versions_in_use(folder: RunFolder, config: RunConfig) -> list[VersionInUse]:
    """Versions that must be kept: from the service, which knows the nodes, if it answers; otherwise
    from the ledger. WireError if there is a launcher, but the service does not answer."""
    from penstock.dataflow.ledger.recorded import open_recorded_run
    from penstock.dataflow.service.trainers.version_use import versions_in_use_on_disk
    from penstock.types import PolicyName

    has_launcher = folder.launcher_pid() is not None
    try:
        with _status_client(folder, patience_s=PATIENCE_S if has_launcher else 0.0) as client:
            return list(client.versions_in_use().versions)
    except (WireError, ConfigError):
        if has_launcher:
            raise
    bounds = {
        PolicyName(name): config.for_policy(name).training.max_staleness for name in config.models
    }
    with closing(open_recorded_run(folder.path / "ledger")) as recorded:
        return list(versions_in_use_on_disk(recorded, bounds))


def forget_session(folder: RunFolder, session: str) -> ForgetSessionAnswer:
    """Exclude an agent's session from all future batches; the run must be running."""
    from penstock.dataflow.service.operators.messages import ForgetSessionAnswer

    token = folder.token(folder.read_config().name, Role.ADMIN, ttl_s=TOKEN_TTL_S)
    with closing(_operator_client(folder, token)) as client:
        path = f"/v1/sessions/{quote(session, safe='')}"
        return client.call("DELETE", path, None, ForgetSessionAnswer, deadline_s=FORGET_DEADLINE_S)


def tag_node(
    folder: RunFolder,
    node: str,
    *,
    add: Sequence[str],
    remove: Sequence[str],
    who: str = "",
    why: str = "",
) -> NodeTags:
    """Add and remove tags of a node; the run must be running. `who`: name of the operator, for the
    log of actions."""
    from penstock.dataflow.service.operators.messages import NodeTags

    if not add and not remove:
        raise ConfigError("nothing to change: pass --add TAG or --remove TAG, such as --add train")
    token = folder.token(folder.read_config().name, Role.ADMIN, ttl_s=TOKEN_TTL_S, subject=who)
    query = urlencode({"add": ",".join(add), "remove": ",".join(remove), "why": why})
    with closing(_operator_client(folder, token)) as client:
        path = f"/v1/nodes/{quote(node, safe='')}/tags?{query}"
        return client.call("PUT", path, None, NodeTags, deadline_s=FORGET_DEADLINE_S)


def stop_run(folder: RunFolder, *, timeout_s: float) -> bool:
    """Stop a run gracefully and wait for its launcher to exit; False if it was not running."""
    holder = folder.lock_holder()
    if holder is None or (pid := holder.pid) is None:
        return False
    if owner_of(pid) != holder.owner:
        raise LaunchError(
            f"the lock of {folder.path} names process {pid}, which is not of the user who owns the "
            f"lock; nothing was stopped. If it is the launcher (`ps -fp {pid}`): kill {pid}"
        )
    with suppress(OSError):  # a full disk may be why it has to stop
        folder.admin_log.append(AdminAction.RUN_STOPPED, launcher=pid)
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
