# SPDX-License-Identifier: Apache-2.0
"""Rows that became too old while they were waiting are dropped, not only those that arrive so."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

from tests.chaos.ack_log import AckLog
from tests.chaos.load_generator import FaultyNode
from tests.contract.dataflow_server import POLICY, FakeTrainer, dataflow, small_config

from penstock.dataflow.client.partitioned import PartitionedNodeClient
from penstock.dataflow.service.trainers.messages import IncarnationRequest

STEPS = 4


async def test_what_waits_on_an_abandoned_branch_expires(tmp_path: Path) -> None:
    """Ready rows of version 4 count as version 0 once a successor forks there, and the next batch
    trains from number 4 again."""
    config = small_config(steps=20)
    assert config.training.max_staleness < STEPS
    with dataflow(tmp_path, config) as running, AckLog(tmp_path / "history.jsonl") as history:
        trainer, reader = await asyncio.to_thread(FakeTrainer, running), running.reader()
        client = PartitionedNodeClient(running.url, running.node_token())
        node = asyncio.create_task(FaultyNode("n0", client, history, random.Random(0)).run())
        while trainer.seq < STEPS:
            await asyncio.to_thread(trainer.step)
        for _ in range(200):
            if (await asyncio.to_thread(reader.status)).policies[0].ready > 0:
                break
            await asyncio.sleep(0.05)
        node.cancel()
        with suppress(asyncio.CancelledError):
            await node
        await client.close()
        fork = IncarnationRequest(request_id="fork", expected=trainer.incarnation, number=0, seq=0)
        await asyncio.to_thread(trainer.client.incarnate, POLICY, fork)
        status = await asyncio.to_thread(reader.status)
        assert status.policies[0].ready == 0
        assert status.wasted_tokens["stale"] > 0
