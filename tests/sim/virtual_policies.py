# SPDX-License-Identifier: Apache-2.0
"""Runs with several policies in virtual time: pools of nodes, sources, and a trainer per policy.

Owns how long answers and batches take. The core is the service's own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.virtual_run import TOKEN_S, Answer, VirtualRun

from penstock.dataflow.core.consumers import Consumer, PolicySpec
from penstock.dataflow.core.coordinator import IssueSpec
from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy, LeaseSpec
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.core.rule_runner import RuleSpec
from penstock.dataflow.ledger.assemble import CoreSpec
from penstock.dataflow.records import BatchRecord
from penstock.dataflow.sources import Source
from penstock.types import JsonObject, PolicyName

ANSWER_S = 4.0
"""Median of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Nodes alike, and the policies they serve; none: all."""

    num_nodes: int
    policies: tuple[PolicyName, ...] = ()
    capacity: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    batches: Mapping[PolicyName, int]
    """Groups per batch, by policy in training."""
    pools: Sequence[Pool]
    sources: Mapping[str, tuple[PolicyName, ...]] = field(
        default_factory=lambda: {"train": tuple[PolicyName, ...]()}
    )
    """Policies that each source calls; none: all."""
    frozen: tuple[PolicyName, ...] = ()
    publishes_frozen: bool = True
    max_staleness: int = 1
    train_s: float = 0.5
    group_size: int = 1
    pace: str = "any"


class VirtualTrainer:
    """Trains a batch for a fixed time, commits it and publishes; can stop, for a while or for
    ever."""

    def __init__(self, run: VirtualRun, consumer: Consumer, train_s: float) -> None:
        self.consumer = consumer
        self.commits_at: list[float] = []
        self.batches: list[BatchRecord] = []
        self.is_stopped = False
        self.publishes = True
        self._run, self._train_s = run, train_s
        self._is_busy = False

    def poll(self) -> None:
        if self._is_busy or self.is_stopped:
            return
        record = self._run.sealing.seal(self.consumer, self.consumer.last_sealed + 1, self._run.now)
        if record is not None:
            self._is_busy = True
            self.batches.append(record)
            self._run.router.run(self._run.now)
            self._run.at(self._run.now + self._train_s, self._trained)

    def _trained(self) -> None:
        if self.is_stopped:  # it goes on with this batch when it is back
            self._run.at(self._run.now + self._train_s, self._trained)
            return
        self._run.commit(self.consumer)
        if self.publishes:
            self._run.publish(self.consumer.terms.policy)
        self._is_busy = False
        self.commits_at.append(self._run.now)


class PolicyWorld:
    """One run of a setup."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._rng = random.Random(0)
        sources = [Source(name=n, weight=1.0, make=_task, limit=None) for n in setup.sources]
        self.run = run = VirtualRun(_terms(setup), sources, self._answer)
        self.trainers = {
            policy: VirtualTrainer(run, consumer, setup.train_s)
            for policy, consumer in run.coordinator.consumers.items()
        }
        for policy in (*setup.batches, *(setup.frozen if setup.publishes_frozen else ())):
            run.take_over(policy)
        for index, pool in enumerate(setup.pools):
            for node in range(pool.num_nodes):
                run.join(f"pool{index}-{node}", pool.capacity, pool.policies)
        run.after_settle += [trainer.poll for trainer in self.trainers.values()]

    def _answer(self, grant: Grant) -> Answer:
        seconds = ANSWER_S * self._rng.lognormvariate(0.0, 0.5)
        return Answer(tokens=max(1, int(seconds / TOKEN_S)), reward=self._rng.random())

    def advance(self, seconds: float) -> None:
        until = self.run.now + seconds
        self.run.run(lambda: self.run.now >= until)

    def step_rate(self, policy: PolicyName, since: float) -> float:
        """Steps per second from then to the last one."""
        at = [moment for moment in self.trainers[policy].commits_at if moment >= since]
        return (len(at) - 1) / (at[-1] - at[0])


def _task(ordinal: int, seed: int) -> JsonObject:
    return {"prompt": str(ordinal)}


def _terms(setup: Setup) -> CoreSpec:
    called = {name: frozenset(policies) for name, policies in setup.sources.items() if policies}
    return CoreSpec(
        policies=tuple(
            PolicySpec(
                policy=policy,
                groups_per_batch=size,
                max_staleness=setup.max_staleness,
                steps=1_000_000,
            )
            for policy, size in setup.batches.items()
        ),
        rules=tuple(_rules(setup)),
        issue=IssueSpec(
            num_slots=setup.group_size, pace=setup.pace, policies=called, frozen=setup.frozen
        ),
        closing=ClosingPolicy(kind=ClosingKind.COMPLETE),
        lease=LeaseSpec(ttl_s=60.0, start_to_close_s=1e9, max_attempts=3, policies=called),
        workflow="sim",
        seed=0,
    )


def _rules(setup: Setup) -> Iterator[RuleSpec]:
    shared = ((None, "mix", "weights"), (None, "curate", "all"))
    own = ((p, hook, name) for p in setup.batches for hook, name in _OWN)
    for policy, hook, name in (*shared, *own):
        yield RuleSpec(hook=hook, name=name, options={}, policy=policy, position=0)


_OWN = (("admit", "all"), ("select", "edf"))
