# SPDX-License-Identifier: Apache-2.0
"""An untrusted node neither ends a run nor its nodes: what it says of itself counts neither for the
size of the pool, nor for a budget, nor as progress, and it chooses no experts for the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.attacks.test_cheats import (
    EVIL,
    LIVE,
    honest_row,
    lease,
    start,
    untrusted_config,
)
from tests.contract.dataflow_server import POLICY
from tests.unit.cli.sample_statuses import policy_status, view
from tests.unit.cli.sample_statuses import status as sample_status

from penstock.config.limits import BudgetConfig
from penstock.dataflow.core.leasing import (
    Activity,
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.core.stalls import NodeWait, TrainerWait, find_chain
from penstock.dataflow.report.shape import BalanceReport
from penstock.dataflow.service.build import build, run_info
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    EngineInfo,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.nodes.trust import facts_for
from penstock.dataflow.service.operators.observe import observe_service
from penstock.dataflow.service.operators.prometheus import prometheus_text
from penstock.dataflow.service.operators.status import status
from penstock.errors import BadRequest
from penstock.fleet.autoscaler import NodeType, plan
from penstock.fleet.pool_facts import StartedNode, pool_nodes
from penstock.fleet.run_folder import RunFolder
from penstock.runs.spending import BudgetGuard
from penstock.runs.spot_checker import begins_alike
from penstock.runs.stall_guard import progress_mark
from penstock.types import (
    UNTRUSTED_TAG,
    ExpertChoices,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    Trajectory,
    token_ids,
)
from penstock.wire.auth import Audience, Credential, Role
from penstock.wire.codec import encode

OWN = NodeId("own")
LOUD = NodeId("evil.loud")
GREED = ("gpus=999999", "cost=0.01")


async def join(
    service: DataflowService, name: NodeId, *tags: str, state: NodeState = NodeState.LIVE
) -> None:
    body = RegisterRequest(node_id=name, boot_id="b", capacity=4, policies=(), tags=tags)
    await service.nodes.register(body)
    live = (LIVE,) if state is NodeState.LIVE else ()
    await service.nodes.heartbeat(name, Heartbeat(boot_id="b", state=state, live=live))


def report(service: DataflowService) -> BalanceReport:
    look = observe_service(service.coordinator, service.host)
    return service.balance.report(look, service.process.clock())


@pytest.mark.parametrize("state", [NodeState.LIVE, NodeState.STARTING])
async def test_a_stranger_s_size_retires_no_node_of_the_run(
    tmp_path: Path, state: NodeState
) -> None:
    """It says that it has a million GPUs: the autoscaler would end all others as surplus, or start
    none."""
    service = build(untrusted_config(), tmp_path)
    await start(service)
    await join(service, OWN, "gpus=2")
    before = report(service)
    await join(service, LOUD, *GREED, UNTRUSTED_TAG, state=state)
    await service.tick()
    found = report(service)
    assert (found.pool.total_gpus, found.pool.pending_gpus) == (2, 0)
    assert found.pool.cost_per_hour == before.pool.cost_per_hour
    started = {"own": StartedNode(node_type="a", started_at=found.at)}
    types = {"a": NodeType(name="a", gpus=2)}
    nodes = [*pool_nodes(found, started, types, start_timeout_s=60.0)]
    assert plan(2, nodes, types.values()).retire == ()
    assert plan(4, nodes, types.values()).start == ("a",)
    service.close()


async def test_a_stranger_s_slow_start_does_not_rest_the_autoscaler(tmp_path: Path) -> None:
    """The rule waits for several times the usual start of a node between two actions."""
    service = build(untrusted_config(), tmp_path)
    await start(service)
    now = service.process.clock()
    for name, tag in ((LOUD, UNTRUSTED_TAG), (OWN, "gpus=2")):
        await join(service, name, tag, state=NodeState.STARTING)
    service.balance.look(observe_service(service.coordinator, service.host), now)
    for name, after_s in ((OWN, 10.0), (LOUD, 1e6)):
        live = Heartbeat(boot_id="b", state=NodeState.LIVE, live=(LIVE,))
        await service.nodes.heartbeat(name, live)
        look = observe_service(service.coordinator, service.host)
        service.balance.look(look, now + after_s)
    assert report(service).pool.node_start_s_p90 == pytest.approx(10.0, abs=5.0)
    service.close()


# --- what it says it serves -----------------------------------------------------------------------


def made_up(num: int) -> tuple[LiveVersion, ...]:
    names = (PolicyName(f"mine-{index}") for index in range(num))
    return tuple(LiveVersion(policy=name, incarnation=1, number=7) for name in names)


async def test_versions_of_policies_that_the_run_does_not_have_are_not_kept(tmp_path: Path) -> None:
    """Names of a stranger's choice filled the status and every scrape of the metrics."""
    service = build(untrusted_config(), tmp_path)
    await start(service)
    await join(service, LOUD, UNTRUSTED_TAG)
    said = (*made_up(200), LIVE)
    for name, boot_id in ((EVIL, "s"), (LOUD, "b")):
        body = Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=said, pinned=said)
        await service.nodes.heartbeat(name, body)
    for node in service.partition.nodes.values():
        assert node.live == node.pinned == (LIVE,)
    assert all(node.live == (LIVE,) for node in status(service, "run").nodes)
    assert b"mine-" not in prometheus_text(service, "run")
    service.close()


async def test_one_version_of_each_policy_is_kept(tmp_path: Path) -> None:
    service = build(untrusted_config(), tmp_path)
    await start(service)
    many = tuple(replace(LIVE, number=number) for number in range(200))
    await service.nodes.heartbeat(
        EVIL, Heartbeat(boot_id="s", state=NodeState.LIVE, live=many, pinned=many)
    )
    node = service.partition.nodes[EVIL]
    assert node.live == node.pinned == many[-1:]
    service.close()


async def test_a_lease_keeps_no_made_up_versions(tmp_path: Path) -> None:
    service = build(untrusted_config(), tmp_path)
    await start(service)
    body = LeaseRequest(
        request_id="a",
        node_id=EVIL,
        boot_id="s",
        max_slots=1,
        wait_s=0,
        live=(*made_up(200), LIVE),
        pinned=made_up(200),
    )
    assert (await service.nodes.lease(body)).grants
    assert service.partition.nodes[EVIL].granted["a"].live == (LIVE,)
    service.close()


async def test_a_node_for_policies_that_the_run_does_not_have_is_refused(tmp_path: Path) -> None:
    service = build(untrusted_config(), tmp_path)
    body = RegisterRequest(
        node_id=LOUD, boot_id="b", capacity=1, policies=(POLICY, PolicyName("mine")), tags=()
    )
    with pytest.raises(BadRequest, match="'mine'"):
        await service.nodes.register(body)
    assert LOUD not in service.partition.nodes
    await service.nodes.register(replace(body, policies=(POLICY,)))
    service.close()


# --- budgets --------------------------------------------------------------------------------------


async def deliver(service: DataflowService, row: Trajectory) -> DeliveryStatus:
    delivery = Delivery(row_id=row.row_id, payload=memoryview(encode(row)))
    body = DeliveryRequest(node_id=EVIL, boot_id="s", deliveries=(delivery,))
    [result] = (await service.nodes.deliver(body)).results
    return result.status


@pytest.mark.parametrize("kind", [OutcomeKind.COMPLETED, OutcomeKind.FAILED])
async def test_strangers_do_not_spend_the_budget_of_a_run(
    tmp_path: Path, kind: OutcomeKind
) -> None:
    """A row may have millions of tokens, and one token thousands of nodes. A spent budget ends the
    run, also one that was started again."""
    config = untrusted_config()
    service = build(config, tmp_path / "ledger")
    await start(service)
    [grant] = await lease(service, 1)
    row = replace(honest_row(grant, config), outcome=Outcome(kind=kind))
    assert await deliver(service, row) is DeliveryStatus.STORED
    for again in range(2):
        shown = status(service, "r")
        assert (shown.sampled_tokens, shown.untrusted_tokens) == (2, 2)
        guard = BudgetGuard(RunFolder(tmp_path), BudgetConfig(tokens=1, node_hours=0.01))
        for now in range(0, 3600, 30):
            assert guard.check(float(now), view(shown)) == ""
        service.close()
        if not again:
            service = build(config, tmp_path / "ledger")


def test_nodes_of_the_run_spend_its_budget(tmp_path: Path) -> None:
    shown = sample_status(policy_status())
    guard = BudgetGuard(RunFolder(tmp_path), BudgetConfig(node_hours=0.01))
    guard.check(0.0, view(shown))
    assert "node-hours is spent" in guard.check(60.0, view(shown))


# --- stalls ---------------------------------------------------------------------------------------


async def test_what_a_stranger_says_of_itself_is_no_progress(tmp_path: Path) -> None:
    """A number that grows with each heartbeat, or a node that comes and goes, would keep a hung run
    from being noticed."""
    service = build(untrusted_config(), tmp_path)
    await start(service)
    before = progress_mark(status(service, "r"))
    beat = Heartbeat(boot_id="s", state=NodeState.LIVE, live=(), num_done=7)
    await service.nodes.heartbeat(EVIL, beat)
    await join(service, LOUD, UNTRUSTED_TAG)
    assert progress_mark(status(service, "r")) == before
    await join(service, OWN)
    assert progress_mark(status(service, "r")) != before
    service.close()


def test_a_stranger_takes_the_blame_from_nobody() -> None:
    """It says that it waits for longest, or has the name of a service: that of the launcher which
    hangs is restarted, and no other."""
    trainer = TrainerWait(policy="p", seq=1, is_waiting=True, has_batch=False, since_s=60.0)
    hangs = NodeWait(
        node_id="node-0",
        num_leases=1,
        silent_s=0.0,
        work=(Activity(what="reward", item="row", since_s=50.0),),
    )
    says = (Activity(what="nothing", item="", since_s=1e9),)
    loud = NodeWait(node_id="dataflow", num_leases=9, silent_s=0.0, work=says, is_untrusted=True)
    assert find_chain(trainer, [loud, hangs], blocker="")[-1].service == "node-0"
    for one in (loud, replace(loud, silent_s=99.0), replace(loud, work=())):
        assert {link.service for link in find_chain(trainer, [one], blocker="")} == {
            "trainer-p",
            "",
        }


# --- experts --------------------------------------------------------------------------------------


async def test_a_stranger_chooses_no_experts(tmp_path: Path) -> None:
    """The trainer replays recorded choices, so its log-probs agree with forged ones, and a
    repetition compares tokens only: neither check would notice."""
    config = untrusted_config()
    service = build(config, tmp_path)
    await start(service)
    [grant] = await lease(service, 1)
    row = honest_row(grant, config)
    forged = ExpertChoices(num_layers=1, num_chosen=1, num_experts=4, choices=b"\x00" * 4)
    row = replace(row, turns=(replace(row.turns[0], experts=forged),))
    assert await deliver(service, row) is DeliveryStatus.INVALID
    service.close()


@pytest.mark.parametrize("is_trusted", [False, True])
def test_only_a_trusted_node_is_asked_for_experts(is_trusted: bool) -> None:
    info = run_info(untrusted_config())
    info = replace(info, engines={POLICY: EngineInfo(kind="hf", records_experts=True)})
    holder = Credential(
        run="r",
        role=Role.ROLLOUT,
        audiences=(Audience.DATAFLOW,),
        expires_at=1e12,
        is_trusted=is_trusted,
    )
    assert facts_for(info, holder).engines[POLICY].records_experts == is_trusted


# --- prompts --------------------------------------------------------------------------------------


def test_a_stranger_s_prompt_is_compared_though_engines_differ() -> None:
    """Answers of vLLM differ between two draws; what it was asked first does not. Otherwise a node
    could ask what it likes, and train the model on that."""
    config = untrusted_config()
    grant = Grant(group_id=GroupId("g"), slot=0, epoch=1, attempt=1, task=0, seed=1)
    row = honest_row(grant, config)
    other = replace(row.turns[0], sampled_ids=token_ids([5, 6, 7]), role="")
    again = replace(row, turns=(replace(other, prompt_ids=token_ids([9])), other))
    assert begins_alike(row, again), "of calls that were made at once, any may be the first"
    for forged in ({"prompt_ids": token_ids([1, 3])}, {"role": "judge"}, {"parent": 0}):
        changed = replace(row, turns=(replace(row.turns[0], **forged),))
        assert not begins_alike(changed, again), forged
    assert begins_alike(replace(row, turns=()), again)
