# SPDX-License-Identifier: Apache-2.0
"""The real dataflow service over a real ledger in this process, with a node and a trainer that
need no model and no socket. What they answer and how long they take is the caller's."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from penstock.config import RunConfig, demo_config
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.records import row_id
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.trainers.messages import (
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
    SamplingSpec,
    Task,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import encode

MAX_SLOTS = 4096
NODE = NodeId("node-0")

Reward = Callable[[Task, Grant, Sequence[LiveVersion]], float]
"""What this attempt at a task earns under these versions."""


def quiet() -> None:
    """Keep the service's log off stdout, where the result goes."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


def run_config(
    *,
    seed: int = 0,
    policies: Sequence[str] = ("policy",),
    rules: Sequence[Mapping[str, Any]] = (),
    tasks: str = "penstock.tasks.reverse",
    group_size: int,
    groups_per_batch: int,
    max_staleness: int,
    steps: int = 1_000_000,
    pace: str = "any",
) -> RunConfig:
    """The demo's config with what a benchmark of the flow varies; `tasks` is a module or a JSONL
    file."""
    values = demo_config(seed).model_dump(mode="json")
    [model] = values["models"].values()
    for own in ("algorithm", "training"):
        model[own] = None
    values["models"] = dict.fromkeys(policies, model)
    values["sources"] = [{"name": "train", "task": tasks}]
    values["algorithm"] |= {"num_generations": group_size}
    values["training"] |= {
        "groups_per_batch": groups_per_batch,
        "max_staleness": max_staleness,
        "steps": steps,
    }
    values["dataflow"] |= {"rules": list(rules), "pace": pace}
    values["dataflow"]["lease"] |= {"ttl_s": 300.0}
    return RunConfig.model_validate(values)


def write_tasks(path: Path, payloads: Iterable[Mapping[str, Any]]) -> str:
    """A source of these tasks, pass after pass in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(payload) + "\n" for payload in payloads))
    return str(path)


@dataclass(slots=True)
class LocalNode:
    """Serves the newest version of every policy; each answer is one token of each."""

    service: DataflowService
    reward: Reward
    prepare: Callable[[Sequence[tuple[Task, Grant]]], None] | None = None
    """Called with all that a lease brought, before their rewards are asked for one by one."""
    node_id: NodeId = NODE
    num_rollouts: int = 0
    _num_asked: int = 0
    _live: tuple[LiveVersion, ...] = ()

    async def join(self) -> None:
        body = RegisterRequest(
            node_id=self.node_id, boot_id="first", capacity=MAX_SLOTS, policies=(), tags=()
        )
        await self.service.nodes.register(body)

    async def work(self, max_slots: int = MAX_SLOTS, wait_s: float = 0.0) -> int:
        """Lease what there is and answer all of it; how many rollouts that was."""
        await self._load()
        self._num_asked += 1
        answer = await self.service.nodes.lease(
            LeaseRequest(
                request_id=f"{self.node_id}-{self._num_asked}",
                node_id=self.node_id,
                boot_id="first",
                max_slots=max_slots,
                wait_s=wait_s,
                live=self._live,
            )
        )
        if not answer.grants:
            return 0
        leased = [(answer.tasks[grant.task], grant) for grant in answer.grants]
        if self.prepare is not None:
            self.prepare(leased)
        await self._deliver([self._attempt(task, grant) for task, grant in leased])
        return len(answer.grants)

    async def _load(self) -> None:
        self._live = tuple(
            LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number)
            for v in self.service.partition.target_versions
        )
        state = NodeState.LIVE if self._live else NodeState.STARTING
        body = Heartbeat(boot_id="first", state=state, live=self._live)
        await self.service.nodes.heartbeat(self.node_id, body)

    async def _deliver(self, made: Sequence[Trajectory]) -> None:
        deliveries = tuple(
            Delivery(row_id=one.row_id, payload=memoryview(encode(one))) for one in made
        )
        answer = await self.service.nodes.deliver(
            DeliveryRequest(node_id=self.node_id, boot_id="first", deliveries=deliveries)
        )
        refused = [r for r in answer.results if r.status is not DeliveryStatus.STORED]
        assert not refused, f"a sound delivery was refused: {refused[0]}"
        self.num_rollouts += len(made)

    def _attempt(self, task: Task, grant: Grant) -> Trajectory:
        return Trajectory(
            row_id=row_id(grant.group_id, grant.slot, grant.epoch),
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            attempt=grant.attempt,
            node_id=self.node_id,
            turns=tuple(_turn(version) for version in self._live),
            reward=self.reward(task, grant, self._live),
            outcome=Outcome(kind=OutcomeKind.COMPLETED),
        )


def _turn(version: LiveVersion) -> Turn:
    span = VersionSpan(start=0, end=1, incarnation=version.incarnation, number=version.number)
    return Turn(
        policy=version.policy,
        parent=-1,
        prompt_ids=token_ids([1]),
        sampled_ids=token_ids([2]),
        logprobs=log_probs([-0.1]),
        spans=(span,),
        sampling=SamplingSpec(max_tokens=1),
        finish=FinishReason.STOP,
    )


@dataclass(slots=True)
class LocalTrainer:
    """Draws batches of one policy, commits them and publishes a version for each."""

    service: DataflowService
    policy: PolicyName
    number: int = 0
    seq: int = 0
    _incarnation: int = field(default=0, init=False)

    async def take_over(self) -> None:
        body = IncarnationRequest(request_id="first", expected=0, number=0, seq=0)
        answer = await self.service.trainers.incarnate(self.policy, body)
        self._incarnation = answer.incarnation
        await self.publish()

    async def publish(self) -> None:
        body = PublishRequest(
            incarnation=self._incarnation,
            number=self.number,
            manifest_digest=f"m{self.number}",
            weights_digest=f"w{self.number}",
        )
        await self.service.trainers.publish(self.policy, body)

    async def batch(self, wait_s: float = 0.0) -> Manifest | None:
        body = BatchRequest(
            consumer=self.policy, seq=self.seq + 1, incarnation=self._incarnation, wait_s=wait_s
        )
        return (await self.service.trainers.batch(body)).manifest

    async def commit(self) -> None:
        self.seq += 1
        self.number += 1
        body = CommitRequest(incarnation=self._incarnation, number=self.number)
        await self.service.trainers.commit(self.policy, self.seq, body)
        await self.publish()
