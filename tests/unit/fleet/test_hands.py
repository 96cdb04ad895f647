# SPDX-License-Identifier: Apache-2.0
"""Nodes by commands of the user, and by the launcher, over real processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from penstock.errors import LaunchError
from penstock.fleet import hands as hands_module
from penstock.fleet.hands import CommandHands, LauncherHands
from penstock.fleet.launchers import local
from penstock.fleet.launchers.local import LocalLauncher, ServiceExit
from penstock.fleet.services import ServiceKind, ServiceSpec

WRITE = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')"
NODE = """
import signal, sys, time
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""


def wait_until(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.02)


def make_hands(tmp_path: Path, start: tuple[str, ...], stop: tuple[str, ...]) -> CommandHands:
    def placeholders(name: str) -> Mapping[str, str]:
        return {"name": name, "url": "http://run:1", "token_file": f"/tokens/{name}"}

    return CommandHands(
        node_type="spot",
        start_command=start,
        stop_command=stop,
        placeholders=placeholders,
        env=dict(os.environ),
        work_dir=tmp_path,
        log=tmp_path / "scale.log",
    )


def test_commands_get_their_values_and_no_shell_reads_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (sys.executable, "-S", "-c", WRITE, str(out))
    hands = make_hands(
        tmp_path,
        (*program, "start", "{name}", "{token_file}", "; $HOME {{}}"),
        (*program, "{name}"),
    )
    assert hands.start(7) == "spot-7"
    hands.close()
    hands.retire("spot-7")
    hands.retire("spot-7")
    hands.close()
    assert out.read_text().splitlines() == ["start spot-7 /tokens/spot-7 ; $HOME {}", "spot-7"]
    assert hands.failed() == {}


def test_a_failed_start_is_reported_and_a_failed_stop_is_tried_again(tmp_path: Path) -> None:
    fail = (sys.executable, "-S", "-c", "print('no quota'); raise SystemExit(3)", "{name}")
    hands = make_hands(tmp_path, fail, fail)
    name = hands.start(0)
    found: dict[str, str] = {}
    wait_until(lambda: found.update(hands.failed()) or found)
    assert "exited with 3" in found[name] and str(hands.log) in found[name]
    for _ in range(2):
        hands.retire(name)
        hands.close()
    assert hands.log.read_text().splitlines() == ["no quota"] * 3


def test_a_command_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hands_module, "COMMAND_TIMEOUT_S", 0.0)
    hang = (sys.executable, "-S", "-c", "import time; time.sleep(600)", "{name}")
    hands = make_hands(tmp_path, hang, hang)
    name = hands.start(0)
    found: dict[str, str] = {}
    wait_until(lambda: found.update(hands.failed()) or found)
    assert "exited with -9" in found[name]


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    hands = make_hands(tmp_path, ("no-such-sbatch", "{name}"), ("scancel", "{name}"))
    with pytest.raises(LaunchError, match=r"no-such-sbatch.*start command of node type spot"):
        hands.start(0)


class _Monitor:
    def progress(self) -> int:
        return 0

    def is_finished(self) -> bool:
        return False


def make_node(index: int, how: str = "kind") -> ServiceSpec:
    command = (sys.executable, "-S", "-c", NODE, how)
    return ServiceSpec(
        name=f"node-{index}",
        kind=ServiceKind.NODE,
        command=command,
        build_env=lambda: dict(os.environ),
    )


@pytest.fixture
def exits() -> list[ServiceExit]:
    return []


@pytest.fixture
def launcher(tmp_path: Path, exits: list[ServiceExit]) -> Iterator[LocalLauncher]:
    made = LocalLauncher([make_node(0)], log_dir=tmp_path, on_exit=exits.append, monitor=_Monitor())
    made.start()
    yield made
    made.kill()


def is_up(tmp_path: Path, name: str) -> Callable[[], bool]:
    return lambda: "up" in (tmp_path / f"{name}.log").read_text()


def test_nodes_of_the_launcher_come_go_and_are_not_restarted(
    launcher: LocalLauncher, exits: list[ServiceExit], tmp_path: Path
) -> None:
    hands = LauncherHands(launcher, make_node)
    assert [hands.start(9), hands.start(9)] == ["node-1", "node-2"]
    assert {*launcher.nodes()} == {"node-0", "node-1", "node-2"}
    for name in launcher.nodes():
        wait_until(is_up(tmp_path, name))
    pid = launcher.pids()["node-1"]
    hands.retire("node-1")
    wait_until(lambda: launcher.poll() and "node-1" not in launcher.nodes())
    assert not exits, "it was told to leave: no failure"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert hands.start(9) == "node-1", "the first free name, with its devices"
    assert {*launcher.pids()} == {"node-0", "node-1", "node-2"}


def test_a_node_that_does_not_leave_is_killed(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "NODE_STOP_TIMEOUT_S", 0.0)
    launcher.add(make_node(1, "deaf"))
    wait_until(is_up(tmp_path, "node-1"))
    launcher.retire("node-1")
    wait_until(lambda: launcher.poll() and "node-1" not in launcher.nodes())
