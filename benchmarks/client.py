# SPDX-License-Identifier: Apache-2.0
"""A node and a trainer that only talk: register, lease, build valid trajectories, deliver, seal,
fetch, commit. Over aiohttp, because a slow client would hide the service."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import uuid4

import aiohttp

from benchmarks.harness import Server
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryAnswer,
    DeliveryRequest,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    RegisterAnswer,
)
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    CommitRequest,
    IncarnationAnswer,
    IncarnationRequest,
    PublishRequest,
)
from penstock.types import (
    FinishReason,
    LogProbs,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    TokenIds,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import MSGPACK, decode, encode

POLICY = PolicyName("policy")
NODE = NodeId("bench")
NODE_PATHS = ("/v1/nodes", "/v1/leases", "/v1/trajectories")
TOKEN_TTL_S = 7200.0
CAPACITY = 50_000
TURNS = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """One turn's arrays; made once, because random numbers cost more than a delivery."""

    prompt_ids: TokenIds
    sampled_ids: TokenIds
    logprobs: LogProbs


def make_tokens(payload_bytes: int, *, seed: int = 0, variants: int = 16) -> list[Tokens]:
    """Arrays for trajectories of this size: a third prompt, two thirds answer and log-probs."""
    draw = random.Random(seed)
    num = payload_bytes // TURNS // 12
    return [
        Tokens(
            prompt_ids=token_ids(draw.randrange(150_000) for _ in range(num)),
            sampled_ids=token_ids(draw.randrange(150_000) for _ in range(num)),
            logprobs=log_probs(-draw.expovariate(1.0) for _ in range(num)),
        )
        for _ in range(variants)
    ]


@dataclass(slots=True)
class Service:
    """One service under load, with every credential a call needs."""

    http: aiohttp.ClientSession
    server: Server
    signer: Signer
    token: str = field(init=False)
    node_token: str = field(init=False)
    """For all nodes `bench` and `bench.SUFFIX`."""
    node_id: NodeId = NODE
    boot_id: str = field(default_factory=lambda: uuid4().hex)
    secrets: dict[NodeId, str] = field(default_factory=dict[NodeId, str])
    """Boot secrets of its nodes."""
    incarnation: int = 0
    seq: int = 0

    def __post_init__(self) -> None:
        audiences = [Audience.DATAFLOW]
        self.token = self.signer.mint(Role.ADMIN, audiences, ttl_s=TOKEN_TTL_S)
        self.node_token = self.signer.mint(Role.ROLLOUT, audiences, ttl_s=TOKEN_TTL_S, subject=NODE)

    async def raw(self, method: str, path: str, body: bytes | None = None) -> bytes:
        token = self.node_token if path.startswith(NODE_PATHS) else self.token
        headers = {
            "authorization": f"Bearer {token}",
            "accept": MSGPACK,
            "content-type": MSGPACK,
        }
        async with self.http.request(
            method, self.server.url + path, data=body, headers=headers
        ) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {content[:300]!r}")
            return content

    async def call(self, method: str, path: str, body: object, kind: type[T]) -> T:
        return decode(await self.raw(method, path, encode(body)), kind)

    # --- a trainer ----------------------------------------------------------------------------

    async def incarnate(self) -> None:
        """Become the trainer and publish version 0."""
        request = IncarnationRequest(request_id=uuid4().hex, expected=0, number=0, seq=0)
        answer = await self.call(
            "POST", f"/v1/policies/{POLICY}/incarnations", request, IncarnationAnswer
        )
        self.incarnation = answer.incarnation
        publish = PublishRequest(
            incarnation=self.incarnation, number=0, manifest_digest="0" * 64, weights_digest="0"
        )
        await self.call("POST", f"/v1/policies/{POLICY}/versions", publish, Ack)

    async def seal(self) -> int:
        """The next batch; returns how many rows it has."""
        return self.num_rows(await self.raw("POST", "/v1/batches", self.seal_body()))

    def seal_body(self) -> bytes:
        self.seq += 1
        return encode(BatchRequest(consumer=POLICY, seq=self.seq, incarnation=self.incarnation))

    def num_rows(self, sealed: bytes) -> int:
        answer = decode(sealed, BatchAnswer)
        if answer.manifest is None:
            raise RuntimeError(f"batch {self.seq} was not sealed in time")
        return sum(1 for _ in answer.manifest.rows)

    async def commit(self, *, number: int, skipped: str = "") -> None:
        request = CommitRequest(incarnation=self.incarnation, number=number, skipped=skipped)
        await self.call("POST", f"/v1/batches/{POLICY}.{self.seq}/commit", request, Ack)

    # --- a node -------------------------------------------------------------------------------

    @property
    def live(self) -> tuple[LiveVersion, ...]:
        return (LiveVersion(policy=POLICY, incarnation=self.incarnation, number=0),)

    async def register(self, node_id: NodeId) -> None:
        body = RegisterRequest(
            node_id=node_id, boot_id=self.boot_id, capacity=CAPACITY, policies=()
        )
        await self.join(body)
        await self.beat(node_id)

    async def join(self, body: RegisterRequest) -> None:
        answer = await self.call("POST", "/v1/nodes", body, RegisterAnswer)
        self.secrets[body.node_id] = answer.secret

    async def beat(self, node_id: NodeId) -> None:
        await self.call("PUT", f"/v1/nodes/{node_id}", self.beat_body(node_id), HeartbeatAnswer)

    def beat_body(self, node_id: NodeId) -> Heartbeat:
        return Heartbeat(
            boot_id=self.boot_id,
            state=NodeState.LIVE,
            live=self.live,
            secret=self.secrets[node_id],
        )

    def lease_body(self, node_id: NodeId, max_slots: int, wait_s: float = 20.0) -> bytes:
        return encode(
            LeaseRequest(
                request_id=uuid4().hex,
                node_id=node_id,
                boot_id=self.boot_id,
                max_slots=max_slots,
                wait_s=wait_s,
                live=self.live,
                secret=self.secrets[node_id],
            )
        )

    async def lease(self, num: int) -> list[Grant]:
        grants: list[Grant] = []
        while len(grants) < num:
            body = self.lease_body(self.node_id, num - len(grants))
            answer = decode(await self.raw("POST", "/v1/leases", body), LeaseAnswer)
            if not answer.grants:
                raise RuntimeError(f"no work: {len(grants)} of {num} slots were leased")
            grants += answer.grants
        return grants

    def delivery(self, grant: Grant, tokens: Sequence[Tokens]) -> Delivery:
        """A valid trajectory under this lease."""
        row_id = RowId(f"{grant.group_id}.{grant.slot}.{grant.epoch}")
        trajectory = Trajectory(
            row_id=row_id,
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            attempt=grant.attempt,
            node_id=self.node_id,
            turns=tuple(
                self._turn(index, tokens[(grant.slot * TURNS + index) % len(tokens)])
                for index in range(TURNS)
            ),
            reward=float(grant.slot % 2),
            outcome=Outcome(kind=OutcomeKind.COMPLETED),
        )
        return Delivery(row_id=row_id, payload=memoryview(encode(trajectory)), secret=grant.secret)

    def _turn(self, index: int, tokens: Tokens) -> Turn:
        num = len(tokens.sampled_ids) // 4
        span = VersionSpan(start=0, end=num, incarnation=self.incarnation, number=0)
        return Turn(
            policy=POLICY,
            parent=index - 1,
            prompt_ids=tokens.prompt_ids,
            sampled_ids=tokens.sampled_ids,
            logprobs=tokens.logprobs,
            spans=(span,),
            sampling=SamplingSpec(max_tokens=num),
            finish=FinishReason.STOP,
        )

    def bodies(
        self, grants: Sequence[Grant], tokens: Sequence[Tokens], per_call: int
    ) -> list[bytes]:
        """Encoded calls that deliver all of them, so many per call."""
        made = [self.delivery(grant, tokens) for grant in grants]
        return [
            encode(
                DeliveryRequest(
                    node_id=self.node_id,
                    boot_id=self.boot_id,
                    deliveries=tuple(made[start : start + per_call]),
                )
            )
            for start in range(0, len(made), per_call)
        ]


def check_stored(answers: Sequence[bytes], num: int) -> None:
    """Every delivery was acknowledged as durable, or the figure is worth nothing."""
    found = [decode(answer, DeliveryAnswer) for answer in answers]
    stored = sum(r.status is DeliveryStatus.STORED for a in found for r in a.results)
    if stored != num or any(a.durability != "D1" for a in found):
        raise RuntimeError(f"{stored} of {num} deliveries were stored durably")
