# SPDX-License-Identifier: Apache-2.0
"""The built-in stage `trusted-reward`: computes rewards where nodes cannot forge them.

Owns one worker's loop over rows without a reward. It scores the text of the last answer, decoded
from the tokens of the row, with the task that the ledger holds: nothing that the node says about
either counts. Rows of untrusted nodes are also offered to the spot checker. Unfinished rows are
leased again; columns are write-once, so scoring twice changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import msgspec
import structlog

from penstock.config import StageConfig
from penstock.dataflow.client.row_stream import Row, RowReader
from penstock.dataflow.client.rows import RowsClient
from penstock.dataflow.columns.origins import RowOrigin
from penstock.dataflow.core.names import ORIGIN, TRAIN
from penstock.rollout.rewards.scorer import Failed, RewardScorer
from penstock.types import Trajectory
from penstock.wire.held_token import Token

MAX_ROWS = 64
"""Rows leased and scored at a time."""
_origin = msgspec.msgpack.Decoder(RowOrigin)
_log = structlog.get_logger(__name__)

OnScored = Callable[[Trajectory, RowOrigin, float], None]
"""Called with each scored row of an untrusted node."""


async def serve_scores(
    urls: Sequence[str],
    token: Token,
    terms: StageConfig,
    scorer: RewardScorer,
    answer_of: Callable[[Trajectory], str],
    on_untrusted: OnScored,
) -> None:
    """Score rows of every partition until cancelled.

    consumes: rows without a reward · produces: the column `reward`
    waits for: the next row · ends: when cancelled"""
    async with AsyncExitStack() as resources, asyncio.TaskGroup() as loops:
        for url in urls:
            client = await resources.enter_async_context(RowsClient(url, token))
            worker = _Worker(client, scorer, answer_of, on_untrusted)
            loops.create_task(worker.run(terms), name=f"score rows of {url}")


class _Worker:
    def __init__(
        self,
        client: RowsClient,
        scorer: RewardScorer,
        answer_of: Callable[[Trajectory], str],
        on_untrusted: OnScored,
    ) -> None:
        self._client = client
        self._scorer = scorer
        self._answer_of = answer_of
        self._on_untrusted = on_untrusted

    async def run(self, terms: StageConfig) -> None:
        reader = await self._client.reader(
            terms.name,
            reads=terms.reads,
            writes=terms.writes,
            deadline_s=terms.deadline_s,
            ttl_s=terms.ttl_s,
            max_attempts=terms.max_attempts,
        )
        while True:
            await self._score_next(reader)

    async def _score_next(self, reader: RowReader) -> None:
        rows = await reader.lease(MAX_ROWS)
        found = await self._client.get(TRAIN, [row.key for row in rows], (ORIGIN,))
        keeper = asyncio.create_task(reader.keep(rows), name="keep rows")
        try:
            async with asyncio.TaskGroup() as scoring:
                for row in rows:
                    origin = found[row.key].columns.get(ORIGIN) if row.key in found else None
                    scoring.create_task(self._score(row, origin))
        finally:
            keeper.cancel()

    async def _score(self, row: Row, origin: float | bytes | None) -> None:
        if not isinstance(origin, bytes):  # forgotten meanwhile
            await row.fail("its task is not in the ledger any more")
            return
        known, trajectory = _origin.decode(origin), row.trajectory()
        try:
            answer = self._answer_of(trajectory)
        except Exception as error:  # strangers made the row: it must not end the stage
            await row.fail(f"its answer cannot be decoded: {error}")
            return
        result = await self._scorer.score(answer, known.task)
        if isinstance(result, Failed):
            _log.warning("reward failed", row=row.key, why=result.detail)
            await row.fail(result.detail)
            return
        if await row.write(reward=result) and not known.is_trusted:
            self._on_untrusted(trajectory, known, result)
