# SPDX-License-Identifier: Apache-2.0
"""External agents: always answered, recorded while the run has a free slot, trained if their reward
arrives in time, and forgotten on request."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from tests.contract.dataflow_server import POLICY, FakeTrainer, dataflow, partition, trajectory
from tests.contract.online_gateway import (
    TASKS,
    Agent,
    OnlineHarness,
    bearer,
    gateway,
    session_config,
    world,
)
from tests.contract.test_dataflow_http import SmallNode
from tests.unit.rollout.polling import eventually

from penstock.dataflow.client.partitioned import PartitionedNodeClient
from penstock.dataflow.core.leasing import NodeState, RegisterRequest
from penstock.dataflow.service.nodes.messages import DeliveryRequest, Heartbeat
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.types import OutcomeKind, Version
from penstock.wire.auth import Audience, Role


async def test_a_late_reward_is_trained(tmp_path: Path) -> None:
    async with world(tmp_path, session_config()) as made:
        one, two = await made.open(), await made.open()
        assert one.is_recorded and two.is_recorded
        assert await one.say("abc") == "cba"
        await one.say("ab")
        assert (await one.tell("end")).json()["state"] == "waiting"
        await two.say("de")
        assert (await one.reward(1.0, "solved"))["state"] == "rewarded"
        assert (await one.reward(1.0))["state"] == "rewarded"  # repeated: nothing changes
        assert (await one.tell("reward", {"reward": 0.0})).status_code == 409
        await two.reward(-0.5)
        manifest = await made.seal()
        assert manifest is not None
        assert {row.row_id: row.reward for row in manifest.rows} == {one.id: 1.0, two.id: -0.5}
        assert [len(group.rows) for group in manifest.groups] == [1, 1]
        record = (await made.rows())[one.id]
        assert record is not None and len(record.turns) == 2
        assert record.outcome.kind is OutcomeKind.COMPLETED and record.outcome.detail == "solved"


async def test_without_a_reward_a_session_expires_and_is_never_trained(tmp_path: Path) -> None:
    config = session_config(groups_per_batch=1, reward_deadline_s=4.5, idle_s=3.0)
    async with world(tmp_path, config) as made:
        left, open_ended = await made.open(), await made.open()
        await left.say()
        await left.tell("end")

        async def talk() -> None:
            while "expired" not in made.counts or "overran" not in made.counts:
                await open_ended.say()
                await asyncio.sleep(0.2)

        await asyncio.wait_for(talk(), 60)
        assert await left.state() == "expired"
        assert await open_ended.state() == "open"  # still answered
        for session in (left, open_ended):
            assert (await session.tell("reward", {"reward": 1.0})).status_code == 409
        await made.delivered()
        assert await made.seal(wait_s=1.0) is None
        assert "reward_deadline" in await made.explain(left.id.partition(".")[0])
        status = await asyncio.to_thread(made.running.reader().status)
        assert status.wasted_tokens["failed"] >= 6


async def test_the_declared_default_is_its_reward(tmp_path: Path) -> None:
    config = session_config(
        groups_per_batch=1, reward_deadline_s=1.0, idle_s=0.5, default_reward=-1.0
    )
    async with world(tmp_path, config) as made:
        agent = await made.open()
        await agent.say()  # then it stays idle, is ended, and its reward never arrives
        manifest = await made.seal(wait_s=15.0)
        assert manifest is not None
        assert [(row.row_id, row.reward) for row in manifest.rows] == [(agent.id, -1.0)]
        assert made.counts["defaulted"] == 1


async def test_over_budget_agents_are_answered_unrecorded(tmp_path: Path) -> None:
    """(1 + 1) × 1 groups of one may be in flight, and no trainer takes any."""
    async with world(tmp_path, session_config(groups_per_batch=1)) as made:
        await made.wait_for_slots(2)
        agents = [await made.open() for _ in range(5)]
        assert [agent.is_recorded for agent in agents] == [True, True, False, False, False]
        assert [await agent.say("ab") for agent in agents] == ["ba"] * 5
        for agent in agents:
            await agent.reward(1.0)
        assert await agents[4].state() == "unrecorded"
        assert {k: made.counts[k] for k in ("recorded", "unrecorded", "rewarded")} == {
            "recorded": 2,
            "unrecorded": 3,
            "rewarded": 2,
        }
        scraped = await made.http.get("/metrics", headers=bearer(made.operator))
        assert 'penstock_gateway_sessions_total{event="unrecorded"} 3.0' in scraped.text
        assert "penstock_gateway_open_sessions 0.0" in scraped.text
        assert (await made.http.get("/metrics", headers=bearer(made.token))).status_code == 403
        assert (await made.http.get("/metrics")).status_code == 401
        await made.delivered()
        for _ in range(2):
            await asyncio.to_thread(made.trainer.step)
        await made.wait_for_slots()  # the trainer advanced, so there is capacity again
        assert (await made.open()).is_recorded


async def test_a_token_and_a_path_are_enough_for_an_agent(tmp_path: Path) -> None:
    async with world(tmp_path, session_config()) as made:
        await made.wait_for_slots(4)
        body = {"model": POLICY, "messages": [{"role": "user", "content": "abc"}]}
        for path in ("/v1", "/v1", "/sessions/talk-7/v1"):
            answer = await made.http.post(
                f"{path}/chat/completions", headers={"x-api-key": made.token}, json=body
            )
            assert answer.status_code == 200, answer.text
        assert made.counts["opened"] == 2
        answer = await made.http.post(
            "/sessions/talk-7/reward", headers=bearer(made.token), json={"reward": 1}
        )
        assert answer.json()["state"] == "rewarded"
        await made.delivered()
        assert made.counts["rewarded"] == 1


async def test_a_stalled_gateway_ends_no_session(tmp_path: Path) -> None:
    async with world(tmp_path, session_config(idle_s=0.8)) as made:
        agent = await made.open()
        await agent.say()
        time.sleep(2.0)  # noqa: ASYNC251 - all of its process
        await asyncio.sleep(0.3)  # it checks for idle sessions
        await agent.say()


async def test_permissions(tmp_path: Path) -> None:
    async with world(tmp_path, session_config()) as made:
        agent = await made.open()
        stranger = made.running.token(Role.SESSION, Audience.GATEWAY, ttl_s=500.0)
        trainer = made.running.token(Role.TRAINER, Audience.GATEWAY)
        elsewhere = made.running.token(Role.SESSION, Audience.DATAFLOW)
        for token, status in (
            (stranger, 404),
            (trainer, 403),
            (elsewhere, 403),
            ("sk-penstock-no", 401),
        ):
            answer = await agent.tell("reward", {"reward": 1}, token=token)
            assert answer.status_code == status, answer.text
        for token in (trainer, elsewhere, "nonsense"):
            assert (await made.http.post("/sessions", headers=bearer(token))).status_code in (
                401,
                403,
            )
        assert (await made.http.get("/sessions", headers=bearer(stranger))).status_code == 403
        counts = await made.http.get("/sessions", headers=bearer(made.operator))
        assert counts.json()["opened"] == 1
        await agent.say()
        for bad in ({"reward": "much"}, {"reward": 1e99}, {}, {"reward": 1, "reason": "x" * 600}):
            assert (await agent.tell("reward", bad)).status_code == 400
        answer = await agent.tell("reward", {"reward": 1}, token=made.operator)
        assert answer.json()["state"] == "rewarded"


async def test_forgotten_wherever_it_is(tmp_path: Path) -> None:
    async with world(tmp_path, session_config(groups_per_batch=1)) as made:
        live = await made.open()
        await live.say()
        assert await made.forget(live.id) == "running"
        await eventually(lambda: "dropped" in made.counts)  # by the next heartbeat
        assert await live.say() == "cba"  # and still answered
        await live.reward(1.0)
        waiting = await made.open()
        await waiting.say()
        await waiting.reward(1.0)
        await made.delivered()
        assert await made.forget(waiting.id) == "waiting"
        assert await made.forget(waiting.id) == "dropped"  # repeated: nothing changes
        assert await made.seal(wait_s=1.0) is None
        sealed = await made.open()
        await sealed.say()
        await sealed.reward(1.0)
        assert await made.seal() is not None
        assert (await made.rows())[sealed.id] is not None
        assert await made.forget(sealed.id) == "sealed"
        assert await made.rows() == {sealed.id: None}
        await asyncio.to_thread(made.trainer.step)
        assert await made.forget(sealed.id) == "trained"
        here = await made.open()
        await here.say()
        gone = await made.http.delete(f"/sessions/{here.id}", headers=bearer(made.token))
        assert gone.json()["state"] == "forgotten"
        late = await made.http.delete(f"/sessions/{sealed.id}", headers=bearer(made.token))
        assert late.status_code == 409 and "penstock forget" in late.text


async def test_forgotten_sessions_stay_forgotten_after_a_restart(tmp_path: Path) -> None:
    config = session_config(groups_per_batch=1)
    async with world(tmp_path, config) as made:
        agent = await made.open()
        await agent.say()
        await agent.reward(1.0)
        assert await made.seal() is not None
        await made.forget(agent.id)
    with dataflow(tmp_path, config) as running:
        trainer = await asyncio.to_thread(FakeTrainer, running)
        [row] = (await asyncio.to_thread(trainer.client.rows, POLICY, 1)).rows
        assert (row.row_id, row.payload) == (agent.id, None)


async def session_at(made: OnlineHarness, partition: str) -> Agent:
    """A recorded session with one answer; others are trained until one gets a slot."""
    while True:
        await made.wait_for_slots()
        agent = await made.open()
        await agent.say()
        if agent.id.startswith(partition):
            return agent
        await agent.reward(1.0)
        await made.delivered()
        await asyncio.to_thread(made.trainer.step)


async def test_forgotten_at_a_partition_of_its_own(tmp_path: Path) -> None:
    config = session_config(groups_per_batch=1)
    async with world(tmp_path, config, slot_pool_size=1) as made:
        with partition(tmp_path / "p1", config, made.running, 1) as service:
            await made.node.membership.join()  # is notified immediately
            agent = await session_at(made, "p1-")
            await agent.reward(1.0)
            await made.delivered()
            await asyncio.to_thread(made.trainer.step)
            assert agent.id in await made.rows(made.trainer.seq)
            assert await made.forget(agent.id) == "trained"
            assert await made.rows(made.trainer.seq) == {agent.id: None}
            live = await session_at(made, "p1-")
            assert await made.forget(live.id) == "running"
            await eventually(lambda: made.counts.get("dropped"))
            marks = service.process.ledger.tables.rows("SELECT key FROM meta")
            assert {f"gone/{agent.id}", f"gone/{live.id}"} <= {str(key) for (key,) in marks}


async def test_nodes_and_gateways_never_get_each_others_slots(tmp_path: Path) -> None:
    config = session_config(groups_per_batch=4, tasks=(TASKS,))
    async with world(tmp_path, config, slot_pool_size=16) as made:
        node = SmallNode(made.running)
        await node.join()
        answer = await node.client.lease(node.request(64))
        slots = {grant.group_id for grant in answer.grants}
        assert len(answer.grants) == 2 * len(slots) == 8  # half of the capacity, in groups of two
        assert {task.source for task in answer.tasks} == {"train"}
        await made.wait_for_slots(4)
        assert made.node.slot_pool.num_free == 4
        await node.client.close()


async def test_unused_slots_leave_capacity_for_tasks(tmp_path: Path) -> None:
    config = session_config(groups_per_batch=4, tasks=(TASKS,))
    async with world(tmp_path, config, slot_pool_size=16) as made:
        node = SmallNode(made.running)
        await node.join()
        for _ in range(4):
            await node.beat()
            grants = (await node.client.lease(node.request(64))).grants
            assert len({grant.group_id for grant in grants}) == 4
            done = tuple(trajectory(grant, node.node_id, node.live) for grant in grants)
            await node.client.deliver(
                DeliveryRequest(node_id=node.node_id, boot_id=node.boot_id, deliveries=done)
            )
            await asyncio.to_thread(made.trainer.step)
        assert made.node.slot_pool.num_free == 4
        await node.client.close()


class _Killed(Exception):
    """The gateway dies without deregistering."""


async def test_slots_of_a_lost_gateway_go_to_the_next(tmp_path: Path) -> None:
    """Its sessions are lost with it; they are neither trained nor reused."""
    config = session_config(groups_per_batch=1)
    config = config.model_copy(
        update={
            "dataflow": config.dataflow.model_copy(
                update={"lease": config.dataflow.lease.model_copy(update={"ttl_s": 1.0})}
            )
        }
    )
    with dataflow(tmp_path, config) as running:
        await asyncio.to_thread(FakeTrainer, running)

        lost_ids: set[str] = set()
        with suppress(_Killed):
            async with gateway(running, tmp_path, name="lost") as lost:
                await eventually(lambda: lost.slot_pool.num_free == 2)
                lost_ids.add(lost.online.open_session("owner").id)
                raise _Killed
        async with gateway(running, tmp_path, name="next") as following:
            await eventually(lambda: following.slot_pool.num_free == 2)
            again = following.online.open_session("owner")
            assert again.has_slot and again.id not in lost_ids
            following.online.forget(again)


async def test_version_changes_are_transparent(tmp_path: Path) -> None:
    async with world(tmp_path, session_config(groups_per_batch=1)) as made:
        is_over = False
        failures: list[str] = []
        num_answers = 0

        async def agent_of(made: OnlineHarness) -> None:
            nonlocal num_answers
            while not is_over:
                agent = await made.open()
                for text in ("ab", "abc"):
                    if await agent.say(text) != text[::-1]:
                        failures.append(text)
                    num_answers += 1
                await agent.reward(1.0)

        async with asyncio.TaskGroup() as agents:
            for _ in range(2):
                agents.create_task(agent_of(made))
            while made.trainer.number < 4:
                await asyncio.to_thread(made.trainer.step)
            is_over = True
        assert not failures and num_answers > 8
        assert made.counts["rewarded"] >= 4


async def test_agents_are_answered_after_the_run_ends(tmp_path: Path) -> None:
    async with world(tmp_path, session_config(groups_per_batch=1, steps=1)) as made:
        agent, other = await made.open(), await made.open()
        await agent.say()
        await agent.reward(1.0)
        await made.delivered()
        await asyncio.to_thread(made.trainer.step)
        await eventually(made.node.orders.drained.is_set)
        assert await other.say("ab") == "ba"
        assert not (await made.open()).is_recorded


class GatedEngine(ScriptedEngine):
    """An engine whose loads wait while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def load(self, folder: Path, version: Version) -> None:
        await self.gate.wait()
        await super().load(folder, version)


async def reward_one_session(made: OnlineHarness) -> None:
    agent = await made.open()
    await agent.say()
    await agent.reward(1.0)
    await made.delivered()


async def is_told_finished(made: OnlineHarness) -> bool:
    membership = made.node.membership
    token = made.running.token(Role.GATEWAY, subject=membership.node_id)
    client = PartitionedNodeClient(made.running.url, token)
    await client.register(
        RegisterRequest(
            node_id=membership.node_id,
            boot_id=membership.boot_id,
            capacity=membership.capacity,
            policies=(),
            tags=membership.tags,
        )
    )
    beat = Heartbeat(boot_id=membership.boot_id, state=NodeState.LIVE, live=membership.live)
    answer = await client.heartbeat(membership.node_id, beat)
    await client.close()
    return answer.orders.finished


async def test_the_last_version_is_served_though_it_is_published_after_the_last_commit(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, session_config(groups_per_batch=1, steps=1)) as made:
        await reward_one_session(made)
        publish = made.trainer.publish
        made.trainer.publish = lambda: None  # the real one publishes in the background
        await asyncio.to_thread(made.trainer.step)
        assert (await asyncio.to_thread(made.running.reader().status)).finished
        assert not await is_told_finished(made)
        await asyncio.to_thread(publish)
        await eventually(made.node.orders.drained.is_set)
        await eventually(lambda: [live.number for live in made.node.membership.live] == [1])


async def test_the_last_version_is_served_though_its_load_outlasts_the_run(tmp_path: Path) -> None:
    engine = GatedEngine()
    config = session_config(groups_per_batch=1, steps=1)
    async with world(tmp_path, config, make_engine=lambda: engine) as made:
        await reward_one_session(made)
        engine.gate.clear()
        await asyncio.to_thread(made.trainer.step)
        await eventually(made.node.orders.drained.is_set)
        engine.gate.set()
        await eventually(lambda: [live.number for live in made.node.membership.live] == [1])
