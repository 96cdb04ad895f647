# SPDX-License-Identifier: Apache-2.0
"""The log line of an alarm claims no more than the alarm says."""

from __future__ import annotations

import pytest
import structlog.testing

from penstock.trainer.learner import Stats
from penstock.trainer.signals.alarms import ALARM_AFTER
from penstock.trainer.signals.monitor import SignalMonitor

GOOD = {"tokens/trained": 100.0, "signal/informative_groups": 0.5}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gap/k3": 0.14, "gap/staleness": 1.0}, "engines and trainer are far apart"),
        ({"signal/informative_groups": 0.0}, "consecutive batches had no learning signal"),
    ],
)
def test_a_line_names_its_own_cause(change: dict[str, float], why: str) -> None:
    monitor = SignalMonitor(lambda node: None)
    with structlog.testing.capture_logs() as lines:
        for seq in range(1, ALARM_AFTER + 1):
            monitor.observe(seq, Stats(skipped=None, values=GOOD | change))
    (line,) = lines
    assert line["event"] == "training needs attention"
    assert why in line["why"]
