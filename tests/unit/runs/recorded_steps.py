# SPDX-License-Identifier: Apache-2.0
"""A run folder with a real ledger in which some steps were trained."""

from __future__ import annotations

from tests.contract.dataflow_server import POLICY, trajectory

from penstock.config import RunConfig
from penstock.dataflow.core.leasing import LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.build import build
from penstock.dataflow.service.nodes.messages import DeliveryRequest, Heartbeat, LeaseRequest
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.fleet.run_folder import RunFolder
from penstock.types import NodeId

NODE = NodeId("node-0")


async def record_steps(folder: RunFolder, config: RunConfig, *, num_steps: int) -> None:
    """Train the first steps of a run in process; every reward is 0.5."""
    folder.write_config(config)
    service = build(config, folder.path / "ledger")
    await service.trainers.incarnate(
        POLICY, IncarnationRequest(request_id="r", expected=0, number=0, seq=0)
    )
    await service.nodes.register(
        RegisterRequest(node_id=NODE, boot_id="b", capacity=4096, policies=())
    )
    for number in range(num_steps):
        digest = f"{number}"
        await service.trainers.publish(
            POLICY,
            PublishRequest(
                incarnation=1, number=number, manifest_digest=digest, weights_digest=digest
            ),
        )
        live = LiveVersion(policy=POLICY, incarnation=1, number=number)
        beat = Heartbeat(boot_id="b", state=NodeState.LIVE, live=(live,))
        await service.nodes.heartbeat(NODE, beat)
        asked = LeaseRequest(
            request_id=f"l{number}",
            node_id=NODE,
            boot_id="b",
            max_slots=config.training.groups_per_batch * config.algorithm.num_generations,
            wait_s=30.0,
            live=(live,),
        )
        grants = (await service.nodes.lease(asked)).grants
        assert grants, "no work"
        rows = tuple(trajectory(grant, NODE, live) for grant in grants)
        await service.nodes.deliver(DeliveryRequest(node_id=NODE, boot_id="b", deliveries=rows))
        batch = BatchRequest(consumer=POLICY, seq=number + 1, incarnation=1, wait_s=30.0)
        assert (await service.trainers.batch(batch)).manifest is not None
        await service.trainers.commit(
            POLICY, number + 1, CommitRequest(incarnation=1, number=number + 1)
        )
    service.close()
