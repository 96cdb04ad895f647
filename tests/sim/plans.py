# SPDX-License-Identifier: Apache-2.0
"""What a seed stands for: how the run is configured and how hard the world is on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.dataflow.core.completion import RequiredColumns
from penstock.dataflow.core.consumers import PolicySpec
from penstock.dataflow.core.coordinator import IssueSpec
from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy, LeaseSpec
from penstock.dataflow.core.rule_runner import RuleSpec
from penstock.dataflow.ledger.assemble import CoreSpec
from penstock.dataflow.sources import Source
from penstock.types import JsonObject, PolicyName

ENDLESS = 1_000_000
MAX_USES = 3
COMPLETE = ClosingPolicy(kind=ClosingKind.COMPLETE)
LEASE = LeaseSpec(ttl_s=12.0, start_to_close_s=30.0, max_attempts=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often things go wrong while they may."""

    loss: float = 0.0
    repeats: float = 0.0
    slow: float = 0.0
    trouble_s: float = 6.0
    """Mean time between blows: crashes, stalls, zombies, takeovers."""
    failed: float = 0.0
    """Share of attempts that fail."""
    cut: float = 0.0
    """Share of attempts that are truncated, and as many are handed back."""
    skipped: float = 0.0
    """Share of batches that the trainer skips."""
    column_failed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    seed: int
    num_policies: int = 1
    groups_per_batch: int = 3
    max_staleness: int = 1
    steps: int = ENDLESS
    limit: int | None = None
    num_slots: int = 3
    closing: ClosingPolicy = COMPLETE
    pace: str = "any"
    admit: str = "all"
    curate: str = "all"
    replay: float = 0.0
    again: str = "newest"
    """Which replay rule."""
    judge: bool = False
    """Rules wait for a column `reward`."""
    train: bool = False
    """The trainer waits for a column `reference`."""
    has_partition: bool = True
    num_partitions: int = 1
    """Further ones, in processes of their own."""
    num_nodes: int = 4
    capacity: int = 4
    lease: LeaseSpec = LEASE
    retain_batches: int = 4
    names_checkpoints: bool = True
    stream: bool = False
    """Batches come in instalments."""
    is_deterministic: bool = True
    """A trainer that does the same again makes the same weights."""
    faults: Faults = field(default_factory=Faults)
    fault_s: float = 60.0
    """Then the world is kind, and the run must get on."""

    @property
    def policies(self) -> tuple[PolicyName, ...]:
        return tuple(PolicyName(name) for name in ("anna", "bert")[: self.num_policies])

    @property
    def ends(self) -> bool:
        return self.steps < ENDLESS or self.limit is not None

    @property
    def partitions(self) -> range:
        return range(1, self.num_partitions + 1)

    @property
    def needs(self) -> dict[PolicyName, RequiredColumns]:
        """Only the first policy waits for columns, so one delays the other if that is possible."""
        need = RequiredColumns(
            judge=frozenset({"reward"} if self.judge else ()),
            train=frozenset({"reference"} if self.train else ()),
        )
        return {self.policies[0]: need} if self.judge or self.train else {}

    @cached_property
    def terms(self) -> CoreSpec:
        return CoreSpec(
            policies=tuple(
                PolicySpec(
                    policy=policy,
                    groups_per_batch=self.groups_per_batch,
                    max_staleness=self.max_staleness,
                    steps=self.steps,
                    train_columns=self.needs[policy].train if policy in self.needs else frozenset(),
                    is_streamed=self.stream,
                )
                for policy in self.policies
            ),
            rules=tuple(self._rules()),
            issue=IssueSpec(num_slots=self.num_slots, pace=self.pace),
            closing=self.closing,
            lease=self.lease,
            workflow="sim",
            seed=self.seed,
            retain_batches=self.retain_batches,
            needs=self.needs,
        )

    def _rules(self) -> Iterator[RuleSpec]:
        def rule(hook: str, name: str, policy: PolicyName | None, **options: object) -> RuleSpec:
            return RuleSpec(hook=hook, name=name, options=options, policy=policy, position=0)

        yield rule("mix", "weights", None)
        yield rule("curate", self.curate, None)
        for policy in self.policies:
            yield rule("admit", self.admit, policy)
            yield rule("select", "edf", policy)
            if self.replay:
                yield rule("replay", self.again, policy, ratio=self.replay, max_uses=MAX_USES)

    @property
    def sources(self) -> list[Source]:
        def make(ordinal: int, seed: int) -> JsonObject:
            return {"prompt": str(ordinal % 7)}  # tasks come again, as rules with memory expect

        return [Source(name="train", weight=1.0, make=make, limit=self.limit)]


CLOSINGS = (
    COMPLETE,
    ClosingPolicy(kind=ClosingKind.SURVIVORS, min_survivors=2),
    ClosingPolicy(kind=ClosingKind.SURVIVORS, min_survivors=1),
    ClosingPolicy(kind=ClosingKind.DROP),
)


def random_plan(seed: int) -> Plan:
    rng = random.Random(f"plan {seed}")
    has_partition = rng.random() < 0.7
    num_partitions = rng.choice((1, 1, 2, 3)) if has_partition else rng.choice((1, 2, 3))
    num_slots = rng.choice((1, 2, 3, 4))
    harsh = rng.random()
    plan = Plan(
        seed=seed,
        num_policies=rng.choice((1, 1, 2)),
        groups_per_batch=rng.choice((1, 2, 3, 4)),
        max_staleness=rng.choice((0, 1, 1, 2, 4)),
        steps=rng.choice((ENDLESS, ENDLESS, 4, 10)),
        limit=rng.choice((None, None, None, 30)),
        num_slots=num_slots,
        closing=_closing(rng, num_slots),
        pace=rng.choice(("any", "any", "all", "anna")),
        admit=rng.choice(("all", "all", "reward-spread")) if num_slots > 1 else "all",
        curate=rng.choice(("all", "all", "greso")),
        replay=rng.choice((0.0, 0.0, 0.3, 0.5)),
        again=rng.choice(("newest", "uniform", "prioritised")),
        judge=rng.random() < 0.25,
        train=rng.random() < 0.25,
        has_partition=has_partition,
        num_partitions=num_partitions,
        num_nodes=rng.randint(4, 8),
        capacity=rng.choice((2, 4, 8)),
        lease=LeaseSpec(
            ttl_s=12.0,
            start_to_close_s=30.0,
            max_attempts=rng.choice((2, 3, 5)),
            schedule_to_start_s=rng.choice((None, None, 40.0)),
            schedule_to_close_s=rng.choice((None, None, 60.0)),
        ),
        retain_batches=rng.choice((1, 4, 8)),
        names_checkpoints=rng.random() < 0.6,
        is_deterministic=rng.random() < 0.5,
        faults=Faults(
            loss=0.15 * harsh,
            repeats=0.15 * rng.random(),
            slow=0.06 * rng.random(),
            trouble_s=rng.choice((2.0, 4.0, 8.0)),
            failed=rng.choice((0.0, 0.05, 0.2)),
            cut=0.05,
            skipped=rng.choice((0.0, 0.1, 0.4)),
            column_failed=rng.choice((0.0, 0.1)),
        ),
    )
    return replace(plan, stream=True, replay=0.0) if rng.random() < 0.3 else plan


def _closing(rng: random.Random, num_slots: int) -> ClosingPolicy:
    return rng.choice([c for c in CLOSINGS if c.min_survivors <= num_slots])
