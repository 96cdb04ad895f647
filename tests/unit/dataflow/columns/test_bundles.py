# SPDX-License-Identifier: Apache-2.0
"""Bundled rows are read as they were put, and each column has its digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.reader_world import no_blobs

from penstock.dataflow.columns.bundles import (
    BUNDLE_BYTES,
    INLINE_BYTES,
    BlobLike,
    Bundle,
    BundleDraft,
    NewRow,
    bundle_record,
    drafts,
)
from penstock.dataflow.columns.cells import (
    MAX_INLINE_BYTES,
    Cell,
    blob_cell,
    bytes_cell,
    number_cell,
)
from penstock.dataflow.columns.values import BlobRef
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.store import location_of
from penstock.errors import BadRequest
from penstock.types import RowId

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.lists(
    st.dictionaries(st.sampled_from("xyz"), st.binary(max_size=300) | NUMBERS, max_size=3),
    max_size=12,
)
PLACE = Location(segment=7, offset=9, length=11)


def rows_of(values: Sequence[Mapping[str, bytes | float]]) -> list[NewRow]:
    return [(RowId(f'k"{n}\u00e9'), row) for n, row in enumerate(values)]


def stored(draft: BundleDraft, arrival: int = 1) -> tuple[Bundle, bytes]:
    """The bundle as stored, and its payload."""
    record = bundle_record(
        draft, lambda payload: PLACE, space="eval", arrival=arrival, writer="w", now=1.0
    )
    bundle = Bundle(record)
    return bundle, draft.payload if record.segment else record.payload


@settings(deadline=None)
@given(values=ROWS, names=st.sets(st.sampled_from("xyz")))
def test_rows_are_read_as_they_were_put(
    values: list[dict[str, bytes | float]], names: set[str]
) -> None:
    rows = rows_of(values)
    found: list[tuple[RowId, dict[str, float | bytes]]] = []
    for draft in drafts(rows, no_blobs):
        bundle, payload = stored(draft)
        columns = bundle.select([*names])
        one_by_one = [columns.values(n, payload) for n in range(len(bundle.keys))]
        assert columns.all_values(len(bundle.keys), payload) == one_by_one
        found += zip(bundle.keys, one_by_one, strict=True)
    selected = names or {*"xyz"}
    assert found == [(key, {n: v for n, v in row.items() if n in selected}) for key, row in rows]


@settings(deadline=None)
@given(values=ROWS)
def test_a_bundled_column_has_the_digest_of_a_single_one(
    values: list[dict[str, bytes | float]],
) -> None:
    for draft in drafts(rows_of(values), no_blobs):
        bundle, _ = stored(draft)
        for position, (key, row) in enumerate(draft.rows):
            for cell in draft.cells(key, row):
                column = bundle.column(position, cell.name)
                assert column is not None and column.row_id == key
                assert (column.digest, column.value, column.length) == (
                    cell.digest,
                    cell.value,
                    cell.length,
                )
            assert bundle.column(position, "other") is None


def test_bundles_have_a_limited_size() -> None:
    rows = rows_of([{"x": bytes(100_000)}] * 8 + [{"y": bytes(10)}] * 8)
    made = [*drafts(rows, no_blobs)]
    assert [key for draft in made for key in draft.keys] == [key for key, _ in rows]
    assert [len(draft.rows) for draft in made] == [3, 3, 2, 8]
    assert all(len(draft.payload) < BUNDLE_BYTES + 100_000 for draft in made)


@pytest.mark.parametrize(("size", "is_here"), [(INLINE_BYTES, True), (INLINE_BYTES + 1, False)])
def test_short_values_are_stored_in_the_record(size: int, is_here: bool) -> None:
    (draft,) = drafts(rows_of([{"x": bytes(size)}]), no_blobs)
    bundle, _ = stored(draft)
    here = Location(segment=0, offset=0, length=size)
    assert location_of(bundle.record) == (here if is_here else PLACE)
    assert len(bundle.record.payload) == (size if is_here else 0)


def test_blobs_are_stored_as_single_columns() -> None:
    def make_cell(name: str, blob: BlobLike) -> Cell:
        return blob_cell(name, blob.digest, blob.size)

    ref = BlobRef(digest="d" * 64, size=9)
    rows: list[NewRow] = [(RowId("a"), {"x": b"1", "y": ref}), (RowId("b"), {"x": b"2", "y": ref})]
    (draft,) = drafts(rows, make_cell)
    assert draft.names == ("x", "y") and draft.contents.names == ("x",)
    assert draft.single_cells == dict.fromkeys("ab", (blob_cell("y", ref.digest, 9),))
    (rest,) = draft.without({RowId("a")})
    assert rest.keys == ["b"] and rest.single_cells == {"b": draft.single_cells[RowId("b")]}


def test_an_invalid_column_is_rejected_by_name() -> None:
    with pytest.raises(BadRequest, match="'y' has 1048577 bytes"):
        list(drafts(rows_of([{"x": b"", "y": bytes(MAX_INLINE_BYTES + 1)}]), no_blobs))
    with pytest.raises(BadRequest, match="finite"):
        list(drafts(rows_of([{"x": float("nan")}]), no_blobs))
    with pytest.raises(BadRequest, match="1 to 128"):
        list(drafts(rows_of([{"": b""}]), no_blobs))


def test_cells_of_a_row_match_its_values() -> None:
    (draft,) = drafts(rows_of([{"x": b"1", "n": 2.0}]), no_blobs)
    ((key, row),) = draft.rows
    assert draft.cells(key, row) == [bytes_cell("x", b"1"), number_cell("n", 2.0)]
