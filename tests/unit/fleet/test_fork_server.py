# SPDX-License-Identifier: Apache-2.0
"""The fork server: what it starts is a child like any other, and it never has to be there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.unit.fleet.test_local import is_gone, read_lines, wait_until

from penstock import __version__
from penstock.fleet import fork_server, processes
from penstock.fleet.fork_server import ForkServer
from penstock.fleet.service_tokens import TOKEN_FILE_ENV

MODULE = """
import os, sys, time
from pathlib import Path
def run(folder, then):
    from penstock.fleet.processes import exit_with_parent
    exit_with_parent()
    out = Path(folder)
    group, session = os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()
    token = os.environ.get("PENSTOCK_TOKEN_FILE", "")
    (out / "seen").write_text(f"{os.getppid()} {group} {session} {token} {'queue' in sys.modules}")
    print("printed")
    if then == "sleep":
        time.sleep(600)
    sys.exit(int(then))
"""
PROGRAM = """
import sys, penstock.cli.main
def main():
    import stand_in
    stand_in.run(*sys.argv[1:])
penstock.cli.main.main = main
"""


@pytest.fixture
def env(tmp_path: Path) -> Mapping[str, str]:
    """With a stand-in for the command line: `penstock FOLDER CODE` notes what it sees and exits."""
    (tmp_path / "stand_in.py").write_text(MODULE)
    (tmp_path / "sitecustomize.py").write_text(PROGRAM)
    paths = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    return {**os.environ, "PYTHONPATH": paths}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    made = ForkServer(tmp_path / "server.log")
    yield made
    made.close()


def start(
    server: ForkServer, tmp_path: Path, env: Mapping[str, str], then: str
) -> processes.Child | None:
    words = (str(tmp_path), then)
    log = tmp_path / "child.log"
    return server.start(words, env=env, cwd=tmp_path, log=log, preload=("queue",))


def exit_code(child: processes.Child) -> int:
    wait_until(lambda: processes.reap(child) is not None)
    assert child.returncode is not None
    return child.returncode


def test_a_forked_service_is_our_child_with_its_own_group_log_and_environment(
    server: ForkServer, tmp_path: Path, env: Mapping[str, str]
) -> None:
    for code in ("0", "3"):  # the second time the server is warm
        child = start(server, tmp_path, {**env, TOKEN_FILE_ENV: f"token-{code}"}, code)
        assert child is not None
        assert exit_code(child) == int(code)
        seen = (tmp_path / "seen").read_text()
        assert seen == f"{os.getpid()} True True token-{code} True"
    assert read_lines(tmp_path / "child.log") == ["printed", "printed"]


def test_a_killed_service_is_reaped_with_its_group(
    server: ForkServer, tmp_path: Path, env: Mapping[str, str]
) -> None:
    child = start(server, tmp_path, env, "sleep")
    assert child is not None
    assert processes.reap(child) is None
    child.send_signal(signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    assert is_gone(child.pid)


def test_another_environment_is_not_forked(
    server: ForkServer, tmp_path: Path, env: Mapping[str, str]
) -> None:
    """Libraries read variables while they are imported, such as the number of threads."""
    first = start(server, tmp_path, env, "0")
    assert first is not None
    assert start(server, tmp_path, {**env, "OMP_NUM_THREADS": "7"}, "0") is None
    assert exit_code(first) == 0


def test_a_server_that_was_killed_leaves_its_services_alone(
    server: ForkServer, tmp_path: Path, env: Mapping[str, str]
) -> None:
    child = start(server, tmp_path, env, "sleep")
    assert child is not None
    for one in psutil.Process().children():
        if any("fork_server" in word for word in one.cmdline()) and one.pid != child.pid:
            one.kill()
    assert start(server, tmp_path, env, "0") is None, "the launcher starts it in the ordinary way"
    assert processes.reap(child) is None
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGKILL)
    exit_code(child)


def test_the_first_server_ends_when_all_is_started_and_one_for_restarts_stays(
    server: ForkServer, tmp_path: Path, env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_one() -> None:
        child = start(server, tmp_path, env, "0")
        assert child is not None
        assert exit_code(child) == 0

    def is_alive() -> bool:
        return bool({*psutil.Process().children()} - others)

    others = {*psutil.Process().children()}
    start_one()
    monkeypatch.setattr(fork_server, "IDLE_S", 600.0)
    server.free_memory()
    assert is_alive(), "it was used a moment ago"
    monkeypatch.setattr(fork_server, "IDLE_S", -1.0)
    server.free_memory()
    assert not is_alive()
    start_one()
    server.free_memory()
    assert is_alive()


LAUNCHER = """
import os, sys, time
from pathlib import Path
from penstock.fleet.fork_server import ForkServer
folder, env = Path(sys.argv[1]), dict(os.environ)
server = ForkServer(folder / "server.log")
child = server.start((str(folder), "sleep"), env=env, cwd=folder, log=folder / "log", preload=())
(folder / "pid").write_text(str(child.pid))
time.sleep(600)
"""


def test_forked_services_and_the_server_die_with_the_launcher(
    tmp_path: Path, env: Mapping[str, str]
) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], env=dict(env))
    try:
        wait_until((tmp_path / "seen").exists)
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        below = psutil.Process(launcher.pid).children(recursive=True)
        assert int((tmp_path / "pid").read_text()) in {one.pid for one in below}
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: all(is_gone(one.pid) for one in below))


def test_it_runs_real_commands(server: ForkServer, tmp_path: Path) -> None:
    env, log = dict(os.environ), tmp_path / "version.log"
    child = server.start(("--version",), env=env, cwd=None, log=log, preload=())
    assert child is not None
    assert exit_code(child) == 0
    assert read_lines(log) == [__version__]
