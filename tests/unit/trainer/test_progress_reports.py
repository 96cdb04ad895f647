# SPDX-License-Identifier: Apache-2.0
"""A long step is reported while it runs, and a report that fails harms nothing."""

from __future__ import annotations

import threading

from penstock.errors import Unreachable
from penstock.trainer.progress_reports import ProgressReports

MINUTE_S = 60.0


def test_a_count_is_sent_once_it_has_changed_and_again_if_a_report_failed() -> None:
    sent: list[int] = []
    changed = threading.Condition()
    is_down = True

    def send(num_done: int) -> None:
        with changed:
            sent.append(num_done)
            changed.notify_all()
            if is_down:
                raise Unreachable("the service restarts")

    with ProgressReports(send, interval_s=0.01) as reports, changed:
        reports.count()
        assert changed.wait_for(lambda: sent.count(1) == 2, MINUTE_S)
        is_down = False
        assert changed.wait_for(lambda: sent.count(1) == 3, MINUTE_S)
        reports.count()
        assert changed.wait_for(lambda: sent[-1] == 2, MINUTE_S)
    assert sent.count(1) == 3 and sent.count(2) == 1
