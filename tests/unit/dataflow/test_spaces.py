# SPDX-License-Identifier: Apache-2.0
"""Spaces are bounded, cleared alone, and never the rollouts' own."""

from __future__ import annotations

import pytest
from tests.sim.shelf_world import ShelfWorld

from penstock.dataflow.columns import COLUMN_BYTES, Cell, bytes_cell, number_cell
from penstock.dataflow.spaces import NewRow, PutResult
from penstock.dataflow.takes import Claim, ReaderTerms
from penstock.errors import BadRequest, Forbidden, NotFound, StorageFull
from penstock.types import RowId


def put(world: ShelfWorld, space: str, key: str, *cells: Cell) -> list[PutResult]:
    row = NewRow(key=RowId(key), cells=cells)
    return world.spaces.put(space, [row], "user", world.now)


def test_a_key_gets_the_columns_it_does_not_have() -> None:
    world = ShelfWorld()
    assert [r.status for r in put(world, "eval", "a", number_cell("x", 1.0))] == ["stored"]
    results = put(world, "eval", "a", number_cell("x", 1.0), number_cell("y", 2.0))
    assert [r.status for r in results] == ["duplicate", "stored"]
    assert [r.status for r in put(world, "eval", "a", number_cell("x", 3.0))] == ["conflict"]
    world.flush()
    assert world.tables.scalar("SELECT count(*) FROM items") == 1
    assert world.tables.scalar("SELECT value FROM columns WHERE name = 'x'") == 1.0


def test_a_full_space_says_how_to_go_on_and_keeps_what_it_has() -> None:
    world = ShelfWorld()
    world.spaces.set_quota("eval", 2 * (100 + COLUMN_BYTES), world.now)
    put(world, "eval", "a", bytes_cell("x", bytes(100)))
    put(world, "eval", "b", bytes_cell("x", bytes(100)))
    with pytest.raises(StorageFull, match="DELETE /v1/spaces/eval") as caught:
        put(world, "eval", "c", number_cell("x", 1.0))
    assert caught.value.retry_after_s is not None
    assert [r.status for r in put(world, "eval", "a", bytes_cell("x", bytes(100)))] == ["duplicate"]
    put(world, "other", "c", number_cell("x", 1.0))
    world.flush()
    world.crash()
    with pytest.raises(StorageFull):
        put(world, "eval", "c", number_cell("x", 1.0))
    world.spaces.clear("eval")
    world.flush()
    put(world, "eval", "c", number_cell("x", 1.0))


def test_clearing_touches_no_other_space_and_readers_go_on() -> None:
    world = ShelfWorld()
    terms = ReaderTerms(name="judge", reads=("x",), writes=("mark",), space="eval")
    world.readers.declare(terms, world.now)
    put(world, "eval", "a", number_cell("x", 1.0))
    put(world, "other", "a", number_cell("x", 1.0))
    (grant,) = world.readers.lease("judge", "w", "r1", 9, world.now)
    old = Claim(row_id=grant.row_id, arrival=grant.arrival, epoch=grant.epoch)
    world.spaces.clear("eval")
    cell = number_cell("mark", 0.0)
    assert world.readers.write("judge", old, [cell], "w", world.now)[0][0] == "fenced"
    assert world.readers.release("judge", old, world.now)[0] == "fenced"
    world.flush()
    assert world.tables.rows("SELECT space FROM items") == [("other",)]
    assert world.tables.rows("SELECT space FROM columns") == [("other",)]
    put(world, "eval", "a", number_cell("x", 2.0))
    (again,) = world.readers.lease("judge", "w", "r2", 9, world.now)
    assert (again.row_id, again.epoch) == (grant.row_id, grant.epoch), "a new row, a first lease"
    assert world.readers.write("judge", old, [cell], "w", world.now)[0][0] == "fenced"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "é", "x" * 129])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(BadRequest, match="is no name"):
        put(ShelfWorld(), name, "a", number_cell("x", 1.0))


def test_train_belongs_to_the_rollouts() -> None:
    world = ShelfWorld()
    with pytest.raises(Forbidden, match="another name"):
        put(world, "train", "a", number_cell("x", 1.0))
    with pytest.raises(Forbidden):
        world.spaces.clear("train")
    with pytest.raises(NotFound):
        world.spaces.clear("nowhere")
    with pytest.raises(BadRequest, match="service's own"):
        put(world, "eval", "a", number_cell("turns", 1.0))
