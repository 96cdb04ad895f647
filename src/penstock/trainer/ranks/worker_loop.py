# SPDX-License-Identifier: Apache-2.0
"""Worker loop of ranks 1..N-1: execute rank 0's orders on their own rows.

Only rank 0 acts for the trainer: it takes over, commits, publishes and saves. The others hold their
shards of the model and join every collective. Owns the orders between them.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from penstock.dataflow.service.trainers.messages import BatchAnswer, BatchRequest
from penstock.errors import StoreError
from penstock.trainer.checkpoint_saver import ShardSaver
from penstock.trainer.models import Models
from penstock.trainer.publisher import ShareWriter
from penstock.trainer.ranks.group import Ranks, SingleRank
from penstock.trainer.ranks.row_fetch import RowSource, fetch_rows
from penstock.types import PolicyName


class RankOrder(IntEnum):
    WAIT = 0
    """Keepalive: prevents a collective timeout."""
    TRAIN = 1
    WEIGHTS = 2
    """Write your share of a version; the numbers name its file, and a file that will not be."""
    STATE = 3
    """Write your shard of the rest of the state, and, if the second number is 1, your share of the
    weights; the first number names the folder."""
    EXIT = 4


class BatchSource(RowSource, Protocol):
    """What such a rank requests from the dataflow."""

    def batch(self, body: BatchRequest) -> BatchAnswer: ...


def num_ranks(ranks: Ranks) -> int:
    """All ranks, including those that are idle in a stage."""
    return 1 if isinstance(ranks, SingleRank) else dist.get_world_size()


def broadcast_order(ranks: Ranks, order: RankOrder, number: int = 0, second: int = 0) -> None:
    """From rank 0 to all others. number: of the batch, or the token of a file or folder. second:
    the incarnation of a batch, or what the order says."""
    ranks.broadcast_from_rank0([order, number, second])


def worker_loop(
    policy: PolicyName,
    models: Models,
    dataflow: BatchSource,
    ranks: Ranks,
    checkpoints: Path,
    writer: ShareWriter,
) -> None:
    """consumes: orders, and its own rows of each batch · produces: its part of every step, its
    share of every version, and its shard of every checkpoint in that folder · waits for: rank 0's
    next order
    ends: on the order to leave, when a rank is lost, or when its shard could not be written"""
    saver = ShardSaver(checkpoints, rank=ranks.position.rank, num_ranks=num_ranks(ranks))
    try:
        while True:
            order, number, second = ranks.broadcast_from_rank0([0, 0, 0])
            saver.raise_if_failed()
            writer.raise_if_failed()
            match RankOrder(order):
                case RankOrder.WAIT:
                    pass
                case RankOrder.TRAIN:
                    _train(policy, models, dataflow, ranks, number, second)
                case RankOrder.WEIGHTS:
                    writer.submit(number, models.weights(), dropped=second)
                case RankOrder.STATE:
                    weights = models.weights() if second else None
                    saver.submit(number, models.state_tensors(), weights)
                case RankOrder.EXIT:
                    return
    finally:
        saver.close()
        writer.close()


def _train(
    policy: PolicyName,
    models: Models,
    dataflow: BatchSource,
    ranks: Ranks,
    seq: int,
    incarnation: int,
) -> None:
    request = BatchRequest(consumer=policy, seq=seq, incarnation=incarnation, wait_s=0.0)
    manifest = dataflow.batch(request).manifest
    if manifest is None:
        raise StoreError(f"batch {policy}.{seq} is sealed for rank 0, and not for this rank")
    rows = fetch_rows(dataflow, manifest, ranks, minibatches=models.minibatches, cost=models.cost)
    models.step(models.assemble(manifest, rows, policy))
