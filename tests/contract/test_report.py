# SPDX-License-Identifier: Apache-2.0
"""The balance report of a real service, against a recount of its ledger and its published schema.

Two nodes and a trainer in process, on a clock of our own: some attempts fail, some groups are
uniform, some answers come late."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import jsonschema
import msgspec
import pytest
from tests.contract.dataflow_server import POLICY, small_config

from penstock.config import RuleConfig
from penstock.config.dataflow import ReportConfig
from penstock.dataflow.core.leasing import Grant, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.report.figures import Flow
from penstock.dataflow.report.flow_counter import KEY, TOTALS
from penstock.dataflow.report.ledger_counts import SqlReader, count_from_ledger
from penstock.dataflow.report.shape import ZERO, Amount, BalanceReport, WindowReport
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.operators.observe import observe_service
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.types import (
    SANDBOX_MS,
    FinishReason,
    NodeId,
    Outcome,
    OutcomeKind,
    RowId,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import encode, encode_json

SCHEMA = Path(__file__).parents[2] / "docs" / "report.schema.json"
NODES = (NodeId("n0"), NodeId("n1"))
WINDOW = 2


class World:
    """A service that is watched, and the parties around it."""

    def __init__(self, folder: Path, seed: int, replays: bool = False) -> None:
        self.rules = [RuleConfig(admit="reward-spread")]
        if replays:
            self.rules.append(RuleConfig.model_validate({"replay": "newest", "ratio": 0.5}))
        self.random = random.Random(seed)
        self.now = 1_000.0
        self.folder = folder
        self.incarnation = 0
        self.number = self.seq = 0
        self.live = 0
        self.held: list[tuple[NodeId, Grant, int]] = []
        self.requests = 0
        self.open()

    # --- the service --------------------------------------------------------------------------

    def open(self) -> None:
        config = small_config(groups_per_batch=2, num_generations=3, steps=1000)
        update = {"rules": tuple(self.rules), "report": ReportConfig(window=WINDOW)}
        flow = config.dataflow.model_copy(update=update)
        training = config.training.model_copy(update={"max_staleness": 2})
        update = {"dataflow": flow, "training": training}
        with patch("penstock.dataflow.service.build.monotonic_clock", lambda: lambda: self.now):
            self.service: DataflowService = build(config.model_copy(update=update), self.folder)
        self.balance = self.service.balance

    def restart(self, *, forgets_totals: bool) -> None:
        self.service.close()
        self.held.clear()
        if forgets_totals:  # as a ledger written before there were any
            with contextlib.closing(sqlite3.connect(self.folder / "ledger.db")) as ledger:
                ledger.execute("DELETE FROM meta WHERE key = ?", (KEY,))
                ledger.commit()
        self.open()

    def report(self) -> BalanceReport:
        return self.balance.report(
            observe_service(self.service.coordinator, self.service.host), self.now
        )

    async def flow(self) -> Flow:
        """By SQL, of what is on disk."""
        await self.service.process.ledger.flush()
        return count_from_ledger(self.service.process.ledger.tables).get(POLICY, Flow())

    def staleness(self, window: WindowReport) -> float:
        """Sum over the rows sealed in this window, as each batch was judged."""
        query = (
            "SELECT sum(staleness_mean * num_rows) FROM batches "
            "WHERE sealed_at > :opened AND sealed_at <= :closed"
        )
        tables = self.service.process.ledger.tables
        return tables.scalar(query, opened=window.opened_at, closed=window.closed_at)

    # --- the parties --------------------------------------------------------------------------

    async def take_over(self) -> None:
        request = IncarnationRequest(
            request_id=str(self.now),
            expected=self.incarnation,
            number=self.number,
            seq=self.seq,
        )
        answer = await self.service.trainers.incarnate(POLICY, request)
        self.incarnation = answer.incarnation
        await self.publish()

    async def publish(self) -> None:
        body = PublishRequest(
            incarnation=self.incarnation,
            number=self.number,
            manifest_digest=f"m{self.incarnation}.{self.number}",
            weights_digest=f"w{self.number}",
        )
        await self.service.trainers.publish(POLICY, body)

    async def join(self) -> None:
        for node in NODES:
            body = RegisterRequest(
                node_id=node,
                boot_id=str(self.now),
                capacity=6,
                policies=(),
                tags=("gpus=2", "cost=1.5"),
            )
            await self.service.nodes.register(body)
        self.boot_id = str(self.now)

    async def beat(self, nodes: Sequence[NodeId] = NODES) -> None:
        self.live = self.number
        for node in nodes:
            body = Heartbeat(boot_id=self.boot_id, state=NodeState.LIVE, live=(self.version,))
            await self.service.nodes.heartbeat(node, body)

    @property
    def version(self) -> LiveVersion:
        return LiveVersion(policy=POLICY, incarnation=self.incarnation, number=self.live)

    async def lease(self, node: NodeId) -> None:
        self.requests += 1
        body = LeaseRequest(
            request_id=f"r{self.now}.{self.requests}",
            node_id=node,
            boot_id=self.boot_id,
            max_slots=3,
            wait_s=0,
            live=(self.version,),
        )
        answer = await self.service.nodes.lease(body)
        self.held += [(node, grant, self.live) for grant in answer.grants]

    async def deliver(self) -> None:
        """Some of what is held, in any order."""
        self.random.shuffle(self.held)
        for _ in range(min(len(self.held), self.random.randint(0, 4))):
            node, grant, number = self.held.pop()
            made = self._answer(node, grant, number)
            body = DeliveryRequest(node_id=node, boot_id=self.boot_id, deliveries=(made,))
            await self.service.nodes.deliver(body)

    def _answer(self, node: NodeId, grant: Grant, number: int) -> Delivery:
        fails = self.random.random() < 0.1
        length = self.random.randint(1, 30)
        span = VersionSpan(start=0, end=length, incarnation=self.incarnation, number=number)
        turn = Turn(
            policy=POLICY,
            parent=-1,
            prompt_ids=token_ids([1]),
            sampled_ids=token_ids(range(length)),
            logprobs=log_probs([-1.0] * length),
            spans=(span,),
            sampling=SamplingSpec(),
            finish=FinishReason.STOP,
        )
        row_id = RowId(f"{grant.group_id}.{grant.slot}.{grant.epoch}")
        record = Trajectory(
            row_id=row_id,
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            attempt=grant.attempt,
            node_id=node,
            turns=() if fails and grant.slot else (turn,),
            reward=None if fails else float(self.random.randint(0, 1)),
            outcome=Outcome(kind=OutcomeKind.FAILED if fails else OutcomeKind.COMPLETED),
            sandbox_ms=self.random.choice((0, 1, 90_000)),
        )
        return Delivery(row_id=row_id, payload=memoryview(encode(record)))

    async def train(self) -> bool:
        request = BatchRequest(
            consumer=POLICY, seq=self.seq + 1, incarnation=self.incarnation, wait_s=0
        )
        answer = await self.service.trainers.batch(request)
        if answer.manifest is None:
            return False
        self.now += 2.0
        skipped = "planned" if self.random.random() < 0.2 else ""
        self.seq, self.number = self.seq + 1, self.number + (not skipped)
        body = CommitRequest(incarnation=self.incarnation, number=self.number, skipped=skipped)
        await self.service.trainers.commit(POLICY, self.seq, body)
        self.now += 0.5
        await self.publish()
        return True

    async def turn(self) -> None:
        """One to three seconds of the run."""
        self.now += 1.0
        if self.random.random() < 0.5:
            await self.beat()
        for node in NODES:
            await self.lease(node)
        await self.deliver()
        await self.train()
        await self.service.tick()
        self.balance.look(observe_service(self.service.coordinator, self.service.host), self.now)


class MakeWorld(Protocol):
    def __call__(self, seed: int, *, replays: bool = False) -> World: ...


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeWorld]:
    worlds: list[World] = []

    def build_world(seed: int, *, replays: bool = False) -> World:
        worlds.append(World(tmp_path / str(seed), seed, replays))
        return worlds[-1]

    yield build_world
    for world in worlds:
        world.service.close()


def _produced_by_node(tables: SqlReader) -> dict[str, Amount]:
    """Data delivered by each node, over all policies."""
    produced: defaultdict[str, Amount] = defaultdict(lambda: ZERO)
    query = 'SELECT node_id, sampled, "values" FROM rows'
    for node_id, sampled, values in tables.rows(query):
        sandbox_ms = int(json.loads(values).get(SANDBOX_MS, 0))
        for tokens in filter(None, json.loads(sampled).values()):
            produced[node_id] += Amount(sequences=1, tokens=tokens, sandbox_ms=sandbox_ms)
    return produced


def _totals(report: BalanceReport) -> Flow:
    totals = report.policies[0].totals

    def counts(amount: Any) -> Amount:
        return msgspec.convert(amount, Amount, from_attributes=True)

    return Flow(
        produced=counts(totals.produced),
        entered=counts(totals.entered),
        consumed=counts(totals.consumed),
        replayed=counts(totals.replayed),
        wasted={why: counts(amount) for why, amount in totals.wasted.items()},
    )


@pytest.mark.parametrize("seed", range(2))
async def test_the_report_equals_a_recount_of_the_ledger(make: MakeWorld, seed: int) -> None:
    world = make(seed)
    await world.take_over()
    await world.join()
    flow, before, index = Flow(), Flow(), 0
    nodes_before = dict.fromkeys(NODES, ZERO)
    reasons: set[str] = set()
    for _ in range(60):
        await world.turn()
        flow = await world.flow()
        report = world.report()
        assert _totals(report) == flow
        reasons |= flow.wasted.keys()
        if report.window.complete and report.window.index == index:
            figures = world.balance.figures(
                observe_service(world.service.coordinator, world.service.host), world.now
            )
            assert figures.policies[0].window == flow - before
            made = _produced_by_node(world.service.process.ledger.tables)
            for node in figures.nodes:
                assert node.produced == made[node.node_id] - nodes_before[node.node_id]
            assert sum((n.accepted for n in figures.nodes), ZERO) == flow.entered - before.entered
            ages = figures.policies[0].staleness
            assert sum(ages.values(), ZERO) == figures.policies[0].window.consumed
            total = sum(age * rows.sequences for age, rows in ages.items())
            assert total == pytest.approx(world.staleness(figures.window))
            before, index, nodes_before = flow, index + 1, {node: made[node] for node in NODES}
    assert index >= 3, "windows that were judged"
    assert reasons >= {"failed", "uniform_reward", "stale"}
    queued = flow.entered - flow.consumed - flow.stale
    assert queued.tokens == sum(
        g.tokens for g in world.service.coordinator.consumers[POLICY].ready.values()
    )


async def test_a_restart_loses_no_figure(make: MakeWorld) -> None:
    world = make(7)
    await world.take_over()
    await world.join()
    for boot in range(4):
        for _ in range(8):
            await world.turn()
            assert _totals(world.report()) == await world.flow(), f"boot {boot}"
        written = world.service.process.ledger.tables.scalar(TOTALS, key=KEY)
        assert msgspec.json.decode(written, type=dict[str, Flow])[POLICY] == await world.flow()
        world.now += 1.0
        world.restart(forgets_totals=boot == 1)
        await world.join()
    assert _totals(world.report()) == await world.flow()


async def test_what_is_served_again_is_counted_apart(make: MakeWorld) -> None:
    world = make(3, replays=True)
    await world.take_over()
    await world.join()
    for _ in range(30):
        await world.turn()
        assert _totals(world.report()) == await world.flow()
    flow = await world.flow()
    assert flow.replayed.tokens > 0 and flow.consumed.tokens <= flow.entered.tokens


async def test_the_report_is_valid_and_its_accounts_are_whole(make: MakeWorld) -> None:
    validator: Any = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    world = make(11)
    validator.validate(json.loads(encode_json(world.report())))
    began_at = world.now
    await world.take_over()
    await world.join()
    for _ in range(15):
        await world.turn()
        report = world.report()
        validator.validate(json.loads(encode_json(report)))
        lived_s = world.now - began_at
        assert report.policies[0].trainer_time.total_s == pytest.approx(lived_s)
        for account in (report.policies[0].trainer_time, *(n.time for n in report.nodes)):
            assert sum(account.shares.values()) == pytest.approx(1.0)
    report = world.report()
    assert report.pool.total_gpus == 4 and report.pool.cost_per_hour == 3.0
    world.now += 60.0
    await world.beat(NODES[1:])
    await world.service.tick()
    world.balance.look(observe_service(world.service.coordinator, world.service.host), world.now)
    report = world.report()
    assert (report.pool.total_gpus, report.pool.gone) == (2, (NODES[0],))
    assert report.nodes[0].time.seconds["silent"] >= 50.0
