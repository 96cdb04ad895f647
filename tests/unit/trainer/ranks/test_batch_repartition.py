# SPDX-License-Identifier: Apache-2.0
"""Trainers whose stages are spread over different ranks, against one that is alone."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.trainer.rank_jobs import forked
from tests.unit.trainer.spread_jobs import (
    MODULE,
    NUM_STEPS,
    SAVED_AT,
    SPREADS,
    live,
    spread_settings,
)

from penstock.trainer.ranks.group import SingleRank

ROLES = ("reference", "critic", "actor")
"""In the order of their stages."""
DIFFERENT = [name for name, roles in SPREADS.items() if len(set(roles.values())) > 1]
FIGURES = ("loss", "grad_norm", "critic/loss", "critic/grad_norm", "tokens/trained", "gap/k3")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    shutil.copytree(model_folder, folder / "model")
    return folder


@pytest.fixture(scope="module")
def ranks(work: Path) -> list[dict[str, Any]]:
    return forked("spread", 2, work, MODULE)


@pytest.fixture(scope="module")
def alone(work: Path) -> list[list[float]]:
    """The same stages in one process."""
    return _figures(
        live(spread_settings(work, DIFFERENT[0]), SingleRank(), work / "alone", NUM_STEPS)
    )


def _figures(commits: list[dict[str, float]]) -> list[list[float]]:
    return [[stats[name] for name in FIGURES] for stats in commits]


@pytest.mark.parametrize("name", SPREADS)
def test_stages_on_different_ranks_learn_as_one_process_does(
    ranks: list[dict[str, Any]], alone: list[list[float]], name: str
) -> None:
    """Also where a rank has nothing to do for a while: at the first stage, or at the last."""
    found = _figures(ranks[0]["lives"][name]["whole"])
    assert len(found) == NUM_STEPS
    np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_life_that_restored_goes_on_bit_for_bit(
    ranks: list[dict[str, Any]], work: Path, name: str
) -> None:
    lived = ranks[0]["lives"][name]
    assert _figures(lived["rest"]) == _figures(lived["whole"][SAVED_AT:])
    last = f"checkpoints/step_{NUM_STEPS}/model.safetensors"
    cut, whole = (work / name / life / last for life in ("cut", "whole"))
    assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", SPREADS)
def test_rows_move_where_the_spread_changes_and_nowhere_else(
    ranks: list[dict[str, Any]], name: str
) -> None:
    lives = [rank["lives"][name] for rank in ranks]
    in_order = [SPREADS[name][role] for role in ROLES]
    num_changes = sum(one != next_one for one, next_one in pairwise(in_order))
    assert [one["moves"] for one in lives] == [num_changes * NUM_STEPS] * 2
    assert sum(one["sent_bytes"] for one in lives) == sum(one["received_bytes"] for one in lives)
    assert (sum(one["received_bytes"] for one in lives) > 0) is (name in DIFFERENT)


def test_a_moved_batch_is_bit_for_bit_one_that_was_drawn_there(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert len(rank["moves"]) == 18
        assert {way: found for way, found in rank["moves"].items() if found} == {}
