# SPDX-License-Identifier: Apache-2.0
"""When a run counts as stalled, and whom the chain blames."""

from __future__ import annotations

from dataclasses import replace

from penstock.dataflow.core.leasing import Activity
from penstock.dataflow.core.stalls import (
    START_S,
    Link,
    NodeWait,
    StallClock,
    TrainerWait,
    find_chain,
)

LIMIT_S = 10.0
WAITING = TrainerWait(policy="a", seq=4, is_waiting=True, has_batch=False, since_s=60.0)
REWARD = Activity(what="reward task:score", item="row 7", since_s=59.0)
BUSY = NodeWait(node_id="node-0", num_leases=2, silent_s=0.0, work=(REWARD,))
IDLE = NodeWait(node_id="node-1", num_leases=0, silent_s=0.0, work=())


def _running() -> StallClock:
    """A clock that has seen a result, at time 0."""
    clock = StallClock(LIMIT_S)
    clock.observe(-1.0, started=1, moved=0, num_results=0)
    clock.observe(0.0, started=1, moved=1, num_results=1)
    return clock


def _pass(clock: StallClock, *, since: float, until: float, moved: int = 1) -> None:
    """One look a second at a run that does not move."""
    for now in range(int(since) + 1, int(until) + 1):
        clock.observe(float(now), started=1, moved=moved, num_results=1)


def test_a_run_stalls_when_nothing_moves_for_the_limit() -> None:
    clock = _running()
    _pass(clock, since=0, until=9)
    assert not clock.is_stalled
    _pass(clock, since=9, until=10)
    assert clock.is_stalled


def test_anything_that_moves_is_progress_also_within_a_step() -> None:
    clock = _running()
    for moved in range(2, 20):
        _pass(clock, since=9 * (moved - 2), until=9 * (moved - 1), moved=moved)
        assert not clock.is_stalled


def test_a_run_with_long_pauses_gets_three_times_the_longest() -> None:
    clock = _running()
    _pass(clock, since=0, until=8)
    _pass(clock, since=8, until=9, moved=2)
    assert clock.patience_s == 27.0
    _pass(clock, since=9, until=35, moved=2)
    assert not clock.is_stalled
    _pass(clock, since=35, until=36, moved=2)
    assert clock.is_stalled


def test_a_pause_that_ended_by_a_restart_makes_nobody_patient() -> None:
    clock = _running()
    _pass(clock, since=0, until=10)
    clock.begin_again()
    _pass(clock, since=10, until=19)
    clock.observe(20.0, started=1, moved=2, num_results=2)
    assert clock.patience_s == LIMIT_S and not clock.has_acted


def test_a_process_that_has_just_started_has_time_until_its_first_result() -> None:
    clock = _running()
    clock.observe(1.0, started=2, moved=1, num_results=1)
    clock.observe(2.0, started=2, moved=2, num_results=1)
    assert clock.patience_s == START_S
    clock.observe(3.0, started=2, moved=3, num_results=2)
    assert clock.patience_s == LIMIT_S


def test_the_results_of_earlier_starts_of_a_run_do_not_end_its_start() -> None:
    clock = StallClock(LIMIT_S)
    clock.observe(0.0, started=1, moved=None, num_results=None)
    clock.observe(1.0, started=1, moved=40, num_results=40)
    assert clock.patience_s == START_S
    clock.observe(2.0, started=1, moved=41, num_results=41)
    assert clock.patience_s == LIMIT_S


def test_an_observer_that_stood_still_itself_blames_nobody() -> None:
    clock = _running()
    clock.observe(1000.0, started=1, moved=1, num_results=1)
    assert not clock.is_stalled


def test_the_chain_ends_at_what_the_slowest_node_with_work_waits_for() -> None:
    younger = replace(BUSY, node_id="node-2", work=(replace(REWARD, since_s=3.0),))
    chain = find_chain(WAITING, [IDLE, younger, BUSY], blocker="tasks")
    assert [(link.who, link.on, link.item) for link in chain] == [
        ("trainer-a", "batch 4", ""),
        ("batch 4", "node-0", "2 rows"),
        ("node-0", "reward task:score", "row 7"),
    ]
    assert chain[-1].service == "node-0"
    assert str(chain[-1]) == "node-0 waits for reward task:score (row 7), for 59 s"


def test_a_silent_node_is_blamed_itself_whatever_it_said_last() -> None:
    silent = replace(BUSY, num_leases=0, silent_s=40.0)
    last = find_chain(WAITING, [IDLE, silent], blocker="tasks")[-1]
    assert (last.who, last.on, last.item) == ("node-0", "its process", "no heartbeat")


def test_a_node_without_work_that_loads_a_version_is_blamed_for_that() -> None:
    load = Activity(what="the engine of a, load", item="version a.1.3", since_s=50.0)
    chain = find_chain(WAITING, [IDLE, replace(IDLE, work=(load,))], blocker="tasks")
    assert chain[-1].on == "the engine of a, load"


def test_idle_nodes_wait_for_what_stops_new_work_and_no_nodes_for_the_first() -> None:
    idle = find_chain(WAITING, [IDLE], blocker="tasks: every source is exhausted")
    assert (idle[-1].on, idle[-1].service) == ("tasks: every source is exhausted", "")
    nobody = find_chain(WAITING, [], blocker="tasks")
    assert (nobody[-1].on, nobody[-1].service) == ("a rollout node", "")


def test_a_trainer_that_does_not_ask_for_a_batch_is_blamed() -> None:
    training = replace(WAITING, is_waiting=False, has_batch=True)
    expected = Link(
        who="dataflow", on="trainer-a", item="batch 4", since_s=60.0, service="trainer-a"
    )
    assert find_chain(training, [BUSY], blocker="") == (expected,)
    absent = replace(training, has_batch=False)
    assert find_chain(absent, [BUSY], blocker="")[-1].item == "its start"
