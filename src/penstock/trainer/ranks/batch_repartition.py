# SPDX-License-Identifier: Apache-2.0
"""Moves a batch between two stages with different sharding: each row to the rank that needs it
next, with all its token columns.

Owns what is sent: the tokens as they were cut, so that nothing is cut again and every bit stays.
Row columns are on every rank already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from penstock.config.stages import ParallelConfig
from penstock.trainer.batches import Batch
from penstock.trainer.ranks.repartition import RowPlacement, repartition
from penstock.trainer.ranks.row_fetch import assign_rows
from penstock.trainer.samples import TOKEN_COLUMNS, Samples
from penstock.wire.codec import decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One row in transit; arrays are raw bytes."""

    lengths: tuple[int, ...]
    """Tokens of each of its samples."""
    tokens: Mapping[str, bytes]
    """Its slice of every token array of `Samples`."""
    columns: Mapping[str, bytes]
    subject: str | None
    """Whose credential delivered it; None for a missing row."""


def repartition_batch(
    batch: Batch, before: ParallelConfig, after: ParallelConfig, *, minibatches: int
) -> Batch:
    """This rank's rows in the next stage. Every rank of the trainer calls it."""
    rank = dist.get_rank()
    held, needed = (_placement(batch, parallel, minibatches) for parallel in (before, after))
    rows = {row: encode(_pack(batch, row)) for row in held.rows_of(rank)}
    found = repartition(rows, held, needed, rank=rank)
    return _unpack(batch, {row: decode(content, PackedRow) for row, content in found.items()})


def _placement(batch: Batch, parallel: ParallelConfig, minibatches: int) -> RowPlacement:
    """Where rows would have been fetched to, had this stage been the first."""
    parts_R = np.zeros(batch.groups_R.size, np.int64)
    shares = assign_rows(batch.costs_R, batch.groups_R, parallel.dp, minibatches)
    for part, rows in enumerate(shares):
        parts_R[rows] = part
    return RowPlacement(parallel=parallel, parts_R=parts_R)


def _pack(batch: Batch, row: int) -> PackedRow:
    samples = batch.samples
    first, end = np.searchsorted(samples.rows_S, (row, row + 1))
    spans = list(zip(samples.starts_S[first:end], samples.ends_S[first:end], strict=True))

    def own(values: npt.NDArray[Any]) -> bytes:
        return b"".join(values[start:stop].tobytes() for start, stop in spans)

    return PackedRow(
        lengths=tuple(int(stop - start) for start, stop in spans),
        tokens={name: own(getattr(samples, name)) for name in TOKEN_COLUMNS},
        columns={name: own(values) for name, values in batch.token_columns.items()},
        subject=batch.subjects.get(row),
    )


def _unpack(batch: Batch, rows: Mapping[int, PackedRow]) -> Batch:
    packed = list(rows.values())
    lengths_S = np.array([length for row in packed for length in row.lengths], np.int64)
    ends_S = np.cumsum(lengths_S)
    joined = {
        name: _joined((row.tokens[name] for row in packed), like.dtype).reshape(
            int(lengths_S.sum()), *like.shape[1:]
        )
        for name, like in ((name, getattr(batch.samples, name)) for name in TOKEN_COLUMNS)
    }
    columns = {
        name: _joined((row.columns[name] for row in packed), np.float64)
        for name in batch.token_columns
    }
    samples = Samples(
        starts_S=ends_S - lengths_S,
        ends_S=ends_S,
        rows_S=np.repeat(np.array([*rows], np.int64), [len(row.lengths) for row in packed]),
        **joined,
    )
    return replace(
        batch,
        samples=samples,
        token_columns=columns,
        subjects={r: one.subject for r, one in rows.items() if one.subject is not None},
    )


def _joined(parts: Iterable[bytes], dtype: Any) -> npt.NDArray[Any]:
    return np.frombuffer(bytearray().join(parts), dtype)
