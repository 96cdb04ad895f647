# SPDX-License-Identifier: Apache-2.0
"""Nodes that join and leave once a second, in every way a node can leave: the trainer goes on, what
is alive is busy, work that was handed back is free at once, that of a dead node has another after
its ttl, and nothing is lost or trained twice.

`make chaos CHURN_S=600`: seconds of churn. Repeat a plan with `PENSTOCK_CHAOS_SEED=…`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import statistics
import time
from collections import Counter, deque
from collections.abc import Coroutine, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.chaos.node_processes import NodeProcesses
from tests.chaos.processes import Services, commands, make_run
from tests.chaos.results_table import begin
from tests.contract.dataflow_server import FakeTrainer, RunningDataflow
from tests.unit.rollout.snapshot_files import write_snapshot

from penstock.audit import audit
from penstock.dataflow.client.dataflow import StatusClient
from penstock.dataflow.service.operators.messages import Status
from penstock.errors import WireError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.control import drain_node
from penstock.wire.auth import Role, Signer

CHURN_S = float(os.environ.get("PENSTOCK_CHURN_S", "20"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
NUM_NODES = 10
CAPACITY = 6
TTL_S = 3.0
LOOK_S = 0.1
LEAVES = ("notice of 30 s", "notice of 2 s", "no notice", "stopped", "drained")
IS_CAMPAIGN = CHURN_S >= 60
"""On a machine of its own, so that figures of time count. CI may share its cores."""
MIN_BUSY = 0.9 if IS_CAMPAIGN else 0.7
HANDED_BACK_S = 2.0

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.alone,
    pytest.mark.timeout(900 + 4 * CHURN_S),
    pytest.mark.skipif(not CHURN_S, reason="CHURN_S=0"),
]


@dataclass
class Churn:
    """Who is alive, by the one who starts and ends them, and what the service says of them."""

    folder: RunFolder
    nodes: NodeProcesses
    rng: random.Random
    alive: deque[str] = field(default_factory=deque[str])
    """Not yet asked to leave, oldest first."""
    number: int = 0
    leaves: Counter[str] = field(default_factory=Counter[str])
    told_at: dict[str, float] = field(default_factory=dict[str, float])
    """When nodes got a notice, by the clock of the wall, as the ledger has it."""
    drained_at: dict[str, float] = field(default_factory=dict[str, float])
    """When operators asked for nodes, which hear of it with their next heartbeat."""
    leaving: set[str] = field(default_factory=set[str])
    """Those of them that still hold work."""
    silent_at: dict[str, float] = field(default_factory=dict[str, float])
    """When nodes were killed or stopped."""
    events: Counter[str] = field(default_factory=Counter[str])
    """Signals sent."""
    busy: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Leases and capacity of the nodes that are alive, at each look."""
    later: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    def join(self) -> None:
        self.number += 1
        name = f"n{self.number}"
        self.nodes.start(name, CAPACITY)
        self.alive.append(name)

    def leave(self) -> None:
        how = LEAVES[sum(self.leaves.values()) % len(LEAVES)]
        name = self.alive.popleft()
        self.leaves[how] += 1
        if how in ("no notice", "stopped"):
            self.silent_at[name] = time.time()
        else:
            asked_at = self.drained_at if how == "drained" else self.told_at
            asked_at[name] = time.time()
            self.leaving.add(name)
        if how == "no notice":
            self._send(name, signal.SIGKILL)
        elif how == "stopped":
            self._send(name, signal.SIGSTOP)
            self._after(2 * TTL_S, name, signal.SIGCONT)
            self._after(3 * TTL_S, name, signal.SIGTERM)
        elif how == "drained":
            drain = asyncio.to_thread(
                drain_node, self.folder, name, who="churn", why="churn", timeout_s=0.0
            )
            self._keep(asyncio.create_task(_quietly(drain)))
        else:
            self._send(name, signal.SIGTERM)
            self._after(30.0 if "30" in how else 2.0, name, signal.SIGKILL)

    def see(self, status: Status) -> None:
        held = {str(n.node_id): n for n in status.nodes}
        self.leaving = {name for name in self.leaving if name in held and held[name].num_leases}
        live = [held[n] for n in self.alive if n in held and held[n].state == "live"]
        if live:
            leases = sum(min(node.num_leases, node.capacity) for node in live)
            self.busy.append((leases, sum(node.capacity for node in live)))

    def _after(self, delay_s: float, name: str, number: signal.Signals) -> None:
        async def act() -> None:
            await asyncio.sleep(delay_s)
            if self.nodes.is_alive(name):
                self._send(name, number)

        self._keep(asyncio.create_task(act()))

    def _send(self, name: str, number: signal.Signals) -> None:
        self.events[number.name] += 1
        self.nodes.signal(name, number)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self.later.add(task)
        task.add_done_callback(self.later.discard)


async def _quietly(call: Coroutine[None, None, bool]) -> None:
    with contextlib.suppress(WireError):  # it left by itself before
        await call


def churn_run(path: Path) -> RunFolder:
    """Small batches, and so much work ahead that every node could be busy."""
    folder = make_run(path)
    config = folder.read_config()
    training = config.training.model_copy(update={"groups_per_batch": 8, "max_staleness": 8})
    changes = {"training": training, "workflow": "tests.chaos.node_processes:answer"}
    folder.write_config(config.model_copy(update={**changes, "reward": None}))
    return folder


@contextmanager
def training(folder: RunFolder) -> Generator[FakeTrainer]:
    with contextlib.ExitStack() as clients:
        signer = Signer.read(folder.keys, folder.read_config().name)
        url = folder.endpoints().dataflow
        yield FakeTrainer(RunningDataflow(url=url, signer=signer, clients=clients))


def never_trained_twice(folder: RunFolder) -> list[str]:
    query = (
        "SELECT group_id, count(*) FROM fates WHERE state = 'sealed' GROUP BY group_id, consumer "
        "HAVING count(*) > 1"
    )
    with closing(sqlite3.connect(folder.path / "ledger" / "ledger.db")) as ledger:
        return [f"{group}: {number} times" for group, number in ledger.execute(query)]


def handed_back_s(folder: RunFolder, told_at: Mapping[str, float]) -> list[float]:
    """For each node that held work when it was asked to leave: until the last of it was free."""
    query = (
        "SELECT node_id, max(ended_at) FROM leases WHERE ended IN ('released', 'expired') "
        "GROUP BY node_id"
    )
    with closing(sqlite3.connect(folder.path / "ledger" / "ledger.db")) as ledger:
        ends = dict[str, float](ledger.execute(query).fetchall())
    return [ends[name] - at for name, at in told_at.items() if ends.get(name, 0.0) > at]


def leased_again_s(folder: RunFolder, silent_at: Mapping[str, float]) -> list[float]:
    """For each lease that a silent node lost: from its silence until another node had the work."""
    query = (
        "SELECT l.node_id, (SELECT min(g.granted_at) FROM grants g WHERE g.group_id = l.group_id "
        "AND g.epoch > l.epoch AND l.slot BETWEEN g.slot AND g.slot + g.num_slots - 1) AS again "
        "FROM leases l WHERE l.ended = 'expired'"
    )
    with closing(sqlite3.connect(folder.path / "ledger" / "ledger.db")) as ledger:
        found = ledger.execute(query).fetchall()
    return [
        again - silent_at[node] for node, again in found if node in silent_at and again is not None
    ]


async def test_nodes_join_and_leave_every_second(tmp_path: Path) -> None:
    figures, rng = begin("nodes join and leave once a second"), random.Random(SEED)
    print(f"PENSTOCK_CHAOS_SEED={SEED}")
    folder = churn_run(tmp_path / "run")
    snapshot = write_snapshot(tmp_path / "snapshot")
    with (
        Services(commands(folder), folder.logs) as services,
        NodeProcesses(folder, snapshot) as nodes,
    ):
        await services.start_all()
        with training(folder) as trainer:
            ended, commits = asyncio.Event(), list[float]()

            def train() -> None:
                while not ended.is_set():
                    before = trainer.seq
                    trainer.step()
                    if trainer.seq > before:
                        commits.append(time.monotonic())

            steps = asyncio.create_task(asyncio.to_thread(train))
            churn = Churn(folder, nodes, rng)
            token = folder.token(folder.read_config().name, Role.READER, ttl_s=TTL_S * 10_000)
            with closing(StatusClient(folder.endpoints().dataflow, token)) as reader:
                began_at, ended_at = await _churn(churn, reader)
            ended.set()
            await steps
        services.require_alive()
        figures.trials = sum(churn.leaves.values())
    report = audit(folder.path)
    figures.acknowledged = report.checks[0].num_examined
    figures.lost += [] if report.ok else report.lines()
    figures.trained_twice += never_trained_twice(folder)
    leases, capacity = (sum(numbers) for numbers in zip(*churn.busy, strict=True))
    back_s, drained_s, again_s = (
        handed_back_s(folder, churn.told_at),
        handed_back_s(folder, churn.drained_at),
        leased_again_s(folder, churn.silent_at),
    )
    figures.note = (
        f"busy {leases / capacity:.1%} of alive, {len(commits)} steps, handed back in "
        f"{_spread(back_s)} after a notice and {_spread(drained_s)} after an operator's word, "
        f"leased again {_spread(again_s)} after silence, ttl {TTL_S:g} s"
    )
    print(figures.note, dict(churn.leaves), dict(churn.events))
    figures.require_clean()
    _judge(churn, [at for at in commits if began_at <= at <= ended_at], began_at, ended_at)
    assert back_s and drained_s and again_s, "nobody had work when it left"
    if IS_CAMPAIGN:
        assert statistics.median(back_s) <= HANDED_BACK_S, back_s
        assert statistics.median(again_s) <= TTL_S + 1.0, again_s


def _spread(found: list[float]) -> str:
    if not found:
        return "never"
    limit_s = (
        statistics.quantiles(found, n=20, method="inclusive")[-1] if len(found) > 1 else found[0]
    )
    return (
        f"{statistics.median(found):.2f} s (median; 95 % within {limit_s:.2f} s, "
        f"{max(found):.2f} s at most, {len(found)})"
    )


async def _churn(churn: Churn, reader: StatusClient) -> tuple[float, float]:
    """Returns when it began, with all nodes busy, and when it ended."""
    for _ in range(NUM_NODES):
        churn.join()
    while len(churn.busy) < 20 or churn.busy[-1][0] < 0.9 * NUM_NODES * CAPACITY:
        churn.see(await asyncio.to_thread(reader.status))
        await asyncio.sleep(LOOK_S)
    churn.busy.clear()
    began_at = next_at = time.monotonic()
    while (now := time.monotonic()) < began_at + CHURN_S:
        if now >= next_at:
            next_at += 1.0
            churn.leave()
            churn.join()
        churn.see(await asyncio.to_thread(reader.status))
        await asyncio.sleep(LOOK_S)
    ended_at = time.monotonic()
    while churn.leaving or churn.later:  # who was asked to leave leaves
        churn.see(await asyncio.to_thread(reader.status))
        await asyncio.sleep(LOOK_S)
    return began_at, ended_at


def _judge(churn: Churn, commits: list[float], began_at: float, ended_at: float) -> None:
    leases, capacity = (sum(numbers) for numbers in zip(*churn.busy, strict=True))
    assert leases >= MIN_BUSY * capacity, f"{leases / capacity:.1%} of what was alive was busy"
    middle = (began_at + ended_at) / 2  # steps continue all the time
    assert min(commits) < middle < max(commits), [at - began_at for at in commits]
    assert set(churn.leaves) == set(LEAVES)
