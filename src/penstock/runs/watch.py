# SPDX-License-Identifier: Apache-2.0
"""Shows a running run from another process, until it ends. Changes nothing in the run."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from penstock.fleet.run_folder import RunFolder
from penstock.runs.control import make_status_client
from penstock.runs.curves import reward_by_step
from penstock.runs.launch import REDRAW_S
from penstock.runs.monitor import ErrorTail, StatusPoller

if TYPE_CHECKING:
    from penstock.runs.launch import Display

FIRST_ANSWER_S = 3.0
"""Draw nothing before the first answer, unless it takes longer than this."""
GONE_S = 10.0
"""Without a launcher, a dataflow that does not answer for this long has ended."""


def watch_run(folder: RunFolder, name: str, display: Display) -> None:
    """Update the display until the run ends.

    consumes: the status and errors in logs · produces: display updates · waits for: REDRAW_S
    ends: when the launcher exits; without one, when the dataflow is finished or gone"""
    make_reader = partial(make_status_client, folder, name)
    has_launcher = folder.launcher_pid() is not None
    logs = folder.logs / "latest"
    tail = ErrorTail(lambda: {path.stem: path for path in sorted(logs.glob("*.log"))})
    launcher = folder.launcher()
    since = launcher.started_at if has_launcher and launcher else time.time()
    rewards = reward_by_step(folder.metrics)
    poller = StatusPoller(name, make_reader, rewards, elapsed_s=time.time() - since)
    with poller:
        while True:
            if (error := tail.newest()) is not None:
                poller.notify(error)
            view = poller.view()
            if view.status is not None or view.unreachable_s > FIRST_ANSWER_S:
                display.update(view)
            if has_launcher and folder.launcher_pid() is None:
                return
            if not has_launcher and (poller.is_finished() or view.unreachable_s > GONE_S):
                return
            time.sleep(REDRAW_S)
