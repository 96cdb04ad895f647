# SPDX-License-Identifier: Apache-2.0
"""Each rank fetches its own rows of a sealed batch, directly from the partitions that hold them.

Owns which rank computes which rows (equal cost in each part, update by update) and which one
fetches them: the first rank of each data-parallel part, for all its ranks. No row passes
through a rank that does not compute it; what all ranks need of all rows is in the manifest.

R = rows of a batch, in manifest order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.dataflow.service.trainers.messages import RowsAnswer
from penstock.errors import StoreError
from penstock.trainer.arrays import Floats, Ints
from penstock.trainer.pass_cost import TYPICAL, PassCost
from penstock.trainer.ranks.balance import balance_parts, manifest_costs
from penstock.trainer.ranks.group import Ranks
from penstock.trainer.updates import updates_of
from penstock.types import Manifest, PolicyName, RowPayload
from penstock.wire.codec import decode, encode


class RowSource(Protocol):
    def rows(
        self, policy: PolicyName, seq: int, indexes: Sequence[int] | None = None
    ) -> RowsAnswer: ...


def fetch_rows(
    dataflow: RowSource,
    manifest: Manifest,
    ranks: Ranks,
    *,
    minibatches: int = 1,
    cost: PassCost = TYPICAL,
) -> list[RowPayload]:
    """One entry for each row of the manifest; rows of other parts have no payload, like missing
    rows. cost: of the trained model's passes."""
    position, policy = ranks.position, PolicyName(manifest.consumer)
    if position.is_idle:
        return _at_manifest_index(manifest, (), ())
    own = split_rows(manifest, position.parallel.dp, minibatches, cost)[position.part]
    answer = RowsAnswer(rows=())
    if position.fetches_rows:
        answer = dataflow.rows(policy, manifest.seq, own)
    if position.parallel.ranks_per_part > 1:
        answer = decode(ranks.broadcast_in_part(encode(answer)), RowsAnswer)
    return _at_manifest_index(manifest, answer.rows, own)


def split_rows(
    manifest: Manifest, num_parts: int, minibatches: int, cost: PassCost = TYPICAL
) -> list[list[int]]:
    """The rows of each part, ascending: in every update all parts have about the same cost, prompts
    and context included, so no rank waits long for another. Every rank computes the same result by
    itself."""
    sizes = np.array([len(group.rows) for group in manifest.groups], np.int64)
    if num_parts == 1:
        return [[*range(sizes.sum())]]
    groups_R = np.repeat(np.arange(sizes.size), sizes)
    return assign_rows(manifest_costs(manifest, cost), groups_R, num_parts, minibatches)


def assign_rows(
    costs_R: Floats, groups_R: Ints, num_parts: int, minibatches: int
) -> list[list[int]]:
    """The same, given the rows' costs and groups."""
    num_groups = int(groups_R[-1]) + 1 if groups_R.size else 0
    updates_R = updates_of(num_groups, minibatches)[groups_R]
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for update in range(minibatches):
        rows = np.flatnonzero(updates_R == update)
        for part, chosen in zip(parts, balance_parts(costs_R[rows], num_parts), strict=True):
            part += rows[chosen].tolist()
    return parts


def _at_manifest_index(
    manifest: Manifest, drawn: Sequence[RowPayload], own: Sequence[int]
) -> list[RowPayload]:
    rows = [RowPayload(row_id=row.row_id, payload=None) for row in manifest.rows]
    if len(own) != len(drawn):
        raise StoreError(
            f"batch {manifest.consumer}.{manifest.seq}: {len(drawn)} rows were received, "
            f"{len(own)} were requested"
        )
    for index, row in zip(own, drawn, strict=True):
        rows[index] = row
    return rows
