# SPDX-License-Identifier: Apache-2.0
"""Values that rules see, built with what a test cares about."""

import json
import random
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.dataflow.core.closed_groups import ClosedGroup, with_rows
from penstock.dataflow.records import FateRecord
from penstock.types import (
    ROLE_REWARD,
    Candidate,
    GroupId,
    JudgedGroup,
    OutcomeKind,
    PolicyName,
    RowId,
    RowSummary,
    Task,
)

POLICY = PolicyName("policy")


class Assigned(MutableMapping[str, Any]):
    """A state that refuses what a host need not store: deletions and changes in place."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def __getitem__(self, key: str) -> Any:
        return json.loads(self._texts[key])

    def __setitem__(self, key: str, value: Any) -> None:
        assert not key.startswith("#"), "such keys are the host's"
        self._texts[key] = json.dumps(value)

    def __delitem__(self, key: str) -> None:
        raise AssertionError(f"a rule deleted {key}")

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._texts))

    def __len__(self) -> int:
        return len(self._texts)


def draws(seed: int) -> Callable[[], float]:
    return random.Random(seed).random


def scripted(*numbers: float) -> Callable[[], float]:
    """Gives these numbers and then fails: a rule draws no more than it needs."""
    left = list(numbers)
    return lambda: left.pop(0)


def no_draw() -> float:
    raise AssertionError("this decision needs no chance")


def task(key: str, *, source: str = "train", ordinal: int = 0) -> Task:
    return Task(key=key, source=source, ordinal=ordinal, payload={}, workflow="w", seed=0)


def row(
    reward: float,
    outcome: OutcomeKind = OutcomeKind.COMPLETED,
    policy: PolicyName = POLICY,
    **of_roles: float,
) -> RowSummary:
    """`of_roles`: the policy acted in these roles, each with its own reward."""
    return RowSummary(
        row_id=RowId("p0-1.0.1"),
        digest="",
        reward=reward,
        outcome=outcome,
        sampled={policy: max(1, len(of_roles))},
        versions={policy: ((0, 0),)},
        roles={policy: dict.fromkeys(of_roles, 1)} if of_roles else {},
        values={ROLE_REWARD + role: own for role, own in of_roles.items()},
    )


def judged(
    group: str,
    rewards: Sequence[float],
    *,
    key: str = "t",
    source: str = "train",
    number: int = 0,
    policy: PolicyName = POLICY,
    outcome: OutcomeKind = OutcomeKind.COMPLETED,
) -> JudgedGroup:
    rows = [row(reward, outcome, policy) for reward in rewards]
    return group_of(rows, GroupId(group), key=key, source=source, number=number, policy=policy)


def group_of(
    rows: Sequence[RowSummary],
    group_id: GroupId,
    *,
    key: str = "t",
    source: str = "train",
    number: int = 0,
    policy: PolicyName = POLICY,
) -> JudgedGroup:
    group = FateRecord(consumer=policy, group_id=group_id, task_key=key, source=source)
    return ClosedGroup.of(replace(with_rows(group, rows), number=number), None)


def candidate(
    arrival: int,
    *,
    oldest: int = 0,
    tokens: int = 1,
    rewards: Sequence[float] = (0.0, 1.0),
    uses: int = 0,
) -> Candidate:
    rows = [row(reward) for reward in rewards]
    group = FateRecord(
        consumer=POLICY,
        group_id=GroupId(f"p0-{arrival}"),
        task_key=f"t{arrival}",
        source="train",
        arrival=arrival,
        oldest=oldest,
        uses=uses,
    )
    return replace(with_rows(group, rows), tokens=tokens)
