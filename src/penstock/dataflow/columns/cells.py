# SPDX-License-Identifier: Apache-2.0
"""Cells: one column of one row before it is stored, and the comparison with an earlier write.

Knows nothing about storage."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.errors import BadRequest

MAX_INLINE_BYTES = 1 << 20
"""Longer values are uploaded as blobs first; the column then stores the blob's digest."""
MAX_DETAIL = 2_000
MAX_WRITES = 8_192
"""Columns of one call that become a record each; more would block the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One column of one row, ready to be stored: a number, bytes, a blob, or a failure."""

    name: str
    digest: str
    """BLAKE3 of the value; decides whether a second write is a duplicate or a conflict."""
    value: float | None = None
    payload: bytes | None = None
    blob: str = ""
    length: int = 0
    failed: str = ""
    detail: str = ""


def number_cell(name: str, value: float) -> Cell:
    return Cell(name=name, digest=blake3(struct.pack("<d", value)).hexdigest(), value=value)


def check_column(name: str) -> None:
    if not 0 < len(name) <= 128:
        raise BadRequest(f"column names must have 1 to 128 characters, got {len(name)}")
    if "\0" in name:  # the ledger would store another name
        raise BadRequest(f"column name {name!r} has a NUL; choose another name")


def require_finite(name: str, value: float, most: float = sys.float_info.max) -> float:
    if not abs(value) <= most:
        raise BadRequest(
            f"column {name!r} is {value}; send a finite number up to {most:g}, or mark the column "
            "as failed"
        )
    return float(value)


def check_inline_size(names: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise BadRequest if a value is too large to be inline. `sizes` are row by row."""
    longest = max(sizes, default=0)
    if longest > MAX_INLINE_BYTES:
        name = names[sizes.index(longest) % len(names)]
        raise BadRequest(
            f"column {name!r} has {longest} bytes, the limit is {MAX_INLINE_BYTES}; upload it as a "
            "blob (PUT /v1/blobs/DIGEST) and send the blob's digest instead"
        )


def bytes_cell(name: str, payload: bytes) -> Cell:
    check_inline_size((name,), (len(payload),))
    digest = blake3(payload).hexdigest()
    return Cell(name=name, digest=digest, payload=payload, length=len(payload))


def blob_cell(name: str, digest: str, length: int) -> Cell:
    return Cell(name=name, digest=digest, blob=digest, length=length)


def failed_cell(name: str, kind: str, detail: str = "") -> Cell:
    return Cell(name=name, digest="", failed=kind, detail=detail[:MAX_DETAIL])


def compare_write(existing: ColumnRecord, cell: Cell) -> tuple[DeliveryStatus, str]:
    """The first write wins: an equal second write is a duplicate, a different one a conflict."""
    if (existing.digest, existing.failed) == (cell.digest, cell.failed):
        return DeliveryStatus.DUPLICATE, ""
    current = f"failed({existing.failed})" if existing.failed else f"digest {existing.digest[:12]}"
    where = f"column {cell.name!r} of row {existing.row_id!r}"
    detail = f"{where} already exists ({current}, written by {existing.writer})"
    return DeliveryStatus.CONFLICT, detail
