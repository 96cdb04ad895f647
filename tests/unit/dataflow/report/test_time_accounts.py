# SPDX-License-Identifier: Apache-2.0
"""Time accounts: every second belongs to one activity, for any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataflow.report.figures import NodeActivity, StepTiming
from penstock.dataflow.report.time_accounts import (
    NodeClock,
    TrainerClock,
    p90,
    shares,
    subtract_accounts,
    sum_accounts,
)


def step(clock: TrainerClock, seq: int, at: float, *, wait: float, train: float) -> float:
    """One full step without evaluation: publishing takes 1 s, a checkpoint 2 s."""
    clock.batch_requested(seq, at)
    clock.served(seq, at + wait)
    clock.committed(at + wait + train)
    clock.published(at + wait + train + 1)
    return at + wait + train + 3


def test_a_trainer_from_its_start_to_its_third_batch() -> None:
    clock = TrainerClock(0.0)
    clock.incarnated(10.0)
    clock.published(15.0)
    now = step(clock, 1, 20.0, wait=40.0, train=7.0)
    now = step(clock, 2, now, wait=2.0, train=5.0)
    now = step(clock, 3, now, wait=3.0, train=4.0)
    assert clock.account(now) == {
        "offline": 10.0,
        "starting": 10.0,
        "waiting": 45.0,
        "training": 16.0,
        "publishing": 3.0,
        "other": 6.0,
    }
    now = step(clock, 4, now, wait=0.0, train=1.0)
    samples = (StepTiming(wait_s=2.0, step_s=10.0), StepTiming(wait_s=3.0, step_s=10.0))
    assert clock.pop_samples() == samples, "the first step includes the start of the nodes"
    assert clock.pop_samples() == ()


def test_after_a_service_restart_a_trainer_is_sampled_from_its_second_step() -> None:
    clock = TrainerClock(0.0)
    now = step(clock, 7, 5.0, wait=30.0, train=1.0)
    now = step(clock, 8, now, wait=2.0, train=5.0)
    step(clock, 9, now, wait=2.0, train=5.0)
    assert clock.pop_samples() == (StepTiming(wait_s=2.0, step_s=10.0),)


def test_repeated_requests_of_ranks_and_polls_count_once() -> None:
    clock = TrainerClock(0.0)
    clock.incarnated(0.0)
    step(clock, 1, 0.0, wait=1.0, train=1.0)
    clock.batch_requested(2, 10.0)
    clock.batch_requested(2, 12.0)
    clock.served(1, 13.0)
    clock.batch_requested(1, 14.0)
    clock.served(2, 20.0)
    clock.batch_requested(2, 21.0)
    clock.served(2, 22.0)
    clock.committed(30.0)
    assert clock.account(30.0)["training"] == 11.0
    step(clock, 3, 30.0, wait=0.0, train=1.0)
    assert clock.pop_samples() == (StepTiming(wait_s=10.0, step_s=20.0),)


def test_a_prefetched_batch_counts_as_waiting_only_after_the_commit() -> None:
    clock = TrainerClock(0.0)
    clock.incarnated(0.0)
    clock.batch_requested(1, 0.0)
    clock.served(1, 1.0)
    clock.batch_requested(2, 2.0)
    clock.committed(10.0)
    clock.published(10.5)
    clock.served(2, 12.0)
    clock.batch_requested(3, 13.0)
    clock.served(3, 14.0)
    clock.committed(20.0)
    assert clock.account(20.0) == {"waiting": 3.0, "training": 17.0}
    clock.committed(30.0)
    assert clock.pop_samples() == (StepTiming(wait_s=2.0, step_s=10.0),)


def test_evaluation_between_steps_skips_the_next_sample() -> None:
    clock = TrainerClock(0.0)
    clock.incarnated(0.0)
    now = step(clock, 1, 0.0, wait=1.0, train=6.0)
    now = step(clock, 2, now, wait=1.0, train=6.0)
    clock.batch_requested(3, now + 50.0)
    clock.served(3, now + 50.0)
    clock.committed(now + 57.0, eval_s=50.0)
    assert clock.account(now + 57.0)["evaluating"] == 50.0
    assert clock.eval_s == 50.0
    now = step(clock, 4, now + 60.0, wait=1.0, train=6.0)
    now = step(clock, 5, now, wait=2.0, train=5.0)
    samples = (StepTiming(wait_s=1.0, step_s=10.0), StepTiming(wait_s=1.0, step_s=10.0))
    assert clock.pop_samples() == samples, "steps 2 and 4; 3 found a full buffer"
    assert sum(clock.account(now).values()) == pytest.approx(now)


def test_evaluation_inside_a_step_skips_the_next_sample() -> None:
    clock = TrainerClock(0.0)
    clock.incarnated(0.0)
    now = step(clock, 1, 0.0, wait=1.0, train=6.0)
    clock.batch_requested(2, now)
    clock.served(2, now + 1.0)
    clock.committed(now + 57.0, eval_s=50.0)
    now = step(clock, 3, now + 60.0, wait=0.0, train=6.0)
    now = step(clock, 4, now, wait=2.0, train=5.0)
    assert clock.pop_samples() == (StepTiming(wait_s=1.0, step_s=10.0),), "step 2 without it; not 3"


def test_time_before_a_successor_is_offline() -> None:
    clock = TrainerClock(0.0)
    clock.incarnated(0.0)
    clock.batch_requested(1, 0.0)
    clock.served(1, 5.0)
    assert clock.account(1000.0)["training"] == 995.0, "the same as a long step"
    clock.incarnated(1000.0)
    assert clock.account(1000.0) == {"waiting": 5.0, "offline": 995.0}
    clock.batch_requested(1, 1001.0)
    clock.served(1, 1003.0)
    assert clock.account(1003.0)["waiting"] == 7.0


def test_a_waiting_trainer_that_stops_polling_is_offline() -> None:
    clock = TrainerClock(0.0)
    clock.incarnated(0.0)
    for at in range(0, 100, 20):
        clock.batch_requested(1, float(at))
    assert clock.account(130.0) == {"waiting": 130.0}
    assert clock.account(200.0) == {"waiting": 80.0, "offline": 120.0}
    clock.batch_requested(1, 200.0)
    assert clock.account(210.0) == {"waiting": 90.0, "offline": 120.0}


def test_the_account_of_a_trainer_that_is_done_ends() -> None:
    clock = TrainerClock(0.0)
    clock.incarnated(0.0)
    now = step(clock, 1, 0.0, wait=1.0, train=1.0)
    clock.stop(now)
    clock.batch_requested(2, now + 10)
    assert sum(clock.account(now + 100).values()) == now


def test_a_node_is_booked_up_to_its_last_heartbeat() -> None:
    clock = NodeClock(0.0)
    assert clock.observe(NodeActivity.STARTING, 0.0, 0.0) is None
    assert clock.observe(NodeActivity.STARTING, 10.0, 10.0) is None
    assert clock.observe(NodeActivity.WAITING, 12.0, 12.0) == 12.0, "the duration of its start"
    clock.observe(NodeActivity.ROLLING_OUT, 20.0, 20.0)
    clock.observe(NodeActivity.ROLLING_OUT, 21.0, 30.0)
    assert clock.account(32.0)["rolling_out"] == 20.0, "not silent yet: it may still work"
    clock.observe(NodeActivity.SILENT, 21.0, 34.0)
    expected = {"starting": 10.0, "waiting": 2.0, "rolling_out": 9.0, "silent": 13.0}
    assert clock.account(34.0) == expected
    clock.observe(NodeActivity.ROLLING_OUT, 40.0, 41.0)
    assert clock.account(41.0)["rolling_out"] == 16.0
    assert sum(clock.account(41.0).values()) == pytest.approx(41.0)


def test_the_start_of_an_earlier_node_is_unknown() -> None:
    clock = NodeClock(100.0)
    assert clock.observe(NodeActivity.WAITING, 100.0, 100.5) is None


CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ["incarnated", "batch_requested", "served", "committed", "published", "eval"]
        ),
        st.integers(0, 4),
        st.floats(0, 100),
    ),
    max_size=40,
)


@given(CALLS, st.floats(0, 1000))
def test_no_second_of_a_trainer_is_lost_or_counted_twice(
    calls: list[tuple[str, int, float]], rest: float
) -> None:
    clock, now, seq = TrainerClock(0.0), 0.0, 1
    for what, ahead, gap in calls:
        now += gap
        if what in ("batch_requested", "served"):
            seq += ahead == 4
            getattr(clock, what)(max(1, seq - ahead // 3), now)
        elif what == "eval":
            clock.committed(now, eval_s=gap / 2)
        else:
            getattr(clock, what)(now)
    account = clock.account(now + rest)
    assert sum(account.values()) == pytest.approx(now + rest)
    assert all(seconds >= 0 for seconds in account.values())
    assert all(0 <= s.wait_s <= s.step_s for s in clock.pop_samples())


@given(
    st.lists(
        st.tuples(st.sampled_from(list(NodeActivity)), st.floats(0, 20), st.floats(0, 30)),
        max_size=40,
    )
)
def test_no_second_of_a_node_is_lost_or_counted_twice(
    observations: list[tuple[NodeActivity, float, float]],
) -> None:
    clock, now = NodeClock(0.0), 0.0
    for activity, gap, silent_s in observations:
        now += gap
        clock.observe(activity, now - silent_s, now)
        assert sum(clock.account(now).values()) == pytest.approx(now)


def test_small_sums() -> None:
    assert shares({"a": 1.0, "b": 3.0}) == {"a": 0.25, "b": 0.75}
    assert shares({}) == {}
    assert subtract_accounts({"a": 5.0, "b": 1.0}, {"a": 2.0, "b": 1.5}) == {"a": 3.0}
    assert sum_accounts([{"a": 1.0}, {"a": 2.0, "b": 1.0}]) == {"a": 3.0, "b": 1.0}
    assert p90([]) == 0.0 and p90([5.0]) == 5.0 and p90([float(n) for n in range(10)]) == 9.0
