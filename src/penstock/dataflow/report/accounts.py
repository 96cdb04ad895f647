# SPDX-License-Identifier: Apache-2.0
"""Time accounts: what a trainer or a node did with its wall clock, each summing to 100 %.

Every clock books one activity at a time, from where it booked last, so no second is lost or counted
twice. Told by calls and looks; owns no thread and reads no clock."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.report.figures import Account, NodeActivity, StepTiming, TrainerActivity

TRAINER_SILENT_S = 60.0
"""A trainer that waits asks again within half a minute; after this long it is not there."""


class TrainerClock:
    """One policy's trainer, seen through its calls.

    A step is judged from asking to asking. The first one after a start or an evaluation is no
    sample: it pays for what came before it."""

    def __init__(self, now: float) -> None:
        self.eval_s = 0.0
        """Evaluation since the window opened."""
        self._seconds: dict[str, float] = {}
        self._activity = TrainerActivity.OFFLINE
        self._booked_until = now
        self._heard_at = now
        self._samples: list[StepTiming] = []
        self._seq = 0
        self._asked_at = now
        self._wait_s: float | None = None
        self._step_eval_s = 0.0
        self._ended: StepTiming | None = None
        """The step before this one; this one's commit tells whether evaluation was part of it."""
        self._between_s = 0.0
        """Booked as between when it last committed."""
        self._prefetched: tuple[int, bool] | None = None
        """A batch asked for before the last one was committed, and whether it was served."""
        self._skip_sample = True
        """This step is no sample."""
        self._skip_next_sample = False
        self._is_stopped = False

    # --- what its calls tell ------------------------------------------------------------------

    def touch(self, now: float) -> None:
        self._heard_at = max(self._heard_at, now)

    def incarnated(self, now: float) -> None:
        """A new life: since its predecessor's last word nobody was there."""
        self._switch(TrainerActivity.OFFLINE, self._heard_at)
        self._switch(TrainerActivity.STARTING, now)
        self._seq, self._wait_s, self._step_eval_s = 0, None, 0.0
        self._ended = self._prefetched = None
        self._skip_sample, self._skip_next_sample = True, False
        self.touch(now)

    def batch_requested(self, seq: int, now: float) -> None:
        """The first call for this batch; ranks and long polls repeat it."""
        if seq > self._seq and self._activity is TrainerActivity.TRAINING:
            self._prefetched = self._prefetched or (seq, False)
        elif seq > self._seq:
            self._next_step(seq, now)
        elif self._activity is TrainerActivity.WAITING and self._is_quiet(now):
            self._switch(TrainerActivity.OFFLINE, self._heard_at)
            self._switch(TrainerActivity.WAITING, now)
        self.touch(now)

    def _next_step(self, seq: int, now: float) -> None:
        self._end_step(now)
        self._seq, self._asked_at, self._wait_s = seq, now, None
        self._switch(TrainerActivity.WAITING, now)

    def _end_step(self, now: float) -> None:
        if self._wait_s is None:
            return
        step_s = max(self._wait_s, now - self._asked_at - self._step_eval_s)
        self._ended = None if self._skip_sample else StepTiming(wait_s=self._wait_s, step_s=step_s)
        self._skip_sample, self._skip_next_sample = self._skip_next_sample, False
        self._step_eval_s = 0.0

    def served(self, seq: int, now: float) -> None:
        if self._prefetched is not None and seq == self._prefetched[0]:
            self._prefetched = (seq, True)
        elif seq == self._seq and self._activity is TrainerActivity.WAITING:
            self._wait_s = now - self._asked_at
            self._switch(TrainerActivity.TRAINING, now)
        self.touch(now)

    def committed(self, now: float, *, eval_s: float = 0.0) -> None:
        """`eval_s`: evaluation since the commit before, by the trainer's own word."""
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
        """The policy has trained all its steps; its account ends here."""
        if not self._is_stopped:
            self._switch(self._activity, now)
            self._is_stopped = True

    def _evaluated(self, eval_s: float, now: float) -> None:
        """Take evaluation out of what was booked since the commit before. Nodes work on meanwhile,
        so the first batch after it waits for less than it should."""
        self._switch(self._activity, now)
        since_commit_s = self._seconds.get(TrainerActivity.OTHER, 0.0) - self._between_s
        has_room = since_commit_s >= eval_s
        before = self._reassign(TrainerActivity.OTHER, eval_s) if has_room else 0.0
        within = 0.0 if has_room else self._reassign(TrainerActivity.TRAINING, eval_s)
        self._between_s = self._seconds.get(TrainerActivity.OTHER, 0.0)
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

    # --- what it knows ------------------------------------------------------------------------

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
        if self._activity is TrainerActivity.WAITING and self._is_quiet(now):
            _add(booked, self._activity, self._heard_at - until)
            _add(booked, TrainerActivity.OFFLINE, now - self._heard_at)
        else:
            _add(booked, self._activity, now - until)
        return booked

    def _is_quiet(self, now: float) -> bool:
        return now - self._heard_at > TRAINER_SILENT_S

    def _switch(self, activity: TrainerActivity, now: float) -> None:
        if self._is_stopped:
            return
        at = max(now, self._booked_until)
        self._add_time(self._activity, at - self._booked_until)
        self._activity, self._booked_until = activity, at

    def _add_time(self, activity: TrainerActivity, seconds: float) -> None:
        _add(self._seconds, activity, seconds)


class NodeClock:
    """One node, looked at on every tick. Time is booked only up to its last word: what it did
    after that is known when it speaks again, or falls silent."""

    def __init__(self, now: float) -> None:
        self.activity = NodeActivity.WAITING
        self._starting_since: float | None = None
        self._seconds: dict[str, float] = {}
        self._booked_until = now

    def look(self, activity: NodeActivity, last_seen: float, now: float) -> float | None:
        """`activity` since the last look, as far as the node was heard; then silence, if so.
        Returns the seconds a start took, at the look that sees its end."""
        booked_until, heard_until = self._booked_until, min(max(last_seen, self._booked_until), now)
        if activity is NodeActivity.SILENT:
            self._add_time(self.activity, heard_until)
            self._add_time(NodeActivity.SILENT, now)
        else:
            self._add_time(activity, heard_until)
        self.activity = activity
        if activity is NodeActivity.STARTING:
            if self._starting_since is None:
                self._starting_since = booked_until
            return None
        began, self._starting_since = self._starting_since, None
        is_live = activity in (NodeActivity.ROLLING_OUT, NodeActivity.LOADING, NodeActivity.WAITING)
        return now - began if began is not None and is_live else None

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
    """What was booked since `before`; a correction backwards is shown as nothing."""
    left = {what: seconds - before.get(what, 0.0) for what, seconds in account.items()}
    return {what: seconds for what, seconds in left.items() if seconds > 0}


def sum_accounts(accounts: Sequence[Account]) -> Account:
    total: dict[str, float] = {}
    for account in accounts:
        for what, seconds in account.items():
            _add(total, what, seconds)
    return total


def shares(account: Account) -> dict[str, float]:
    """Each activity's part of the whole; parts sum to 1, or there are none."""
    total = sum(account.values())
    return {what: seconds / total for what, seconds in account.items()} if total > 0 else {}


def p90(values: Sequence[float]) -> float:
    """The value that nine of ten do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))] if ordered else 0.0
