# SPDX-License-Identifier: Apache-2.0
"""Column values as callers write and read them. Data shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.bounds import Count, Digest
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.types import RowId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """A value above 1 MB, stored separately and referenced by its digest."""

    digest: Digest
    size: Count


WireValue = float | Annotated[bytes, Meta(max_length=64 << 20)] | BlobRef
"""The value of a column. Floats are finite; bytes are at most 1 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnStatus:
    """A column that was not stored, and why."""

    key: RowId
    name: str
    status: DeliveryStatus
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedColumn:
    """A column that has no value and never will."""

    kind: str
    detail: str = ""


class RowValues(msgspec.Struct, frozen=True, kw_only=True):
    """The requested columns of one row."""

    key: RowId
    exists: bool
    columns: Mapping[str, WireValue] = {}
    failed: Mapping[str, FailedColumn] = {}
