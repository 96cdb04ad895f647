# SPDX-License-Identifier: Apache-2.0
"""Small real ledgers: the real service in this process, driven by nodes and a trainer without
models. No sockets, no sleeping: every wait is zero."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from penstock.config import RunConfig, demo_config, dump
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.records import row_id
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.partition import PartitionService
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.types import (
    FinishReason,
    Manifest,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    ToolUse,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import encode

POLICY = PolicyName("policy")
NUM_TOKENS = 3
Choose = Callable[[Grant], OutcomeKind]


def small_config() -> RunConfig:
    """Batches of 3 groups of 4, so a ledger is made in a second."""
    config = demo_config(0)
    return config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update={"num_generations": 4}),
            "training": config.training.model_copy(
                update={"groups_per_batch": 3, "steps": 8, "max_staleness": 1}
            ),
        }
    )


def always_completed(grant: Grant) -> OutcomeKind:
    return OutcomeKind.COMPLETED


def some_failures(grant: Grant) -> OutcomeKind:
    """Group 2 fails for good in one slot, some others at the first attempt; one is released."""
    if grant.group_id == "p0-2" and grant.slot == 1:
        return OutcomeKind.FAILED
    if grant.epoch == 1 and (grant.group_id, grant.slot) in {("p0-3", 0), ("p0-7", 2)}:
        return OutcomeKind.FAILED
    if grant.epoch == 1 and (grant.group_id, grant.slot) == ("p0-4", 3):
        return OutcomeKind.CANCELLED
    if grant.slot == 3:
        return OutcomeKind.TRUNCATED
    return OutcomeKind.COMPLETED


@dataclass(slots=True)
class FakeNode:
    """Leases, delivers immediately, and logs the acknowledged ids, as a real node does."""

    service: DataflowService | PartitionService
    run_dir: Path
    node_id: NodeId
    choose: Choose = always_completed
    boot_id: str = "first"
    held: list[Grant] = field(default_factory=list[Grant])
    live: tuple[LiveVersion, ...] = ()
    earlier: tuple[LiveVersion, ...] = ()
    """The version before the last load; answers in flight then have tokens of both."""
    num_requests: int = 0
    explain: Callable[[Grant], str] = lambda grant: ""
    """Why an attempt failed."""
    tags: tuple[str, ...] = ()
    tool_uses: Callable[[Grant], tuple[ToolUse, ...]] = lambda grant: ()
    role: Callable[[], str] = lambda: ""
    """Of the next turn."""
    agent: Callable[[], str] = lambda: ""
    """As `role`."""

    async def join(self) -> None:
        body = RegisterRequest(
            node_id=self.node_id,
            boot_id=self.boot_id,
            capacity=64,
            policies=(),
            tags=self.tags,
        )
        await self.service.nodes.register(body)
        self.held.clear()
        await self.load()

    async def load(self) -> None:
        """Load the current target version."""
        wanted = self.service.partition.target_versions
        self.earlier = self.live
        self.live = tuple(
            LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number) for v in wanted
        )
        state = NodeState.LIVE if self.live else NodeState.STARTING
        body = Heartbeat(boot_id=self.boot_id, state=state, live=self.live)
        await self.service.nodes.heartbeat(self.node_id, body)

    async def lease(self, num_slots: int) -> None:
        self.num_requests += 1
        answer = await self.service.nodes.lease(
            LeaseRequest(
                request_id=f"{self.node_id}-{self.boot_id}-{self.num_requests}",
                node_id=self.node_id,
                boot_id=self.boot_id,
                max_slots=num_slots,
                wait_s=0.0,
                live=self.live,
                pinned=self.live,
            )
        )
        self.held += answer.grants

    async def deliver(self, *, across_load: bool = False) -> int:
        """Deliver all leased slots; with `across_load`, half of each answer by older weights."""
        rows = [self._answer(grant, across_load=across_load) for grant in self.held]
        self.held.clear()
        if not rows:
            return 0
        answer = await self.service.nodes.deliver(
            DeliveryRequest(
                node_id=self.node_id,
                boot_id=self.boot_id,
                deliveries=tuple(
                    Delivery(row_id=t.row_id, payload=memoryview(encode(t))) for t in rows
                ),
            )
        )
        stored = [r.row_id for r in answer.results if r.status is DeliveryStatus.STORED]
        self._acknowledge(stored)
        return len(stored)

    async def release(self, num_slots: int) -> None:
        handed_back, self.held = self.held[:num_slots], self.held[num_slots:]
        await self.service.nodes.deliver(
            DeliveryRequest(
                node_id=self.node_id,
                boot_id=self.boot_id,
                deliveries=(),
                released={row_id(g.group_id, g.slot, g.epoch): g.secret for g in handed_back},
            )
        )

    async def work(self, num_slots: int = 64) -> int:
        await self.lease(num_slots)
        return await self.deliver()

    def _acknowledge(self, row_ids: list[RowId]) -> None:
        path = self.run_dir / "acks" / f"{self.node_id}.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as log:
            log.writelines(f"{found}\n" for found in row_ids)

    def _answer(self, grant: Grant, *, across_load: bool) -> Trajectory:
        kind = self.choose(grant)
        why = self.explain(grant) if kind is OutcomeKind.FAILED else ""
        outcome = Outcome(kind=kind, reason="workflow" if why else "", detail=why)
        spans = [self.live[0]] * NUM_TOKENS
        if across_load and self.earlier:
            spans[0] = self.earlier[0]
        turn = Turn(
            policy=POLICY,
            parent=-1,
            prompt_ids=token_ids([1, 2, 3, 4]),
            sampled_ids=token_ids([grant.slot, grant.epoch, 7]),
            logprobs=log_probs([-0.1, -0.2, -0.3]),
            spans=tuple(
                VersionSpan(start=i, end=i + 1, incarnation=v.incarnation, number=v.number)
                for i, v in enumerate(spans)
            ),
            sampling=SamplingSpec(max_tokens=NUM_TOKENS),
            finish=FinishReason.LENGTH,
            role=self.role(),
            agent=self.agent(),
        )
        aborted = replace(turn, finish=FinishReason.ABORT)
        return Trajectory(
            row_id=row_id(grant.group_id, grant.slot, grant.epoch),
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            attempt=grant.attempt,
            node_id=self.node_id,
            turns=(aborted, turn) if grant.slot == 0 else (turn,),
            reward=grant.slot / 4 if outcome.has_reward else None,
            outcome=outcome,
            tool_uses=self.tool_uses(grant),
            sandbox_ms=1500 * grant.slot,
        )


@dataclass(slots=True)
class FakeTrainer:
    """Commits every batch and publishes a manifest for every number."""

    service: DataflowService
    run_dir: Path
    makes_same_weights: bool = False
    """A replay after a rewind gives the same bits as before."""
    incarnation: int = 0
    number: int = 0
    seq: int = 0

    async def incarnate(self, number: int, seq: int) -> None:
        body = IncarnationRequest(
            request_id=f"life-{self.incarnation}-{number}-{seq}",
            expected=self.incarnation,
            number=number,
            seq=seq,
        )
        self.incarnation = (await self.service.trainers.incarnate(POLICY, body)).incarnation
        self.number, self.seq = number, seq
        await self.publish()

    async def publish(self) -> None:
        life = 1 if self.makes_same_weights else self.incarnation
        weights = blake3(f"weights of {life}.{self.number}".encode()).hexdigest()
        manifest = json.dumps(
            {
                "format": 1,
                "policy": POLICY,
                "number": self.number,
                "files": [],
                "tensors": [],
                "weights_digest": weights,
            }
        ).encode()
        digest = blake3(manifest).hexdigest()
        folder = self.run_dir / "weights" / "manifests"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{digest}.json").write_bytes(manifest)
        await self.service.trainers.publish(
            POLICY,
            PublishRequest(
                incarnation=self.incarnation,
                number=self.number,
                manifest_digest=digest,
                weights_digest=weights,
            ),
        )

    async def batch(self) -> Manifest | None:
        answer = await self.service.trainers.batch(
            BatchRequest(
                consumer=POLICY, seq=self.seq + 1, incarnation=self.incarnation, wait_s=0.0
            )
        )
        return answer.manifest

    async def instalment(self, number: int) -> BatchAnswer:
        """An instalment of the next batch; without a manifest if no group is ready."""
        return await self.service.trainers.batch(
            BatchRequest(
                consumer=POLICY,
                seq=self.seq + 1,
                incarnation=self.incarnation,
                wait_s=0.0,
                instalment=number,
            )
        )

    async def commit(self, *, skipped: str = "") -> None:
        self.seq += 1
        self.number += 0 if skipped else 1
        await self.service.trainers.commit(
            POLICY,
            self.seq,
            CommitRequest(incarnation=self.incarnation, number=self.number, skipped=skipped),
        )
        if not skipped:
            await self.publish()


class Run:
    """One run folder with its service, two nodes and a trainer."""

    def __init__(self, run_dir: Path, config: RunConfig, *, choose: Choose = some_failures) -> None:
        self.run_dir = run_dir
        self.config = config
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(dump(config))
        self.service = build(config, run_dir / "ledger")
        self.nodes = [
            FakeNode(self.service, run_dir, NodeId(name), choose) for name in ("node-0", "node-1")
        ]
        self.trainer = FakeTrainer(self.service, run_dir)

    async def start(self) -> None:
        await self.trainer.incarnate(0, 0)
        for node in self.nodes:
            await node.join()

    async def step(self, *, skipped: str = "", across_load: bool = False) -> bool:
        """Roll out until the next batch is sealed, then commit it; False at the end of the run."""
        for _ in range(100):
            if await self.trainer.batch() is not None:
                await self.trainer.commit(skipped=skipped)
                for node in self.nodes:
                    await node.lease(3)
                    await node.load()
                    await node.deliver(across_load=across_load)
                return True
            delivered = sum([await node.work(11) for node in self.nodes])
            if not delivered and self.service.coordinator.has_ended(
                self.service.coordinator.consumers[POLICY]
            ):
                return False
        raise AssertionError("no batch after 100 rounds")

    def restart_service(self) -> None:
        """Restart the service in the same folder."""
        self.service.close()
        self.service = build(self.config, self.run_dir / "ledger")
        self.trainer.service = self.service
        for node in self.nodes:
            node.service = self.service

    def close(self) -> None:
        self.service.close()


async def eventful_run(run_dir: Path, *, finish: bool = False, same_weights: bool = False) -> None:
    """Failures, releases, a replaced node, a restart, a skipped batch and a rewind over three
    committed batches. Without `finish` it is stopped in the middle of its work."""
    run = Run(run_dir, small_config())
    run.trainer.makes_same_weights = same_weights
    await run.start()
    for _ in range(2):
        await run.step(across_load=True)
    await run.nodes[0].lease(5)
    await run.nodes[0].release(2)
    run.nodes[0].boot_id = "second"
    await run.nodes[0].join()
    for _ in range(3):
        await run.step(across_load=True)
    run.restart_service()
    await run.trainer.incarnate(2, 2)
    for node in run.nodes:
        await node.load()
    await run.step()
    await run.step(skipped="loss is not finite")
    await run.step()
    if finish:
        while await run.step(across_load=True):
            pass
    else:
        await run.nodes[1].lease(6)
    run.close()
