# SPDX-License-Identifier: Apache-2.0
"""Each rank draws its own rows of a sealed batch, straight from the partitions that hold them.

Owns who fetches: the first rank of each data-parallel part, for its neighbours too. No row passes
through a rank that does not compute it; what all ranks need of all rows is in the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.dataflow.protocol import RowPayload, RowsAnswer
from penstock.errors import StoreError
from penstock.trainer.gang.places import Place
from penstock.trainer.gang.team import Word
from penstock.types import Manifest, PolicyName
from penstock.wire.codec import decode, encode


class Rows(Protocol):
    def rows(self, policy: PolicyName, seq: int, rank: int = 0, of: int = 1) -> RowsAnswer: ...


class Drawing(Word, Protocol):
    """What drawing asks of a gang."""

    @property
    def place(self) -> Place: ...


def draw_rows(dataflow: Rows, manifest: Manifest, gang: Drawing) -> list[RowPayload]:
    """One entry for each row of the manifest; those of other parts stand there without payload,
    as a row does that is gone."""
    place, policy = gang.place, PolicyName(manifest.consumer)
    part, of = place.part, place.parallel.dp
    encoded = b""
    if place.is_fetching:
        answer = dataflow.rows(policy, manifest.seq, part, of)
        if place.parallel.tp == 1:
            return _in_place(manifest, answer.rows, part, of)
        encoded = encode(answer)
    answer = decode(gang.to_neighbours(encoded), RowsAnswer)
    return _in_place(manifest, answer.rows, part, of)


def _in_place(
    manifest: Manifest, drawn: Sequence[RowPayload], part: int, of: int
) -> list[RowPayload]:
    rows = [RowPayload(row_id=row.row_id, payload=None) for row in manifest.rows]
    if len(rows[part::of]) != len(drawn):
        raise StoreError(
            f"batch {manifest.consumer}.{manifest.seq}, part {part} of {of}: {len(drawn)} rows "
            f"were served, {len(rows[part::of])} are sealed"
        )
    rows[part::of] = drawn
    return rows
