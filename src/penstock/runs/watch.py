# SPDX-License-Identifier: Apache-2.0
"""Shows a running run from another process, until it ends. Changes nothing in the run."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from penstock.fleet.run_folder import RunFolder
from penstock.runs.control import make_status_client
from penstock.runs.curves import reward_by_step
from penstock.runs.launch import READER_TTL_S, REDRAW_S
from penstock.runs.monitor import ErrorTail, StatusPoller

if TYPE_CHECKING:
    from penstock.runs.launch import Display

GONE_S = 10.0
"""Without a launcher, a dataflow that does not answer for this long has ended."""


def watch_run(folder: RunFolder, name: str, display: Display) -> None:
    """Update the display until the run ends.

    consumes: the status and errors in logs · produces: display updates · waits for: REDRAW_S
    ends: when the launcher exits; without one, when the dataflow is finished or gone"""
    make_reader = partial(make_status_client, folder, name, ttl_s=READER_TTL_S)
    has_launcher = folder.launcher_pid() is not None
    logs = {path.stem: path for path in sorted((folder.logs / "latest").glob("*.log"))}
    tail = ErrorTail(logs)
    with StatusPoller(name, make_reader, reward_by_step(folder.metrics)) as poller:
        while True:
            if (error := tail.newest()) is not None:
                poller.notify(error)
            view = poller.view()
            if view.status is not None or view.unreachable_s > REDRAW_S:
                display.update(view)
            if has_launcher and folder.launcher_pid() is None:
                return
            if not has_launcher and (poller.is_finished() or view.unreachable_s > GONE_S):
                return
            time.sleep(REDRAW_S)
