# SPDX-License-Identifier: Apache-2.0
"""Which versions are in use, and by whom."""

from __future__ import annotations

from penstock.dataflow.core.leasing import LiveVersion
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import CommitRecord, IncarnationRecord, VersionRecord
from penstock.dataflow.service.trainers.messages import VersionUser
from penstock.dataflow.service.trainers.version_use import versions_in_use
from penstock.types import PolicyName

POLICY = PolicyName("policy")


def lineage_of(*published: int, committed: int) -> Lineage:
    lineage = Lineage(POLICY)
    lineage.apply_incarnation(
        IncarnationRecord(policy=POLICY, incarnation=1, number=0, seq=0, request_id="r", at=0.0)
    )
    for seq in range(1, committed + 1):
        lineage.apply_commit(
            CommitRecord(
                consumer=POLICY,
                seq=seq,
                incarnation=1,
                number=seq,
                skipped="",
                stats="{}",
                at=0.0,
            )
        )
    for number in published:
        lineage.apply_version(
            VersionRecord(
                policy=POLICY,
                incarnation=1,
                number=number,
                manifest_digest=f"m{number}",
                weights_digest=f"w{number}",
                at=0.0,
            )
        )
    return lineage


def used(
    lineage: Lineage,
    *,
    live: tuple[int, ...] = (),
    retained: tuple[int, ...] = (),
    max_staleness: int = 1,
) -> dict[int, VersionUser]:
    found = versions_in_use(
        lineage,
        live=[LiveVersion(policy=POLICY, incarnation=1, number=number) for number in live],
        retained=[(number, number) for number in retained],
        max_staleness=max_staleness,
    )
    return {version.number: version.by for version in found}


def test_who_uses_what() -> None:
    lineage = lineage_of(*range(13), committed=12)
    assert used(lineage, live=(4, 11), retained=(6, 10), max_staleness=2) == {
        4: VersionUser.NODE,
        5: VersionUser.ROWS,
        6: VersionUser.CHECKPOINT,
        7: VersionUser.ROWS,
        8: VersionUser.ROWS,
        9: VersionUser.ROWS,
        10: VersionUser.CHECKPOINT,
        11: VersionUser.NEWEST,
        12: VersionUser.NEWEST,
    }


def test_without_a_checkpoint_the_committed_number_counts() -> None:
    lineage = lineage_of(*range(9), committed=8)
    assert set(used(lineage, max_staleness=3)) == {5, 6, 7, 8}


def test_versions_that_were_never_published_are_not_invented() -> None:
    lineage = lineage_of(0, 3, 7, committed=8)
    assert set(used(lineage, retained=(0,))) == {0, 3, 7}


def test_a_node_of_another_policy_holds_nothing_here() -> None:
    lineage = lineage_of(*range(6), committed=5)
    live = [LiveVersion(policy=PolicyName("other"), incarnation=1, number=0)]
    found = versions_in_use(lineage, live=live, retained=[(5, 5)], max_staleness=0)
    assert [version.number for version in found] == [4, 5]
