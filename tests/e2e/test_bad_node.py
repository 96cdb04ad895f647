# SPDX-License-Identifier: Apache-2.0
"""One bad node among four: it is named and quarantined by its credential, and the run does not
notice."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.e2e.system import (
    PENSTOCK,
    SMALL,
    System,
    assert_complete,
    beside_a_straight_one,
    penstock,
    until,
)

from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.core.spot_checks import CheckCounts
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
    NodeDirectives,
)
from penstock.errors import ConfigError, WireError
from penstock.seeds import derive
from penstock.types import (
    FinishReason,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.auth import Role
from penstock.wire.codec import encode

EVIL = NodeId("evil")
POLICY = PolicyName("policy")
MAX_ROWS = 200
"""Rows that the bad node may have stored before it is quarantined."""
STRANGERS = ("models.policy.replicas=3", "trust={accept_untrusted: true, regenerate_share: 0.2}")


def node_state(system: System, node_id: str) -> str:
    try:
        status = system.status()
    except ConfigError:  # not started yet
        return ""
    nodes = () if status is None else status.nodes
    return next((node.state for node in nodes if node.node_id == node_id), "")


@dataclass(slots=True)
class BadNode:
    """Holds a valid, untrusted token, and tries everything."""

    client: NodeClient
    sampling: SamplingSpec
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    live: LiveVersion = field(
        default_factory=lambda: LiveVersion(policy=POLICY, incarnation=1, number=0)
    )
    statuses: Counter[str] = field(default_factory=Counter[str])
    refused: Counter[str] = field(default_factory=Counter[str])
    """Calls that were refused, by what was tried."""
    sent: list[tuple[Grant, Trajectory]] = field(default_factory=list[tuple[Grant, Trajectory]])

    async def register(self, node_id: NodeId = EVIL) -> None:
        body = RegisterRequest(node_id=node_id, boot_id=self.boot_id, capacity=16, policies=())
        self._follow((await self.client.register(body, deadline_s=5.0)).orders)

    def _follow(self, orders: NodeDirectives) -> None:
        for version in orders.wanted:
            self.live = LiveVersion(
                policy=POLICY, incarnation=version.incarnation, number=version.number
            )

    async def lease(self, node_id: NodeId = EVIL, num: int = 8) -> tuple[Grant, ...]:
        beat = Heartbeat(boot_id=self.boot_id, state=NodeState.LIVE, live=(self.live,))
        self._follow((await self.client.heartbeat(node_id, beat, deadline_s=60.0)).orders)
        body = LeaseRequest(
            request_id=uuid.uuid4().hex,
            node_id=node_id,
            boot_id=self.boot_id,
            max_slots=num,
            wait_s=0.2,
            live=(self.live,),
        )
        answer = await self.client.lease(body, deadline_s=60.0)
        self._follow(answer.orders)
        return answer.grants

    def row(self, grant: Grant, *, lag: int) -> Trajectory:
        """A constant text with false log-probs, said to come from `lag` versions ago."""
        number = max(0, self.live.number - lag)
        span = VersionSpan(start=0, end=3, incarnation=self.live.incarnation, number=number)
        turn = Turn(
            policy=POLICY,
            parent=-1,
            prompt_ids=token_ids([1, 2, 3]),
            sampled_ids=token_ids([5, 5, 5]),
            logprobs=log_probs([-0.01, -0.01, -0.01]),
            spans=(span,),
            sampling=replace(self.sampling, seed=derive(grant.seed, 0)),
            finish=FinishReason.LENGTH,
        )
        return Trajectory(
            row_id=grant.row_id,
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            attempt=grant.attempt,
            node_id=EVIL,
            turns=(turn,),
            reward=None,
            outcome=Outcome(kind=OutcomeKind.COMPLETED),
        )

    async def deliver(self, *rows: tuple[Grant, Trajectory]) -> list[DeliveryStatus]:
        deliveries = tuple(
            Delivery(row_id=grant.row_id, payload=memoryview(encode(row)), secret=grant.secret)
            for grant, row in rows
        )
        body = DeliveryRequest(node_id=EVIL, boot_id=self.boot_id, deliveries=deliveries)
        answer = await self.client.deliver(body, deadline_s=60.0)
        found = [result.status for result in answer.results]
        self.statuses.update(found)
        return found

    async def forge(self) -> None:
        """One row of each kind that the door must refuse."""
        for grant in await self.lease(num=4):
            row = self.row(grant, lag=0)
            [turn] = row.turns
            nan = replace(turn, sampling=replace(turn.sampling, temperature=math.nan))
            giant = replace(
                turn,
                sampled_ids=token_ids([5] * 200_000),
                logprobs=log_probs([-0.01] * 200_000),
                spans=(replace(turn.spans[0], end=200_000),),
            )
            forged = {
                "reward": replace(row, reward=1.0),
                "NaN spec": replace(row, turns=(nan,)),
                "giant row": replace(row, turns=(giant,)),
                "other node": replace(row, node_id=NodeId("node-0")),
            }
            what = [*forged][grant.slot % len(forged)]
            [status] = await self.deliver((grant, forged[what]))
            if status is not DeliveryStatus.FENCED:  # the group may have ended in the meantime
                assert status is DeliveryStatus.INVALID, what
                self.refused[what] += 1

    async def pose_as_others(self) -> None:
        for name in ("node-0", "node-0.x", "other"):
            with pytest.raises(WireError):
                await self.register(NodeId(name))
            self.refused["other id"] += 1

    async def flood(self) -> None:
        beat = Heartbeat(boot_id=self.boot_id, state=NodeState.LIVE, live=(self.live,))
        calls = [self.client.heartbeat(EVIL, beat, deadline_s=0.5) for _ in range(200)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        unexpected = [one for one in answers if isinstance(one, BaseException)]
        assert all(isinstance(one, WireError) for one in unexpected), unexpected

    async def cheat(self, round_: int) -> None:
        """Believable rows, then the same ones again."""
        lag = (0, 1, 3)[round_ % 3]
        rows = [(grant, self.row(grant, lag=lag)) for grant in await self.lease()]
        if rows:
            await self.deliver(*rows)
            again = await self.deliver(*rows)
            assert DeliveryStatus.STORED not in again


async def misbehave(system: System, timeout_s: float) -> BadNode:
    config = system.folder.read_config()
    token = system.folder.token(
        config.name, Role.ROLLOUT, ttl_s=3600.0, subject=EVIL, is_trusted=False
    )
    client = NodeClient(system.folder.endpoints().dataflow, token)
    node = BadNode(client, SamplingSpec(**config.sampling.model_dump()))
    try:
        async with asyncio.timeout(timeout_s):
            await node.register()
            await node.pose_as_others()
            while len(node.refused) < 5:
                await node.forge()
            round_ = 0
            while await asyncio.to_thread(node_state, system, EVIL) != "quarantined":
                await node.cheat(round_)
                round_ += 1
            await node.flood()
            await _return_under_new_names(node)
    finally:
        await client.close()
    return node


async def _return_under_new_names(node: BadNode) -> None:
    """A new process, a new name, the same credential: no work."""
    for name in (EVIL, NodeId("evil.two")):
        node.boot_id = uuid.uuid4().hex
        try:
            await node.register(name)
            assert await node.lease(name) == ()
            await node.client.leave(name, node.boot_id)
        except WireError:
            pass  # refused at the door
        node.refused["new name"] += 1


def run_with_bad_node(system: System, *words: str, timeout_s: float) -> BadNode:
    system.start(*STRANGERS, *words)
    trusted = ("node-0", "node-1", "node-2")
    until(
        lambda: any(node_state(system, name) == "live" for name in trusted),
        timeout_s=timeout_s,
        what="a live node",
    )
    node = asyncio.run(misbehave(system, timeout_s))
    assert node.statuses[DeliveryStatus.STORED] <= MAX_ROWS
    assert {"other id", "new name"} <= node.refused.keys()
    states = {name: node_state(system, name) for name in trusted}
    assert "quarantined" not in states.values(), states
    return node


def test_a_bad_node_is_named_and_quarantined_and_the_run_goes_on(system: System) -> None:
    """Forged rewards, NaN specs, giant rows, foreign ids, replays, a flood, false log-probs. The
    run has no end of its own, so the bad node has time for all this on any machine."""
    node = run_with_bad_node(system, *SMALL, "training.steps=100000", timeout_s=600.0)
    assert {"reward", "NaN spec", "giant row", "other node"} <= node.refused.keys()
    system.until_step(system.step() + 3)
    stopped = penstock("stop", str(system.folder.path), "--timeout-s", "600")
    assert stopped.returncode == 0, stopped.stderr
    report = system.audit()
    assert report["ok"] is True
    assert (report["summary"]["lost"], report["summary"]["trained_twice"]) == (0, 0)


def rewards(path: Path) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_learns_as_well_with_a_bad_node(tmp_path: Path) -> None:
    """A whole demo, beside an honest one: the same reward at the end, within its own noise."""
    with beside_a_straight_one(tmp_path, "attacked") as (honest, attacked):
        honest.start("models.policy.replicas=3")
        assert honest.wait(1800.0) == 0, honest.output()
        run_with_bad_node(attacked, timeout_s=1800.0)
        assert attacked.wait(1800.0) == 0, attacked.output()
        assert_complete(attacked, steps=130)
        ends = [rewards(one.folder.metrics)[-20:] for one in (honest, attacked)]
        usual, found = map(statistics.fmean, ends)
        assert found >= usual - max(0.05, 3 * statistics.stdev(ends[0])), (usual, found)


@pytest.mark.slow
def test_an_honest_stranger_is_believed(system: System, tmp_path: Path) -> None:
    """Its rows are scored on the trusted side, generated again, and agree."""
    words = ("models.policy.replicas=1", "trust={accept_untrusted: true, regenerate_share: 1.0}")
    system.start(*SMALL, *words, "training.steps=100000")
    until(lambda: node_state(system, "node-0"), timeout_s=600.0, what="the first node")
    token = system.folder.token(
        system.folder.read_config().name,
        Role.ROLLOUT,
        ttl_s=3600.0,
        subject="alice",
        is_trusted=False,
    )
    file = tmp_path / "alice.token"
    file.write_text(token)
    words = ("join", system.folder.endpoints().dataflow, "--token-file", str(file))
    stranger = subprocess.Popen([*PENSTOCK, *words], cwd=tmp_path)
    try:
        counts = CheckCounts()

        def is_checked() -> bool:
            nonlocal counts
            status = system.status()
            counts = counts if status is None else status.checks.get("alice", counts)
            is_over = system.launcher is not None and system.launcher.poll() is not None
            return counts.num_compared >= 10 or is_over

        until(is_checked, timeout_s=600.0, what="ten checks")
        assert counts.num_compared >= 10
        assert counts.num_different == 0 and counts.num_tokens > 0 and counts.seconds > 0
    finally:
        stranger.kill()
        stranger.wait()
