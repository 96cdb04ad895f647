# SPDX-License-Identifier: Apache-2.0
"""What an untrusted credential cannot do: be believed, pass for a trusted one, or accuse others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.attacks.test_cheats import (
    EVIL,
    LIVE,
    honest_row,
    lease,
    start,
    untrusted_config,
)
from tests.contract.dataflow_server import POLICY, RunningDataflow, dataflow, small_config
from tests.sim.world import FAILED, Settings, World

from penstock.config import RunConfig
from penstock.config.stages import stage_subject
from penstock.config.trust import SCORE_STAGE
from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.columns.origins import RowOrigin
from penstock.dataflow.core.leasing import DeliveryStatus, NodeState, RegisterRequest
from penstock.dataflow.core.names import ORIGIN, TRAIN
from penstock.dataflow.core.spot_checks import SpotCheck
from penstock.dataflow.service.build import build
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
    RecordedTurn,
    RecordRequest,
)
from penstock.dataflow.service.operators.prometheus import prometheus_text
from penstock.dataflow.service.operators.status import status
from penstock.dataflow.service.rows.messages import GetRequest
from penstock.dataflow.service.trainers.messages import IncarnationRequest, PublishRequest
from penstock.errors import Forbidden, SandboxError
from penstock.fleet.run_folder import Endpoints, RunFolder
from penstock.rollout.isolation import IsolationSettings
from penstock.runs.scoring import run_score_stage
from penstock.runs.spot_checker import SpotChecker
from penstock.types import UNTRUSTED_TAG, NodeId, VersionSpan
from penstock.wire.auth import Audience, Role
from penstock.wire.client import ServiceClient
from penstock.wire.codec import encode

DIFFERS = SpotCheck(has_same_tokens=False, reward_change=0.0, num_tokens=3, seconds=0.5)
AGREES = replace(DIFFERS, has_same_tokens=True)


def token(running: RunningDataflow, *, is_trusted: bool, subject: str = "evil") -> str:
    return running.signer.mint(
        Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=600.0, subject=subject, is_trusted=is_trusted
    )


def registration(**change: object) -> RegisterRequest:
    body = RegisterRequest(node_id=EVIL, boot_id="s" * 16, capacity=4, policies=())
    return replace(body, **change)


def test_a_run_that_does_not_check_strangers_takes_none(tmp_path: Path) -> None:
    """Trust is the run's choice, not the token's: the default refuses, with the cure."""
    with dataflow(tmp_path, small_config()) as running:

        async def join() -> None:
            client = NodeClient(running.url, token(running, is_trusted=False))
            with pytest.raises(Forbidden, match="accept_untrusted: true"):
                await client.register(registration())
            await client.close()

        asyncio.run(join())


def test_the_credential_says_who_is_trusted_not_the_node(tmp_path: Path) -> None:
    """No tag of the node's own makes it trusted; it learns that it must not score."""
    with dataflow(tmp_path, untrusted_config()) as running:

        async def join() -> tuple[bool, bool]:
            stranger = NodeClient(running.url, token(running, is_trusted=False))
            own = NodeClient(running.url, token(running, is_trusted=True, subject="own"))
            told = await stranger.register(registration(tags=("trusted", "gpus=8")))
            body = registration(node_id=NodeId("own"), tags=(UNTRUSTED_TAG,))
            trusted = await own.register(body)
            await stranger.close()
            await own.close()
            return told.facts.is_scored, trusted.facts.is_scored

        assert asyncio.run(join()) == (False, True)


def test_an_untrusted_token_cannot_use_a_node_of_a_trusted_one(tmp_path: Path) -> None:
    """The same subject twice: the untrusted holder cannot register over it, lease or deliver."""
    with dataflow(tmp_path, untrusted_config()) as running:

        async def attack() -> None:
            own = NodeClient(running.url, token(running, is_trusted=True))
            stranger = NodeClient(running.url, token(running, is_trusted=False))
            answer = await own.register(registration())
            boot_id, secret = registration().boot_id, answer.secret
            calls = (
                lambda: stranger.register(registration()),
                lambda: stranger.register(registration(boot_id="t" * 16)),
                lambda: stranger.heartbeat(
                    EVIL, Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=(), secret=secret)
                ),
                lambda: stranger.lease(
                    LeaseRequest(
                        request_id="r",
                        node_id=EVIL,
                        boot_id=boot_id,
                        max_slots=1,
                        wait_s=0,
                        live=(LIVE,),
                        secret=secret,
                    )
                ),
                lambda: stranger.deliver(
                    DeliveryRequest(node_id=EVIL, boot_id=boot_id, deliveries=())
                ),
            )
            for call in calls:
                with pytest.raises(Forbidden, match="trusted token"):
                    await call()
            await own.close()
            await stranger.close()

        asyncio.run(attack())


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.READER, Role.GATEWAY, Role.SESSION])
def test_only_the_trusted_side_reports_checks(role: Role, tmp_path: Path) -> None:
    """No node accuses another, whatever its credential."""
    with dataflow(tmp_path, untrusted_config()) as running:
        caller = ServiceClient(running.url, running.token(role, subject="evil"))
        running.clients.callback(caller.close)
        with pytest.raises(Forbidden):
            caller.call("POST", "/v1/nodes/good/checks", DIFFERS, Ack)


def test_no_other_stage_reports_checks(tmp_path: Path) -> None:
    """A stage token is for one stage: that of a reward model cannot put a node in quarantine."""
    with dataflow(tmp_path, untrusted_config()) as running:
        other = ServiceClient(running.url, running.token(Role.STAGE, subject="stage-prm"))
        own = running.token(Role.STAGE, subject=stage_subject(SCORE_STAGE))
        checker = ServiceClient(running.url, own)
        running.clients.callback(other.close)
        running.clients.callback(checker.close)
        with pytest.raises(Forbidden, match="only stage-trusted-reward reports checks"):
            other.call("POST", "/v1/nodes/good/checks", DIFFERS, Ack)
        checker.call("POST", "/v1/nodes/good/checks", DIFFERS, Ack)


def world_with(*names: str, settings: Settings | None = None) -> World:
    """A run with these nodes; `evil` and `worse` are untrusted."""
    world = World(settings)
    world.incarnate()
    world.publish()
    for name in names:
        tags = (UNTRUSTED_TAG,) if name in ("evil", "worse") else ()
        body = RegisterRequest(
            node_id=NodeId(name), boot_id=name, capacity=1000, policies=(), tags=tags
        )
        world.partition.register(body, world.now)
        world.settle()
        world.held[NodeId(name)] = []
        world.load(NodeId(name))
    return world


@pytest.mark.parametrize("name", ["evil", "own"])
def test_a_stranger_does_not_end_a_run_by_failing_its_work(name: str) -> None:
    """A fresh run ends when its first groups all fail; by the word of its own nodes only."""
    world = world_with(name, settings=Settings(num_slots=8))
    node_id = NodeId(name)
    for _ in range(40):
        for grant in world.lease(node_id):
            world.deliver(node_id, grant, FAILED)
    cause = world.coordinator.failure_limit.cause(world.now)
    assert bool(cause) == (name == "own"), cause


def test_a_stranger_s_failures_are_known_after_a_restart() -> None:
    world = world_with("evil")
    [grant] = world.lease(EVIL, 1)
    world.deliver(EVIL, grant, FAILED)
    world.crash()
    for _ in range(2):
        [grant] = world.lease(EVIL, 1)
        world.deliver(EVIL, grant, FAILED)
    assert world.coordinator.failure_limit.count.num_groups == 0


def test_strangers_leave_half_of_the_groups_to_a_trusted_node() -> None:
    """A group waits for all its slots: who holds one of each, and is never done, stops the run."""
    world = world_with("evil", "worse", "own")
    num_groups = len(world.partition.groups)
    assert num_groups >= 4
    taken = [g for name in ("evil", "worse") for _ in range(50) for g in world.lease(NodeId(name))]
    groups = {grant.group_id for grant in taken}
    assert len(groups) == num_groups // 2, "all their names share one quota"
    own = NodeId("own")
    while grants := world.lease(own):
        for grant in grants:
            world.deliver(own, grant)
    assert world.consumer.ready, "the other half is done without them"


def test_strangers_alone_may_take_everything() -> None:
    world = world_with("evil")
    num_slots = sum(group.num_waiting for group in world.partition.groups.values())
    assert len(world.lease(EVIL)) == num_slots
    world = world_with("evil", "own")
    world.now += 100.0
    world.heartbeat(EVIL)
    world.settle(world.partition.tick(world.now))
    assert len(world.lease(EVIL)) == num_slots, "a trusted node that fell silent keeps nothing"


async def test_rows_that_differ_cost_the_credential_its_work_for_good(tmp_path: Path) -> None:
    """Counted by subject, over restarts, and shown with what it cost."""
    service = build(untrusted_config(), tmp_path)
    await start(service)
    for _ in range(3):
        await service.trainers.record_check("evil", AGREES)
    assert len(await lease(service, 1)) == 1
    service.close()
    service = build(untrusted_config(), tmp_path)
    assert service.coordinator.spot_checks.counts["evil"].num_checked == 3
    for _ in range(5):
        await service.trainers.record_check("evil", DIFFERS)
    assert service.partition.nodes[EVIL].is_quarantined
    shown = status(service, "r").checks["evil"]
    assert (shown.num_checked, shown.num_different, shown.num_tokens) == (8, 5, 24)
    assert b'penstock_checked_tokens{subject="evil"} 24.0' in prometheus_text(service, "r")
    service.close()
    service = build(untrusted_config(), tmp_path)
    assert service.partition.nodes[EVIL].is_quarantined
    service.close()


async def test_the_trusted_side_scores_the_ledger_s_task_and_seed(tmp_path: Path) -> None:
    """What a row is scored and repeated with comes from the lease, not from the row."""
    config = untrusted_config()
    service = build(config, tmp_path)
    await start(service)
    [grant] = await lease(service, 1)
    delivery = Delivery(row_id=grant.row_id, payload=memoryview(encode(honest_row(grant, config))))
    body = DeliveryRequest(node_id=EVIL, boot_id="s", deliveries=(delivery,))
    await service.nodes.deliver(body)
    await service.rows.tick()
    [row] = (
        await service.rows.get(TRAIN, GetRequest(keys=(grant.row_id,), columns=(ORIGIN,)))
    ).rows
    packed = row.columns[ORIGIN]
    assert isinstance(packed, bytes)
    origin = msgspec.msgpack.decode(packed, type=RowOrigin)
    assert (origin.seed, origin.node_id, origin.is_trusted) == (grant.seed, EVIL, False)
    assert origin.task == service.partition.groups[grant.group_id].task
    assert POLICY not in row.columns
    service.close()


async def test_turns_of_an_untrusted_node_are_not_delivered_by_a_trusted_one(
    tmp_path: Path,
) -> None:
    """It plants turns and releases the slot: the next holder would deliver them as its own, with a
    reward, and nobody would generate them again."""
    config = untrusted_config()
    service = build(config, tmp_path)
    await start(service)
    [grant] = await lease(service, 1)
    planted = RecordedTurn(row_id=grant.row_id, index=0, turn=honest_row(grant, config).turns[0])
    service.nodes.turns.record(RecordRequest(node_id=EVIL, turns=(planted,)))
    body = DeliveryRequest(
        node_id=EVIL, boot_id="s", deliveries=(), released={grant.row_id: grant.secret}
    )
    await service.nodes.deliver(body)
    good = NodeId("good")
    await service.nodes.register(registration(node_id=good, boot_id="g"))
    await service.nodes.heartbeat(good, Heartbeat(boot_id="g", state=NodeState.LIVE, live=(LIVE,)))
    ask = LeaseRequest(
        request_id="b", node_id=good, boot_id="g", max_slots=1, wait_s=0, live=(LIVE,)
    )
    [again] = (await service.nodes.lease(ask)).grants
    assert (again.group_id, again.slot) == (grant.group_id, grant.slot)
    assert again.num_recorded == 0
    assert service.nodes.turns.offer(good, again.row_id).turns == ()
    service.close()


OLD = VersionSpan(start=0, end=1, incarnation=1, number=0)
NEW = VersionSpan(start=1, end=2, incarnation=2, number=0)


@pytest.mark.parametrize(
    ("spans", "is_taken"),
    [
        ((OLD, NEW), True),
        ((replace(NEW, start=0),), True),
        ((replace(NEW, start=0, end=1), replace(OLD, start=1, end=2)), False),
    ],
)
@pytest.mark.parametrize("had_new", [False, True])
async def test_an_untrusted_node_does_not_choose_its_version_afterwards(
    tmp_path: Path, spans: tuple[VersionSpan, ...], is_taken: bool, had_new: bool
) -> None:
    """It could draw one answer with each version in use and name the one that it likes: every draw
    passes its check. So it names none older than it served when it got its lease."""
    config = untrusted_config()
    service = build(config, tmp_path)
    await start(service)
    request = IncarnationRequest(request_id="s", expected=1, number=0, seq=0)
    await service.trainers.incarnate(POLICY, request)
    published = PublishRequest(
        incarnation=2, number=0, manifest_digest="c" * 64, weights_digest="d" * 64
    )
    await service.trainers.publish(POLICY, published)
    if had_new:
        now = Heartbeat(boot_id="s", state=NodeState.LIVE, live=(replace(LIVE, incarnation=2),))
        await service.nodes.heartbeat(EVIL, now)
    [grant] = await lease(service, 1)
    row = honest_row(grant, config)
    row = replace(row, turns=(replace(row.turns[0], spans=spans),))
    delivery = Delivery(row_id=grant.row_id, payload=memoryview(encode(row)))
    body = DeliveryRequest(node_id=EVIL, boot_id="s", deliveries=(delivery,))
    [result] = (await service.nodes.deliver(body)).results
    is_older = had_new and OLD in spans
    assert (result.status is DeliveryStatus.STORED) == (is_taken and not is_older), result.detail
    if result.detail:
        assert "when its node served policy@2.0" in result.detail
    service.close()


async def test_turns_of_an_earlier_holder_are_not_offered_to_an_untrusted_node(
    tmp_path: Path,
) -> None:
    """It answers for the versions that it served itself, so it generates every turn."""
    config = untrusted_config()
    service = build(config, tmp_path)
    await start(service)
    good = NodeId("good")
    await service.nodes.register(registration(node_id=good, boot_id="g"))
    await service.nodes.heartbeat(good, Heartbeat(boot_id="g", state=NodeState.LIVE, live=(LIVE,)))
    ask = LeaseRequest(
        request_id="b", node_id=good, boot_id="g", max_slots=1, wait_s=0, live=(LIVE,)
    )
    [grant] = (await service.nodes.lease(ask)).grants
    turn = RecordedTurn(row_id=grant.row_id, index=0, turn=honest_row(grant, config).turns[0])
    service.nodes.turns.record(RecordRequest(node_id=good, turns=(turn,)))
    body = DeliveryRequest(
        node_id=good, boot_id="g", deliveries=(), released={grant.row_id: grant.secret}
    )
    await service.nodes.deliver(body)
    [again] = await lease(service, 1)
    assert (again.group_id, again.slot) == (grant.group_id, grant.slot)
    assert again.num_recorded == 0
    assert service.nodes.turns.offer(EVIL, again.row_id).turns == ()
    service.close()


async def _wait(*_: object) -> None:
    await asyncio.Event().wait()


async def test_the_trusted_side_scores_strangers_only_behind_the_walls_that_the_run_demands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that has the keys scores text of strangers: `sandbox` holds there too, and its
    folder of runs is hidden from the reward."""
    config = untrusted_config().model_dump() | {"sandbox": {"demand": "namespaces"}}
    seen = list[IsolationSettings]()

    async def refuse(settings: IsolationSettings) -> SandboxError:
        seen.append(settings)
        return SandboxError("no bubblewrap here")

    monkeypatch.setattr("penstock.rollout.isolation._find", refuse)
    monkeypatch.setattr("penstock.runs.scoring.serve_scores", _wait)
    monkeypatch.setattr(SpotChecker, "run", _wait)
    endpoints = Endpoints(dataflow="http://127.0.0.1:1", weights="", work_dir="")
    monkeypatch.setattr(RunFolder, "endpoints", lambda _: endpoints)  # pyright: ignore
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.path.mkdir(parents=True)
    with pytest.RaisesGroup(pytest.RaisesExc(SandboxError), flatten_subgroups=True):
        async with asyncio.timeout(100):
            await run_score_stage(RunConfig.model_validate(config), folder, "t")
    assert [one.hidden for one in seen] == [(tmp_path / "runs",)]
