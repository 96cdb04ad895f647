# SPDX-License-Identifier: Apache-2.0
"""Ranks begin together, and those that the others wait for are named."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from penstock.trainer.ranks import rendezvous
from penstock.trainer.ranks.rendezvous import RanksNotMet, blamed, meet, open_store
from penstock.trainer.ranks.supervisor import LOOPBACK, HostRanks, RankEnv, run_ranks

PATIENCE_S = 120.0


@contextmanager
def two_ranks() -> Generator[tuple[RankEnv, RankEnv]]:
    with socket.create_server((LOOPBACK, 0), backlog=16) as listener:
        port = listener.getsockname()[1]
        common = RankEnv(rank=0, num_ranks=2, local_rank=0, host=LOOPBACK, port=port)
        own = replace(common, listener=os.dup(listener.fileno()))
        yield own, replace(common, rank=1, local_rank=1)


def test_rank_0_waits_for_the_others_and_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "REMIND_S", 0.0)
    with two_ranks() as (first, second), structlog.testing.capture_logs() as lines:
        store = open_store(first, timeout_s=PATIENCE_S)
        waiting = threading.Thread(
            target=meet, args=(store, first), kwargs={"hosts": ("a", "b")}, daemon=True
        )
        waiting.start()
        while not lines:
            waiting.join(0.01)
        assert waiting.is_alive()
        other = open_store(second, timeout_s=PATIENCE_S)
        meet(other, second)
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
    assert lines[0]["missing"] == "1 (b)"


def test_a_rank_that_comes_again_after_the_beginning_is_too_late() -> None:
    with two_ranks() as (first, second):
        store = open_store(first, timeout_s=PATIENCE_S)
        other = open_store(second, timeout_s=PATIENCE_S)
        store.add("joined/1", 1)  # by a process of rank 1 that died
        meet(store, first)
        with pytest.raises(RanksNotMet, match="began without it"):
            meet(other, second)


def test_a_rank_that_came_again_before_the_beginning_takes_part() -> None:
    with two_ranks() as (first, second):
        store = open_store(first, timeout_s=PATIENCE_S)
        other = open_store(second, timeout_s=PATIENCE_S)
        store.add("joined/1", 1)  # by a process of rank 1 that died
        waits = threading.Event()

        def has_come() -> bool:
            waits.set()
            return False

        late = threading.Thread(
            target=meet, args=(other, second), kwargs={"is_stopping": has_come}, daemon=True
        )
        late.start()
        assert waits.wait(PATIENCE_S)
        meet(store, first)
        late.join(PATIENCE_S)
        assert not late.is_alive()


def test_a_stopped_rank_does_not_wait() -> None:
    with two_ranks() as (first, _):
        store = open_store(first, timeout_s=PATIENCE_S)
        with pytest.raises(RanksNotMet, match="stopped"):
            meet(store, first, is_stopping=lambda: True)


def test_silent_ranks_and_ranks_that_are_behind_are_told_apart() -> None:
    before = {0: "5:9:x", 1: "5:8:x", 2: "5:9:x"}
    after = {0: "6:9:x", 1: "6:8:x", 2: "5:9:x"}
    assert blamed(before, after, num_ranks=4) == ([2, 3], [1])
    assert blamed(before, {**after, 2: "6:9:x"}, num_ranks=3) == ([], [1])


HANGS = """
import os, sys, time
from pathlib import Path
from penstock.observe import logs
from penstock.trainer.ranks import rendezvous
from penstock.trainer.ranks.group import init_process_group, make_rank_group
from penstock.trainer.ranks.supervisor import read_rank_env
from penstock.config.stages import ParallelConfig
rank_env = read_rank_env(os.environ)
logs.configure("rank", stream=open(sys.argv[1] + f"/{rank_env.rank}.log", "w", buffering=1))
watch = init_process_group(rank_env, timeout_s=15.0, hosts=("a", "b"))
group = make_rank_group(ParallelConfig(dp=2))
if rank_env.rank == 1:
    time.sleep(1000)  # alive, and never at the collective
try:
    group.max_over_ranks(1)
except RuntimeError as error:
    assert rendezvous.is_of_collective(error), error
    watch.explain(error)
    os._exit(4)
"""


def test_a_hung_collective_names_the_rank_that_is_behind(tmp_path: Path) -> None:
    code = run_ranks(
        [sys.executable, "-c", HANGS, str(tmp_path)],
        HostRanks.one_host(2),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        is_stopping=lambda: False,
        final_codes=(4,),
    )
    log = (tmp_path / "0.log").read_text()
    assert code == 4 and '"behind": "1 (b)"' in log and '"silent": ""' in log, log
