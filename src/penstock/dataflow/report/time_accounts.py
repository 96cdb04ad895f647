# SPDX-License-Identifier: Apache-2.0
"""Time accounts: how a trainer or a node spent its wall-clock time, by activity.

A clock books one activity at a time, starting where it last stopped, so no second is lost or
counted twice. Driven by calls and periodic observations; owns no thread and reads no clock."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.report.figures import Account, NodeActivity, StepTiming, TrainerActivity

SERVING = (
    NodeActivity.ROLLING_OUT,
    NodeActivity.LOADING,
    NodeActivity.WAITING,
    NodeActivity.PAUSED,
)
"""What a node of the pool does; one that trains meanwhile is busy."""
TRAINER_SILENT_S = 60.0
"""A waiting trainer polls at least every half minute; after this silence it counts as offline."""


class TrainerClock:
    """Time account of one policy's trainer, from its calls.

    A step lasts from one batch request to the next. The first step after a start or an evaluation
    is not sampled, because its wait is not representative."""

    def __init__(self, now: float) -> None:
        self.eval_s = 0.0
        """Evaluation since the window opened."""
        self._seconds: dict[str, float] = {}
        self._activity = TrainerActivity.OFFLINE
        self._booked_until = now
        self._last_call_at = now
        self._samples: list[StepTiming] = []
        self._seq = 0
        self._requested_at = now
        self._waits_since = now
        self._wait_s: float | None = None
        """Waited in this step, over all instalments; None before the first is served."""
        self._step_eval_s = 0.0
        self._ended: StepTiming | None = None
        """The previous step; the next commit says how much of it was evaluation."""
        self._other_s_at_commit = 0.0
        """Seconds booked as OTHER at the last commit."""
        self._prefetched: tuple[int, bool] | None = None
        """A batch requested before the last one was committed, and whether it was served."""
        self._skip_sample = True
        """Do not sample the current step."""
        self._skip_next_sample = False
        self._is_stopped = False

    # --- calls of the trainer -----------------------------------------------------------------

    def touch(self, now: float) -> None:
        self._last_call_at = max(self._last_call_at, now)

    def incarnated(self, now: float) -> None:
        """A new trainer took over; since the last call of the old one, the policy was offline."""
        self._switch(TrainerActivity.OFFLINE, self._last_call_at)
        self._switch(TrainerActivity.STARTING, now)
        self._seq, self._wait_s, self._step_eval_s = 0, None, 0.0
        self._ended = self._prefetched = None
        self._skip_sample, self._skip_next_sample = True, False
        self.touch(now)

    def batch_requested(self, seq: int, now: float, *, instalment: int = 0) -> None:
        """A request for this batch, or an instalment of it; ranks and long polls repeat it, only
        the first counts."""
        if instalment > 1 and seq == self._seq and self._activity is TrainerActivity.TRAINING:
            self._waits_since = now
            self._switch(TrainerActivity.WAITING, now)
        elif seq > self._seq and self._activity is TrainerActivity.TRAINING:
            self._prefetched = self._prefetched or (seq, False)
        elif seq > self._seq:
            self._next_step(seq, now)
        elif self._activity is TrainerActivity.WAITING and self._is_silent(now):
            self._switch(TrainerActivity.OFFLINE, self._last_call_at)
            self._switch(TrainerActivity.WAITING, now)
        self.touch(now)

    def _next_step(self, seq: int, now: float) -> None:
        self._end_step(now)
        self._seq, self._requested_at, self._wait_s = seq, now, None
        self._waits_since = now
        self._switch(TrainerActivity.WAITING, now)

    def _end_step(self, now: float) -> None:
        if self._wait_s is None:
            return
        step_s = max(self._wait_s, now - self._requested_at - self._step_eval_s)
        self._ended = None if self._skip_sample else StepTiming(wait_s=self._wait_s, step_s=step_s)
        self._skip_sample, self._skip_next_sample = self._skip_next_sample, False
        self._step_eval_s = 0.0

    def served(self, seq: int, now: float) -> None:
        if self._prefetched is not None and seq == self._prefetched[0]:
            self._prefetched = (seq, True)
        elif seq == self._seq and self._activity is TrainerActivity.WAITING:
            self._wait_s = (self._wait_s or 0.0) + now - self._waits_since
            self._switch(TrainerActivity.TRAINING, now)
        self.touch(now)

    def committed(self, now: float, *, eval_s: float = 0.0) -> None:
        """`eval_s`: evaluation time since the previous commit, as reported by the trainer."""
        if self._is_stopped:
            return
        self._evaluated(eval_s, now)
        self._switch(TrainerActivity.PUBLISHING, now)
        if self._prefetched is not None:
            seq, is_served = self._prefetched
            self._prefetched = None
            self._next_step(seq, now)
            if is_served:
                self.served(seq, now)
        self.touch(now)

    def published(self, now: float) -> None:
        if self._activity is TrainerActivity.PUBLISHING:
            self._switch(TrainerActivity.OTHER, now)
        self.touch(now)

    def stop(self, now: float) -> None:
        """Close the account: the policy has trained all its steps."""
        if not self._is_stopped:
            self._switch(self._activity, now)
            self._is_stopped = True

    def _evaluated(self, eval_s: float, now: float) -> None:
        """Rebook evaluation time since the previous commit. Nodes keep working during evaluation,
        so the wait for the next batch is shorter than usual and its step is not sampled."""
        self._switch(self._activity, now)
        since_commit_s = self._seconds.get(TrainerActivity.OTHER, 0.0) - self._other_s_at_commit
        has_room = since_commit_s >= eval_s
        before = self._reassign(TrainerActivity.OTHER, eval_s) if has_room else 0.0
        within = 0.0 if has_room else self._reassign(TrainerActivity.TRAINING, eval_s)
        self._other_s_at_commit = self._seconds.get(TrainerActivity.OTHER, 0.0)
        self._skip_sample = self._skip_sample or before > 0
        self._skip_next_sample = within > 0
        self._step_eval_s += within
        if self._ended is not None:
            step_s = max(self._ended.wait_s, self._ended.step_s - before)
            self._samples.append(StepTiming(wait_s=self._ended.wait_s, step_s=step_s))
            self._ended = None

    def _reassign(self, activity: TrainerActivity, seconds: float) -> float:
        moved = min(seconds, self._seconds.get(activity, 0.0))
        if moved <= 0:
            return 0.0
        self._seconds[activity] -= moved
        self._add_time(TrainerActivity.EVALUATING, moved)
        self.eval_s += moved
        return moved

    # --- reading ------------------------------------------------------------------------------

    def pop_samples(self) -> tuple[StepTiming, ...]:
        """Steps that ended since the last call."""
        samples, self._samples = tuple(self._samples), []
        return samples

    @property
    def samples(self) -> tuple[StepTiming, ...]:
        return tuple(self._samples)

    def account(self, now: float) -> Account:
        booked = dict(self._seconds)
        if self._is_stopped:
            return booked
        until = self._booked_until
        if self._activity is TrainerActivity.WAITING and self._is_silent(now):
            _add(booked, self._activity, self._last_call_at - until)
            _add(booked, TrainerActivity.OFFLINE, now - self._last_call_at)
        else:
            _add(booked, self._activity, now - until)
        return booked

    def _is_silent(self, now: float) -> bool:
        return now - self._last_call_at > TRAINER_SILENT_S

    def _switch(self, activity: TrainerActivity, now: float) -> None:
        if self._is_stopped:
            return
        at = max(now, self._booked_until)
        self._add_time(self._activity, at - self._booked_until)
        self._activity, self._booked_until = activity, at

    def _add_time(self, activity: TrainerActivity, seconds: float) -> None:
        _add(self._seconds, activity, seconds)


class NodeClock:
    """Time account of one node, observed on every tick. Time is booked only up to its last
    heartbeat; the rest is booked with the next heartbeat, or as silence."""

    def __init__(self, now: float) -> None:
        self.activity = NodeActivity.WAITING
        self._starting_since: float | None = None
        self._seconds: dict[str, float] = {}
        self._booked_until = now

    def observe(self, activity: NodeActivity, last_seen: float, now: float) -> float | None:
        """Book `activity` from the last booking to the last heartbeat, then silence if the node is
        silent. Returns the duration of a start on the observation after it ended."""
        booked_until, seen_until = self._booked_until, min(max(last_seen, self._booked_until), now)
        if activity is NodeActivity.SILENT:
            self._add_time(self.activity, seen_until)
            self._add_time(NodeActivity.SILENT, now)
        else:
            self._add_time(activity, seen_until)
        self.activity = activity
        if activity is NodeActivity.STARTING:
            if self._starting_since is None:
                self._starting_since = booked_until
            return None
        started_at, self._starting_since = self._starting_since, None
        is_live = activity in SERVING
        return now - started_at if started_at is not None and is_live else None

    def account(self, now: float) -> Account:
        booked = dict(self._seconds)
        _add(booked, self.activity, max(0.0, now - self._booked_until))
        return booked

    def _add_time(self, activity: NodeActivity, until: float) -> None:
        _add(self._seconds, activity, until - self._booked_until)
        self._booked_until = until


def _add(account: dict[str, float], activity: str, seconds: float) -> None:
    if seconds > 0:
        account[str(activity)] = account.get(str(activity), 0.0) + seconds


def subtract_accounts(account: Account, before: Account) -> Account:
    """Time booked since `before`; negative corrections are dropped."""
    left = {what: seconds - before.get(what, 0.0) for what, seconds in account.items()}
    return {what: seconds for what, seconds in left.items() if seconds > 0}


def sum_accounts(accounts: Sequence[Account]) -> Account:
    total: dict[str, float] = {}
    for account in accounts:
        for what, seconds in account.items():
            _add(total, what, seconds)
    return total


def shares(account: Account) -> dict[str, float]:
    """Each activity's share of the total; shares sum to 1, or there are none."""
    total = sum(account.values())
    return {what: seconds / total for what, seconds in account.items()} if total > 0 else {}


def p90(values: Sequence[float]) -> float:
    """90th percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))] if ordered else 0.0
