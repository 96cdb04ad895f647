# SPDX-License-Identifier: Apache-2.0
"""The report of the GPU tests: what a user sends. Figures are what a test recorded with
`record_property`; `gpu-report.json` and `gpu-report.txt` are written to the working directory, or
to the folder that PENSTOCK_GPU_REPORT names."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.machines import ENGINE

from penstock import __version__
from penstock.cli.doctor import check_vllm
from penstock.devices import links, visible_devices

PACKAGES = ("torch", "transformers", "nvidia-nccl-cu12")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tests = [
        _entry(report, outcome)
        for outcome in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        if isinstance(report, pytest.TestReport) and "tests/gpu/" in report.nodeid
    ]
    body = {**_machine(), "tests": sorted(tests, key=lambda test: test["test"])}
    folder = Path(os.environ.get("PENSTOCK_GPU_REPORT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(_lines(body)) + "\n"
    (folder / "gpu-report.json").write_text(json.dumps(body, indent=2) + "\n")
    (folder / "gpu-report.txt").write_text(text)
    terminalreporter.section("GPU report: please send gpu-report.json")
    terminalreporter.write(text)


def _entry(report: pytest.TestReport, outcome: str) -> dict[str, Any]:
    why = ""
    if isinstance(report.longrepr, tuple):
        why = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.failed:
        why = report.longreprtext[-2000:]
    return {
        "test": report.nodeid.rpartition("::")[2],
        "outcome": outcome,
        "seconds": round(report.duration, 2),
        "figures": dict(report.user_properties),
        "why": why,
    }


def _machine() -> dict[str, Any]:
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "vllm": check_vllm(ENGINE).detail,
        "devices": [asdict(device) for device in visible_devices()],
        "links": links(),
    }


def _version(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return "not installed"


def _lines(body: dict[str, Any]) -> list[str]:
    kinds = [f"{one['name']}, {one['memory_bytes'] / 1e9:.1f} GB" for one in body["devices"]]
    lines = [f"penstock {body['penstock']} on Python {body['python']}, {body['system']}"]
    lines += [f"{name} {version}" for name, version in body["packages"].items()]
    lines += [f"vllm {body['vllm']}"]
    lines += [f"device {index}: {kind}" for index, kind in enumerate(kinds)] or ["no GPU"]
    for test in body["tests"]:
        figures = ", ".join(f"{name} {value}" for name, value in test["figures"].items())
        why = test["why"].splitlines()
        head = f"{test['outcome']:<8} {test['test']}  {test['seconds']} s"
        lines.append("  ".join(filter(None, (head, figures, why[-1] if why else ""))))
    return lines
