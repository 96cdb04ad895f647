# SPDX-License-Identifier: Apache-2.0
"""One row at a scorer: what it gives is written, what it breaks costs this row an attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest
from tests.unit.trainer import own_stages
from tests.unit.trainer.doubles import make_trajectory, make_turn
from tests.unit.trainer.stage_makers import OWN, stage

from penstock.config import StageConfig
from penstock.dataflow.client.row_stream import ColumnValue, Row
from penstock.errors import ConfigError
from penstock.trainer.pipeline.stage_worker import Scorer, score, serve
from penstock.types import Trajectory


@dataclass(slots=True)
class HeldRow:
    """A leased row without its service."""

    columns: dict[str, ColumnValue] = field(default_factory=dict[str, ColumnValue])
    written: dict[str, ColumnValue] = field(default_factory=dict[str, ColumnValue])
    failed: str = ""
    key: str = "p0-0.0.1"

    def __getitem__(self, name: str) -> ColumnValue:
        return self.columns[name]

    def trajectory(self) -> Trajectory:
        return make_trajectory(make_turn([1], [2, 3, 4]))

    async def write(self, **columns: ColumnValue) -> bool:
        self.written |= columns
        return True

    async def fail(self, error: str) -> None:
        self.failed = error


async def scored(scorer: Scorer, reads: str = "turns", **more: object) -> HeldRow:
    held = HeldRow(columns={"score": 6.0})
    placed = stage("judge", reads, "score", type="infer", place=("gpu",), **more)
    await score(cast(Row, held), scorer, placed)
    return held


async def test_what_a_scorer_gives_is_written() -> None:
    assert (await scored(own_stages.score)).written == {"score": 3.0}
    assert (await scored(own_stages.score, options={"factor": 2.0})).written == {"score": 6.0}
    assert (await scored(own_stages.score_late)).written == {"score": 3.0}


async def test_columns_are_given_under_the_names_that_the_scorer_takes() -> None:
    def double(trajectory: Trajectory, *, mark: float) -> dict[str, float]:
        return {"score": 2 * mark}

    held = await scored(double, "turns score", rename={"score": "mark"})
    assert held.written == {"score": 12.0}


@pytest.mark.parametrize(
    ("scorer", "why"),
    [
        (own_stages.broken, "RuntimeError: the scorer is broken"),
        (own_stages.reward_of_length, "instead of a mapping of score"),
        (lambda trajectory: None, "instead of a mapping of score"),
        (lambda trajectory: {"score": "high"}, "could not convert"),
    ],
)
async def test_a_scorer_that_breaks_costs_the_row_an_attempt(scorer: Scorer, why: str) -> None:
    held = await scored(scorer)
    assert why in held.failed and not held.written


async def test_a_worker_refuses_a_scorer_that_does_not_fit() -> None:
    placed = stage("judge", "turns", "score", type="infer", place=("gpu",), fn=f"{OWN}:needy")
    terms = StageConfig(name="judge", reads=("turns",), writes=("score",))
    with pytest.raises(ConfigError, match=r"stage judge: .*needs reward"):
        await serve("http://127.0.0.1:1", "", placed, terms)
