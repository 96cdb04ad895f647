# SPDX-License-Identifier: Apache-2.0
"""A step that begins before its batch is complete: gradients are accumulated instalment by
instalment, and the optimizer is called when the last one is in.

Owns the order of summation: group by group, in the order of the manifest. No forward pass mixes two
groups, so the bits of a step depend neither on when its groups arrived nor on how they were cut
into instalments. Takes only stages that need one group at a time; the config refuses others. Knows
no service.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from penstock.trainer.arrays import Bools, Floats
from penstock.trainer.batches import Batch, join_batches
from penstock.trainer.learner import Learner, MetricSums, SkipReason, Stats, not_seen
from penstock.trainer.pipeline.run import Pipeline
from penstock.trainer.signals.alarms import EXCLUDED


class StreamedStep:
    """One step. Call `add` for each instalment, then `finish`; or `discard`, and nothing happened
    to the weights."""

    def __init__(self, actor: Learner, columns: Pipeline, *, num_sequences: int) -> None:
        """columns: the stages before the training. num_sequences: expected of a complete batch; if
        others come, the gradient is rescaled at the end."""
        self._actor = actor
        self._columns = columns
        self._num_sequences = num_sequences
        self._parts: list[Batch] = []
        self._tallies: list[MetricSums] = []
        self._is_bad: list[Bools] = []
        self._seen: list[Floats] = []
        self._seconds: dict[str, float] = {"seconds/train": 0.0}

    def add(self, part: Batch) -> None:
        """Compute the gradient of these groups; a last instalment may have none."""
        if not part.groups_R.size:
            return
        part = self._columns.add_columns(part, self._seconds)
        excluded_R = part.row_columns.get("excluded")
        if excluded_R is not None:
            part = part.without(excluded_R > 0)
        started = time.perf_counter()
        seen_2T = not_seen(part)
        tallies, is_bad_T = self._actor.accumulate(part, seen_2T, self._num_sequences)
        self._parts.append(part)
        self._tallies += tallies
        self._is_bad.append(is_bad_T)
        self._seen.append(seen_2T)
        self._seconds["seconds/train"] += time.perf_counter() - started

    def finish(self) -> Stats:
        """Change the weights; or skip the batch, with the reason."""
        started = time.perf_counter()
        if not self._parts:
            return Stats(
                skipped=SkipReason.NO_TOKENS, values={"tokens/trained": 0.0, **self._seconds}
            )
        batch = join_batches(self._parts)
        stats = self._actor.complete(
            batch,
            self._tallies,
            np.concatenate(self._is_bad),
            np.concatenate(self._seen, axis=1),
            self._num_sequences,
        )
        values = {**stats.values, **self._seconds}
        if (excluded_R := batch.row_columns.get("excluded")) is not None:
            values[EXCLUDED] = float((excluded_R > 0).sum())
        values["seconds/train"] += time.perf_counter() - started
        return replace(stats, values=values)

    def discard(self) -> None:
        """Forget what was added: the batch will be trained from its start by another process."""
        self._actor.discard()
