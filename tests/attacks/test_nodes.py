# SPDX-License-Identifier: Apache-2.0
"""A holder of one node's token gets nothing of another node: no result, lease, turn or place.

The attackers speak plain HTTP, as anybody who holds some token of the run can.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import uuid
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import structlog
from blake3 import blake3
from tests.attacks.in_process import dataflow_door
from tests.contract.dataflow_server import (
    POLICY,
    FakeTrainer,
    RunningDataflow,
    dataflow,
    small_config,
)

from penstock.dataflow.core.leasing import RegisterRequest
from penstock.dataflow.service.build import build
from penstock.dataflow.service.nodes import quotas
from penstock.dataflow.service.trainers.messages import QuarantineRequest
from penstock.types import (
    FinishReason,
    GroupId,
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
from penstock.wire.auth import Role
from penstock.wire.codec import decode, encode

Record = dict[str, Any]
LIVE: Record = {"policy": POLICY, "incarnation": 1, "number": 0}
SECRET = "x-penstock-secret"
CONFIG = small_config(groups_per_batch=64, steps=9)


def name_of(grant: Record) -> str:
    return f"{grant['group_id']}.{grant['slot']}.{grant['epoch']}"


def turn() -> Turn:
    return Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([1, 2]),
        sampled_ids=token_ids([3, 4]),
        logprobs=log_probs([-0.5, -0.25]),
        spans=(VersionSpan(start=0, end=2, incarnation=1, number=0),),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )


def row(grant: Record, node_id: str, reward: float = 0.5) -> Record:
    """A delivery in JSON, with the secret of the grant."""
    record = Trajectory(
        row_id=RowId(name_of(grant)),
        group_id=GroupId(grant["group_id"]),
        slot=grant["slot"],
        epoch=grant["epoch"],
        attempt=grant["attempt"],
        node_id=NodeId(node_id),
        turns=(turn(),),
        reward=reward,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )
    payload = base64.b64encode(encode(record)).decode()
    return {"row_id": name_of(grant), "payload": payload, "secret": grant.get("secret", "")}


def cancelled(grant: Record, node_id: str) -> Record:
    """A delivery without a result, as of an attempt that was stopped."""
    found = row(grant, node_id)
    record = decode(base64.b64decode(found["payload"]), Trajectory)
    outcome = Outcome(kind=OutcomeKind.CANCELLED)
    payload = encode(replace(record, turns=(), reward=None, outcome=outcome))
    return {**found, "payload": base64.b64encode(payload).decode()}


@dataclass
class Holder:
    """Whoever holds a token. By default it acts as the node that the token is for."""

    http: httpx2.Client
    node_id: str
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    secret: str = ""

    def register(self, **changes: object) -> httpx2.Response:
        body: Record = {"node_id": self.node_id, "boot_id": self.boot_id, "capacity": 64}
        answer = self.http.post("/v1/nodes", json={**body, "policies": [], **changes})
        if answer.status_code == 200:
            self.secret = answer.json().get("secret", "")
        return answer

    def beat(self, **changes: object) -> httpx2.Response:
        body = {"boot_id": self.boot_id, "state": "live", "live": [LIVE], "secret": self.secret}
        return self.http.put(f"/v1/nodes/{self.node_id}", json={**body, **changes})

    def lease(self, num: int = 2, **changes: object) -> httpx2.Response:
        body = {
            "request_id": uuid.uuid4().hex,
            "node_id": self.node_id,
            "boot_id": self.boot_id,
            "max_slots": num,
            "wait_s": 0,
            "live": [LIVE],
            "secret": self.secret,
        }
        return self.http.post("/v1/leases", json={**body, **changes})

    def grants(self, num: int = 2) -> list[Record]:
        found = self.lease(num, wait_s=20).json()["grants"]
        assert len(found) == num
        return found

    def deliver(self, *rows: Record, **changes: object) -> httpx2.Response:
        body = {"node_id": self.node_id, "boot_id": self.boot_id, "deliveries": rows}
        return self.http.post("/v1/trajectories", json={**body, **changes})

    def statuses(self, *rows: Record, **changes: object) -> list[str]:
        return [one["status"] for one in self.deliver(*rows, **changes).json()["results"]]

    def record(self, grant: Record, **changes: object) -> httpx2.Response:
        told = {
            "row_id": name_of(grant),
            "index": 0,
            "turn": json_of(turn()),
            "secret": grant.get("secret", ""),
        }
        return self.http.post(
            "/v1/turns", json={"node_id": self.node_id, "turns": [{**told, **changes}]}
        )

    def recorded(self, grant: Record, secret: str, node_id: str = "") -> httpx2.Response:
        path = f"/v1/turns/{name_of(grant)}?node_id={node_id or self.node_id}"
        return self.http.get(path, headers={SECRET: secret})

    def leave(self, secret: str) -> httpx2.Response:
        path = f"/v1/nodes/{self.node_id}?boot_id={self.boot_id}"
        return self.http.delete(path, headers={SECRET: secret})

    def named(self, node_id: str) -> Holder:
        """The same token, acting as this node, with everything but its secrets."""
        return Holder(self.http, node_id)


def json_of(value: Turn) -> Record:
    return msgspec.json.decode(msgspec.json.encode(value))


@dataclass
class World:
    running: RunningDataflow
    trainer: FakeTrainer
    folder: Path
    num_nodes: int = 0

    def holder(self, subject: str = "", role: Role = Role.ROLLOUT) -> Holder:
        """Of a token that nobody else has."""
        self.num_nodes += 1
        subject = subject or f"n{self.num_nodes}"
        return self.with_token(self.running.token(role, subject=subject), subject)

    def with_token(self, token: str, node_id: str) -> Holder:
        headers = {"authorization": f"Bearer {token}"}
        http = httpx2.Client(base_url=self.running.url, headers=headers, timeout=60)
        self.running.clients.callback(http.close)
        return Holder(http, node_id)

    def node(self, subject: str = "") -> Holder:
        """A registered node that may lease."""
        holder = self.holder(subject)
        assert holder.register().status_code == 200
        assert holder.beat().status_code == 200
        return holder

    def state_of(self, node_id: str) -> str:
        """Empty: not registered."""
        nodes = self.running.reader().status().nodes
        return next((node.state for node in nodes if node.node_id == node_id), "")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Generator[World]:
    folder = tmp_path_factory.mktemp("nodes")
    with dataflow(folder, CONFIG) as running:
        yield World(running, FakeTrainer(running), folder)


def quarantine(world: World, node_id: str) -> None:
    body = QuarantineRequest(policy=POLICY, incarnation=1, why="it lies", boot_id="s")
    world.trainer.client.quarantine(NodeId(node_id), body)


# --- finding 2: another node's name ---------------------------------------------------------------


@pytest.mark.finding(2)
def test_no_reward_is_forged_in_the_name_of_another_node(world: World) -> None:
    victim, thief = world.node(), world.holder()
    grants = victim.grants()
    forged = [row({**grant, "secret": ""}, victim.node_id, reward=1e9) for grant in grants]
    answer = thief.named(victim.node_id).deliver(*forged)
    assert answer.status_code == 403 and "cannot act as node" in answer.text
    honest = victim.statuses(*(row(grant, victim.node_id) for grant in grants))
    assert honest == ["stored", "stored"]


@pytest.mark.finding(2)
def test_leases_of_another_node_are_not_released(world: World) -> None:
    victim, thief = world.node(), world.node()
    [grant] = victim.grants(1)
    for released in ({name_of(grant): ""}, [name_of(grant)]):
        for who in (thief, thief.named(victim.node_id)):
            answer = who.deliver(released=released)
            assert answer.status_code in (400, 403) or "stored" not in answer.text
    assert victim.statuses(row(grant, victim.node_id)) == ["stored"]


@pytest.mark.finding(2)
def test_nobody_registers_as_another_node_and_evicts_it(world: World) -> None:
    victim, thief = world.node(), world.holder()
    answer = thief.named(victim.node_id).register()
    assert answer.status_code == 403 and victim.node_id in answer.text
    assert victim.beat().status_code == 200, "it is still the process of its node"


@pytest.mark.finding(2)
def test_no_heartbeat_drains_another_node(world: World) -> None:
    victim, thief = world.node(), world.holder()
    stranger = thief.named(victim.node_id)
    assert stranger.beat(boot_id=victim.boot_id, state="draining").status_code == 403
    assert world.state_of(victim.node_id) == "live"


@pytest.mark.finding(2)
def test_nobody_leaves_for_another_node(world: World) -> None:
    victim, thief = world.node(), world.holder()
    stranger = thief.named(victim.node_id)
    stranger.boot_id = victim.boot_id
    assert stranger.leave(victim.secret).status_code == 403
    assert world.state_of(victim.node_id) == "live"


@pytest.mark.finding(2)
def test_nobody_leases_for_another_node(world: World) -> None:
    victim, thief = world.node(), world.holder()
    stranger = thief.named(victim.node_id)
    assert stranger.lease(boot_id=victim.boot_id, secret=victim.secret).status_code == 403


@pytest.mark.finding(2)
def test_turns_of_another_node_are_neither_read_nor_planted(world: World) -> None:
    victim, thief = world.node(), world.node()
    [grant] = victim.grants(1)
    assert victim.record(grant).status_code == 200
    assert thief.recorded(grant, grant.get("secret", ""), victim.node_id).status_code == 403
    assert thief.recorded(grant, grant.get("secret", "")).status_code == 409
    assert thief.named(victim.node_id).record(grant).status_code == 403
    thief.record(grant, index=1)  # ignored: not its lease
    assert victim.deliver(released={name_of(grant): grant.get("secret", "")}).status_code == 200
    heir = world.node()
    found = {(one["group_id"], one["slot"]): one for one in heir.grants(1)}
    assert found[grant["group_id"], grant["slot"]]["num_recorded"] == 1


# --- who may be a node ----------------------------------------------------------------------------


@pytest.mark.finding(2)
@pytest.mark.parametrize(
    "role", [Role.STAGE, Role.ADMIN, Role.READER, Role.TRAINER, Role.RELAY, Role.PARTITION]
)
def test_only_nodes_act_as_nodes(world: World, role: Role) -> None:
    """A stage, a reader or an operator cannot deliver results, whatever its token is for."""
    holder = world.holder(role=role)
    answers = [holder.register(), holder.beat(), holder.lease(), holder.deliver()]
    assert [answer.status_code for answer in answers] == [403] * 4


def test_a_gateway_is_no_rollout_node_and_a_node_no_gateway(world: World) -> None:
    """Neither leases the slots of the other: a session's reward comes from its agent's owner."""
    gateway, node = world.holder(role=Role.GATEWAY), world.holder()
    assert gateway.register().status_code == 403
    assert gateway.register(tags=["session"]).status_code == 200
    assert node.register(tags=["session"]).status_code == 403


def test_a_token_that_names_nobody_is_no_node(world: World) -> None:
    """A token from before tokens had names does not choose who it is."""
    holder = world.with_token(world.running.token(Role.ROLLOUT), "n0")
    assert holder.register().status_code == 403
    assert holder.named("").register().status_code in (400, 403)
    assert holder.named(".x").register().status_code in (400, 403)


STRANGE_NAMES = (
    *("{}..x", "{}.", ".{}", "{}x", "x{}", "{}-x"),
    *("{}\u200b", "{}.\u00e9", "\uff4e", "{}.x y", "{}.x\x00", "{}.x\n"),
    *("", "{}." + "a" * 128, "{}.x/../y", "{}%2ex", "../{}"),
)


@pytest.mark.parametrize("node_id", STRANGE_NAMES)
def test_no_spelling_of_a_node_id_leaves_the_name_in_the_token(world: World, node_id: str) -> None:
    """Prefixes, empty parts, look-alikes, control characters and paths are refused."""
    holder = world.holder()
    answer = holder.named(node_id.format(holder.node_id)).register()
    assert answer.status_code in (400, 403), answer.text


def test_the_case_of_a_name_counts(world: World) -> None:
    """`Alice` is another name than `alice`."""
    victim = world.node("alice")
    thief = world.holder("Alice")
    assert thief.named(victim.node_id).register().status_code == 403


def test_a_name_with_a_dot_is_nobodys_second_node(world: World) -> None:
    """A token for `a.b` cannot act as node `a.b`, which belongs to the token for `a`."""
    world.node("dotted")
    thief = world.with_token(world.running.token(Role.ROLLOUT, subject="dotted.b"), "dotted.b")
    assert thief.register().status_code == 403


# --- secrets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "zeros", "long", "unicode", "other lease", "boot"])
def test_no_guessed_secret_delivers_or_releases(world: World, kind: str) -> None:
    """The token alone is not enough: two processes may share it, and only one holds the lease."""
    node = world.node()
    grant, other = node.grants(2)
    if other["group_id"] == grant["group_id"]:
        [other] = node.grants(1)
    guess = {
        "none": "",
        "zeros": "0" * 32,
        "long": "f" * 128,
        "unicode": "\U0001f511\ud7ff",
        "other lease": other["secret"],
        "boot": node.secret,
    }[kind]
    assert guess != grant["secret"]
    assert node.statuses({**row(grant, node.node_id), "secret": guess}) == ["fenced"]
    assert node.statuses(released={name_of(grant): guess}) == ["fenced"]
    assert node.recorded(grant, guess.encode("ascii", "ignore").decode()[:999]).status_code == 409
    assert node.statuses(row(grant, node.node_id)) == ["stored"]


def test_a_stolen_lease_secret_is_worth_nothing_to_another_node(world: World) -> None:
    """The secret of a lease proves it only for the node that got it."""
    victim, thief = world.node(), world.node()
    [grant] = victim.grants(1)
    assert thief.statuses(row(grant, thief.node_id, reward=1.0)) == ["fenced"]
    assert thief.statuses(row(grant, victim.node_id, reward=1.0)) == ["fenced"]
    assert thief.statuses(released={name_of(grant): grant["secret"]}) == ["fenced"]
    assert victim.statuses(row(grant, victim.node_id)) == ["stored"]


def test_a_second_process_of_the_same_token_cannot_take_the_first_ones_work(world: World) -> None:
    """It knows node id, boot_id and request_id of the other, and has none of its secrets."""
    first = world.node()
    request = uuid.uuid4().hex
    [grant] = first.lease(1, request_id=request, wait_s=20).json()["grants"]
    second = first.named(f"{first.node_id}.second")
    assert second.register().status_code == 200
    spy = first.named(first.node_id)
    spy.boot_id = first.boot_id
    for secret in ("", second.secret):
        assert spy.beat(secret=secret).status_code == 404
        assert spy.lease(request_id=request, secret=secret).status_code == 404
        assert spy.leave(secret).status_code == 404
    assert world.state_of(first.node_id) == "live"
    assert second.statuses(row(grant, second.node_id)) == ["fenced"]
    assert first.statuses(row(grant, first.node_id)) == ["stored"]


def test_the_secret_of_an_earlier_process_is_of_no_use(world: World) -> None:
    """A process that was replaced is told so, and its secret does not prove the new one."""
    old = world.node()
    new = old.named(old.node_id)
    assert new.register().status_code == 200
    assert old.beat().status_code == 409
    assert old.register().status_code == 409
    assert new.beat(secret=old.secret).status_code == 404
    assert new.beat().status_code == 200


def test_a_replayed_delivery_counts_once(world: World) -> None:
    """The same bytes again change nothing, other bytes are a conflict, from elsewhere fenced."""
    node, other = world.node(), world.node()
    [grant] = node.grants(1)
    sent = row(grant, node.node_id)
    assert node.statuses(sent) == ["stored"]
    assert node.statuses(sent, sent) == ["duplicate", "duplicate"]
    assert node.statuses(row(grant, node.node_id, reward=1e9)) == ["conflict"]
    assert other.statuses(sent) == ["fenced"], "it does not learn that the row exists"
    counts = {one.node_id: one.delivered for one in world.running.reader().status().nodes}
    assert counts[NodeId(node.node_id)] == 1


def test_the_right_secret_of_an_ended_lease_is_fenced(world: World) -> None:
    """A lease ends once: what comes under its old epoch changes nothing, proven or not."""
    node = world.node()
    [grant] = node.grants(1)
    assert node.statuses(released={name_of(grant): grant["secret"]}) == ["stored"]
    [again] = node.grants(1)
    assert (again["group_id"], again["slot"]) == (grant["group_id"], grant["slot"])
    assert again["secret"] != grant["secret"]
    assert node.statuses(row(grant, node.node_id)) == ["fenced"]
    mixed = {**row(again, node.node_id), "secret": grant["secret"]}
    assert node.statuses(mixed) == ["fenced"]
    assert node.statuses(row(again, node.node_id)) == ["stored"]


def test_one_bad_row_in_a_call_spoils_no_other(world: World) -> None:
    """Results come in the order of the rows, and only the unproven one is refused."""
    node = world.node()
    good, bad, late = (row(grant, node.node_id) for grant in node.grants(3))
    answers = node.deliver(good, {**bad, "secret": "x"}, late).json()["results"]
    assert [one["row_id"] for one in answers] == [one["row_id"] for one in (good, bad, late)]
    assert [one["status"] for one in answers] == ["stored", "fenced", "stored"]


def test_a_row_names_neither_another_node_nor_another_row(world: World) -> None:
    """A confused deputy: the envelope is the node's own, the record inside another's."""
    victim, node = world.node(), world.node()
    [theirs], [mine, second] = victim.grants(1), node.grants(2)
    for inside in (row(theirs, victim.node_id), row(mine, victim.node_id)):
        envelope = {**row(mine, node.node_id), "payload": inside["payload"]}
        assert node.statuses(envelope) in (["invalid"], ["fenced"])
    wrong = {**row(second, node.node_id), "payload": row(theirs, node.node_id)["payload"]}
    assert node.statuses(wrong) == ["invalid"]
    assert victim.statuses(row(theirs, victim.node_id)) == ["stored"]


def test_secrets_of_another_run_or_partition_are_others(tmp_path: Path) -> None:
    """Even with the key file copied, as a forked or moved ledger has it."""
    from penstock.dataflow.service.nodes.proofs import KEY_FILE, NodeSecrets

    node = NodeId("n")
    here = NodeSecrets.open(tmp_path, run="a", partition=0)
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / KEY_FILE, tmp_path / "copy" / KEY_FILE)
    again = NodeSecrets.open(tmp_path, run="a", partition=0)
    assert again.of_boot(node, "b") == here.of_boot(node, "b"), "it survives a restart"
    for run, partition in (("b", 0), ("a", 1), ("0 a", 0)):
        there = NodeSecrets.open(tmp_path / "copy", run=run, partition=partition)
        assert there.of_boot(node, "b") != here.of_boot(node, "b")
        assert not there.is_of_lease(node, RowId("g.0.1"), here.of_lease(node, GroupId("g"), 1))
    assert here.of_boot(node, "b") != here.of_lease(node, GroupId("b"), 1)
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_secrets_stand_in_no_file_and_in_no_answer_to_others(world: World) -> None:
    """Who may read the ledger, the status or the metrics cannot act as a node."""
    node = world.node()
    [grant] = node.grants(1)
    assert node.statuses(row(grant, node.node_id)) == ["stored"]
    held = b"".join(p.read_bytes() for p in world.folder.rglob("*") if p.is_file())
    reader = world.holder(role=Role.READER)
    shown = "".join(
        reader.http.get(path).text
        for path in ("/v1/status", "/v1/report", "/metrics", f"/v1/explain/{name_of(grant)}")
    )
    for secret in (grant["secret"], node.secret):
        assert len(secret) == 32 and secret.encode() not in held and secret not in shown


# --- finding 10: quarantine -----------------------------------------------------------------------


@pytest.mark.finding(10)
@pytest.mark.parametrize("way", ["new process", "new node", "leave and come back"])
def test_quarantine_follows_the_credential(world: World, way: str) -> None:
    """A new boot_id, a new name under the same token, a new registration: none gets work."""
    liar = world.node()
    quarantine(world, liar.node_id)
    assert liar.lease(wait_s=0).json()["grants"] == []
    if way == "leave and come back":
        assert liar.leave(liar.secret).status_code == 200
    again = liar.named(f"{liar.node_id}.again" if way == "new node" else liar.node_id)
    assert again.register().status_code == 200 and again.beat().status_code == 200
    assert again.lease(wait_s=0).json()["grants"] == []
    assert world.state_of(again.node_id) == "quarantined"
    assert len(world.node().grants(1)) == 1, "there is work for others"


@pytest.mark.finding(10)
def test_quarantine_of_a_credential_survives_a_restart(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        here = World(running, FakeTrainer(running), tmp_path)
        here.node("liar")
        quarantine(here, "liar.of-old")
    with dataflow(tmp_path, CONFIG) as running:
        there = World(running, FakeTrainer(running), tmp_path)
        liar = there.holder("liar").named("liar.new")
        assert liar.register().status_code == 200
        live = {**LIVE, "incarnation": there.trainer.incarnation}
        assert liar.beat(live=[live]).status_code == 200
        assert liar.lease(live=[live]).json()["grants"] == []
        assert there.state_of("liar.new") == "quarantined"


def test_turns_of_a_credential_in_quarantine_reach_nobody(world: World) -> None:
    """Else the next holder of the slot delivers them, and is the next one to be quarantined."""
    liar = world.node()
    [grant] = liar.grants(1)
    assert liar.record(grant).status_code == 200
    quarantine(world, liar.node_id)
    heir = world.node()
    [again] = heir.grants(1)
    assert (again["group_id"], again["slot"]) == (grant["group_id"], grant["slot"])
    assert again["num_recorded"] == 0
    assert heir.recorded(again, again["secret"]).json()["turns"] == []


def test_nobody_but_a_trainer_quarantines(world: World) -> None:
    """A node cannot have its rival put into quarantine."""
    victim, rival = world.node(), world.node()
    body = {"policy": POLICY, "incarnation": 1, "why": "so that I get its work", "boot_id": ""}
    for who in (rival, world.holder(role=Role.GATEWAY), world.holder(role=Role.STAGE)):
        path = f"/v1/nodes/{victim.node_id}/quarantine"
        assert who.http.post(path, json=body).status_code == 403
    assert world.state_of(victim.node_id) == "live"


# --- finding 14: quotas ---------------------------------------------------------------------------


@pytest.mark.finding(14)
@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "s" * 500_000},
        {"boot_id": ""},
        {"tags": ["t" * 100_000]},
        {"tags": ["t"] * 10_000},
        {"policies": ["p" * 100_000]},
        {"policies": ["p"] * 10_000},
    ],
    ids=["long boot", "no boot", "long tag", "many tags", "long policy", "many policies"],
)
def test_a_registration_is_small(world: World, changes: Record) -> None:
    """Every text of a registration has a bound, so a node costs the service little memory."""
    assert world.holder().register(**changes).status_code == 400


@pytest.mark.finding(14)
@pytest.mark.parametrize("capacity", [0, -1, 100_001, 10**9, 2**63, 2**64, 1e308, True, "64"])
def test_a_node_cannot_lie_about_its_capacity(world: World, capacity: object) -> None:
    assert world.holder().register(capacity=capacity).status_code == 400


@pytest.mark.finding(14)
def test_many_nodes_of_one_token_share_a_limit_of_slots(world: World) -> None:
    """Eleven nodes of 100,000 slots are refused together; others are not affected."""
    holder = world.holder()
    answers = [holder.named(f"{holder.node_id}.{n}").register(capacity=100_000) for n in range(11)]
    assert [answer.status_code for answer in answers] == [200] * 10 + [429]
    assert "slots" in answers[-1].text and "retry-after" in answers[-1].headers
    assert world.holder().register(capacity=100_000).status_code == 200


@pytest.mark.finding(14)
def test_registrations_without_end_stay_bounded_in_memory(tmp_path: Path) -> None:
    """10^5 names under one token: a bounded number of nodes, and no more writes than the rate."""
    from penstock.dataflow.service.nodes.quotas import MAX_NODES, NodeQuotas
    from penstock.errors import Busy

    service = build(CONFIG, tmp_path)
    partition = service.partition
    quotas = NodeQuotas(partition.node_registry, lambda: 0.0, service.nodes.forget_silent)
    num_refused = 0
    for n in range(100_000):
        body = RegisterRequest(node_id=NodeId(f"flood.{n}"), boot_id="b", capacity=1, policies=())
        try:
            quotas.check_registration(body)
        except Busy:
            num_refused += 1
        else:
            partition.register(body, 0.0)
    assert len(partition.nodes) == MAX_NODES and num_refused == 100_000 - MAX_NODES
    quotas.check_registration(
        RegisterRequest(node_id=NodeId("honest"), boot_id="b", capacity=1, policies=())
    )
    service.close()


@pytest.mark.parametrize("how", ["released", "cancelled", "left"])
def test_who_only_hands_slots_back_gets_none_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It costs no attempt, so a node did it without end: 3,400 slots a second, each of 400 bytes in
    the ledger and a timer of ten minutes in memory."""
    monkeypatch.setattr(quotas, "RELEASED_AT_ONCE", 0)
    monkeypatch.setattr(quotas, "RELEASES_PER_S", 0.0)
    node, num_released = world.node(), 0
    while (answer := node.lease(16)).status_code == 200 and num_released < 300:
        grants = answer.json()["grants"]
        num_released += len(grants)
        if how == "released":
            secrets = {name_of(grant): grant["secret"] for grant in grants}
            assert set(node.statuses(released=secrets)) <= {"stored"}
        elif how == "cancelled":
            assert set(node.statuses(*(cancelled(one, node.node_id) for one in grants))) == {
                "stored"
            }
        else:
            assert node.leave(node.secret).status_code == 200
            assert node.register().status_code == node.beat().status_code == 200
    assert answer.status_code == 429 and "hands back" in answer.text
    assert 64 <= num_released <= 64 + 16
    other = world.node()
    assert other.statuses(*(row(grant, other.node_id) for grant in other.grants())) == [
        "stored",
        "stored",
    ]


def test_a_fleet_that_restarts_displaces_its_own_silent_nodes_only(tmp_path: Path) -> None:
    """Nodes that never left make room for new ones of the same credential, and for no other."""
    service = build(CONFIG, tmp_path)
    partition = service.partition
    for name in ("fleet.0", "fleet.1", "other"):
        body = RegisterRequest(node_id=NodeId(name), boot_id="b", capacity=1, policies=())
        partition.register(body, float(name == "fleet.1"))
    assert not service.nodes.forget_silent("fleet"), "none of them is silent"
    partition.tick(1e6)
    assert service.nodes.forget_silent("fleet") and set(partition.nodes) == {"fleet.1", "other"}
    assert service.nodes.forget_silent("fleet") and set(partition.nodes) == {"other"}
    service.close()


@pytest.mark.finding(14)
def test_unfinished_uploads_have_a_quota_per_credential(world: World) -> None:
    """Gigabytes announced and never sent: refused after the first few, also under a new node id,
    while another credential uploads."""
    flooder, honest = world.node(), world.node()
    path = "/v1/blobs/{:064x}?offset=0&size=1000000000"
    codes = [flooder.http.put(path.format(n), content=b"x" * 1000).status_code for n in range(20)]
    assert 0 < codes.count(200) < 8 and set(codes) == {200, 429}
    assert flooder.http.put(path.format(0), content=b"x" * 1000).status_code == 200, "resumed"
    data = os.urandom(2000)
    target = f"/v1/blobs/{blake3(data).hexdigest()}?offset=0&size={len(data)}"
    assert honest.http.put(target, content=data).json()["complete"]


def test_finished_uploads_without_a_row_count_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And refused deliveries do not free them: only a row that refers to the blob does."""
    monkeypatch.setattr("penstock.dataflow.service.rows.upload_quotas.MAX_UPLOADS", 2)
    node = world.node()
    [grant] = node.grants(1)
    payload = base64.b64decode(row(grant, node.node_id)["payload"])

    def upload(data: bytes) -> int:
        target = f"/v1/blobs/{blake3(data).hexdigest()}?offset=0&size={len(data)}"
        return node.http.put(target, content=data).status_code

    def deliver(secret: str) -> list[str]:
        made = {"row_id": name_of(grant), "payload": "", "secret": secret}
        return node.statuses({**made, "blob": blake3(payload).hexdigest()})

    assert [upload(payload), upload(os.urandom(9)), upload(os.urandom(9))] == [200, 200, 429]
    assert deliver("") == ["fenced"] and upload(os.urandom(9)) == 429
    assert deliver(grant["secret"]) == ["stored"] and upload(os.urandom(9)) == 200


def test_an_upload_that_claims_to_be_smaller_later_counts_in_full(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are still on the disk."""
    monkeypatch.setattr("penstock.dataflow.service.rows.upload_quotas.MAX_UPLOAD_BYTES", 5000)
    node = world.node()

    def upload(number: int, size: int, data: bytes) -> int:
        target = f"/v1/blobs/{number:064x}?offset=0&size={size}"
        return node.http.put(target, content=data).status_code

    assert upload(1, 3000, b"x" * 2999) == 200
    assert upload(1, 2, b"x") == 200
    assert upload(2, 3000, b"x" * 2999) == 429


def test_nobody_spoils_the_upload_of_another(world: World) -> None:
    """Two credentials upload under one digest; the wrong bytes of one do not end up in the blob."""
    victim, vandal = world.node(), world.node()
    data = os.urandom(4000)
    path = f"/v1/blobs/{blake3(data).hexdigest()}?size=4000&offset="
    assert victim.http.put(f"{path}0", content=data[:2000]).json()["held_bytes"] == 2000
    assert vandal.http.put(f"{path}0", content=b"x" * 3000).status_code == 200
    assert vandal.http.put(f"{path}3000", content=b"x" * 1000).status_code == 400
    assert victim.http.put(f"{path}2000", content=data[2000:]).json()["complete"]


@pytest.mark.finding(14)
def test_open_polls_have_a_quota_per_credential(world: World) -> None:
    """A flood of lease requests is refused beyond a few; another node's request is answered."""
    flooder, honest = world.node(), world.node()
    quarantine(world, flooder.node_id)  # so that all of them stay open
    with ThreadPoolExecutor(24) as pool:
        polls = [pool.submit(flooder.lease, wait_s=30) for _ in range(24)]
        refused = list(islice(as_completed(polls), 14))
        assert {poll.result().status_code for poll in refused} == {429}
        assert len(honest.grants(1)) == 1
        assert flooder.leave(flooder.secret).status_code == 200  # which ends the ten open ones
        codes = [poll.result().status_code for poll in polls]
    assert sorted(codes) == [404] * 10 + [429] * 14


@pytest.mark.parametrize("max_slots", [-(10**9), 0, 10**12])
def test_a_poll_that_lies_about_its_slots_gets_and_blocks_none(
    world: World, max_slots: int
) -> None:
    """More slots than the capacity are never granted, and fewer than one keep no slot from
    others."""
    liar = world.holder()
    assert liar.register(capacity=1).status_code == 200 and liar.beat().status_code == 200
    answer = liar.lease(max_slots)
    assert answer.status_code == 400 or len(answer.json()["grants"]) <= 1
    assert len(world.node().grants(1)) == 1


def test_a_call_with_a_million_rows_is_refused_before_any_is_checked(world: World) -> None:
    node = world.node()
    rows = [{"row_id": "p0-1.0.1", "payload": "", "secret": ""}] * 10_001
    answer = node.deliver(*rows)
    assert answer.status_code == 400 and "length <= 10000" in answer.text


async def test_a_flood_of_one_credential_waits_behind_itself() -> None:
    """Its calls share a budget and the rest wait in order; another credential enters at once."""
    from penstock.errors import Busy
    from penstock.wire.call_budget import CallBudget

    budget, entered = CallBudget(max_bytes=10, max_waiting=3), list[int]()
    flood, honest = ("flood", "/v1/trajectories"), ("honest", "/v1/trajectories")

    async def call(number: int) -> None:
        await budget.enter(flood, 10)
        entered.append(number)

    calls = [asyncio.create_task(call(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert entered == [0]
    with pytest.raises(Busy):
        await budget.enter(flood, 1)
    async with asyncio.timeout(60):
        await budget.enter(honest, 50)
        await budget.enter(("flood", "/v1/nodes/{node_id}"), 1)
    calls[1].cancel()
    await asyncio.wait({calls[1]})
    for number in (2, 3):
        budget.leave(flood, 10)
        await calls[number]
    assert entered == [0, 2, 3]


def test_bodies_that_never_come_hold_up_their_sender_only(world: World) -> None:
    """Two calls announce 60 MB and stay silent: another node delivers meanwhile, and the sender's
    own heartbeats arrive."""
    flooder, honest = world.node(), world.node()
    [grant] = honest.grants(1)

    def drip() -> Generator[bytes]:
        yield b"{"
        stop.result()

    with ThreadPoolExecutor(3) as pool:
        stop: Future[None] = Future()
        headers = {"content-length": str(60 << 20), "content-type": "application/json"}
        post = flooder.http.post
        silent = [
            pool.submit(post, "/v1/trajectories", content=drip(), headers=headers) for _ in range(2)
        ]
        try:
            assert flooder.beat().status_code == 200
            assert honest.statuses(row(grant, honest.node_id)) == ["stored"]
        finally:
            stop.set_result(None)
            for one in silent:
                one.exception()


async def test_results_without_a_proof_fill_no_log(tmp_path: Path) -> None:
    """A line is written each time that their number doubles."""
    async with dataflow_door(tmp_path) as door:
        joins = {"node_id": "n", "boot_id": "b", "capacity": 1, "policies": [POLICY]}
        assert (await door.call("POST", "/v1/nodes", Role.ROLLOUT, body=joins)).is_success
        forged: Record = {
            "node_id": "n",
            "boot_id": "b",
            "deliveries": [],
            "released": {"p0-1.0.1": "x"},
        }
        with structlog.testing.capture_logs() as lines:
            for _ in range(64):
                answer = await door.call("POST", "/v1/trajectories", Role.ROLLOUT, body=forged)
                assert answer.json()["results"][0]["status"] == "fenced", answer.text
        assert 1 <= len([line for line in lines if "secret" in line["event"]]) <= 7
