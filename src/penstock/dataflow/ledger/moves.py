# SPDX-License-Identifier: Apache-2.0
"""Changes of where the payload of a record is; written by compaction like records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.types import RowId


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadMove:
    """Applies only if the record still has the old location, so a record that was deleted or put
    again meanwhile is not changed."""

    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]
    """All fields but the new location, in their order."""

    to_segment: int
    to_offset: int
    segment: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMove(PayloadMove):
    TABLE: ClassVar[str] = "rows"
    KEY: ClassVar[tuple[str, ...]] = ("segment", "offset", "row_id")

    row_id: RowId


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMove(PayloadMove):
    TABLE: ClassVar[str] = "columns"
    KEY: ClassVar[tuple[str, ...]] = ("segment", "offset", "space", "row_id", "name")

    space: str
    row_id: RowId
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleMove(PayloadMove):
    TABLE: ClassVar[str] = "bundles"
    KEY: ClassVar[tuple[str, ...]] = ("segment", "offset", "space", "arrival")

    space: str
    arrival: int
