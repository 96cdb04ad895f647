# SPDX-License-Identifier: Apache-2.0
"""Prints the table of all campaigns that ran, whether they passed or not."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import cast

import pytest
from tests.chaos.results_table import CAMPAIGNS, lines

_rows: list[Sequence[str]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report carries the figures, also to another process."""
    report = yield
    if call.when == "call":
        report.user_properties += [("campaign", figures.cells) for figures in CAMPAIGNS]
        CAMPAIGNS.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, cells in report.user_properties:
        if name == "campaign":
            _rows.append(cast(Sequence[str], cells))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _rows:
        terminalreporter.section("faults")
        for line in lines(_rows):
            terminalreporter.write_line(line)
