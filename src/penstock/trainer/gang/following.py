# SPDX-License-Identifier: Apache-2.0
"""A rank that is not the first: it does what the first one says, with its own rows.

The first rank alone speaks for the trainer: it takes over, commits, publishes and saves. The others
hold their shares of the model, and take part whenever shares meet. Owns the words between them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from penstock.dataflow.protocol import BatchAnswer, BatchRequest, RowsAnswer
from penstock.errors import StoreError
from penstock.trainer.batches import assemble
from penstock.trainer.crew import Crew
from penstock.trainer.gang.drawing import draw_rows
from penstock.trainer.gang.team import Team
from penstock.types import PolicyName


class Order(IntEnum):
    WAIT = 0
    """Nothing yet; said now and then, so that nobody gives up."""
    TRAIN = 1
    WEIGHTS = 2
    """Bring the weights together in the first rank."""
    STATE = 3
    """Bring the rest of the state together there."""
    LEAVE = 4


class Served(Protocol):
    """What such a rank asks of the dataflow."""

    def batch(self, body: BatchRequest) -> BatchAnswer: ...

    def rows(self, policy: PolicyName, seq: int, rank: int = 0, of: int = 1) -> RowsAnswer: ...


def say(team: Team, order: Order, seq: int = 0, incarnation: int = 0) -> None:
    """The first rank to all others."""
    team.first_says([order, seq, incarnation])


def follow(policy: PolicyName, crew: Crew, dataflow: Served, team: Team) -> None:
    """consumes: orders, and its own rows of each batch · produces: its share of every step
    waits for: the first rank's next word · ends: when that is to leave, or when a rank is lost"""
    doings: dict[Order, Callable[[], object]] = {
        Order.WAIT: lambda: None,
        Order.WEIGHTS: crew.weights,
        Order.STATE: crew.state_tensors,
    }
    while True:
        number, seq, incarnation = team.first_says([0, 0, 0])
        order = Order(number)
        if order is Order.LEAVE:
            return
        if order is Order.TRAIN:
            _train(policy, crew, dataflow, team, seq, incarnation)
        else:
            doings[order]()


def _train(
    policy: PolicyName, crew: Crew, dataflow: Served, team: Team, seq: int, incarnation: int
) -> None:
    request = BatchRequest(consumer=policy, seq=seq, incarnation=incarnation, wait_s=0.0)
    manifest = dataflow.batch(request).manifest
    if manifest is None:
        raise StoreError(f"batch {policy}.{seq} is sealed for the first rank, and not for this one")
    rows = draw_rows(dataflow, manifest, team)
    crew.step(assemble(manifest, rows, policy, crew.vocab_size, ranks=team))
