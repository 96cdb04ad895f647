# SPDX-License-Identifier: Apache-2.0
"""The local launcher over real processes that stand in for services."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from penstock.errors import LaunchError
from penstock.fleet.hands import LauncherHands
from penstock.fleet.launchers import local
from penstock.fleet.launchers.local import LocalLauncher, ServiceExit, describe_exit
from penstock.fleet.services import ServiceKind, ServiceSpec

FOREVER = "import time\ntime.sleep(600)"
PARENT_WITH_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "a").write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""
SIGNAL_LOGGER = """
import signal, sys, time
def end(number, frame):
    open(sys.argv[1], "a").write(sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "a").write("up\\n")
time.sleep(600)
"""
Launch = Callable[..., LocalLauncher]


@dataclass
class FakeMonitor:
    """A run that is as the test says."""

    advance: Callable[[], int] = lambda: 0
    is_over: bool = False

    def progress(self) -> int:
        return self.advance()

    def is_finished(self) -> bool:
        return self.is_over


def fake_service(
    name: str, code: str, *args: str, kind: ServiceKind = ServiceKind.SERVER
) -> ServiceSpec:
    command = (sys.executable, "-S", "-c", code, *args)
    return ServiceSpec(name=name, kind=kind, command=command, build_env=lambda: dict(os.environ))


@pytest.fixture
def exits() -> list[ServiceExit]:
    return []


@pytest.fixture
def launch(tmp_path: Path, exits: list[ServiceExit]) -> Iterator[Launch]:
    made: list[LocalLauncher] = []

    def start(*services: ServiceSpec, monitor: FakeMonitor | None = None) -> LocalLauncher:
        launcher = LocalLauncher(
            services, log_dir=tmp_path, on_exit=exits.append, monitor=monitor or FakeMonitor()
        )
        made.append(launcher)
        launcher.start()
        return launcher

    yield start
    for launcher in made:
        launcher.kill()


def wait_until(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.02)


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("code", [FOREVER, "raise SystemExit(0)"], ids=["hangs", "exited early"])
def test_a_service_is_restarted_on_request(launch: Launch, code: str) -> None:
    launcher = launch(fake_service("trainer", code, kind=ServiceKind.TRAINER))
    first = launcher.pids()["trainer"]
    if code != FOREVER:
        wait_until(lambda: launcher.poll() or launcher.has_finished_training())
    assert launcher.restart("trainer") and not launcher.restart("node-9")
    wait_until(lambda: launcher.poll() and launcher.pids().get("trainer", first) != first)


def test_a_killed_service_comes_back(launch: Launch, exits: list[ServiceExit]) -> None:
    launcher = launch(fake_service("dataflow", FOREVER))
    first = launcher.pids()["dataflow"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: launcher.poll() and launcher.pids().get("dataflow", first) != first)
    assert [(death.service, death.code) for death in exits] == [("dataflow", -9)]
    assert "was killed by SIGKILL" in str(exits[0])
    assert "dataflow.log" in str(exits[0])


def test_back_off_doubles_and_ends_with_the_last_log_lines(
    launch: Launch, exits: list[ServiceExit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_BACKOFF_S", 0.3)
    launcher = launch(
        fake_service("node-0", "raise SystemExit('no such model')", kind=ServiceKind.NODE)
    )

    def poll_for_ever() -> None:
        while True:
            launcher.poll()
            time.sleep(0.01)

    with pytest.raises(
        LaunchError, match=r"node-0 exited with code 1: 8 failures without progress"
    ) as e:
        poll_for_ever()
    assert "no such model" in str(e.value)
    assert [death.delay_s for death in exits] == [0.2, *[0.3] * 6]
    assert re.search(r"node-0 exited with code 1 after [\d.]+ ", str(exits[0]))
    assert ": no such model; restarting in 0.2 s (log: " in str(exits[0])


def test_failures_with_progress_between_them_never_end_the_run(
    launch: Launch, exits: list[ServiceExit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_BACKOFF_S", 0.01)
    launcher = launch(fake_service("weights", ""), monitor=FakeMonitor(lambda: len(exits)))

    def has_restarted_repeatedly() -> bool:
        launcher.poll()
        return len(exits) >= local.MAX_FAILURES + 4

    wait_until(has_restarted_repeatedly, timeout_s=300.0)


def test_a_trainer_that_exits_with_0_is_done_and_one_that_fails_is_not(launch: Launch) -> None:
    launcher = launch(
        fake_service("trainer-a", "", kind=ServiceKind.TRAINER), fake_service("dataflow", FOREVER)
    )
    assert not launcher.has_finished_training()
    wait_until(lambda: launcher.poll() or launcher.has_finished_training())
    wait_until(launcher.has_finished_training)
    assert list(launcher.pids()) == ["dataflow"]
    failing = launch(fake_service("trainer-b", "raise SystemExit(1)", kind=ServiceKind.TRAINER))
    wait_until(failing.poll)
    assert not failing.has_finished_training()


def test_a_trainer_that_was_replaced_ends_the_run_and_is_not_restarted(
    launch: Launch, exits: list[ServiceExit]
) -> None:
    launcher = launch(
        fake_service(
            "trainer-a", f"raise SystemExit({local.EXIT_FENCED})", kind=ServiceKind.TRAINER
        )
    )
    with pytest.raises(LaunchError, match=r"trainer-a.*another trainer took over.*trainer-a\.log"):
        wait_until(launcher.poll)
    assert exits == [] and launcher.pids() == {}


def test_a_trainer_whose_checkpoint_is_rejected_ends_the_run_with_the_reason(
    launch: Launch, exits: list[ServiceExit]
) -> None:
    code = (
        "import sys; sys.stderr.write('the ledger refuses'); "
        f"sys.exit({local.EXIT_RESUME_REJECTED})"
    )
    launcher = launch(fake_service("trainer-a", code, kind=ServiceKind.TRAINER))
    with pytest.raises(
        LaunchError, match=r"(?s)cannot resume.*the ledger rejects.*the ledger refuses"
    ):
        wait_until(launcher.poll)
    assert exits == [] and launcher.pids() == {}


def test_a_run_that_only_goes_back_and_forth_makes_no_progress(
    launch: Launch, exits: list[ServiceExit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_BACKOFF_S", 0.01)
    monitor = FakeMonitor(lambda: 7 - 2 * (len(exits) % 2))
    launcher = launch(
        fake_service("trainer-a", "raise SystemExit(1)", kind=ServiceKind.TRAINER), monitor=monitor
    )

    def has_exited_repeatedly() -> bool:
        launcher.poll()
        return len(exits) > local.MAX_FAILURES

    with pytest.raises(LaunchError, match="8 failures without progress"):
        wait_until(has_exited_repeatedly, timeout_s=300.0)


def test_nodes_that_exit_are_restarted_before_the_end_and_not_after_it(
    launch: Launch, exits: list[ServiceExit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "NODE_RESTART_DELAY_S", 0.2)
    monitor = FakeMonitor()
    node = fake_service("node-0", "import time; time.sleep(0.2)", kind=ServiceKind.NODE)
    launcher = launch(
        node, fake_service("trainer-a", FOREVER, kind=ServiceKind.TRAINER), monitor=monitor
    )
    wait_until(lambda: (launcher.poll(), "node-0" not in launcher.pids())[1])
    wait_until(lambda: (launcher.poll(), "node-0" in launcher.pids())[1])
    monitor.is_over = True
    wait_until(lambda: (launcher.poll(), "node-0" not in launcher.pids())[1])
    give_up_at = time.monotonic() + 0.6
    while time.monotonic() < give_up_at:
        launcher.poll()
        assert "node-0" not in launcher.pids()
    assert exits == []


def test_orphans_of_a_dead_service_are_killed_before_it_restarts(
    launch: Launch, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    launcher = launch(fake_service("node-0", PARENT_WITH_CHILD, str(pids), kind=ServiceKind.NODE))
    wait_until(lambda: read_lines(pids))
    parent, grandchild = map(int, read_lines(pids)[0].split())
    os.kill(parent, signal.SIGKILL)
    wait_until(launcher.poll)
    wait_until(lambda: is_gone(grandchild))


def test_stop_ends_workers_before_servers_and_the_dataflow_last(
    launch: Launch, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    launcher = launch(
        *(
            fake_service(name, SIGNAL_LOGGER, str(notes), name, kind=kind)
            for name, kind in [
                ("dataflow", ServiceKind.SERVER),
                ("weights", ServiceKind.SERVER),
                ("trainer-a", ServiceKind.TRAINER),
                ("node-0", ServiceKind.NODE),
            ]
        )
    )
    wait_until(lambda: read_lines(notes).count("up") == 4)
    launcher.stop()
    order = [line for line in read_lines(notes) if line != "up"]
    assert set(order[:2]) == {"trainer-a", "node-0"}
    assert order[2:] == ["weights", "dataflow"]
    assert launcher.pids() == {}


def test_stop_does_not_wait_forever(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NODE_STOP_TIMEOUT_S", "TRAINER_STOP_TIMEOUT_S", "SERVER_STOP_TIMEOUT_S"):
        monkeypatch.setattr(local, name, 0.2)
    up = tmp_path / "up"
    deaf = f"import signal; signal.signal(15, signal.SIG_IGN); open({str(up)!r}, 'w').write('up')\n"
    launcher = launch(
        fake_service("dataflow", deaf + FOREVER),
        fake_service("node-0", FOREVER, kind=ServiceKind.NODE),
    )
    wait_until(up.exists)
    launcher.stop()
    assert launcher.pids() == {}


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from penstock.fleet.launchers.local import LocalLauncher
from penstock.fleet.services import ServiceKind, ServiceSpec
import os
folder = Path({folder!r})
code = {prologue!r} + {family!r}
command = (sys.executable, "-c", code, str(folder / "pids"))
env = lambda: dict(os.environ)
service = ServiceSpec(name="node-0", kind=ServiceKind.NODE, command=command, build_env=env)
class FakeMonitor:
    def progress(self): return 0
    def is_finished(self): return False
launcher = LocalLauncher([service], log_dir=folder, on_exit=print, monitor=FakeMonitor())
launcher.start()
while True:
    launcher.poll()
    time.sleep(0.05)
"""
EXITS_WITH_PARENT = "from penstock.fleet.processes import exit_with_parent\nexit_with_parent()\n"


@pytest.mark.parametrize(
    "prologue", [EXITS_WITH_PARENT, ""], ids=["dies with parent", "does not care"]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_no_process_outlives_a_killed_launcher(
    tmp_path: Path, prologue: str, number: signal.Signals
) -> None:
    code = LAUNCHER.format(
        here=str(Path(__file__).parent),
        folder=str(tmp_path),
        prologue=prologue,
        family=PARENT_WITH_CHILD,
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: read_lines(tmp_path / "pids"))
        family = list(map(int, read_lines(tmp_path / "pids")[0].split()))
        assert not any(map(is_gone, family))
    finally:
        launcher.send_signal(number)
        launcher.wait()
    wait_until(lambda: all(map(is_gone, family)))


def test_the_parent_death_signal_alone_ends_a_service(tmp_path: Path) -> None:
    """The orphan reaper is killed first, so that only the parent-death signal is left."""
    code = LAUNCHER.format(
        here=str(Path(__file__).parent),
        folder=str(tmp_path),
        prologue=EXITS_WITH_PARENT,
        family=PARENT_WITH_CHILD,
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: read_lines(tmp_path / "pids"))
        service, grandchild = map(int, read_lines(tmp_path / "pids")[0].split())
        (reaper,) = [p for p in psutil.Process(launcher.pid).children() if p.pid != service]
        reaper.kill()
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: is_gone(service))
    os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "exited with code 1"),
        (-11, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
    ],
)
def test_exit_codes_are_described(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_a_run_whose_trainers_are_started_elsewhere_is_not_over_when_its_publisher_exits(
    tmp_path: Path,
) -> None:
    for trains in (True, False):
        launcher = LocalLauncher(
            [fake_service("publisher-judge", "pass", kind=ServiceKind.TRAINER)],
            log_dir=tmp_path,
            on_exit=lambda _: None,
            monitor=FakeMonitor(),
            trains=trains,
        )
        launcher.start()
        try:
            wait_until(launcher.poll)
            assert launcher.has_finished_training() is trains
        finally:
            launcher.kill()


def test_a_drained_node_is_not_started_again(launch: Launch) -> None:
    code = f"raise SystemExit({local.EXIT_DRAINED})"
    bad = fake_service("node-0", code, kind=ServiceKind.NODE)
    good = fake_service("node-1", FOREVER, kind=ServiceKind.NODE)
    launcher = launch(bad, good)
    wait_until(lambda: launcher.poll() or "node-0" not in launcher.nodes())
    wait_until(lambda: "node-0" not in launcher.nodes())
    assert launcher.drained == {"node-0"} and launcher.nodes().keys() == {"node-1"}
    hands = LauncherHands(
        launcher, lambda index: fake_service(f"node-{index}", FOREVER, kind=ServiceKind.NODE)
    )
    assert hands.start(0) == "node-2", "the name and the devices of a drained node stay unused"
