# SPDX-License-Identifier: Apache-2.0
"""Values of columns as callers give and get them. Owns shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock.types import RowId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """A value above 1 MB, by name."""

    digest: str
    size: int


WireValue = float | bytes | BlobRef
"""What a column holds. Floats are finite; bytes go up to 1 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedColumn:
    kind: str
    detail: str = ""


class RowValues(msgspec.Struct, frozen=True, kw_only=True):
    key: RowId
    exists: bool
    columns: Mapping[str, WireValue] = {}
    failed: Mapping[str, FailedColumn] = {}
