# SPDX-License-Identifier: Apache-2.0
"""Columns are write-once, even before a commit, and different values have different digests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.reader_world import ReaderWorld

from penstock.dataflow.columns.cells import (
    MAX_INLINE_BYTES,
    Cell,
    blob_cell,
    bytes_cell,
    compare_write,
    failed_cell,
    number_cell,
)
from penstock.dataflow.columns.column_store import UnflushedWrites
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.ledger.tables import open_memory_tables
from penstock.errors import BadRequest
from penstock.types import RowId

TABLES = open_memory_tables()
ROW = RowId("p0-1.0.1")
CELLS = st.one_of(
    st.builds(number_cell, st.just("x"), st.floats(allow_nan=False, allow_infinity=False)),
    st.builds(bytes_cell, st.just("x"), st.binary(max_size=40)),
    st.builds(failed_cell, st.just("x"), st.sampled_from(["overdue", "attempts"])),
)


@settings(deadline=None)
@given(first=CELLS, second=CELLS)
def test_only_an_equal_write_is_a_duplicate(first: Cell, second: Cell) -> None:
    world = ReaderWorld(tables=TABLES)
    world.columns.complete("eval", ROW, first, "w", 1.0)
    existing = world.columns.existing("eval", [ROW], ["x"])[ROW, "x"]
    is_same = (first.value, first.payload, first.failed) == (
        second.value,
        second.payload,
        second.failed,
    ) and str(first.value) == str(second.value)  # 0.0 and -0.0 are other bytes
    status, detail = compare_write(existing, second)
    assert status is (DeliveryStatus.DUPLICATE if is_same else DeliveryStatus.CONFLICT)
    assert is_same or "written by w" in detail


def test_a_write_is_visible_before_it_is_on_disk() -> None:
    world = ReaderWorld()
    world.columns.complete("eval", ROW, number_cell("x", 1.0), "w", 1.0)
    assert (ROW, "x") in world.columns.existing("eval", [ROW], ["x", "y"])
    world.flush()
    assert (ROW, "x") in world.columns.existing("eval", [ROW], ["x", "y"])
    assert world.columns.existing("train", [ROW], ["x"]) == {}, "another space"


def test_a_flush_releases_only_what_it_made_durable() -> None:
    recent: UnflushedWrites[str, int] = UnflushedWrites()
    recent["before"] = 1
    recent.begin_flush()
    recent["during"] = 2
    recent.end_flush()
    assert (recent.get("before"), recent.get("during")) == (None, 2)


def test_bytes_go_to_the_payload_store_and_long_ones_are_rejected() -> None:
    world = ReaderWorld()
    record = world.columns.complete("eval", ROW, bytes_cell("x", b"abc"), "w", 1.0)
    assert record.length == 3 and record.segment == 1
    with pytest.raises(BadRequest, match="PUT /v1/blobs"):
        bytes_cell("x", bytes(MAX_INLINE_BYTES + 1))
    blob = world.columns.complete("eval", ROW, blob_cell("y", "f" * 64, 5 << 20), "w", 1.0)
    assert (blob.segment, blob.length, blob.blob) == (0, 5 << 20, "f" * 64)
