# SPDX-License-Identifier: Apache-2.0
"""Incarnations: one trainer at a time, and the age of tokens across forks."""

from __future__ import annotations

import pytest

from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.records import CommitRecord, IncarnationRecord
from penstock.errors import BadRequest, Conflict, Fenced, UnknownCommit
from penstock.types import PolicyName


def incarnate(lineage: Lineage, number: int = 0, seq: int = 0) -> None:
    record = lineage.incarnate(
        expected=lineage.incarnation,
        number=number,
        seq=seq,
        request_id=f"r{lineage.incarnation}",
        now=0.0,
    )
    lineage.apply_incarnation(record)


def commit(lineage: Lineage, incarnation: int | None = None, skipped: str = "") -> None:
    record = lineage.commit(
        seq=lineage.seq + 1,
        incarnation=incarnation or lineage.incarnation,
        number=lineage.number + (not skipped),
        skipped=skipped,
        stats="{}",
        now=0.0,
    )
    lineage.apply_commit(record)


def publish(lineage: Lineage, number: int | None = None, weights: str = "") -> None:
    number = lineage.number if number is None else number
    record = lineage.publish(
        incarnation=lineage.incarnation,
        number=number,
        manifest_digest=weights or f"m{lineage.incarnation}.{number}",
        weights_digest=weights or f"w{lineage.incarnation}.{number}",
        now=0.0,
    )
    lineage.apply_version(record)


def trained(steps: int) -> Lineage:
    lineage = Lineage(PolicyName("p"))
    incarnate(lineage)
    publish(lineage)
    for _ in range(steps):
        commit(lineage)
        publish(lineage)
    return lineage


def test_a_replaced_trainer_can_neither_commit_nor_publish() -> None:
    lineage = trained(3)
    incarnate(lineage, number=2, seq=2)
    with pytest.raises(Fenced):
        commit(lineage, incarnation=1)
    with pytest.raises(Fenced):
        lineage.publish(incarnation=1, number=3, manifest_digest="m", weights_digest="w", now=0.0)


def test_two_trainers_race_for_one_incarnation() -> None:
    lineage = trained(1)
    first = lineage.incarnate(expected=1, number=0, seq=0, request_id="x", now=0.0)
    lineage.apply_incarnation(first)
    again = lineage.incarnate(expected=1, number=0, seq=0, request_id="x", now=9.0)
    assert again == first, "its answer was lost; the same caller asks again"
    with pytest.raises(Conflict):
        lineage.incarnate(expected=1, number=0, seq=0, request_id="y", now=0.0)


def test_tokens_of_an_abandoned_branch_count_as_the_fork() -> None:
    lineage = trained(5)
    incarnate(lineage, number=2, seq=2)
    assert [lineage.effective_number(1, n) for n in range(6)] == [0, 1, 2, 2, 2, 2]
    publish(lineage)
    commit(lineage)
    publish(lineage)
    incarnate(lineage, number=1, seq=1)
    assert lineage.effective_number(2, 3) == 1
    assert lineage.effective_number(1, 5) == 1


def test_a_bit_equal_replay_moves_the_fork_point_up() -> None:
    lineage = trained(5)
    incarnate(lineage, number=2, seq=2)
    publish(lineage, weights="w1.2")
    for number in (3, 4):
        commit(lineage)
        publish(lineage, weights=f"w1.{number}")
    assert lineage.effective_number(1, 5) == 4 and lineage.effective_number(1, 3) == 3
    commit(lineage)
    publish(lineage, weights="other")
    assert lineage.effective_number(1, 5) == 4, "from here on the two differ"


@pytest.mark.parametrize(("number", "seq"), [(2, 0), (0, 2), (1, 2), (-3, -2), (9, 9), (2**70, 0)])
def test_a_life_forks_only_where_one_was_committed(number: int, seq: int) -> None:
    """Batches 1, 2 and 3, the second skipped: (0, 0), (1, 1), (1, 2)… are the places."""
    lineage = trained(1)
    commit(lineage, skipped="nothing to learn")
    commit(lineage)
    if (number, seq) == (1, 2):
        incarnate(lineage, number, seq)
        with pytest.raises(Conflict):
            incarnate(lineage, 2, 3)
        return
    with pytest.raises(UnknownCommit, match="never committed"):
        incarnate(lineage, number, seq)


def test_nothing_is_published_before_a_trainer_took_over() -> None:
    with pytest.raises(Conflict, match="incarnate first"):
        publish(Lineage(PolicyName("p")))


def test_commits_are_in_order_and_numbered() -> None:
    lineage = trained(1)
    with pytest.raises(Conflict):
        lineage.commit(seq=3, incarnation=1, number=2, skipped="", stats="", now=0.0)
    with pytest.raises(BadRequest):
        lineage.commit(seq=2, incarnation=1, number=3, skipped="", stats="", now=0.0)
    with pytest.raises(BadRequest):
        lineage.commit(seq=2, incarnation=1, number=2, skipped="why", stats="", now=0.0)
    commit(lineage)
    repeated = lineage.commit(seq=2, incarnation=1, number=2, skipped="", stats="", now=9.0)
    assert repeated == lineage.last_commit
    with pytest.raises(Conflict):
        lineage.commit(seq=2, incarnation=1, number=1, skipped="x", stats="", now=0.0)


def test_publishing_is_write_once_and_only_what_is_committed() -> None:
    lineage = trained(2)
    with pytest.raises(Conflict):
        publish(lineage, number=3)
    with pytest.raises(Conflict):
        publish(lineage, number=2, weights="other content")
    publish(lineage, number=2)
    with pytest.raises(Conflict):
        lineage.incarnate(expected=1, number=9, seq=9, request_id="z", now=0.0)


def test_a_replica_made_from_the_history_agrees_in_everything() -> None:
    """A partition that joins is told the past from memory: the ledger may lag behind it."""
    lineage = trained(4)
    incarnate(lineage, number=2, seq=2)
    publish(lineage)
    commit(lineage)
    publish(lineage, weights="w1.3")  # bit-equal to what its predecessor made
    commit(lineage, skipped="nan")
    replica = Lineage(lineage.policy)
    for record in lineage.history():
        if isinstance(record, IncarnationRecord):
            replica.apply_incarnation(record)
        elif isinstance(record, CommitRecord):
            replica.apply_commit(record)
        else:
            replica.apply_version(record)
    assert (replica.incarnation, replica.number, replica.seq) == (2, 3, 4)
    assert replica.newest == lineage.newest
    for incarnation in (1, 2):
        for number in range(6):
            asked = incarnation, number
            assert replica.has(*asked) == lineage.has(*asked)
            assert replica.effective_number(*asked) == lineage.effective_number(*asked)
