# SPDX-License-Identifier: Apache-2.0
"""The lease gate with several policies: a trainer that never publishes again stops nobody else."""

from __future__ import annotations

from penstock.dataflow.core.leasing import LiveVersion
from penstock.dataflow.core.version_gate import VersionGate
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import CommitRecord, IncarnationRecord, VersionRecord
from penstock.types import PolicyName

A, B = PolicyName("a"), PolicyName("b")


def lineage(policy: PolicyName, *, committed: int, published: int) -> Lineage:
    found = Lineage(policy)
    found.apply_incarnation(
        IncarnationRecord(policy=policy, incarnation=1, number=0, seq=0, request_id="r", at=0.0)
    )
    for seq in range(1, committed + 1):
        found.apply_commit(
            CommitRecord(
                consumer=policy,
                seq=seq,
                incarnation=1,
                number=seq,
                skipped="",
                stats="{}",
                at=0.0,
            )
        )
    for number in range(published + 1):
        found.apply_version(
            VersionRecord(
                policy=policy,
                incarnation=1,
                number=number,
                manifest_digest=f"m{number}",
                weights_digest=f"w{number}",
                at=0.0,
            )
        )
    return found


def live(**numbers: int) -> list[LiveVersion]:
    return [
        LiveVersion(policy=PolicyName(policy), incarnation=1, number=number)
        for policy, number in numbers.items()
    ]


def gate(*lineages: Lineage) -> VersionGate:
    return VersionGate({one.policy: one for one in lineages}, {one.policy: 1 for one in lineages})


def test_one_policy_waits_for_what_it_committed() -> None:
    single = gate(lineage(A, committed=3, published=2))
    assert not single.can_lease({A: 4}, live(a=2)), (
        "its rows would be too old when they are trained"
    )
    assert single.can_lease({A: 3}, live(a=2))


def test_a_policy_that_never_publishes_stops_no_other() -> None:
    both = gate(lineage(A, committed=3, published=2), lineage(B, committed=5, published=5))
    assert both.can_lease({A: 9, B: 5}, live(a=2, b=5))


def test_a_node_that_could_load_a_younger_version_loads_it_first() -> None:
    both = gate(lineage(A, committed=3, published=2), lineage(B, committed=5, published=5))
    assert not both.can_lease({A: 9, B: 5}, live(a=1, b=5))
    assert not both.can_lease({A: 3, B: 6}, live(a=2, b=3))


def test_work_that_no_policy_could_use_waits() -> None:
    both = gate(lineage(A, committed=3, published=2), lineage(B, committed=5, published=4))
    assert not both.can_lease({A: 9, B: 9}, live(a=2, b=4))
