# SPDX-License-Identifier: Apache-2.0
"""The report as text: complete, not too wide, and every number has a label."""

from __future__ import annotations

from tests.unit.dataflow.report.report_factories import (
    counts,
    figures,
    flow,
    node_figures,
    policy_figures,
)

from penstock.dataflow.report.build import make_report
from penstock.dataflow.report.figures import BalanceSettings, Figures, NodeActivity
from penstock.dataflow.report.shape import WindowReport
from penstock.dataflow.report.text import render


def text(given: Figures) -> str:
    return render(make_report(given, BalanceSettings(), 1101.0))


def test_a_busy_run() -> None:
    big = 10**12
    given = figures(
        policies=(
            policy_figures("solver", total=flow(big, big, big, stale=40, uniform_reward=900)),
            policy_figures("verifier", done=True),
        ),
        nodes=(
            node_figures(
                "node-eu-west-1b-0",
                cost_per_hour=2.0,
                produced=counts(10**9),
                accepted=counts(10**9),
            ),
            node_figures("n1", silent_s=9.0),
            node_figures("n2", activity=NodeActivity.SILENT),
        ),
    )
    shown = text(given)
    for words in (
        "SCALE UP",
        "1 GPU → 2 (+1)",
        "trainers wait 15.0% of their time, above 5%",
        "cooldown until",
        "suspect (not counted): n1",
        "gone (not counted): n2",
        "policy solver",
        "policy verifier (done)",
        "1.50 s waiting (15.0%)",
        "12 groups on nodes · 3 ready · 1 batch sealed",
        "0: 67% · 1: 33%",
        "uniform_reward",
        "100,000,000,000",
        "training 70.0% · waiting 30.0%",
        "rolling out",
    ):
        assert words in shown, words
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_a_run_that_has_not_started() -> None:
    first = WindowReport(index=0, opened_at=1100.0, closed_at=1101.0, complete=False)
    empty = policy_figures(samples=(), window=flow(0, 0, 0), total=flow(0, 0, 0), staleness={})
    shown = text(figures(window=first, policies=(empty,), nodes=()))
    assert "first window, still running" in shown
    assert "no step measured yet" in shown and "no node has joined yet" in shown
    assert "None" not in shown and "nan" not in shown
