# SPDX-License-Identifier: Apache-2.0
"""Rows between stages of different sizes: who moves what, and four processes that do it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.unit.trainer.rank_jobs import NUM_ROWS, UNEVEN, forked, payload_of, round_robin

from penstock.config.stages import ParallelConfig
from penstock.trainer.ranks.repartition import RowPlacement, plan_transfers
from penstock.trainer.ranks.topology import RankPosition

SIZES = [ParallelConfig(dp=dp, tp=tp) for dp in (1, 2, 3, 4) for tp in (1, 2)]


def _held(parallel: ParallelConfig) -> RowPlacement:
    return RowPlacement(parallel=parallel, parts_R=round_robin(parallel.dp))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SIZES, SIZES)))
def test_a_plan_brings_each_rank_what_it_lacks_from_one_that_has_it(
    before: ParallelConfig, after: ParallelConfig
) -> None:
    moves = plan_transfers(_held(before), _held(after))
    has = {rank: set(_held(before).rows_of(rank)) for rank in range(8)}
    for move in moves:
        assert move.row in has[move.source]
        assert move.row not in has[move.target], "sent to a rank that has it"
    for rank in range(8):
        came = [move.row for move in moves if move.target == rank]
        assert len(came) == len(set(came))
        assert set(_held(after).rows_of(rank)) <= has[rank] | set(came)
        assert set(came) <= set(_held(after).rows_of(rank))


def test_ranks_that_hold_the_same_rows_share_the_sending() -> None:
    moves = plan_transfers(_held(ParallelConfig(dp=1, tp=2)), _held(ParallelConfig(dp=4)))
    sent = np.bincount([move.source for move in moves])
    assert sent.tolist() == [16, 16]


def test_places_of_a_stage() -> None:
    square = ParallelConfig(dp=2, tp=2)
    *places, fifth = [RankPosition(rank=rank, parallel=square) for rank in range(5)]
    assert fifth.is_idle and not any(position.is_idle for position in places)
    assert [position.part for position in places] == [0, 0, 1, 1]
    assert [position.fetches_rows for position in places] == [True, False, True, False]
    assert [position.is_rank0 for position in places] == [True, False, False, False]


# --- four processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return forked("four", 4, tmp_path_factory.mktemp("four"))


def _stage(ranks: list[dict[str, Any]], chain: str, index: int) -> list[list[int]]:
    stages = [rank[chain][index] for rank in ranks]
    assert all(stage["is_right"] for stage in stages)
    assert sum(stage["sent"] for stage in stages) == sum(stage["received"] for stage in stages)
    return [stage["rows"] for stage in stages]


def test_from_two_parts_of_two_to_four_gives_sixteen_rows_each(ranks: list[dict[str, Any]]) -> None:
    rows = _stage(ranks, "dp2tp2-dp4", 0)
    assert [len(own) for own in rows] == [16, 16, 16, 16]
    assert sorted(itertools.chain(*rows)) == list(range(NUM_ROWS))


def test_from_four_to_two_to_three_rows_stay_disjoint_and_complete(
    ranks: list[dict[str, Any]],
) -> None:
    for index, num_parts in enumerate((2, 3)):
        rows = _stage(ranks, "4-2-3", index)
        assert sorted(itertools.chain(*rows)) == list(range(NUM_ROWS))
        assert [bool(own) for own in rows] == [rank < num_parts for rank in range(4)]


def test_no_rank_carries_more_than_it_gives_up_or_lacks(ranks: list[dict[str, Any]]) -> None:
    """From four to two, ranks 2 and 3 give all they have; 0 and 1 send nothing."""
    stages = [rank["4-2-3"][0] for rank in ranks]
    share = [sum(len(payload_of(row)) for row in range(rank, NUM_ROWS, 4)) for rank in range(4)]
    assert [stage["sent"] for stage in stages] == [0, 0, share[2], share[3]]
    assert [stage["received"] for stage in stages] == [share[2], share[3], 0, 0]


@pytest.mark.parametrize("chain", ["dp2tp2-dp2", "4-4"])
def test_an_unchanged_size_moves_nothing(ranks: list[dict[str, Any]], chain: str) -> None:
    assert [(rank[chain][0]["sent"], rank[chain][0]["received"]) for rank in ranks] == [(0, 0)] * 4
    assert all(rank[chain][0]["rows"] for rank in ranks)


def test_metrics_of_three_uneven_ranks_have_one_denominator(ranks: list[dict[str, Any]]) -> None:
    every = list(itertools.chain(*UNEVEN))
    expected = {"mean": sum(every) / len(every), "most": 5}
    assert [rank["metrics"] for rank in ranks] == [expected, expected, expected, None]


def test_ranks_of_one_part_count_once_and_fetch_once(ranks: list[dict[str, Any]]) -> None:
    assert [rank["summed"] for rank in ranks] == [[11.0]] * 4
    drawn = [rank["drawn"] for rank in ranks]
    assert [found["fetched"] > 0 for found in drawn] == [True, False, True, False]
    assert [found["own"] for found in drawn[::2]] == [found["own"] for found in drawn[1::2]]
    assert sorted(drawn[0]["own"] + drawn[2]["own"]) == list(range(NUM_ROWS))
    for found in drawn:
        assert found["is_right"]
        assert found["through"] <= found["all"] / 2 * 1.05
