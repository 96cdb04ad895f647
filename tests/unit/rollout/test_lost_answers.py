# SPDX-License-Identifier: Apache-2.0
"""An engine in the node's process streams tokens to nobody who does not listen, and loses none when
it fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.unit.rollout.fake_dataflow import POLICY
from tests.unit.rollout.snapshot_files import write_snapshot

from penstock.gateway.generation import GenerationRequest, TokenChunk
from penstock.rollout.decoding.batch import Logits, Staged
from penstock.rollout.decoding.continuous import ContinuousEngine
from penstock.rollout.decoding.decoding_thread import DecodingThread
from penstock.rollout.engine_pool import EnginePool
from penstock.rollout.snapshot import read_snapshot
from penstock.types import SamplingSpec, Version, view_ids

VERSION = Version(policy=POLICY, incarnation=1, number=0)


class OneLetter:
    """Always samples the same token; fails once, before its fourth in a row."""

    num_left = 1

    def __init__(self) -> None:
        self._num_steps = 0

    def stage(self, folder: Path, patch: Path | None = None) -> Staged:
        return Staged(read_snapshot(folder), lambda: None)

    def join(self, contexts: Sequence[Sequence[int]]) -> Logits:
        return self._logits(len(contexts))

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Logits:
        self._num_steps += 1
        if self._num_steps == 3 and OneLetter.num_left:
            OneLetter.num_left -= 1
            raise RuntimeError("out of memory")
        return self._logits(len(rows))

    def repeat_last(self, tokens: NDArray[np.int64]) -> Logits:
        return self._logits(len(tokens))

    def clear(self) -> None:
        self._num_steps = 0

    def experts(self, row: int) -> None:
        return None

    def share(self) -> OneLetter:
        return OneLetter()

    def _logits(self, num_rows: int) -> Logits:
        logits = np.full((num_rows, 16), -50.0, np.float32)
        logits[:, 5] = 0.0
        return logits


def make_engine() -> ContinuousEngine:
    thread = DecodingThread(OneLetter, name="one-letter")
    engine = ContinuousEngine(thread)
    thread.start()
    return engine


async def test_tokens_of_a_lost_answer_are_kept_without_a_listener(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "snapshot")
    pool = EnginePool([make_engine(), make_engine()])
    await pool.load(tmp_path / "snapshot", VERSION)
    heard: list[TokenChunk] = []
    for on_chunk in (None, heard.append):
        OneLetter.num_left = 1
        kept = pool.stats.num_tokens_kept
        answer = await pool(
            GenerationRequest(
                [1, 2],
                SamplingSpec(max_tokens=8),
                policy=POLICY,
                session="s",
                on_chunk=on_chunk,
            )
        )
        assert view_ids(answer.sampled_ids).tolist() == [5] * 8
        assert pool.stats.num_tokens_kept - kept == 3
    assert [token for chunk in heard for token in chunk.sampled_ids] == [5] * 8
    await pool.close()
