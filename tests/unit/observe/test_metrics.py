# SPDX-License-Identifier: Apache-2.0
"""Metrics lines and the Prometheus registry."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

from prometheus_client import Counter, generate_latest

from penstock.observe.metrics import MetricsFile
from penstock.observe.prometheus import new_registry


def test_records_are_complete_lines_of_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append({"step": 1, "reward": 0.5, "ratio": float("nan"), "note": "ä"})
    metrics.close()
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert {k: record[k] for k in ("step", "reward", "ratio", "note")} == {
        "step": 1,
        "reward": 0.5,
        "ratio": None,
        "note": "ä",
    }
    assert record["time"] > 1e9


def test_writers_never_tear_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def write(writer: int) -> None:
        metrics = MetricsFile(path)
        for step in range(200):
            metrics.append({"writer": writer, "step": step, "pad": "x" * 500})
        metrics.close()

    threads = [Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(r["writer"], r["step"]) for r in records} == {
        (writer, step) for writer in range(4) for step in range(200)
    }


def test_two_services_in_one_process_have_separate_registries() -> None:
    first, second = new_registry("dataflow", "r"), new_registry("weights", "r")
    Counter("rows", "Rows.", registry=first).inc(3)
    assert b"rows_total 3.0" in generate_latest(first)
    assert b"rows_total" not in generate_latest(second)
    assert b'service="weights"' in generate_latest(second)
