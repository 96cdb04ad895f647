# SPDX-License-Identifier: Apache-2.0
"""Reports that a step advances, while it runs: without reports, a long step looks like a trainer
that hangs.

Owns the count of micro-batches and the thread that sends it. A report that fails is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.errors import WireError

REPORT_S = 5.0
CLOSE_S = 10.0


class ProgressReports:
    """`with ProgressReports(send) as reports: … reports.count()`."""

    def __init__(self, send: Callable[[int], None], interval_s: float = REPORT_S) -> None:
        self._send = send
        self._interval_s = interval_s
        self._num_done = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress-reports", daemon=True)

    def count(self) -> None:
        """One more micro-batch is done."""
        self._num_done += 1

    def __enter__(self) -> ProgressReports:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        """consumes: the count · produces: a report if it has changed
        waits for: the next interval · woken by: the end"""
        sent = 0
        while not self._closing.wait(self._interval_s):
            if (num_done := self._num_done) == sent:
                continue
            try:
                self._send(num_done)
                sent = num_done
            except WireError:
                pass  # the next report says more
