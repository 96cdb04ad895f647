# SPDX-License-Identifier: Apache-2.0
"""A rank that is not the first: it does what the first one says, with its own rows.

The first rank alone speaks for the trainer: it takes over, commits, publishes and saves. The others
hold their shares of the model, and take part whenever shares meet. Owns the words between them.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from penstock.dataflow.service.trainers.messages import BatchAnswer, BatchRequest
from penstock.errors import StoreError
from penstock.trainer.batches import assemble
from penstock.trainer.checkpoint_saver import ShareSaver
from penstock.trainer.models import Crew
from penstock.trainer.ranks.group import Alone, Team
from penstock.trainer.ranks.row_fetch import Rows, draw_rows
from penstock.types import PolicyName


class Order(IntEnum):
    WAIT = 0
    """Nothing yet; said now and then, so that nobody gives up."""
    TRAIN = 1
    WEIGHTS = 2
    """Bring the weights together in the first rank."""
    STATE = 3
    """Write your share of the rest of the state; the number names the folder."""
    LEAVE = 4


class Served(Rows, Protocol):
    """What such a rank asks of the dataflow."""

    def batch(self, body: BatchRequest) -> BatchAnswer: ...


def num_ranks(team: Team) -> int:
    """All there are, also those that sit a stage out."""
    return 1 if isinstance(team, Alone) else dist.get_world_size()


def say(team: Team, order: Order, number: int = 0, incarnation: int = 0) -> None:
    """The first rank to all others. number: of the batch, or of a checkpoint's folder."""
    team.first_says([order, number, incarnation])


def follow(policy: PolicyName, crew: Crew, dataflow: Served, team: Team, checkpoints: Path) -> None:
    """consumes: orders, and its own rows of each batch · produces: its share of every step and of
    every checkpoint in that folder · waits for: the first rank's next word
    ends: when that is to leave, when a rank is lost, or when its share could not be written"""
    saver = ShareSaver(checkpoints, rank=team.place.rank, num_ranks=num_ranks(team))
    try:
        while True:
            said, number, incarnation = team.first_says([0, 0, 0])
            saver.refuse_if_failed()
            match Order(said):
                case Order.WAIT:
                    pass
                case Order.TRAIN:
                    _train(policy, crew, dataflow, team, number, incarnation)
                case Order.WEIGHTS:
                    crew.weights()
                case Order.STATE:
                    saver.hand_over(number, crew.state_tensors())
                case Order.LEAVE:
                    return
    finally:
        saver.close()


def _train(
    policy: PolicyName, crew: Crew, dataflow: Served, team: Team, seq: int, incarnation: int
) -> None:
    request = BatchRequest(consumer=policy, seq=seq, incarnation=incarnation, wait_s=0.0)
    manifest = dataflow.batch(request).manifest
    if manifest is None:
        raise StoreError(f"batch {policy}.{seq} is sealed for the first rank, and not for this one")
    rows = draw_rows(dataflow, manifest, team, minibatches=crew.minibatches)
    crew.step(assemble(manifest, rows, policy, crew.vocab_size, ranks=team))
