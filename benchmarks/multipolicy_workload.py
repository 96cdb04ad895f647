# SPDX-License-Identifier: Apache-2.0
"""A solver and a verifier over the same tasks: how long each answers, how much work training is,
and how a synchronous system uses the same machines.

Work is counted in machine seconds. A machine generates `SLOTS_PER_MACHINE` answers at a time, each
at the same speed, or trains. No schedule pays for swaps of weights or for switching phases."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.overlap_workload import Workload, barrier_s
from benchmarks.virtual_run import TOKEN_S
from penstock.types import PolicyName

SOLVER, VERIFIER = PolicyName("solver"), PolicyName("verifier")
SLOTS_PER_MACHINE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Rollouts of two turns: a draft, then a verdict on it."""

    drafts: Workload
    verdicts: Workload
    rollout_to_train: float
    """Machine seconds of generation over those of training, of both policies together."""
    slowness: float = 1.0
    """How much longer the verifier trains than its share of the machines allows for."""
    _tokens: dict[tuple[int, int], tuple[int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[int, int]], repr=False
    )

    def tokens(self, issue: int, slot: int) -> tuple[int, int]:
        """Of the draft and of the verdict."""
        at = issue, slot
        if at not in self._tokens:
            self._tokens[at] = self.drafts.tokens(*at), self.verdicts.tokens(*at)
        return self._tokens[at]

    @property
    def _mean_tokens(self) -> tuple[float, float]:
        return self.drafts.expected_tokens, self.verdicts.expected_tokens

    @property
    def generate_s(self) -> float:
        """Of a batch, with no slot ever idle."""
        rows = self.drafts.rows_per_batch
        return rows * sum(self._mean_tokens) * TOKEN_S / self.drafts.num_slots

    @property
    def num_machines(self) -> float:
        """Of all kinds, divided like the work: each kind is busy for `generate_s` per batch."""
        generating = self.drafts.num_slots / SLOTS_PER_MACHINE
        return generating * (1 + 1 / self.rollout_to_train)

    def train_s(self, policy: PolicyName, num_tokens: float) -> float:
        """On the policy's own machines. A batch of the mean length takes `generate_s`."""
        mean = self._mean_tokens[policy == VERIFIER] * self.drafts.rows_per_batch
        slowness = self.slowness if policy == VERIFIER else 1.0
        return self.generate_s * num_tokens / mean * slowness

    # --- the synchronous system -----------------------------------------------------------------

    def synchronous_s(self, *, is_by_turn: bool) -> float:
        """Mean seconds of a cycle on all machines: generate a batch, train one policy, train the
        other. By turn: all drafts end before the first verdict begins."""
        num_slots = round(self.num_machines * SLOTS_PER_MACHINE)
        steps = self.drafts.steps
        generating = sum(self._generation_s(batch, num_slots, is_by_turn) for batch in range(steps))
        draft, verdict = self._mean_tokens
        uneven = (draft + self.slowness * verdict) / (draft + verdict)
        return generating / steps + uneven * self.generate_s / (1 + self.rollout_to_train)

    def _generation_s(self, batch: int, num_slots: int, is_by_turn: bool) -> float:
        workload = self.drafts
        first = 1 + batch * workload.groups_per_batch
        rows = [
            self.tokens(issue, slot)
            for issue in range(first, first + workload.groups_per_batch)
            for slot in range(workload.group_size)
        ]
        if is_by_turn:
            turns = zip(*rows, strict=True)
            return sum(barrier_s([n * TOKEN_S for n in turn], num_slots) for turn in turns)
        return barrier_s([sum(row) * TOKEN_S for row in rows], num_slots)


def pair(*, sigma: float, rollout_to_train: float, steps: int, slowness: float = 1.0) -> Pair:
    """The seed's kind of task: long drafts, short verdicts, 256 rollouts in a batch."""
    drafts = Workload(steps=steps, sigma=sigma, mean_tokens=400, max_tokens=4000)
    verdicts = Workload(steps=steps, sigma=sigma, mean_tokens=150, max_tokens=1500, seed=1)
    return Pair(
        drafts=drafts, verdicts=verdicts, rollout_to_train=rollout_to_train, slowness=slowness
    )
