# SPDX-License-Identifier: Apache-2.0
"""A real dataflow service over HTTP on loopback, for tests: server, keys, clients, a small node
and trainer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from penstock.config import RunConfig, demo_config
from penstock.dataflow.client.dataflow import StatusClient, TrainerClient
from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.dataflow.service.build import build, build_partition
from penstock.dataflow.service.nodes.messages import Delivery
from penstock.dataflow.service.partition import PartitionService
from penstock.dataflow.service.partitions.coordinator_client import CoordinatorClient
from penstock.dataflow.service.server import (
    build_partition_server,
    build_server,
    surface,
)
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.types import (
    FinishReason,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.codec import encode
from penstock.wire.serving import Tls, server

POLICY = PolicyName("policy")


def small_config(
    *, groups_per_batch: int = 2, num_generations: int = 2, steps: int = 3
) -> RunConfig:
    config = demo_config(0)
    training = config.training.model_copy(
        update={"groups_per_batch": groups_per_batch, "steps": steps}
    )
    algorithm = config.algorithm.model_copy(update={"num_generations": num_generations})
    return config.model_copy(update={"training": training, "algorithm": algorithm})


@contextlib.contextmanager
def serving(app: Starlette, port: int = 0, tls: Tls | None = None) -> Generator[str]:
    """The app on a port of loopback, a free one unless told, in a thread of its own."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    host = server(app, "127.0.0.1", listener.getsockname()[1], tls)
    thread = threading.Thread(target=_run, args=(host, listener), daemon=True)
    thread.start()
    while not host.started:
        assert thread.is_alive(), "the server ended before it started"
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        host.should_exit = True
        thread.join(timeout=60)
        assert not thread.is_alive()
        listener.close()


def _run(host: uvicorn.Server, listener: socket.socket) -> None:
    host.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with asyncio.Runner() as runner:
        runner.run(host.serve(sockets=[listener]))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDataflow:
    url: str
    signer: Signer
    clients: contextlib.ExitStack
    """Synchronous clients, closed with the service."""

    def reader(self) -> StatusClient:
        client = StatusClient(self.url, self.token(Role.READER))
        self.clients.callback(client.close)
        return client

    def token(
        self, role: Role, *audiences: Audience, ttl_s: float = 3600.0, subject: str = ""
    ) -> str:
        given = audiences or [Audience.DATAFLOW]
        return self.signer.mint(role, given, ttl_s=ttl_s, subject=subject)

    def node_token(self, subject: str = "n0") -> str:
        """For the nodes `SUBJECT` and `SUBJECT.suffix`."""
        return self.token(Role.ROLLOUT, subject=subject)


@contextlib.contextmanager
def dataflow(folder: Path, config: RunConfig, port: int = 0) -> Generator[RunningDataflow]:
    """Home on a port, a free one unless told: one that comes back is where it was."""
    signer = Signer.create(folder / "keys", config.name)
    service = build(config, folder / "ledger")
    app = build_server(
        surface(service, config, "http://127.0.0.1:1"), signer.verifier(Audience.DATAFLOW)
    )
    with serving(app, port) as url, contextlib.ExitStack() as clients:
        yield RunningDataflow(url=url, signer=signer, clients=clients)


@contextlib.contextmanager
def partition(
    folder: Path,
    config: RunConfig,
    running: RunningDataflow,
    index: int,
    home_client: type[CoordinatorClient] = CoordinatorClient,
    port: int = 0,
) -> Generator[PartitionService]:
    """A further partition over its own ledger folder, as another process would serve it."""
    port = port or free_port()
    # An operator's token: here a partition may come back on another port.
    coordinator = home_client(running.url, running.token(Role.ADMIN))
    service = build_partition(config, folder, index, coordinator, url=f"http://127.0.0.1:{port}")
    verifier = running.signer.verifier(Audience.DATAFLOW)
    app = build_partition_server(service, config, "http://127.0.0.1:1", verifier)
    with serving(app, port):
        yield service


def trajectory(
    grant: Grant,
    node_id: NodeId,
    live: LiveVersion,
    reward: float | None = 0.5,
    boot_id: str = "",
) -> Delivery:
    row_id = RowId(f"{grant.group_id}.{grant.slot}.{grant.epoch}")
    record = Trajectory(
        row_id=row_id,
        group_id=grant.group_id,
        slot=grant.slot,
        epoch=grant.epoch,
        attempt=grant.attempt,
        node_id=node_id,
        turns=(
            Turn(
                policy=live.policy,
                parent=-1,
                prompt_ids=token_ids([1, 2]),
                sampled_ids=token_ids([3, 4]),
                logprobs=log_probs([-0.5, -0.25]),
                spans=(
                    VersionSpan(start=0, end=2, incarnation=live.incarnation, number=live.number),
                ),
                sampling=SamplingSpec(),
                finish=FinishReason.STOP,
            ),
        ),
        reward=reward,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
        boot_id=boot_id,
    )
    return Delivery(row_id=row_id, payload=memoryview(encode(record)), secret=grant.secret)


class FakeTrainer:
    """Six calls and nothing learned."""

    def __init__(self, running: RunningDataflow) -> None:
        self.client = TrainerClient(running.url, running.token(Role.TRAINER))
        running.clients.callback(self.client.close)
        state = self.client.state(POLICY)
        self.number, self.seq = state.number, state.seq
        request = IncarnationRequest(
            request_id=uuid.uuid4().hex,
            expected=state.incarnation,
            number=self.number,
            seq=self.seq,
        )
        self.incarnation = self.client.incarnate(POLICY, request).incarnation
        self.publish()

    def publish(self) -> None:
        body = PublishRequest(
            incarnation=self.incarnation,
            number=self.number,
            manifest_digest="0" * 64,
            weights_digest=f"{self.incarnation}.{self.number}",
        )
        self.client.publish(POLICY, body)

    def step(self) -> bool:
        """One batch; False at the end of the run."""
        request = BatchRequest(consumer=POLICY, seq=self.seq + 1, incarnation=self.incarnation)
        answer = self.client.batch(request)
        if answer.end:
            return False
        if answer.manifest is not None:
            self.seq, self.number = self.seq + 1, self.number + 1
            commit = CommitRequest(incarnation=self.incarnation, number=self.number)
            self.client.commit(POLICY, self.seq, commit)
            self.publish()
        return True
