# SPDX-License-Identifier: Apache-2.0
"""Spaces have quotas, are cleared separately, and never include the rollouts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.sim.reader_world import ReaderWorld, no_blobs

from penstock.dataflow.column_records import ItemRecord
from penstock.dataflow.columns.bundles import Values, drafts
from penstock.dataflow.columns.cells import number_cell
from penstock.dataflow.columns.column_store import COLUMN_BYTES
from penstock.dataflow.columns.row_leases import LeaseOutcome, ReaderSpec
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.errors import BadRequest, Forbidden, NotFound, StorageFull
from penstock.types import RowId

BOTH = {"x": "duplicate", "y": "duplicate"}


def put(
    world: ReaderWorld, space: str, key: str, **values: float | bytes
) -> dict[str, DeliveryStatus]:
    """Columns that were not stored."""
    return put_all(world, space, {key: values})


def put_all(
    world: ReaderWorld, space: str, rows: Mapping[str, Values]
) -> dict[str, DeliveryStatus]:
    made = [*drafts(((RowId(key), row) for key, row in rows.items()), no_blobs)]
    refused = world.spaces.put(space, made, "user", world.now)
    return {result.name: result.status for result in refused}


def test_a_key_gets_the_columns_it_does_not_have() -> None:
    world = ReaderWorld()
    assert put(world, "eval", "a", x=1.0) == {}
    for _ in range(2):
        world.flush()
        assert put(world, "eval", "a", x=1.0, y=b"two") in ({"x": "duplicate"}, BOTH)
        assert put(world, "eval", "a", x=3.0, y=b"two") == {"x": "conflict", "y": "duplicate"}
    assert world.tables.rows("SELECT row_id, bundle FROM items") == [("a", 1)]
    assert world.tables.rows("SELECT name FROM columns") == [("y",)], "x came with the row"


def test_a_full_space_names_the_fix_and_keeps_its_rows() -> None:
    world = ReaderWorld()
    world.spaces.set_quota("eval", 2 * (100 + COLUMN_BYTES), world.now)
    put(world, "eval", "a", x=bytes(100))
    put(world, "eval", "b", x=bytes(100))
    with pytest.raises(StorageFull, match="DELETE /v1/spaces/eval") as caught:
        put(world, "eval", "c", x=1.0)
    assert caught.value.retry_after_s is not None
    assert put(world, "eval", "a", x=bytes(100)) == {"x": "duplicate"}
    put(world, "other", "c", x=1.0)
    world.flush()
    world.crash()
    with pytest.raises(StorageFull):
        put(world, "eval", "c", x=1.0)
    world.spaces.clear("eval")
    world.flush()
    put(world, "eval", "c", x=1.0)


def test_clearing_affects_no_other_space_and_readers_continue() -> None:
    world = ReaderWorld()
    terms = ReaderSpec(name="judge", reads=("x",), writes=("mark",), space="eval")
    world.readers.declare(terms, world.now)
    put(world, "eval", "a", x=1.0)
    put(world, "other", "a", x=1.0)
    (grant,) = world.readers.lease("judge", "w", "r1", 9, world.now)
    old = grant.claim
    world.spaces.clear("eval")
    cell = number_cell("mark", 0.0)
    assert world.readers.write("judge", old, [cell], "w", world.now)[0][0] == "fenced"
    assert world.readers.end("judge", old, LeaseOutcome.RELEASED, world.now)[0] == "fenced"
    world.flush()
    assert world.tables.rows("SELECT space FROM items") == [("other",)]
    assert world.tables.rows("SELECT space FROM bundles") == [("other",)]
    put(world, "eval", "a", x=2.0)
    (again,) = world.readers.lease("judge", "w", "r2", 9, world.now)
    assert (again.claim.row_id, again.claim.epoch) == (grant.claim.row_id, grant.claim.epoch), (
        "a new row, a first lease"
    )
    assert world.readers.write("judge", old, [cell], "w", world.now)[0][0] == "fenced"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "é", "x" * 129])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(BadRequest, match="invalid name"):
        put(ReaderWorld(), name, "a", x=1.0)


def test_train_belongs_to_the_rollouts() -> None:
    world = ReaderWorld()
    with pytest.raises(Forbidden, match="another space"):
        put(world, "train", "a", x=1.0)
    with pytest.raises(Forbidden):
        world.spaces.clear("train")
    with pytest.raises(NotFound):
        world.spaces.clear("nowhere")
    with pytest.raises(BadRequest, match="reserved"):
        put(world, "eval", "a", turns=1.0)


def test_rows_of_one_call_are_one_record_and_each_is_found() -> None:
    world = ReaderWorld()
    rows: dict[str, Values] = {f"k{n}": {"text": b"t%d" % n, "score": float(n)} for n in range(5)}
    assert put_all(world, "eval", rows) == {}
    assert put_all(world, "eval", rows) == {"text": "duplicate", "score": "duplicate"}
    world.flush()
    assert world.tables.scalar("SELECT count(*) FROM bundles") == 1
    world.crash()
    assert put_all(world, "eval", {"k9": {"text": b"new"}, **rows, "k8": {"text": b"n"}}) == {
        "text": "duplicate",
        "score": "duplicate",
    }
    assert put_all(world, "eval", {"k3": {"text": b"t4"}}) == {"text": "conflict"}
    world.flush()
    found = world.tables.rows("SELECT row_id, arrival - bundle FROM items ORDER BY arrival")
    assert found == [*((f"k{n}", n) for n in range(5)), ("k9", 0), ("k8", 0)]


def test_readers_know_the_columns_delivered_with_rows() -> None:
    world = ReaderWorld(window=2)
    terms = ReaderSpec(name="judge", reads=("text",), writes=("mark",), space="eval")
    world.readers.declare(terms, world.now)
    put_all(world, "eval", {f"k{n}": {"text": b"t"} for n in range(4)})
    put_all(world, "eval", {"k4": {"text": b"t", "mark": 1.0}, "k5": {"other": b"t"}})
    world.flush()
    world.crash()
    seen: list[str] = []
    for request in range(4):
        for grant in world.readers.lease("judge", "w", f"r{request}", 9, world.now):
            claim = grant.claim
            world.readers.write("judge", claim, [number_cell("mark", 0.0)], "w", world.now)
            world.readers.end("judge", claim, LeaseOutcome.DONE, world.now)
            seen.append(grant.claim.row_id)
        world.flush()
    assert seen == ["k0", "k1", "k2", "k3"], "k4 came with its mark, k5 without text"


def test_rows_of_an_older_ledger_are_read_as_they_were_written() -> None:
    """Before format 3, every column of a row was a separate record, without bundles."""
    world = ReaderWorld()
    world.readers.declare(ReaderSpec(name="judge", reads=("x",), space="eval"), world.now)
    world.spaces.set_quota("eval", 0, world.now)
    old = ItemRecord(space="eval", row_id=RowId("a"), arrival=1, at=world.now)
    world.columns.complete("eval", RowId("a"), number_cell("x", 1.0), "user", world.now)
    world.tables.commit([*world.journaled, old])
    world.crash()
    assert put(world, "eval", "a", x=1.0, y=2.0) == {"x": "duplicate"}
    assert put(world, "eval", "b", x=1.0) == {}
    world.flush()
    grants = world.readers.lease("judge", "w", "r1", 9, world.now)
    assert [grant.claim.row_id for grant in grants] == ["a", "b"]
