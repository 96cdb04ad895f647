# SPDX-License-Identifier: Apache-2.0
"""The local launcher over real processes that stand in for services."""

from __future__ import annotations

import os
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
from penstock.fleet.launchers import local
from penstock.fleet.launchers.local import Death, LocalLauncher, describe_exit
from penstock.fleet.services import Kind, Service

FOREVER = "import time\ntime.sleep(600)"
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "a").write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""
NOTES = """
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
class Told:
    """A run that is as the test says."""

    advance: Callable[[], int] = lambda: 0
    is_over: bool = False

    def progress(self) -> int:
        return self.advance()

    def is_finished(self) -> bool:
        return self.is_over


def stand_in(name: str, code: str, *words: str, kind: Kind = Kind.SERVER) -> Service:
    command = (sys.executable, "-S", "-c", code, *words)
    return Service(name=name, kind=kind, command=command, make_env=lambda: dict(os.environ))


@pytest.fixture
def deaths() -> list[Death]:
    return []


@pytest.fixture
def launch(tmp_path: Path, deaths: list[Death]) -> Iterator[Launch]:
    made: list[LocalLauncher] = []

    def start(*services: Service, view: Told | None = None) -> LocalLauncher:
        launcher = LocalLauncher(
            services, log_dir=tmp_path, on_death=deaths.append, view=view or Told()
        )
        made.append(launcher)
        launcher.start()
        return launcher

    yield start
    for launcher in made:
        launcher.kill()


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.02)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_service_comes_back(launch: Launch, deaths: list[Death]) -> None:
    launcher = launch(stand_in("dataflow", FOREVER))
    first = launcher.pids()["dataflow"]
    os.kill(first, signal.SIGKILL)
    until(lambda: launcher.poll() and launcher.pids().get("dataflow", first) != first)
    assert [(death.service, death.code) for death in deaths] == [("dataflow", -9)]
    assert "was killed by SIGKILL" in str(deaths[0])
    assert "dataflow.log" in str(deaths[0])


def test_back_off_doubles_and_ends_with_the_last_log_lines(
    launch: Launch, deaths: list[Death], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_DELAY_S", 0.3)
    launcher = launch(stand_in("node-0", "raise SystemExit('no such model')", kind=Kind.NODE))

    def poll_for_ever() -> None:
        while True:
            launcher.poll()
            time.sleep(0.01)

    with pytest.raises(LaunchError, match=r"node-0 ended with exit code 1, for the 8th time") as e:
        poll_for_ever()
    assert "no such model" in str(e.value)
    assert [death.delay_s for death in deaths] == [0.2, *[0.3] * 6]
    assert "node-0 ended with exit code 1 after 0." in str(deaths[0])
    assert ": no such model; starting it again in 0.2 s (log: " in str(deaths[0])


def test_failures_with_progress_between_them_never_end_the_run(
    launch: Launch, deaths: list[Death], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_DELAY_S", 0.01)
    launcher = launch(stand_in("weights", ""), view=Told(lambda: len(deaths)))

    def is_often() -> bool:
        launcher.poll()
        return len(deaths) >= local.MAX_FAILURES + 4

    until(is_often, timeout_s=30.0)


def test_a_trainer_that_ends_well_is_done_and_one_that_fails_is_not(launch: Launch) -> None:
    launcher = launch(stand_in("trainer-a", "", kind=Kind.TRAINER), stand_in("dataflow", FOREVER))
    assert not launcher.is_trained()
    until(lambda: launcher.poll() or launcher.is_trained())
    until(launcher.is_trained)
    assert list(launcher.pids()) == ["dataflow"]
    failing = launch(stand_in("trainer-b", "raise SystemExit(1)", kind=Kind.TRAINER))
    until(failing.poll)
    assert not failing.is_trained()


def test_a_trainer_that_was_replaced_ends_the_run_instead_of_coming_back(
    launch: Launch, deaths: list[Death]
) -> None:
    launcher = launch(
        stand_in("trainer-a", f"raise SystemExit({local.EXIT_FENCED})", kind=Kind.TRAINER)
    )
    with pytest.raises(LaunchError, match=r"trainer-a.*another trainer took over.*trainer-a\.log"):
        until(launcher.poll)
    assert deaths == [] and launcher.pids() == {}


def test_a_trainer_whose_checkpoint_the_ledger_refuses_ends_the_run_and_says_why(
    launch: Launch, deaths: list[Death]
) -> None:
    code = f"import sys; sys.stderr.write('the ledger refuses'); sys.exit({local.EXIT_REFUSED})"
    launcher = launch(stand_in("trainer-a", code, kind=Kind.TRAINER))
    with pytest.raises(
        LaunchError, match=r"(?s)refuses to go on.*change nothing.*the ledger refuses"
    ):
        until(launcher.poll)
    assert deaths == [] and launcher.pids() == {}


def test_a_run_that_only_goes_back_and_forth_makes_no_progress(
    launch: Launch, deaths: list[Death], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_DELAY_S", 0.01)
    told = Told(lambda: 7 - 2 * (len(deaths) % 2))
    launcher = launch(stand_in("trainer-a", "raise SystemExit(1)", kind=Kind.TRAINER), view=told)

    def has_died_often() -> bool:
        launcher.poll()
        return len(deaths) > local.MAX_FAILURES

    with pytest.raises(LaunchError, match="for the 8th time without any progress"):
        until(has_died_often, timeout_s=30.0)


def test_nodes_that_leave_are_called_back_before_the_end_and_not_after_it(
    launch: Launch, deaths: list[Death], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LEFT_S", 0.2)
    told = Told()
    node = stand_in("node-0", "import time; time.sleep(0.2)", kind=Kind.NODE)
    launcher = launch(node, stand_in("trainer-a", FOREVER, kind=Kind.TRAINER), view=told)
    until(lambda: (launcher.poll(), "node-0" not in launcher.pids())[1])
    until(lambda: (launcher.poll(), "node-0" in launcher.pids())[1])
    told.is_over = True
    until(lambda: (launcher.poll(), "node-0" not in launcher.pids())[1])
    give_up_at = time.monotonic() + 0.6
    while time.monotonic() < give_up_at:
        launcher.poll()
        assert "node-0" not in launcher.pids()
    assert deaths == []


def test_what_a_dead_service_left_behind_dies_before_it_comes_back(
    launch: Launch, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    launcher = launch(stand_in("node-0", FAMILY, str(pids), kind=Kind.NODE))
    until(lambda: lines_of(pids))
    parent, grandchild = map(int, lines_of(pids)[0].split())
    os.kill(parent, signal.SIGKILL)
    until(launcher.poll)
    until(lambda: is_gone(grandchild))


def test_stop_ends_workers_before_servers_and_the_dataflow_last(
    launch: Launch, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    launcher = launch(
        *(
            stand_in(name, NOTES, str(notes), name, kind=kind)
            for name, kind in [
                ("dataflow", Kind.SERVER),
                ("weights", Kind.SERVER),
                ("trainer-a", Kind.TRAINER),
                ("node-0", Kind.NODE),
            ]
        )
    )
    until(lambda: lines_of(notes).count("up") == 4)
    launcher.stop()
    order = [line for line in lines_of(notes) if line != "up"]
    assert set(order[:2]) == {"trainer-a", "node-0"}
    assert order[2:] == ["weights", "dataflow"]
    assert launcher.pids() == {}


def test_stop_does_not_wait_for_ever(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DRAIN_S", "COMMIT_S", "SERVER_S"):
        monkeypatch.setattr(local, name, 0.2)
    up = tmp_path / "up"
    deaf = f"import signal; signal.signal(15, signal.SIG_IGN); open({str(up)!r}, 'w').write('up')\n"
    launcher = launch(
        stand_in("dataflow", deaf + FOREVER), stand_in("node-0", FOREVER, kind=Kind.NODE)
    )
    until(up.exists)
    launcher.stop()
    assert launcher.pids() == {}


LAUNCHER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from penstock.fleet.launchers.local import LocalLauncher
from penstock.fleet.services import Kind, Service
import os
folder = Path({folder!r})
code = {prologue!r} + {family!r}
command = (sys.executable, "-c", code, str(folder / "pids"))
service = Service(name="node-0", kind=Kind.NODE, command=command, make_env=lambda: dict(os.environ))
class Told:
    def progress(self): return 0
    def is_finished(self): return False
launcher = LocalLauncher([service], log_dir=folder, on_death=print, view=Told())
launcher.start()
while True:
    launcher.poll()
    time.sleep(0.05)
"""
POLITE = "from penstock.fleet.processes import exit_with_parent\ndie_with_parent()\n"


@pytest.mark.parametrize("prologue", [POLITE, ""], ids=["dies with parent", "does not care"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_no_process_outlives_a_killed_launcher(
    tmp_path: Path, prologue: str, number: signal.Signals
) -> None:
    code = LAUNCHER.format(
        here=str(Path(__file__).parent), folder=str(tmp_path), prologue=prologue, family=FAMILY
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: lines_of(tmp_path / "pids"))
        family = list(map(int, lines_of(tmp_path / "pids")[0].split()))
        assert not any(map(is_gone, family))
    finally:
        launcher.send_signal(number)
        launcher.wait()
    until(lambda: all(map(is_gone, family)))


def test_the_parent_death_signal_alone_ends_a_service(tmp_path: Path) -> None:
    """The guard is killed first, so that only what the service asked of the kernel is left."""
    code = LAUNCHER.format(
        here=str(Path(__file__).parent), folder=str(tmp_path), prologue=POLITE, family=FAMILY
    )
    launcher = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: lines_of(tmp_path / "pids"))
        service, grandchild = map(int, lines_of(tmp_path / "pids")[0].split())
        (guard,) = [p for p in psutil.Process(launcher.pid).children() if p.pid != service]
        guard.kill()
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: is_gone(service))
    os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (1, "ended with exit code 1"),
        (-11, "was killed by SIGSEGV"),
        (-63, "was killed by signal 63"),
    ],
)
def test_exit_codes_are_told_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text
