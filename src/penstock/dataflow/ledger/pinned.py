# SPDX-License-Identifier: Apache-2.0
"""Batches that a trainer may still request, read from the ledger when a service starts."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from penstock.dataflow.core.retention import RetainedBatches
from penstock.dataflow.ledger.tables import Tables
from penstock.types import GroupId, PolicyName

PAGE_BATCHES = 64
NEWEST = "SELECT max(seq) FROM fates WHERE consumer = :consumer"
PAGE = (
    "SELECT f.seq, f.group_id, "
    "EXISTS (SELECT 1 FROM freed WHERE freed.group_id = f.group_id) FROM fates f "
    "WHERE f.consumer = :consumer AND f.seq <= :upper AND f.seq > :lower ORDER BY f.seq DESC"
)


def read_retained_batches(tables: Tables, consumer: PolicyName) -> RetainedBatches:
    """Read newest first, so that the cost of a start depends on retained batches only."""
    found: dict[int, tuple[GroupId, ...]] = {}
    upper = int(tables.scalar(NEWEST, consumer=consumer) or 0)
    while upper > 0:
        lower = max(0, upper - PAGE_BATCHES)  # 0 means not in any batch
        page = tables.rows(PAGE, consumer=consumer, upper=upper, lower=lower)
        for seq, fates in groupby(page, key=itemgetter(0)):
            members = list(fates)
            if any(is_freed for _, _, is_freed in members):
                return RetainedBatches(floor=int(seq), batches=dict(reversed(found.items())))
            found[int(seq)] = tuple(GroupId(group_id) for _, group_id, _ in members)
        upper -= PAGE_BATCHES
    return RetainedBatches(floor=0, batches=dict(reversed(found.items())))
