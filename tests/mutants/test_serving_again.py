# SPDX-License-Identifier: Apache-2.0
"""A sealed batch is served again as it was sealed, however old its rows have become."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

from blake3 import blake3
from tests.chaos.ack_log import AckLog
from tests.chaos.load_generator import FaultyNode
from tests.contract.dataflow_server import POLICY, FakeTrainer, dataflow, small_config

from penstock.dataflow.client.partitioned import PartitionedNodeClient
from penstock.dataflow.service.trainers.messages import BatchRequest
from penstock.wire.codec import encode

STEPS = 5
"""So many that rows of the first batches are older than the bound lets a new batch have."""


async def test_an_old_batch_is_not_judged_anew(tmp_path: Path) -> None:
    config = small_config(steps=STEPS + 1)
    assert config.training.max_staleness < STEPS - 1
    with dataflow(tmp_path, config) as running, AckLog(tmp_path / "history.jsonl") as history:
        trainer = await asyncio.to_thread(FakeTrainer, running)
        client = PartitionedNodeClient(running.url, running.node_token())
        node = asyncio.create_task(FaultyNode("n0", client, history, random.Random(0)).run())
        while trainer.seq < STEPS:
            await asyncio.to_thread(trainer.step)
        for seq in range(1, STEPS + 1):
            request = BatchRequest(consumer=POLICY, seq=seq, incarnation=trainer.incarnation)
            answer = await asyncio.to_thread(trainer.client.batch, request)
            assert answer.manifest is not None and len(answer.manifest.groups) == 2
            assert blake3(encode(answer.manifest)).hexdigest() == answer.digest
        node.cancel()
        with suppress(asyncio.CancelledError):
            await node
        await client.close()
