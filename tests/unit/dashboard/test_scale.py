# SPDX-License-Identifier: Apache-2.0
"""Queries of the views do not grow with the run: a million rows against ten thousand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import big_ledger
from benchmarks.client import POLICY

from penstock.config import demo_config, dump
from penstock.dashboard import decisions, flow, overview, rows, spend, timeline
from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.explain.explain import explain
from penstock.fleet.run_folder import RunFolder

pytestmark = pytest.mark.slow
GROUP_SIZE = 8
NUM_SMALL, NUM_LARGE = 10_000, 1_000_000
REPEATS = 20
NOISE_S = 0.010
"""Below this, a ratio says nothing."""


def make_run(folder: Path, num_rows: int) -> ShownRun:
    big_ledger.fill(folder / "ledger", num_groups=num_rows // GROUP_SIZE, group_size=GROUP_SIZE)
    config = demo_config(0)
    models = {str(POLICY): config.models["policy"]}
    (folder / "config.yaml").write_text(dump(config.model_copy(update={"models": models})))
    return ShownRun(RunFolder(folder), "run")


def views(run: ShownRun, num_rows: int) -> dict[str, Callable[[], Any]]:
    middle = f"p0-{num_rows // GROUP_SIZE // 2}"
    [group] = run.recorded.groups("group_id = :id", id=middle)
    task_key = group.task_key

    def page(**filters: Any) -> Callable[[], Any]:
        return lambda: rows.read_page(run, rows.PageQuery(**filters))

    return {
        "overview": lambda: overview.summarise(run),
        "newest": page(),
        "in the middle": page(before={0: num_rows // 2}),
        "none matches": page(outcome="failed"),
        "best": page(order="best"),
        "fate": page(fate="trained"),
        "text": page(text="no such text"),
        "flow": lambda: flow.read_flow(run),
        "lineage": lambda: explain(run.recorded, middle),
        "of a row": lambda: explain(run.recorded, f"{middle}.0.1"),
        "of a task": lambda: explain(run.recorded, task_key),
        "of a version": lambda: explain(run.recorded, f"{POLICY}@1.0"),
        "fleet": lambda: timeline.read_timeline(run, rows.NEWEST),
        "rules": lambda: decisions.read_decisions(run),
        "spend": lambda: spend.read_spend(run),
    }


def p95_s(query: Callable[[], Any]) -> float:
    """CPU seconds: other programs on the machine do not count."""
    query()  # opens files and caches
    took: list[float] = []
    for _ in range(REPEATS):
        began = time.thread_time()
        query()
        took.append(time.thread_time() - began)
    return sorted(took)[int(0.95 * len(took)) - 1]


def test_a_million_rows_cost_what_ten_thousand_cost(tmp_path: Path) -> None:
    small, large = make_run(tmp_path / "small", NUM_SMALL), make_run(tmp_path / "large", NUM_LARGE)
    slow: list[str] = []
    few, many = views(small, NUM_SMALL), views(large, NUM_LARGE)
    for name, query in few.items():
        before, after = p95_s(query), p95_s(many[name])
        print(f"{name:>14} {1e3 * before:8.1f} ms {1e3 * after:8.1f} ms")
        if after > 3 * max(before, NOISE_S):
            slow.append(f"{name}: {before:.3f} s, then {after:.3f} s")
    assert slow == []
