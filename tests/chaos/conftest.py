# SPDX-License-Identifier: Apache-2.0
"""Prints the table of all campaigns that ran, whether they passed or not."""

from __future__ import annotations

import pytest
from tests.chaos.results_table import CAMPAIGNS, lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if CAMPAIGNS:
        terminalreporter.section("faults")
        for line in lines(CAMPAIGNS):
            terminalreporter.write_line(line)
