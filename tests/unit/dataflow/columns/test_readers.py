# SPDX-License-Identifier: Apache-2.0
"""Readers: readiness, redelivery, attempts, deadlines, chains, restarts."""

from __future__ import annotations

import tracemalloc
import uuid

import pytest
from tests.sim.reader_world import ReaderWorld

from penstock.dataflow.column_records import ColumnRecord, ReaderRecord
from penstock.dataflow.columns.cells import number_cell
from penstock.dataflow.columns.row_leases import (
    LEASE_TRANSITIONS,
    Claim,
    LeasedRow,
    LeaseOutcome,
    ReaderSpec,
    RowLease,
    RowLeaseState,
    RowTrigger,
)
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.errors import Conflict, NotFound
from penstock.types import RowId

SCORE = ReaderSpec(
    name="score", reads=("turns",), writes=("reward",), deadline_s=60, max_attempts=2
)
REFER = ReaderSpec(name="refer", reads=("turns", "reward"), writes=("reference",))


@pytest.fixture
def world() -> ReaderWorld:
    world = ReaderWorld()
    world.readers.declare(SCORE, world.now)
    return world


def lease(world: ReaderWorld, name: str, num: int = 9, request_id: str = "") -> list[LeasedRow]:
    return world.readers.lease(name, "w", request_id or uuid.uuid4().hex, num, world.now)


def claim(grant: LeasedRow) -> Claim:
    return grant.claim


def score(
    world: ReaderWorld, grant: LeasedRow, name: str = "score", column: str = "reward"
) -> None:
    cell = number_cell(column, 0.5)
    assert world.readers.write(name, claim(grant), [cell], "w", world.now) == [("stored", "")]
    assert world.readers.end(name, claim(grant), LeaseOutcome.DONE, world.now) == ("stored", "")


def column(world: ReaderWorld, row_id: str, name: str) -> ColumnRecord | None:
    return world.columns.existing("train", [RowId(row_id)], [name]).get((RowId(row_id), name))


def test_a_chain_of_readers_overlaps_row_by_row(world: ReaderWorld) -> None:
    world.readers.declare(REFER, world.now)
    world.arrive("p0-1.0.1")
    world.arrive("p0-2.0.1")
    first, _ = lease(world, "score")
    assert lease(world, "refer") == [], "its input is not there yet"
    score(world, first)
    assert [grant.claim.row_id for grant in lease(world, "refer")] == ["p0-1.0.1"]
    assert [(event.row_id, event.value) for event in world.row_window.pop_completed()] == [
        ("p0-1.0.1", 0.5)
    ]


def test_a_row_delivered_with_its_column_is_finished(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1", reward=1.0)
    assert lease(world, "score") == []
    world.tick()
    assert world.readers.reader("score").cursor == 1


def test_rows_of_a_killed_worker_are_leased_again(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    (first,) = lease(world, "score")
    world.tick(11.9)
    assert lease(world, "score") == []
    world.tick(0.2)
    (second,) = lease(world, "score")
    assert (second.claim.row_id, second.claim.epoch, second.attempt) == (first.claim.row_id, 2, 2)
    late = world.readers.write("score", claim(first), [number_cell("reward", 1.0)], "w", world.now)
    assert late[0][0] is DeliveryStatus.FENCED
    score(world, second)


def test_a_poison_row_fails_its_column_with_the_last_error(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    for error in ("first", "the judge said no"):
        (grant,) = lease(world, "score")
        world.readers.end("score", claim(grant), LeaseOutcome.FAILED, world.now, error)
    record = column(world, "p0-1.0.1", "reward")
    assert record is not None and (record.failed, record.detail) == (
        "attempts",
        "the judge said no",
    )
    assert lease(world, "score") == []
    assert [event.failed for event in world.row_window.pop_completed()] == ["attempts"]


def test_releasing_costs_no_attempt(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    for _ in range(5):
        (grant,) = lease(world, "score")
        world.readers.end("score", claim(grant), LeaseOutcome.RELEASED, world.now)
    assert lease(world, "score")[0].attempt == 1


def test_columns_without_a_worker_fail_at_their_deadline(world: ReaderWorld) -> None:
    world.readers.declare(REFER, world.now)
    world.arrive("p0-1.0.1")
    world.tick(59.9)
    assert world.row_window.pop_completed() == []
    world.tick(0.2)
    events = {(event.name, event.failed) for event in world.row_window.pop_completed()}
    assert events == {("reward", "overdue"), ("reference", "input")}, "nothing waits for ever"


def test_a_deadline_on_admission_counts_from_there() -> None:
    world = ReaderWorld()
    terms = ReaderSpec(
        name="prm", reads=("turns",), writes=("steps",), on=RowTrigger.ADMITTED, deadline_s=60
    )
    world.readers.declare(terms, world.now)
    world.arrive("p0-1.0.1")
    world.arrive("p0-2.0.1")
    world.tick(500)
    assert lease(world, "prm") == [], "not admitted"
    world.row_window.admitted([RowId("p0-2.0.1")], world.now)
    assert [grant.claim.row_id for grant in lease(world, "prm")] == ["p0-2.0.1"]
    world.row_window.admitted([RowId("p0-1.0.1")], world.now)
    world.tick(30)
    world.row_window.admitted(
        [RowId("p0-1.0.1"), RowId("p0-2.0.1")], world.now
    )  # by another policy
    first = column(world, "p0-1.0.1", "admitted")
    assert first is not None and first.value == world.now - 30, "the first admission counts"
    world.tick(31)
    assert {event.row_id for event in world.row_window.pop_completed()} == {"p0-1.0.1", "p0-2.0.1"}


def test_first_write_wins(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    (grant,) = lease(world, "score")
    score(world, grant)
    for value, expected in ((0.5, "duplicate"), (0.6, "conflict")):
        cell = number_cell("reward", value)
        found = world.readers.write("score", claim(grant), [cell], "w", world.now)
        assert found[0][0] == expected
    record = column(world, "p0-1.0.1", "reward")
    assert record is not None and record.value == 0.5


def test_a_repeated_request_gets_the_same_rows(world: ReaderWorld) -> None:
    for n in range(4):
        world.arrive(f"p0-{n}.0.1")
    first = lease(world, "score", 2, "r1")
    assert lease(world, "score", 2, "r1") == first
    assert len(lease(world, "score", 9, "r2")) == 2
    for grant in first:
        score(world, grant)
    world.arrive("p0-9.0.1")
    assert lease(world, "score", 2, "r1") == [], "a late retry gets no rows"


def test_a_row_with_all_columns_is_finished_without_an_acknowledgement(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    (grant,) = lease(world, "score")
    world.readers.write("score", claim(grant), [number_cell("reward", 1.0)], "w", world.now)
    world.tick(13)
    assert lease(world, "score") == [] and world.readers.reader("score").cursor == 1


def test_leases_survive_a_restart_with_a_full_ttl(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    (grant,) = lease(world, "score", request_id="r1")
    world.settle()
    world.now += 11
    world.crash()
    world.tick(11)
    assert lease(world, "score", request_id="r1") == [grant]
    score(world, grant)


def test_restart_gives_workers_time_before_deadlines(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    world.settle()
    world.now += 3600
    world.crash()
    world.tick(1)
    assert world.row_window.pop_completed() == []
    world.tick(24)
    assert [event.failed for event in world.row_window.pop_completed()] == ["overdue"]


def test_a_slow_reader_gets_the_rows_whose_group_was_freed() -> None:
    world = ReaderWorld(window=1)
    world.readers.declare(ReaderSpec(name="slow", reads=("turns",)), world.now)
    for n in range(3):
        world.arrive(f"p0-{n}.0.1")
        world.free(f"p0-{n}.0.1")
    world.flush()
    world.crash()
    seen: list[str] = []
    while grants := lease(world, "slow", 1):
        seen += [grant.claim.row_id for grant in grants]
        world.readers.end("slow", claim(grants[0]), LeaseOutcome.DONE, world.now)
    assert seen == ["p0-0.0.1", "p0-1.0.1", "p0-2.0.1"]


def test_a_reader_declared_later_gets_no_row_freed_before(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    world.free("p0-1.0.1")
    world.arrive("p0-2.0.1")
    world.flush()
    world.now += 1
    world.readers.declare(ReaderSpec(name="late", reads=("turns",)), world.now)
    assert [grant.claim.row_id for grant in lease(world, "late")] == ["p0-2.0.1"]


def test_freed_rows_that_no_policy_admitted_do_not_block_a_reader_of_admitted_ones() -> None:
    world = ReaderWorld(window=1)
    spec = ReaderSpec(name="refer", reads=("turns",), on=RowTrigger.ADMITTED)
    world.readers.declare(spec, world.now)
    for n in range(2):
        world.arrive(f"p0-{n}.0.1")
    world.row_window.admitted([RowId("p0-1.0.1")], world.now)
    for n in range(2):
        world.free(f"p0-{n}.0.1")
    world.flush()
    world.crash()
    assert [grant.claim.row_id for grant in lease(world, "refer")] == ["p0-1.0.1"]


def test_forgotten_rows_are_not_leased(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    world.arrive("p0-2.0.1")
    (first,) = lease(world, "score", 1)
    world.forget("p0-1.0.1")
    world.forget("p0-2.0.1")
    assert lease(world, "score") == []
    assert (
        world.readers.end("score", claim(first), LeaseOutcome.DONE, world.now)[0]
        is DeliveryStatus.FENCED
    )
    world.settle()
    world.crash()
    assert lease(world, "score") == []


def test_a_row_forgotten_a_moment_ago_is_not_read_from_disk() -> None:
    world = ReaderWorld(window=1)
    world.readers.declare(ReaderSpec(name="slow", reads=("turns",)), world.now)
    for n in range(3):
        world.arrive(f"p0-{n}.0.1")
    world.flush()
    world.forget("p0-1.0.1")  # its record is journaled, the tables show it still
    (first,) = lease(world, "slow", 1)
    world.readers.end("slow", claim(first), LeaseOutcome.DONE, world.now)
    assert [grant.claim.row_id for grant in lease(world, "slow")] == ["p0-2.0.1"]


def test_a_failed_input_is_seen_by_readers_that_come_later(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    for _ in range(2):
        (grant,) = lease(world, "score")
        world.readers.end("score", claim(grant), LeaseOutcome.FAILED, world.now, "no")
    world.flush()
    world.row_window.pop_completed()
    world.readers.declare(REFER, world.now)
    world.tick()
    assert [(e.name, e.failed) for e in world.row_window.pop_completed()] == [
        ("reference", "input")
    ]


def test_rows_finished_out_of_order_stay_finished(world: ReaderWorld) -> None:
    world.readers.declare(ReaderSpec(name="export", reads=("turns",)), world.now)
    for n in range(3):
        world.arrive(f"p0-{n}.0.1")
    grants = lease(world, "export", request_id="r1")
    world.readers.end("export", claim(grants[1]), LeaseOutcome.DONE, world.now)
    world.settle()
    world.crash()
    world.tick(13)
    assert [grant.claim.row_id for grant in lease(world, "export")] == ["p0-0.0.1", "p0-2.0.1"]


def test_a_row_that_arrives_waits_for_those_before_it_on_disk() -> None:
    world = ReaderWorld(window=1)
    world.readers.declare(ReaderSpec(name="slow", reads=("turns",)), world.now)
    seen: list[str] = []
    for n in range(6):
        world.arrive(f"p0-{n}.0.1")
        world.flush()
        if n % 2:
            (grant,) = lease(world, "slow", 1)
            world.readers.end("slow", claim(grant), LeaseOutcome.DONE, world.now)
            seen.append(grant.claim.row_id)
    while grants := lease(world, "slow", 1):
        world.readers.end("slow", claim(grants[0]), LeaseOutcome.DONE, world.now)
        seen.append(grants[0].claim.row_id)
    assert seen == [f"p0-{n}.0.1" for n in range(6)]


def test_no_row_is_done_without_its_columns(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    (grant,) = lease(world, "score")
    status, detail = world.readers.end("score", claim(grant), LeaseOutcome.DONE, world.now)
    assert status is DeliveryStatus.INVALID and "['reward']" in detail
    score(world, grant)


def test_workers_are_seen_for_two_ttl(world: ReaderWorld) -> None:
    assert not world.readers.has_worker("score", world.now)
    lease(world, "score")
    assert world.readers.has_worker("score", world.now + 23.9)
    assert not world.readers.has_worker("score", world.now + 24.1)
    world.readers.extend_deadlines(10)
    assert world.readers.has_worker("score", world.now + 33.9)


def test_declaring_again_resumes_and_other_columns_are_rejected(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    score(world, lease(world, "score")[0])
    world.tick()
    world.readers.declare(SCORE, world.now)
    assert world.readers.reader("score").cursor == 1
    with pytest.raises(Conflict, match="choose another name"):
        world.readers.declare(ReaderSpec(name="score", reads=("turns",)), world.now)
    world.readers.remove("score")
    with pytest.raises(NotFound, match="declare it"):
        world.readers.reader("score")


def test_the_life_cycle_is_a_table() -> None:
    row_lease = RowLease(
        row_id=RowId("r"), arrival=1, deadline_start=0.0, missing_inputs=0, pending_outputs=0
    )
    with pytest.raises(AssertionError, match="cannot move from pending to leased"):
        row_lease.move(RowLeaseState.LEASED)
    ended = [state for state, following in LEASE_TRANSITIONS.items() if not following]
    assert ended == [RowLeaseState.DONE, RowLeaseState.DEAD, RowLeaseState.FREED]


def test_a_slow_reader_costs_bounded_memory_and_loses_nothing() -> None:
    world = ReaderWorld(window=100)
    world.readers.declare(ReaderSpec(name="slow", reads=("turns",)), world.now)
    for n in range(3000):
        world.arrive(f"p0-{n}.0.1")
    world.flush()
    reader = world.readers.reader("slow")
    assert len(reader.window) == 100
    seen: list[str] = []
    while grants := lease(world, "slow", 64):
        seen += [grant.claim.row_id for grant in grants]
        for grant in grants:
            world.readers.end("slow", claim(grant), LeaseOutcome.DONE, world.now)
        assert len(reader.window) <= 1200
        world.tick(0.1)
        world.flush()
    assert seen == [f"p0-{n}.0.1" for n in range(3000)], "in order of arrival, each once"
    assert world.tables.read(ReaderRecord)[0].cursor == 3000
    assert world.tables.scalar("SELECT count(*) FROM row_leases") == 0


def test_a_stuck_row_does_not_pin_those_behind_it() -> None:
    world = ReaderWorld()
    world.readers.declare(ReaderSpec(name="export", reads=("turns",)), world.now)
    world.arrive("p0-0.0.1")
    (stuck,) = lease(world, "export", 1)
    reader = world.readers.reader("export")
    for n in range(1, 1000):
        world.arrive(f"p0-{n}.0.1")
        world.readers.end(
            "export", claim(lease(world, "export", 1)[0]), LeaseOutcome.DONE, world.now
        )
    assert len(reader.by_arrival) < 100 and len(reader.window) == 1
    world.tick(0.1)
    assert reader.cursor == 0
    world.readers.end("export", claim(stuck), LeaseOutcome.DONE, world.now)
    world.tick(0.1)
    assert reader.cursor == 1000


def test_a_row_in_the_window_costs_200_bytes() -> None:
    world = ReaderWorld()
    ids = [RowId(f"p0-{n}.0.1") for n in range(20_000)]
    world.readers.declare(SCORE, world.now)
    tracemalloc.start()
    try:
        for n, row_id in enumerate(ids):
            world.row_window.add_rows("train", (row_id,), n + 1, ("turns",), world.now)
        before = tracemalloc.get_traced_memory()[0]
        assert before / len(ids) <= 200
    finally:
        tracemalloc.stop()


# --- the service stalls -----------------------------------------------------------------------


def stand_still(world: ReaderWorld, seconds: float) -> None:
    """The service stalls, then notices it."""
    world.now += seconds
    world.readers.extend_deadlines(seconds)
    world.tick()


def test_a_stall_expires_neither_leases_nor_deadlines(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    (grant,) = lease(world, "score")
    stand_still(world, 700)
    assert world.row_window.pop_completed() == [], "the deadline is extended by the stall"
    assert world.readers.has_worker("score", world.now)
    score(world, grant)


def test_leases_granted_after_a_stall_are_not_extended(world: ReaderWorld) -> None:
    """Requests may be answered after a stall, before the service notices it."""
    world.now += 700
    world.arrive("p0-1.0.1")
    assert len(lease(world, "score")) == 1
    world.readers.extend_deadlines(700)
    world.tick()
    assert world.readers.has_worker("score", world.now)
    world.tick(SCORE.ttl_s + 0.1)
    (again,) = lease(world, "score")  # its worker was silent apart from the stall
    world.readers.end("score", claim(again), LeaseOutcome.RELEASED, world.now)
    world.tick(60 - SCORE.ttl_s)
    assert [event.failed for event in world.row_window.pop_completed()] == ["overdue"]


def test_repeated_stalls_do_not_postpone_a_deadline_for_ever(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    for _ in range(60):
        assert world.row_window.pop_completed() == [], "it had less than its time"
        world.tick(1.0)
        stand_still(world, 5.0)
    assert [event.failed for event in world.row_window.pop_completed()] == ["overdue"]


def test_a_deadline_that_had_passed_stays_passed(world: ReaderWorld) -> None:
    world.arrive("p0-1.0.1")
    world.now += 60.1
    stand_still(world, 700)
    assert [event.failed for event in world.row_window.pop_completed()] == ["overdue"]


def test_a_stall_extends_deadlines_of_rows_on_disk() -> None:
    world = ReaderWorld(window=1)
    world.readers.declare(SCORE, world.now)
    for n in range(3):
        world.arrive(f"p0-{n}.0.1")
    world.flush()
    stand_still(world, 700)
    for _ in range(3):
        for grant in lease(world, "score"):
            score(world, grant)
        world.flush()
    assert [event.failed for event in world.row_window.pop_completed()] == ["", "", ""]
