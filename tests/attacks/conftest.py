# SPDX-License-Identifier: Apache-2.0
"""The attacks that once worked, and at the end of a run how many of them held.

Each attack is a test; its name and the first line of its docstring say what it proves.
"""

from __future__ import annotations

from typing import cast

import pytest

FINDINGS = {
    1: "a hostile relay names a file of the node as a blob",
    2: "one node's token delivers, releases and registers as another node",
    3: "user code reads the node's token, the signing key and cloud variables",
    4: "an agent controls the engine",
    5: "large prompts stop the gateway's event loop",
    6: "trailers bypass the limit on headers and carry credentials",
    7: "silent connections stop a service",
    8: "a NUL ends the ledger on PostgreSQL",
    9: "sampling specs and giant rows poison the trainer",
    10: "a node avoids quarantine by claiming lag or a new session",
    11: "a proxy of the environment gets bearer tokens",
    12: "a node joins over clear text and runs what the answer names",
    13: "a bad Retry-After freezes the weights",
    14: "registrations and uploads without end",
    15: "an agent's key sets its own reward and takes every session",
    16: "a partition's token redirects nodes and trainers",
    17: "tokens cannot be revoked and stand in command lines",
    18: "lenient base64, integers beyond the store, readable ledger, templates without end",
}
HERE = "tests/attacks/"
_held: dict[int, list[bool]] = {}
_outcomes: list[bool] = []


def pytest_itemcollected(item: pytest.Item) -> None:
    """So that a report says it, also that of another process."""
    item.user_properties += [("finding", mark.args[0]) for mark in item.iter_markers("finding")]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    is_outcome = (report.when == "call" or report.failed) and not report.skipped
    if is_outcome and report.nodeid.startswith(HERE):
        _outcomes.append(report.passed)
        for name, number in report.user_properties:
            if name == "finding":
                _held.setdefault(cast(int, number), []).append(report.passed)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _outcomes:
        return
    terminalreporter.section("attacks")
    for number, attack in FINDINGS.items():
        outcomes = _held.get(number)
        state = "not run" if outcomes is None else "held" if all(outcomes) else "WORKED"
        terminalreporter.write_line(f"{number:3} {state:8} {attack}")
    held = sum(all(outcomes) for outcomes in _held.values())
    terminalreporter.write_line(
        f"{held} of {len(FINDINGS)} findings held; "
        f"{sum(_outcomes)} of {len(_outcomes)} attacks held"
    )
