# SPDX-License-Identifier: Apache-2.0
"""Polls a run's status and derives reward curves and the ETA.

Owns the thread that polls the dataflow once a second. Draws nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.dataflow.client.dataflow import StatusClient
from penstock.dataflow.service.operators.messages import PolicyStatus, Status
from penstock.durable import open_regular
from penstock.errors import WireError

POLL_INTERVAL_S = 1.0
ETA_WINDOW_STEPS = 20
"""The ETA is estimated from the pace of this many recent steps."""
MIN_ETA_STEPS = 3
"""Ends of steps to observe before there is an ETA."""
ERROR_MARKERS = (b'"level": "error"', b'"level": "critical"', b'"msg": "rollout failed"')
"""To a node a failed rollout is a warning; a user should see it, since all may be failing."""


@dataclass(slots=True)
class RewardCurve:
    """Reward by step of one policy."""

    rewards: dict[int, float] = field(default_factory=dict[int, float])
    times: deque[tuple[int, float]] = field(
        default_factory=lambda: deque[tuple[int, float]](maxlen=ETA_WINDOW_STEPS)
    )
    """Steps that were seen to end, and when. The first number seen is none of them: it may have
    ended long before, or stand for services that are still loading."""
    number: int | None = None
    """The last number seen."""

    def add(self, policy: PolicyStatus, now: float) -> None:
        if self.number is not None and policy.number < self.number:
            self._rewind(policy.number)
        elif self.number is not None and policy.number > self.number:
            self.times.append((policy.number, now))
        self.number = policy.number
        if policy.reward_mean is not None:
            self.rewards[policy.number] = policy.reward_mean

    def _rewind(self, number: int) -> None:
        """The trainer resumed from a checkpoint."""
        self.times.clear()
        for step in [step for step in self.rewards if step > number]:
            del self.rewards[step]

    def eta_s(self, steps: int, now: float) -> float | None:
        """Seconds to the last step; None before MIN_ETA_STEPS steps were seen to end."""
        if len(self.times) < MIN_ETA_STEPS:
            return None
        (first, since), (last, until) = self.times[0], self.times[-1]
        pace_s = max(until - since, (now - since) * 0.5) / (last - first)
        return max(0.0, (steps - last) * pace_s - (now - until))


def resume_note(policy: PolicyStatus) -> str:
    """Why a policy's step went back at the last start of its trainer; empty if it did not."""
    if not policy.repeats_to:
        return ""
    first, last = policy.resumed_at + 1, policy.repeats_to
    repeated = f"step {first} is" if first == last else f"steps {first}–{last} are"
    return f"resumed from the checkpoint at step {policy.resumed_at}; {repeated} repeated"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The state of a run at one moment, for a display."""

    name: str
    elapsed_s: float
    status: Status | None
    """The newest status; None before the first."""
    unreachable_s: float
    """Seconds since the dataflow last answered."""
    curves: dict[str, list[float]]
    """Rewards in step order, by policy."""
    eta_s: float | None
    note: str
    """The last problem: a service that exited, or an error in a log."""

    @classmethod
    def from_status(
        cls, status: Status, rewards: Mapping[str, Mapping[int, float]] | None = None
    ) -> RunView:
        """A single status; `rewards`: by step, by policy, as far as they are known."""
        curves: dict[str, list[float]] = {}
        for policy in status.policies:
            known = dict((rewards or {}).get(policy.policy, {}))
            if policy.reward_mean is not None:
                known[policy.number] = policy.reward_mean
            curves[policy.policy] = [known[step] for step in sorted(known)]
        return cls(
            name=status.run,
            elapsed_s=status.uptime_s,
            status=status,
            unreachable_s=0.0,
            curves=curves,
            eta_s=None,
            note="",
        )


class StatusPoller:
    """Polls the status in a background thread; `view()` never blocks."""

    def __init__(
        self,
        name: str,
        make_reader: Callable[[], StatusClient],
        rewards: Mapping[str, Mapping[int, float]] | None = None,
        *,
        elapsed_s: float = 0.0,
    ) -> None:
        """`make_reader` is called again after an error, to get a fresh token.

        rewards: by step, by policy, from before this poller.
        elapsed_s: how long the run has been running."""
        self._name = name
        self._make_reader = make_reader
        self._answered_at = time.monotonic()
        self._began_at = self._answered_at - elapsed_s
        self._status: Status | None = None
        self._curves = {
            policy: RewardCurve(rewards=dict(known)) for policy, known in (rewards or {}).items()
        }
        self._note = ""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._poll_loop, name="watch", daemon=True)

    def __enter__(self) -> StatusPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=10.0)

    def progress(self) -> int:
        """A number that grows as the run advances."""
        status = self._status
        if status is None:
            return 0
        return status.trajectories + sum(policy.number for policy in status.policies)

    def is_finished(self) -> bool:
        return self._status is not None and self._status.finished

    def is_evaluating(self) -> bool:
        """Is an evaluation in progress? Each of its questions has a time limit."""
        found = None if self._status is None else self._status.evaluation
        return found is not None and found.running is not None

    def live_nodes(self) -> set[str]:
        """Nodes that have joined, not left, and are not silent."""
        nodes = () if self._status is None else self._status.nodes
        return {str(node.node_id) for node in nodes if node.state != "silent"}

    def failure(self) -> str:
        """Why the run has to end, if all its groups fail; empty otherwise."""
        return "" if self._status is None else self._status.failed

    def notify(self, text: str) -> None:
        with self._lock:
            self._note = text

    def view(self) -> RunView:
        now = time.monotonic()
        with self._lock:
            etas = [
                self._curves[policy.policy].eta_s(policy.steps, now)
                for policy in (self._status.policies if self._status else ())
            ]
            known = [eta for eta in etas if eta is not None]
            return RunView(
                name=self._name,
                elapsed_s=now - self._began_at,
                status=self._status,
                unreachable_s=now - self._answered_at,
                curves={
                    name: [curve.rewards[step] for step in sorted(curve.rewards)]
                    for name, curve in self._curves.items()
                },
                eta_s=max(known) if etas and len(known) == len(etas) else None,
                note=self._note,
            )

    def _poll_loop(self) -> None:
        """consumes: the dataflow's status · produces: the newest view
        waits for: POLL_INTERVAL_S · woken by: the end of the run"""
        reader = self._make_reader()
        while not self._ended.wait(POLL_INTERVAL_S):
            try:
                self._add(reader.status())
            except WireError:
                reader.close()
                reader = self._make_reader()
        reader.close()

    def _add(self, status: Status) -> None:
        now = time.monotonic()
        with self._lock:
            self._status = status
            self._answered_at = now
            for policy in status.policies:
                self._curves.setdefault(policy.policy, RewardCurve()).add(policy, now)


class ErrorTail:
    """Finds the newest error line in a set of growing logs; reads each byte once."""

    def __init__(self, logs: Callable[[], Mapping[str, Path]]) -> None:
        """`logs`: by service; services come and go."""
        self._logs = logs
        self._read_bytes: dict[str, int] = {}

    def newest(self) -> str | None:
        found = None
        for name, path in self._logs().items():
            for line in self._new_lines(name, path):
                if any(mark in line for mark in ERROR_MARKERS):
                    found = f"{name}: {_message(line)}"
        return found

    def _new_lines(self, name: str, path: Path) -> list[bytes]:
        try:
            with open_regular(path) as file:
                file.seek(self._read_bytes.get(name, 0))
                text = file.read(1 << 20)
        except OSError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._read_bytes[name] = self._read_bytes.get(name, 0) + len(complete)
        return complete.splitlines()


def _message(line: bytes) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return line.decode(errors="replace")[:300]
    what = str(record.get("msg", ""))
    if record.get("reason"):
        what = f"{what} ({record['reason']})"
    why = next(
        (record[key] for key in ("exception", "error", "detail", "why") if record.get(key)), ""
    )
    return ": ".join([what, *str(why).strip().splitlines()[-1:]])[:300]
