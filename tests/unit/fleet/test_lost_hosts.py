# SPDX-License-Identifier: Apache-2.0
"""The launcher over hosts that are lost all the time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.fleet.test_local import FOREVER, FakeMonitor, fake_service, wait_until

from penstock.fleet.launchers import local
from penstock.fleet.launchers.local import LocalLauncher, ServiceExit
from penstock.fleet.launchers.starter import EXIT_HOST_LOST
from penstock.fleet.services import ServiceKind, ServiceSpec


class LosingStarter:
    """Every host is lost at once, and there is always another."""

    def __init__(self) -> None:
        self.num_started = 0

    def start(self, service: ServiceSpec, log: Path) -> LostChild:
        self.num_started += 1
        return LostChild()

    def check(self) -> None: ...

    def close(self) -> None: ...


class LostChild:
    pid = None

    def exit_code(self) -> int:
        return EXIT_HOST_LOST

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def test_a_service_that_loses_its_hosts_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits: list[ServiceExit] = []
    monkeypatch.setattr(local, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(local, "INITIAL_BACKOFF_S", 0.01)
    starter = LosingStarter()
    launcher = LocalLauncher(
        [fake_service("node-0", FOREVER, kind=ServiceKind.NODE)],
        starter=starter,
        log_dir=tmp_path,
        on_exit=exits.append,
        monitor=FakeMonitor(),
    )
    launcher.start()
    wait_until(lambda: launcher.poll() and starter.num_started > 2 * local.MAX_FAILURES)
    assert "node-0 lost its host" in str(exits[0]) and launcher.pids() == {}
