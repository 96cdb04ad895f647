# SPDX-License-Identifier: Apache-2.0
"""A workload, the schedules with a barrier, and the time that no schedule can beat.

Synchronous and one-step-off schedules are computed answer by answer; penstock runs elsewhere, over
the same answers. No schedule pays for swaps of weights.
Legend: N batches, S slots, T seconds of training per batch, W seconds of generation in all."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from benchmarks.virtual_run import TOKEN_S

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is generated, on how many slots, and how long a batch trains."""

    steps: int = 100
    groups_per_batch: int = 32
    group_size: int = 8
    num_slots: int = 64
    num_nodes: int = 2
    max_staleness: int = 4
    sigma: float = 1.0
    mean_tokens: int = 400
    """Before the cut at `max_tokens`."""
    max_tokens: int = 4000
    rollout_to_train: float = 2.0
    """Generation of a batch with no slot ever idle, over its training."""
    seed: int = 0

    @property
    def rows_per_batch(self) -> int:
        return self.groups_per_batch * self.group_size

    @property
    def train_s(self) -> float:
        return self.train_s_at(TOKEN_S)

    def train_s_at(self, token_s: float) -> float:
        """When a token takes so long; a batch generates for `rollout_to_train` times as long."""
        generate_s = self.rows_per_batch * self.expected_tokens * token_s / self.num_slots
        return generate_s / self.rollout_to_train

    @property
    def median_tokens(self) -> float:
        return self.mean_tokens * math.exp(-(self.sigma**2) / 2)

    @property
    def expected_tokens(self) -> float:
        """Mean of the log-normal, cut."""
        if not self.sigma:
            return min(self.mean_tokens, self.max_tokens)
        z = (math.log(self.max_tokens) - self._mu) / self.sigma
        below = self.mean_tokens * _NORMAL.cdf(z - self.sigma)
        return below + self.max_tokens * (1 - _NORMAL.cdf(z))

    @property
    def _mu(self) -> float:
        return math.log(self.median_tokens)

    def tokens(self, issue: int, slot: int) -> int:
        """Of one answer: depends on the task alone, so every schedule sees the same answers."""
        rng = random.Random(f"{self.seed}/{issue}/{slot}")
        drawn = max(1, round(rng.lognormvariate(self._mu, self.sigma)))
        return min(self.max_tokens, drawn)

    def batches(self) -> Iterator[list[float]]:
        """Seconds of each answer, batch by batch in the order of issue."""
        for batch in range(self.steps):
            first = 1 + batch * self.groups_per_batch
            yield [
                self.tokens(issue, slot) * TOKEN_S
                for issue in range(first, first + self.groups_per_batch)
                for slot in range(self.group_size)
            ]


# --- schedules with a barrier ---------------------------------------------------------------------


def barrier_s(answers_s: Sequence[float], num_slots: int) -> float:
    """Until the last answer of a batch ends: a free slot takes the next one in order."""
    free_at = [0.0] * min(num_slots, len(answers_s))
    for answer_s in answers_s:
        heapq.heapreplace(free_at, free_at[0] + answer_s)
    return max(free_at)


def synchronous_s(generations_s: Sequence[float], train_s: float) -> float:
    """Generate, train, generate, train."""
    return sum(generations_s) + len(generations_s) * train_s


def one_step_off_s(generations_s: Sequence[float], train_s: float) -> float:
    """A batch trains while the next one is generated; both end before either goes on."""
    first, *others = generations_s
    return first + sum(max(one, train_s) for one in others) + train_s


# --- the bound ------------------------------------------------------------------------------------


def bound_s(
    answers_s: Sequence[float], *, num_batches: int, num_slots: int, train_s: float
) -> float:
    """No schedule trains these answers in less, even one that knows every length: slots do W / S
    at best, the last batch trains after the last answer, the first after the shortest answers."""
    rows_per_batch = len(answers_s) // num_batches
    shortest_s = sum(sorted(answers_s)[:rows_per_batch]) / num_slots
    generating_s = max(sum(answers_s) / num_slots, max(answers_s))
    return max(generating_s + train_s, shortest_s + num_batches * train_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyInterval:
    """A slot at work on one answer that was trained."""

    began_at: float
    seconds: float

    def within(self, begin: float, end: float) -> float:
        return max(0.0, min(self.began_at + self.seconds, end) - max(self.began_at, begin))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From one commit to a later one."""

    begin: float
    end: float
    num_batches: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def fraction(
        self, busy_intervals: Sequence[BusyInterval], *, num_slots: int, train_s: float
    ) -> float:
        """Of the bound max(W / S, N T): how busy the scarcer of slots and trainer was with what
        was trained. Never above 1."""
        generated_s = sum(spell.within(self.begin, self.end) for spell in busy_intervals)
        return max(generated_s / num_slots, self.num_batches * train_s) / self.seconds
