# SPDX-License-Identifier: Apache-2.0
"""Watching a run from another process: until its launcher exits, or its services are gone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.unit.cli.sample_statuses import policy_status, status
from tests.unit.runs.metrics_files import run_with_metrics
from tests.unit.runs.test_monitor import FakeDataflow

from penstock.fleet.run_folder import LauncherRecord, RunFolder
from penstock.runs import monitor, watch
from penstock.runs.monitor import RunView
from penstock.runs.watch import watch_run
from penstock.wire.auth import Signer


class Views:
    """A display that keeps what it is given."""

    def __init__(self) -> None:
        self.views: list[RunView] = []
        self.has_status = threading.Event()

    def update(self, view: RunView) -> None:
        self.views.append(view)
        if view.status is not None:
            self.has_status.set()

    def notify(self, text: str) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(monitor, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(watch, "REDRAW_S", 0.02)
    made = run_with_metrics(tmp_path / "r", [(1, 1, 0.1), (2, 2, 0.2)])
    made.allocate_endpoints(tmp_path, ())
    Signer.create(made.keys, "reverse")
    return made


def served(folder: RunFolder) -> FakeDataflow:
    port = int(folder.endpoints().dataflow.rpartition(":")[2])
    fake = FakeDataflow(Signer.read(folder.keys, "reverse"), port)
    fake.status = status(policy_status(number=3, reward=0.3))
    return fake


def start(folder: RunFolder, views: Views) -> threading.Thread:
    thread = threading.Thread(target=watch_run, args=(folder, "reverse", views))
    thread.start()
    assert views.has_status.wait(60)
    return thread


def test_the_watch_ends_with_the_launcher_and_knows_the_earlier_curve(folder: RunFolder) -> None:
    folder.write_launcher(LauncherRecord(pid=1, started_at=1.0, attempt=1))
    views, fake = Views(), served(folder)
    with folder.locked():
        thread = start(folder, views)
        assert thread.is_alive()
    thread.join(60)
    fake.stop()
    assert not thread.is_alive()
    shown = views.views[-1]
    assert shown.curves == {"policy": [0.1, 0.2, 0.3]}
    assert shown.elapsed_s > 1e6, "counts from the start of the launch"
    assert views.views[0].status is not None, "draws nothing before the first answer"


def test_without_a_launcher_the_watch_ends_with_the_dataflow(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    views, fake = Views(), served(folder)
    thread = start(folder, views)
    fake.stop()
    monkeypatch.setattr(watch, "GONE_S", 0.5)
    thread.join(60)
    assert not thread.is_alive()
