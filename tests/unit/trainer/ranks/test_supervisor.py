# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a gang, with ranks that are small programs: it sees only processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.fleet import processes
from penstock.trainer.ranks import supervisor as ranks
from penstock.trainer.ranks.supervisor import HostRanks, RankEnv, read_rank_env, run_ranks

RANK = """
import os, signal, sys, time
from pathlib import Path
from penstock.fleet.processes import exit_with_parent

exit_with_parent()
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
life = len(list(folder.glob(f"began.{rank}.*")))
(folder / f"began.{rank}.{life}").write_text(str(os.getpid()))
def wait_for(condition):
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
def all_began():
    return len(list(folder.glob(f"began.*.{life}"))) == int(os.environ["WORLD_SIZE"])
"""


def _run(
    folder: Path, body: str, *, num_ranks: int = 3, is_stopping: Callable[[], bool] | None = None
) -> int:
    return run_ranks(
        [sys.executable, "-c", RANK + body, str(folder)],
        HostRanks.one_host(num_ranks),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        is_stopping=is_stopping or (lambda: False),
        final_codes=(3,),
    )


def _pids(folder: Path) -> list[int]:
    """Of the ranks that have written theirs; a file may exist before its content."""
    texts = [path.read_text() for path in sorted(folder.glob("began.*"))]
    return [int(text) for text in texts if text]


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_killed_rank_ends_the_others_and_all_begin_again(tmp_path: Path) -> None:
    body = """
wait_for(all_began)
if life == 0:
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(lambda: False)
"""
    assert _run(tmp_path, body) == 0
    began = {path.name for path in tmp_path.glob("began.*")}
    assert began == {f"began.{rank}.{life}" for rank in range(3) for life in range(2)}
    assert not any(map(_is_alive, _pids(tmp_path)))


def test_a_final_code_ends_the_gang_for_good(tmp_path: Path) -> None:
    body = """
wait_for(all_began)
sys.exit(3) if rank == "0" else wait_for(lambda: False)
"""
    assert _run(tmp_path, body) == 3
    assert len(_pids(tmp_path)) == 3
    assert not any(map(_is_alive, _pids(tmp_path)))


def test_a_stop_reaches_every_rank_and_waits_for_the_last(tmp_path: Path) -> None:
    body = """
wait_for(lambda: stopped)
if rank == "2":
    time.sleep(0.3)
    (folder / "saved").touch()
os._exit(143 if stopped else 1)
"""

    def is_stopping() -> bool:
        return len(list(tmp_path.glob("began.*"))) == 3

    assert _run(tmp_path, body, is_stopping=is_stopping) == 143
    assert (tmp_path / "saved").exists(), "a rank that saved its checkpoint was killed"
    assert len(_pids(tmp_path)) == 3, "a gang that was told to stop began again"


def test_a_gang_that_cannot_live_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "INITIAL_BACKOFF_S", 0.0)
    assert _run(tmp_path, "sys.exit(7)", num_ranks=1) == 7
    assert len(_pids(tmp_path)) == ranks.MAX_FAST_FAILURES


def test_no_rank_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    body = RANK + "\nwait_for(lambda: False)\n"
    supervisor = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys\n"
            "from penstock.trainer.ranks.supervisor import HostRanks, run_ranks\n"
            "run_ranks([sys.executable, '-c', sys.argv[2], sys.argv[1]], HostRanks.one_host(2),"
            " env=os.environ, is_stopping=lambda: False)",
            str(tmp_path),
            body,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        until = time.monotonic() + 60
        while len(_pids(tmp_path)) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        pids = _pids(tmp_path)
        assert len(pids) == 2
    finally:
        supervisor.send_signal(signal.SIGKILL)
        supervisor.wait()
    while any(map(_is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(_is_alive, pids))


def test_ranks_are_told_apart_as_torchrun_does(tmp_path: Path) -> None:
    body = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PENSTOCK_STORE_FD")
(folder / f"env.{rank}").write_text(" ".join(os.environ.get(name, "-") for name in names))
"""
    assert _run(tmp_path, body, num_ranks=2) == 0
    first, second = ((tmp_path / f"env.{rank}").read_text().split() for rank in range(2))
    assert first[:4] == ["0", "0", "2", "127.0.0.1"]
    assert second[:4] == ["1", "1", "2", "127.0.0.1"]
    assert first[4] == second[4]
    assert first[5] != "-" and second[5] == "-"


def test_membership_is_what_the_environment_says() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host"}
    assert read_rank_env({}) is None
    assert read_rank_env({**environ, "MASTER_PORT": "29500"}) == RankEnv(
        rank=5, num_ranks=8, local_rank=1, host="host", port=29500
    )
    with pytest.raises(ValueError, match="MASTER_PORT"):
        read_rank_env(environ)


def test_ranks_are_tied_by_the_word_that_every_command_heeds() -> None:
    assert ranks.PARENT_PID_ENV == processes.PARENT_PID_ENV
