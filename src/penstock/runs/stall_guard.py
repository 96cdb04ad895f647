# SPDX-License-Identifier: Apache-2.0
"""Acts when a run is stalled: names who waits for whom, has the stacks written, then restarts the
culprit or ends the run.

Owns what counts as progress and the record of a stall. When it is one is decided by
`dataflow.core.stalls`; processes belong to the launcher.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from penstock.config.limits import StallConfig
from penstock.dataflow.core.stalls import Link, StallClock
from penstock.dataflow.service.operators.messages import Status
from penstock.errors import Stalled
from penstock.fleet.process_state import ask_for_stacks, is_suspended
from penstock.observe.stacks import STACKS_SIGNAL
from penstock.runs.monitor import RunView

UNREACHABLE_S = 10.0
"""A dataflow service that has not answered for this long is what the run waits for."""
STACKS_S = 1.0
"""Time for the services to write their stacks, before any is killed."""


class Services(Protocol):
    """The processes of the run on this machine."""

    def pids(self) -> dict[str, int]: ...

    def logs(self) -> dict[str, Path]: ...

    def restart(self, service: str) -> bool: ...


class StallGuard:
    def __init__(
        self,
        services: Services,
        config: StallConfig,
        log_dir: Path,
        notify: Callable[[str], None],
        *,
        stacks_s: float = STACKS_S,
    ) -> None:
        self.limit_s = config.limit_s
        self._services = services
        self._restarts = config.action == "restart"
        self._log_dir = log_dir
        self._notify = notify
        self._stacks_s = stacks_s
        self._clock = StallClock(config.limit_s)
        self._num_stalls = 0

    def check(self, now: float, view: RunView) -> None:
        """Call it at intervals. Raises Stalled if the run has to end."""
        started = tuple(sorted(self._services.pids().items()))
        moved, results = progress_mark(view.status), num_results(view.status)
        self._clock.observe(now, started=started, moved=moved, num_results=results)
        if self._clock.is_stalled:
            self._act(self._chain(view), self._clock.idle_s, self._clock.patience_s)

    def trainers_exited(self, view: RunView, since_s: float) -> None:
        """Every trainer exited with code 0 this long ago, and the run is not complete."""
        policies = () if view.status is None else view.status.policies
        early = [policy for policy in policies if policy.number < policy.steps]
        chain = [
            Link(
                who="dataflow",
                on=f"trainer-{policy.policy}",
                item=f"it exited with code 0 at step {policy.number} of {policy.steps}",
                since_s=since_s,
                service=f"trainer-{policy.policy}",
            )
            for policy in early
        ]
        end = Link(who="launcher", on="dataflow", item="the end of the run", since_s=since_s)
        self._act(tuple(chain) or (replace(end, service="dataflow"),), since_s, since_s)

    def _chain(self, view: RunView) -> tuple[Link, ...]:
        """Who waits for whom, with what only this machine knows: a service that does not answer,
        and processes that are suspended."""
        pids, idle_s = self._services.pids(), round(self._clock.idle_s, 1)
        chain = () if view.status is None else view.status.chain
        if view.status is None or view.unreachable_s > UNREACHABLE_S:
            why = "no answer"
            chain = (_link("launcher", "dataflow", why, round(view.unreachable_s, 1), "dataflow"),)
        suspended = [name for name, pid in pids.items() if is_suspended(pid)]
        named = [link.service for link in chain]
        for name in sorted(suspended, key=lambda name: name not in named)[:1]:
            kept = [link for link in chain if link.who != name]
            why = f"its process {pids[name]} is suspended"
            return (*kept, _link(name, "SIGCONT", why, idle_s, name))
        return chain

    def _act(self, chain: tuple[Link, ...], idle_s: float, limit_s: float) -> None:
        culprit = _culprit(chain)
        action = self._choose(culprit)
        if action != "wait" or not self._clock.has_acted:
            self._record(chain, idle_s, limit_s, action)
        if action == "stop":
            raise Stalled(self._message(chain, idle_s))
        self._clock.begin_again()
        if action == "restart":
            self._services.restart(culprit)

    def _choose(self, culprit: str) -> str:
        """`wait`: the run waits for a party that this launcher cannot restart, such as a node of
        another host; it is reported once. A second restart without a result between would not
        help."""
        if not self._restarts:
            return "stop"
        if culprit not in self._services.logs():
            return "wait"
        return "stop" if self._clock.has_acted else "restart"

    def _record(self, chain: tuple[Link, ...], idle_s: float, limit_s: float, action: str) -> None:
        """Have the stacks written to the logs, then the stall to its own file and to the log of
        the launcher."""
        self._num_stalls += 1
        culprit = _culprit(chain)
        asked = [
            name
            for name, pid in self._services.pids().items()
            if ask_for_stacks(pid, STACKS_SIGNAL)
        ]
        time.sleep(self._stacks_s if asked else 0.0)
        found = {
            "time": time.time(),
            "idle_s": round(idle_s, 1),
            "limit_s": round(limit_s, 1),
            "chain": [asdict(link) for link in chain],
            "culprit": culprit,
            "action": action,
            "stacks": {name: str(self._services.logs()[name]) for name in asked},
        }
        waits = " <- ".join(map(str, reversed(chain))) or "no wait is known"
        text = f"stalled: nothing advanced for {idle_s:.0f} s: {waits}; action: {action} {culprit}"
        line = json.dumps({"service": "launcher", "level": "error", "msg": text.strip()})
        with suppress(OSError):  # for people only; the disk may be the reason
            path = self._log_dir / f"stall-{self._num_stalls}.json"
            path.write_text(json.dumps(found, indent=2) + "\n")
            with (self._log_dir / "launcher.log").open("a") as log:
                log.write(line + "\n")
        self._notify(text.strip())

    def _message(self, chain: tuple[Link, ...], idle_s: float) -> str:
        waits = "\n".join(f"    {link}" for link in chain) or "    no wait is known"
        again = ", also after a restart" if self._clock.has_acted else ""
        log = self._services.logs().get(_culprit(chain))
        where = f"the end of {log}" if log else f"the logs in {self._log_dir}"
        return (
            f"stalled: nothing advanced for {idle_s:.0f} s{again}:\n{waits}\n"
            f"  Stacks are in {where}, the record in "
            f"{self._log_dir / f'stall-{self._num_stalls}.json'}. Fix the last party of this "
            "list, or raise stall.limit_s if it only needs longer, then run again: no data is lost"
        )


def _culprit(chain: tuple[Link, ...]) -> str:
    """The process that has to act; empty if none is known."""
    return chain[-1].service if chain else ""


def progress_mark(status: Status | None) -> Hashable:
    """All that advances in a run, also within a step or an attempt. Of untrusted nodes only what
    they deliver: what they say of themselves would keep a stall from being seen."""
    if status is None:
        return None
    found = status.evaluation
    return (
        status.trajectories,
        status.sampled_tokens,
        status.salvaged_tokens,
        None if found is None else (found.last, found.running, found.num_answered),
        tuple(
            (p.incarnation, p.number, p.published, p.sealed, p.progress) for p in status.policies
        ),
        tuple(
            (node.node_id, node.live, node.num_done)
            for node in status.nodes
            if not node.is_untrusted
        ),
    )


def num_results(status: Status | None) -> int | None:
    """Results so far, also of earlier starts of the run; None: not known yet."""
    if status is None:
        return None
    found = status.evaluation
    num_answered = 0 if found is None else found.num_answered
    return status.trajectories + num_answered + sum(policy.number for policy in status.policies)


def _link(who: str, on: str, item: str, since_s: float, service: str) -> Link:
    return Link(who=who, on=on, item=item, since_s=since_s, service=service)
