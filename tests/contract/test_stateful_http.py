# SPDX-License-Identifier: Apache-2.0
"""A dataflow service over HTTP against the dictionary of `tests/sim/model.py`, with restarts."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import rule
from tests.contract.dataflow_server import POLICY, RunningDataflow, dataflow, small_config
from tests.sim.model import (
    CAPACITY,
    MAX_STALENESS,
    NODES,
    NUM_SLOTS,
    DataflowStateMachine,
    reward_of,
)

from penstock.dataflow.client.dataflow import NodeClient, TrainerClient
from penstock.dataflow.core.leasing import Grant, LiveVersion, NodeState, RegisterRequest
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
from penstock.errors import WireError
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
from penstock.wire.codec import encode


def code(error: WireError) -> str:
    return "fenced" if error.code == "fenced" else "conflict"


def delivery(grant: Grant, node: NodeId, live: LiveVersion, word: str) -> Delivery:
    name = RowId(f"{grant.group_id}.{grant.slot}.{grant.epoch}")
    turn = Turn(
        policy=live.policy,
        parent=-1,
        prompt_ids=token_ids([1, 2]),
        sampled_ids=token_ids([len(word), 4]),
        logprobs=log_probs([-0.5, -0.25]),
        spans=(VersionSpan(start=0, end=2, incarnation=live.incarnation, number=live.number),),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )
    failed = word == "failed"
    record = Trajectory(
        row_id=name,
        group_id=grant.group_id,
        slot=grant.slot,
        epoch=grant.epoch,
        attempt=grant.attempt,
        node_id=node,
        turns=(turn,),
        reward=None if failed else reward_of(word, grant.slot),
        outcome=Outcome(kind=OutcomeKind.FAILED, reason="engine")
        if failed
        else Outcome(kind=OutcomeKind.COMPLETED),
    )
    return Delivery(row_id=name, payload=memoryview(encode(record)), secret=grant.secret)


class HttpSubject:
    def __init__(self) -> None:
        self._folders = contextlib.ExitStack()
        self._folder = Path(self._folders.enter_context(tempfile.TemporaryDirectory()))
        config = small_config(groups_per_batch=1, num_generations=NUM_SLOTS, steps=10_000)
        training = config.training.model_copy(update={"max_staleness": MAX_STALENESS})
        self._config = config.model_copy(update={"training": training})
        self._loop = asyncio.Runner()
        self._boot_ids: dict[NodeId, str] = {}
        self._said: dict[tuple[int, int], str] = {}
        """Reasons of commits, to repeat them exactly."""
        self._start()

    def _start(self) -> None:
        self._life = contextlib.ExitStack()
        self._running: RunningDataflow = self._life.enter_context(
            dataflow(self._folder, self._config)
        )
        running = self._running
        self._nodes = {n: NodeClient(running.url, running.node_token(n)) for n in NODES}
        self._trainer = TrainerClient(self._running.url, self._running.token(Role.TRAINER))
        self._life.callback(self._trainer.close)
        self._life.callback(lambda: self._loop.run(self._close_nodes()))

    async def _close_nodes(self) -> None:
        for client in self._nodes.values():
            await client.close()

    def restart(self) -> None:
        self._life.close()
        self._start()
        for node, boot_id in self._boot_ids.items():
            self.register(node, boot_id)  # a new client learns its secret; nothing else changes

    def close(self) -> None:
        self._life.close()
        self._loop.close()
        self._folders.close()

    def register(self, node: NodeId, boot_id: str) -> None:
        body = RegisterRequest(node_id=node, boot_id=boot_id, capacity=CAPACITY, policies=())
        self._loop.run(self._nodes[node].register(body))
        self._boot_ids[node] = boot_id

    def join(self, node: NodeId, boot_id: str) -> None:
        self.register(node, boot_id)
        beat = Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=())
        self._loop.run(self._nodes[node].heartbeat(node, beat))

    def lease(
        self, node: NodeId, boot_id: str, request: str, count: int, live: LiveVersion
    ) -> list[Grant]:
        body = LeaseRequest(
            request_id=request,
            node_id=node,
            boot_id=boot_id,
            max_slots=count,
            wait_s=0.0,
            live=(live,),
        )
        answer = self._loop.run(self._nodes[node].lease(body))
        return list(answer.grants)

    def deliver(
        self, node: NodeId, boot_id: str, grant: Grant, live: LiveVersion, word: str
    ) -> str:
        body = DeliveryRequest(
            node_id=node, boot_id=boot_id, deliveries=(delivery(grant, node, live, word),)
        )
        return self._loop.run(self._nodes[node].deliver(body)).results[0].status.value

    def release(self, node: NodeId, boot_id: str, grant: Grant) -> str:
        name = RowId(f"{grant.group_id}.{grant.slot}.{grant.epoch}")
        body = DeliveryRequest(
            node_id=node, boot_id=boot_id, deliveries=(), released={name: grant.secret}
        )
        return self._loop.run(self._nodes[node].deliver(body)).results[0].status.value

    def incarnate(self, request: str, expected: int, number: int, seq: int) -> int | str:
        body = IncarnationRequest(request_id=request, expected=expected, number=number, seq=seq)
        try:
            return self._trainer.incarnate(POLICY, body).incarnation
        except WireError as error:
            return code(error)

    def publish(self, incarnation: int, number: int) -> str:
        body = PublishRequest(
            incarnation=incarnation,
            number=number,
            manifest_digest=f"{incarnation:032x}{number:032x}",
            weights_digest=f"w{incarnation}.{number}",
        )
        try:
            self._trainer.publish(POLICY, body)
        except WireError as error:
            return code(error)
        return "ok"

    def batch(self, incarnation: int, seq: int) -> tuple[GroupId, ...] | str:
        body = BatchRequest(consumer=POLICY, seq=seq, incarnation=incarnation, wait_s=0.0)
        try:
            manifest = self._trainer.batch(body).manifest
        except WireError as error:
            return code(error)
        if manifest is None:
            return "wait"
        rows = self._trainer.rows(POLICY, seq).rows
        assert [row.row_id for row in rows] == [row.row_id for row in manifest.rows]
        assert all(row.payload for row in rows)
        return tuple(group.group_id for group in manifest.groups)

    def commit(self, incarnation: int, seq: int, number: int) -> str:
        state = self._trainer.state(POLICY)
        skipped = "" if number > state.number else "nothing to learn"
        if state.seq == seq:
            skipped = self._said.get((incarnation, seq), "")
        body = CommitRequest(incarnation=incarnation, number=number, skipped=skipped)
        try:
            self._trainer.commit(POLICY, seq, body)
        except WireError as error:
            return code(error)
        self._said[incarnation, seq] = skipped
        return "ok"


class HttpMachine(DataflowStateMachine):
    def make_subject(self) -> HttpSubject:
        return HttpSubject()

    @rule()
    def restart(self) -> None:
        self.subject.restart()


TestHttp = HttpMachine.TestCase
TestHttp.settings = settings(
    max_examples=6,
    stateful_step_count=20,
    deadline=None,
    # A failure shows within seconds; shrinking it would take minutes.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
