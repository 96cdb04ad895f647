# SPDX-License-Identifier: Apache-2.0
"""Sources that call some policies, nodes that serve some, and a frozen policy: the same after a
restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.dataflow_server import dataflow, trajectory

from penstock.config import ModelConfig, RunConfig, load
from penstock.dataflow.core.leasing import DeliveryStatus, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    DeliveryRequest,
    Heartbeat,
    LeaseAnswer,
    LeaseRequest,
)
from penstock.dataflow.service.operators.status import status
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.errors import NotFound
from penstock.trainer.frozen import publish_frozen
from penstock.trainer.model_folders import init_model
from penstock.types import NodeId, PolicyName
from penstock.weights.manifest import parse_manifest
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Role

A, B, JUDGE = PolicyName("a"), PolicyName("b"), PolicyName("judge")
RUN = """\
name: pools
models:
  a: {init: builtin:tiny-qwen3}
  b: {init: builtin:tiny-qwen3}
  judge: {init: builtin:tiny-qwen3, frozen: true}
sources:
  - {name: left, task: penstock.tasks.reverse, policies: [a, judge]}
  - {name: right, task: penstock.tasks.reverse, policies: [b]}
workflow: my_pair:run
algorithm: {num_generations: 2}
training: {steps: 9, groups_per_batch: 2, max_staleness: 0}
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "run.yaml").write_text(RUN)
    return load(tmp_path / "run.yaml")


def live(*policies: PolicyName) -> tuple[LiveVersion, ...]:
    return tuple(LiveVersion(policy=policy, incarnation=1, number=0) for policy in policies)


async def publish(service: DataflowService, *policies: PolicyName) -> None:
    for policy in policies:
        body = IncarnationRequest(request_id=policy, expected=0, number=0, seq=0)
        await service.trainers.incarnate(policy, body)
        version = PublishRequest(
            incarnation=1, number=0, manifest_digest=policy, weights_digest="w"
        )
        await service.trainers.publish(policy, version)


async def join(service: DataflowService, name: str, *policies: PolicyName) -> None:
    body = RegisterRequest(node_id=NodeId(name), boot_id=name, capacity=64, policies=policies)
    await service.nodes.register(body)
    beat = Heartbeat(boot_id=name, state=NodeState.LIVE, live=live(*policies))
    await service.nodes.heartbeat(NodeId(name), beat)


async def lease(service: DataflowService, name: str, *policies: PolicyName) -> LeaseAnswer:
    body = LeaseRequest(
        request_id=f"{name}-{service.process.clock()}",
        node_id=NodeId(name),
        boot_id=name,
        max_slots=64,
        wait_s=0,
        live=live(*policies),
    )
    return await service.nodes.lease(body)


async def test_groups_are_for_the_policies_of_their_source(
    tmp_path: Path, config: RunConfig
) -> None:
    service = build(config, tmp_path / "ledger")
    await publish(service, A, B)
    sources = {record.source for record in service.coordinator.open.values()}
    assert sources == {"right"}, "nothing of `left` starts before its judge is published"
    await publish(service, JUDGE)
    issued = {g: service.coordinator.undecided(r) for g, r in service.coordinator.open.items()}
    assert sorted(map(sorted, issued.values())) == [["a"], ["a"], ["b"], ["b"]]
    await join(service, "n-b", B)
    found = await lease(service, "n-b", B)
    assert {task.source for task in found.tasks} == {"right"}
    waits = [wait.on for wait in status(service, "pools").waiting]
    assert any("a node that serves a, judge: source left" in text for text in waits)
    service.close()
    service = build(config, tmp_path / "ledger")  # a restart
    again = {g: service.coordinator.undecided(r) for g, r in service.coordinator.open.items()}
    assert again == issued
    assert service.coordinator.consumers[A].num_undecided == 2
    assert service.coordinator.frozen[JUDGE].newest is not None
    assert {v.policy for v in service.partition.target_versions} == {A, B, JUDGE}
    service.close()


async def test_a_policy_seals_its_batch_without_the_groups_of_others(
    tmp_path: Path, config: RunConfig
) -> None:
    service = build(config, tmp_path / "ledger")
    await publish(service, A, B, JUDGE)
    await join(service, "n-b", B)
    grants = (await lease(service, "n-b", B)).grants
    rows = [
        trajectory(grant, NodeId("n-b"), live(B)[0], reward=0.5 * grant.slot) for grant in grants
    ]
    body = DeliveryRequest(node_id=NodeId("n-b"), boot_id="n-b", deliveries=tuple(rows))
    answer = await service.nodes.deliver(body)
    assert {result.status for result in answer.results} == {DeliveryStatus.STORED}
    batch = await service.trainers.batch(BatchRequest(consumer=B, seq=1, incarnation=1))
    assert batch.manifest is not None and len(batch.manifest.groups) == 2
    assert service.coordinator.consumers[A].expected_yield == 1.0
    tables = service.process.ledger.tables
    assert {consumer for (consumer,) in tables.rows("SELECT consumer FROM fates")} == {"b"}
    service.close()


def test_a_checkpoint_becomes_a_frozen_policy_without_its_trainer_state(
    tmp_path: Path, config: RunConfig
) -> None:
    """It is published once, however often the run starts."""
    checkpoint = tmp_path / "step_20"
    init_model("builtin:tiny-qwen3", checkpoint, seed=3)
    (checkpoint / "optimizer.safetensors").write_bytes(
        (checkpoint / "model.safetensors").read_bytes()
    )
    (checkpoint / "trainer.json").write_text("{}")
    models = {**config.models, "judge": ModelConfig(init=str(checkpoint), frozen=True)}
    config = config.model_copy(update={"models": models})
    with dataflow(tmp_path / "ledger", config) as running:
        token = running.token(Role.TRAINER)
        for _ in range(2):
            publish_frozen(config, "judge", url=running.url, token=token, store_root=tmp_path / "w")
        [version] = running.reader().versions_in_use().versions
    assert (version.incarnation, version.number) == (1, 0)
    manifest = parse_manifest(DirectoryStore(tmp_path / "w").read_manifest(version.manifest_digest))
    names = {file.name for file in manifest.files}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not names & {"optimizer.safetensors", "trainer.json"}


async def test_a_frozen_policy_has_versions_and_no_batches(
    tmp_path: Path, config: RunConfig
) -> None:
    service = build(config, tmp_path / "ledger")
    assert service.trainers.policy_state(JUDGE).published == -1
    await publish(service, JUDGE)
    assert service.trainers.policy_state(JUDGE).published == 0
    assert [v.policy for v in service.trainers.versions_in_use(()).versions] == [JUDGE]
    with pytest.raises(NotFound, match="frozen: it has no batches"):
        await service.trainers.batch(BatchRequest(consumer=JUDGE, seq=1, incarnation=1))
    assert JUDGE not in {policy.policy for policy in status(service, "pools").policies}
    service.close()
