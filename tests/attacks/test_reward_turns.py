# SPDX-License-Identifier: Apache-2.0
"""The stage `trusted-reward`: rows of one untrusted credential hold up no reward of another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.config.stages import StageConfig
from penstock.dataflow.columns.origins import RowOrigin
from penstock.dataflow.core.names import ORIGIN
from penstock.rollout.rewards.failed import Failed
from penstock.runs import score_stage
from penstock.runs.score_stage import MAX_HELD, MAX_OF_ONE, MAX_ROWS, TRUSTED, num_to_lease
from penstock.types import NodeId, Task, Trajectory

LIMIT_S = 60.0
TERMS = StageConfig(name="trusted-reward", reads=("turns",), writes=("reward",))


class FakeRow:
    """A row that only says what its answer is."""

    def __init__(self, key: str, answer: str) -> None:
        self.key, self.answer, self.is_finished = key, answer, False
        self.reward: float | None = None
        self.written = asyncio.Event()

    def trajectory(self) -> Any:
        return SimpleNamespace(answer=self.answer)

    async def write(self, reward: float) -> bool:
        self.reward, self.is_finished = reward, True
        self.written.set()
        return True

    async def fail(self, error: str) -> None:
        self.is_finished = True


class FakeRows:
    """A dataflow with these rows and no others, in this order; a key begins with its node."""

    def __init__(self, rows: Sequence[FakeRow], *, trusted: str = "") -> None:
        self.waiting = [*rows]
        self.kept: Sequence[Any] = ()
        self._trusted = trusted

    async def reader(self, name: str, **terms: Any) -> FakeRows:
        return self

    async def lease(self, max_rows: int) -> list[FakeRow]:
        if not self.waiting:
            await asyncio.Event().wait()
        leased, self.waiting = self.waiting[:max_rows], self.waiting[max_rows:]
        return leased

    async def keep(self, rows: Sequence[Any]) -> None:
        self.kept = rows
        await asyncio.Event().wait()

    async def get(self, space: str, keys: Sequence[str], columns: Sequence[str]) -> Any:
        return {key: SimpleNamespace(columns={ORIGIN: self._origin(key)}) for key in keys}

    def _origin(self, key: str) -> bytes:
        node = key.partition("-")[0]
        task = Task(key="t", source="s", ordinal=0, payload={}, workflow="", seed=0)
        return msgspec.msgpack.encode(
            RowOrigin(
                task=task, seed=0, node_id=NodeId(f"{node}.1"), is_trusted=node == self._trusted
            )
        )


class StuckScorer:
    """Ends with no answer but those that say 42."""

    def __init__(self) -> None:
        self.num_stuck = 0

    async def score(self, completion: str, task: Task) -> float | Failed:
        if completion == "42":
            return 1.0
        self.num_stuck += 1
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def serving(
    rows: FakeRows, scorer: StuckScorer, monkeypatch: pytest.MonkeyPatch, threads: set[int]
) -> AsyncGenerator[None]:
    @asynccontextmanager
    async def client(url: str, token: object) -> AsyncGenerator[FakeRows]:
        yield rows

    def answer_of(trajectory: Trajectory) -> str:
        threads.add(threading.get_ident())
        return cast(Any, trajectory).answer

    def ignore(*_: object) -> None: ...

    monkeypatch.setattr(score_stage, "RowsClient", client)
    stage = asyncio.create_task(
        score_stage.serve_scores(["url"], cast(Any, "t"), TERMS, scorer, answer_of, ignore)
    )
    try:
        yield
    finally:
        stage.cancel()
        await asyncio.gather(stage, return_exceptions=True)


async def until_scored(rows: Sequence[FakeRow]) -> None:
    async with asyncio.timeout(LIMIT_S):
        for row in rows:
            await row.written.wait()


@pytest.mark.parametrize("trusted", ["", "bob"])
async def test_rows_without_end_hold_up_no_row_of_another_credential(
    trusted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 answers of one node that take five seconds each were leased together; no row behind them
    was looked at, until their groups were dropped as overdue."""
    hostile = [FakeRow(f"mallory-{number}", "(x+y+z+w)^{9999}") for number in range(200)]
    honest = [FakeRow(f"bob-{number}", "42") for number in range(100)]
    scorer, rows = StuckScorer(), FakeRows([*hostile, *honest], trusted=trusted)
    async with serving(rows, scorer, monkeypatch, set()):
        await until_scored(honest)
        assert {row.reward for row in honest} == {1.0}
        assert scorer.num_stuck == MAX_OF_ONE
        assert {row.key for row in rows.kept} == {row.key for row in hostile}, "they expire"


async def test_a_row_that_was_lost_while_it_waited_is_not_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, honest = FakeRow("mallory-0", "(x+y)^9"), FakeRow("bob-0", "42")
    lost.is_finished = True
    scorer = StuckScorer()
    async with serving(FakeRows([lost, honest]), scorer, monkeypatch, set()):
        await until_scored([honest])
    assert scorer.num_stuck == 0


async def test_answers_are_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 answers of 32,768 tokens took longer than the leases, not renewed meanwhile."""
    threads, honest = set[int](), [FakeRow(f"bob-{number}", "42") for number in range(9)]
    async with serving(FakeRows(honest), StuckScorer(), monkeypatch, threads):
        await until_scored(honest)
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("held", "num"),
    [
        ({}, MAX_ROWS),
        ({TRUSTED: 40}, 24),
        ({TRUSTED: 60}, 0),
        ({"a": 3, TRUSTED: 10}, MAX_ROWS - 13),
        ({"a": 100}, MAX_ROWS - MAX_OF_ONE),
        ({"a": 200, "b": 40}, MAX_HELD - 240),
        ({"a": MAX_HELD - 1}, 0),
    ],
)
def test_rows_that_wait_for_their_turn_take_no_place_of_others(
    held: dict[str, int], num: int
) -> None:
    assert num_to_lease(held) == num
