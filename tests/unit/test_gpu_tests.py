# SPDX-License-Identifier: Apache-2.0
"""The tests that need GPUs: they are collected, skip with the reason, and make a report; the docs
list them with their commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_gpu_tests_skip_with_their_reason_and_report_it(tmp_path: Path) -> None:
    env = {**os.environ, "PENSTOCK_GPU_REPORT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-report.json").read_text())
    assert report["devices"] == [] and len(report["tests"]) >= 7
    for test in report["tests"]:
        assert test["outcome"] == "skipped" and "GPU" in test["why"], test
        assert f"skipped  {test['test']}" in (tmp_path / "gpu-report.txt").read_text()
    page = (ROOT / "docs" / "how-to" / "large-models.md").read_text()
    names = {test["test"].partition("[")[0] for test in report["tests"]}
    assert {name for name in names if f"`{name}`" not in page} == set()
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"`make gpu GPUS={name}`" in page for name in ("1", "8", "hosts"))
    files = [path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    assert files and all(f"tests/gpu/{name}" in makefile for name in files)
