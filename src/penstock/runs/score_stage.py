# SPDX-License-Identifier: Apache-2.0
"""The built-in stage `trusted-reward`: computes rewards where nodes cannot forge them.

Owns one worker's loop over rows without a reward. It scores the text of the last answer, decoded
from the tokens of the row, with the task that the ledger holds: nothing that the node says about
either counts. Rows of untrusted nodes are also offered to the spot checker. Of each untrusted
credential few rows are scored at a time, so that rows of others never wait behind all of its rows.
Unfinished rows are leased again; columns are write-once, so scoring twice changes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import msgspec
import structlog

from penstock.config import StageConfig
from penstock.dataflow.client.row_stream import Row, RowReader
from penstock.dataflow.client.rows import RowsClient
from penstock.dataflow.columns.origins import RowOrigin
from penstock.dataflow.core.names import ORIGIN, TRAIN
from penstock.rollout.rewards.scorer import Failed, RewardScorer
from penstock.types import Trajectory, subject_of_node
from penstock.wire.held_token import Token

MAX_ROWS = 64
"""Rows in work at a time, without those that wait for their credential's turn."""
MAX_OF_ONE = 4
"""Rows of an untrusted credential that are scored at a time."""
MAX_HELD = 256
"""Rows that are leased at a time, with those that wait."""
MIN_LEASED = 16
"""Rows are leased when there is room for 16, not one by one."""
WAIT_S = 10.0
TRUSTED = ""
"""Stands for all credentials that are trusted."""
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
    shares = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_OF_ONE))
    async with AsyncExitStack() as resources, asyncio.TaskGroup() as loops:
        for url in urls:
            client = await resources.enter_async_context(RowsClient(url, token))
            worker = _Worker(client, scorer, answer_of, on_untrusted, shares)
            loops.create_task(worker.run(terms), name=f"score rows of {url}")


def num_to_lease(num_held: Mapping[str, int]) -> int:
    """How many more rows to lease, by how many of each credential are held."""
    num_placed = sum(
        num if subject == TRUSTED else min(num, MAX_OF_ONE) for subject, num in num_held.items()
    )
    num_free = min(MAX_ROWS - num_placed, MAX_HELD - sum(num_held.values()))
    return num_free if num_free >= MIN_LEASED else 0


class _Worker:
    def __init__(
        self,
        client: RowsClient,
        scorer: RewardScorer,
        answer_of: Callable[[Trajectory], str],
        on_untrusted: OnScored,
        shares: Mapping[str, asyncio.Semaphore],
    ) -> None:
        """`shares`: of each untrusted credential, over all workers."""
        self._client = client
        self._scorer = scorer
        self._answer_of = answer_of
        self._on_untrusted = on_untrusted
        self._shares = shares
        self._decoding = asyncio.Lock()
        self._held: list[Row] = []
        self._num_held: Counter[str] = Counter()

    async def run(self, terms: StageConfig) -> None:
        reader = await self._client.reader(
            terms.name,
            reads=terms.reads,
            writes=terms.writes,
            deadline_s=terms.deadline_s,
            ttl_s=terms.ttl_s,
            max_attempts=terms.max_attempts,
        )
        scoring = set[asyncio.Task[None]]()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.keep(self._held), name="keep rows")
            while True:
                while not (num_free := num_to_lease(self._num_held)):
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait(scoring, timeout=WAIT_S, return_when=first)
                for row, origin in await self._lease(reader, num_free):
                    task = tasks.create_task(self._score_in_turn(row, origin))
                    scoring.add(task)
                    task.add_done_callback(scoring.discard)

    async def _lease(self, reader: RowReader, num_rows: int) -> list[tuple[Row, RowOrigin | None]]:
        """The next rows; without an origin if it was forgotten meanwhile."""
        rows = await reader.lease(num_rows)
        self._held += rows
        found = await self._client.get(TRAIN, [row.key for row in rows], (ORIGIN,))
        leased: list[tuple[Row, RowOrigin | None]] = []
        for row in rows:
            origin = found[row.key].columns.get(ORIGIN) if row.key in found else None
            known = _origin.decode(origin) if isinstance(origin, bytes) else None
            self._num_held[_subject(known)] += 1
            leased.append((row, known))
        return leased

    async def _score_in_turn(self, row: Row, origin: RowOrigin | None) -> None:
        subject = _subject(origin)
        try:
            if origin is None:
                await row.fail("its task is not in the ledger any more")
            elif subject == TRUSTED:
                await self._score(row, origin)
            else:
                async with self._shares[subject]:
                    await self._score(row, origin)
        finally:
            self._held.remove(row)
            self._num_held[subject] -= 1

    async def _score(self, row: Row, origin: RowOrigin) -> None:
        if row.is_finished:  # overdue, or leased by another worker, while it waited
            return
        trajectory = row.trajectory()
        try:
            async with self._decoding:
                answer = await asyncio.to_thread(self._answer_of, trajectory)
        except Exception as error:  # strangers made the row: it must not end the stage
            await row.fail(f"its answer cannot be decoded: {error}")
            return
        result = await self._scorer.score(answer, origin.task)
        if isinstance(result, Failed):
            _log.warning("reward failed", row=row.key, why=result.detail)
            await row.fail(result.detail)
            return
        if await row.write(reward=result) and not origin.is_trusted:
            self._on_untrusted(trajectory, origin, result)


def _subject(origin: RowOrigin | None) -> str:
    """Whose turn a row takes."""
    return TRUSTED if origin is None or origin.is_trusted else subject_of_node(origin.node_id)
