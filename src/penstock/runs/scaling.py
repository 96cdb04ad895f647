# SPDX-License-Identifier: Apache-2.0
"""The autoscaler of a run: follows the balance report and the requests of operators.

Owns the wanted size of the pool and the list of nodes that were started for it. The rule is in the
report, the choice of nodes in `fleet.autoscaler`, starting and ending them in `fleet.hands`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from penstock.config import RunConfig
from penstock.dataflow.client.dataflow import StatusClient
from penstock.dataflow.report.shape import BalanceReport, ScalingBranch
from penstock.errors import ConfigError, LaunchError, WireError
from penstock.fleet.autoscaler import (
    NodeHealth,
    NodeType,
    Retirement,
    ScaleMode,
    plan,
    wanted_after,
)
from penstock.fleet.hands import Hands
from penstock.fleet.pool_facts import StartedNode, pool_nodes
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.scaling_records import ManagedNode, ScaleAction, ScaleRequest, ScalingRecord
from penstock.observe.admin_log import AdminAction, local_user

POLL_S = 1.0
REPORT_POLL_S = 5.0
BLOCKED_S = 600.0
"""A type whose start failed rests for this long, and others are started in its place."""
MAX_ACTIONS = 50
WHO = "autoscaler"


class ReportPoller:
    """Reads the balance report in a background thread; `newest` never blocks."""

    def __init__(self, make_reader: Callable[[], StatusClient]) -> None:
        self.newest: BalanceReport | None = None
        self._make_reader = make_reader
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="autoscaler", daemon=True)

    def __enter__(self) -> ReportPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=10.0)

    def _loop(self) -> None:
        """consumes: the dataflow's report · produces: the newest one
        waits for: REPORT_POLL_S · woken by: the end of the run"""
        reader = self._make_reader()
        while not self._ended.wait(REPORT_POLL_S):
            try:
                self.newest = reader.report()
            except WireError:
                reader.close()
                reader = self._make_reader()
        reader.close()


@dataclass(slots=True, kw_only=True)
class Scaler:
    """Brings the pool to the wanted size; called by the thread that owns the launcher."""

    folder: RunFolder
    node_types: Mapping[str, NodeType]
    hands: Mapping[str, Hands]
    """By node type."""
    launched: Callable[[], Mapping[str, float]]
    """Nodes of the launcher, and their seconds since they were last started."""
    launched_type: str | None
    """Type of the nodes that the launcher started by itself; None: they are left alone."""
    not_scaled: frozenset[str]
    """Nodes of the launcher that do nothing but evaluate."""
    start_timeout_s: float
    read_report: Callable[[], BalanceReport | None]
    notify: Callable[[str], None]
    record: ScalingRecord
    revoke: Callable[[str], None] = lambda name: None
    """Ends the token of a node that has left: its machine may be anybody's next."""
    _leaving: set[str] = field(default_factory=set[str])
    """Nodes of the launcher that were asked to leave, until the report knows."""
    _blocked_until: dict[str, float] = field(default_factory=dict[str, float])
    _next_at: float = 0.0

    def poll(self) -> None:
        """Act if it is time to; returns at once."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + POLL_S
        before = self.record
        self._follow_request()
        self._give_up_failed()
        report = self.read_report()
        if report is not None:
            self._follow_rule(report)
            self._forget_left(report)
            if self.record.wanted_gpus is not None:
                self._reconcile(report, self.record.wanted_gpus)
        if self.record != before:
            with suppress(OSError):  # a full disk must not end the run
                self.folder.write_scaling(self.record)

    def close(self) -> None:
        """End the nodes that commands of the user started; the launcher ends the others."""
        for name, node in self.record.nodes.items():
            with suppress(LaunchError):
                self.hands[node.node_type].retire(name)
        for hands in self.hands.values():
            hands.close()
        with suppress(OSError):
            self.folder.write_scaling(replace(self.record, nodes={}))

    # --- what is wanted ---------------------------------------------------------------------------

    def _follow_request(self) -> None:
        try:
            request = self.folder.scale_request()
        except (ConfigError, OSError):
            return
        if request is None or request.at <= self.record.request_at:
            return
        mode = request.mode or self.record.mode
        gpus = self.record.wanted_gpus if request.gpus is None else request.gpus
        self.record = replace(self.record, mode=mode, wanted_gpus=gpus, request_at=request.at)
        size = "" if request.gpus is None else f" {request.gpus} GPUs"
        self._note(
            f"{request.who} asked for{size}{f' mode {request.mode}' if request.mode else ''}"
        )

    def _follow_rule(self, report: BalanceReport) -> None:
        decision = report.decision
        if decision.decided_at <= self.record.decided_at or not report.window.complete:
            return
        is_action = decision.branch is not ScalingBranch.HOLD
        mode, wanted = ScaleMode(self.record.mode), self.record.wanted_gpus
        wanted = wanted_after(
            wanted, target_gpus=decision.target_gpus, is_action=is_action, mode=mode
        )
        self.record = replace(self.record, wanted_gpus=wanted, decided_at=decision.decided_at)
        if is_action and mode is ScaleMode.ACT:
            self._note(f"scaling to {decision.target_gpus} GPUs: {decision.reason}")
        elif is_action:
            self._note(
                f"the rule recommends {decision.target_gpus} GPUs: {decision.reason}; "
                f"`penstock scale {self.folder.path} --to {decision.target_gpus}` does it"
            )

    # --- what is there ----------------------------------------------------------------------------

    def _started(self, now: float) -> Iterator[tuple[str, StartedNode]]:
        if self.launched_type is not None:
            launched = self.launched()
            for name, uptime_s in launched.items():
                if name not in self.not_scaled:
                    yield (
                        name,
                        StartedNode(
                            node_type=self.launched_type,
                            started_at=now - uptime_s,
                            is_restarted=True,
                            is_leaving=name in self._leaving,
                        ),
                    )
            for name in self._leaving - launched.keys():
                yield (
                    name,
                    StartedNode(node_type=self.launched_type, started_at=now, is_leaving=True),
                )
        for name, node in self.record.nodes.items():
            yield (
                name,
                StartedNode(
                    node_type=node.node_type, started_at=node.started_at, is_leaving=node.is_leaving
                ),
            )

    def _give_up_failed(self) -> None:
        for node_type, hands in self.hands.items():
            for name, why in hands.failed().items():
                self._drop(name)
                self._block(node_type, f"{name} did not start: {why}")

    def _forget_left(self, report: BalanceReport) -> None:
        """A node that was asked to leave is gone when a report without it says so; until then an
        old report must not count it."""
        present = {str(node.node_id) for node in report.nodes if node.status != "gone"}
        self._leaving &= present | self.launched().keys()
        for name, node in self.record.nodes.items():
            if node.is_leaving and name not in present:
                self._drop(name)
            elif node.is_leaving:
                self._end(node.node_type, name)  # again if its command failed

    # --- what to do -------------------------------------------------------------------------------

    def _reconcile(self, report: BalanceReport, wanted_gpus: int) -> None:
        nodes = list(
            pool_nodes(
                report,
                dict(self._started(report.at)),
                self.node_types,
                start_timeout_s=self.start_timeout_s,
            )
        )
        reported = {str(node.node_id) for node in report.nodes}
        for node in nodes:  # before the plan, which would start another of this type
            if node.health is NodeHealth.DEAD and node.node_type and node.name not in reported:
                self._block(node.node_type, f"{node.name} did not join in time")
        now = time.monotonic()
        blocked = [name for name, until in self._blocked_until.items() if until > now]
        todo = plan(wanted_gpus, nodes, self.node_types.values(), blocked=blocked)
        of_type = {node.name: node.node_type for node in nodes}
        for retired in todo.retire:
            node_type = of_type[retired.name]
            assert node_type is not None
            self._retire(node_type, retired)
        for node_type in todo.start:
            self._start(node_type)
        if todo.missing_gpus and todo.missing_gpus != self.record.missing_gpus:
            self._note(f"{todo.missing_gpus} of {wanted_gpus} GPUs are missing: no type has room")
        self.record = replace(self.record, missing_gpus=todo.missing_gpus)

    def _start(self, node_type: str) -> None:
        number = self.record.next_number
        self.record = replace(self.record, next_number=number + 1)
        try:
            name = self.hands[node_type].start(number)
        except LaunchError as error:
            self._block(node_type, str(error))
            return
        self._leaving.discard(name)
        if node_type != self.launched_type:
            node = ManagedNode(node_type=node_type, started_at=time.time())
            self.record = replace(self.record, nodes={**self.record.nodes, name: node})
        self._note(f"started {name}")
        self._audit(AdminAction.NODE_STARTED, name, why=f"{self.record.wanted_gpus} GPUs wanted")

    def _retire(self, node_type: str, retired: Retirement) -> None:
        name = retired.name
        if name in self.record.nodes:
            node = replace(self.record.nodes[name], is_leaving=True)
            self.record = replace(self.record, nodes={**self.record.nodes, name: node})
        else:
            self._leaving.add(name)
        self._end(node_type, name)
        self._note(f"retired {name} ({retired.reason})")
        self._audit(AdminAction.NODE_RETIRED, name, why=retired.reason)

    def _end(self, node_type: str, name: str) -> None:
        try:
            self.hands[node_type].retire(name)
        except LaunchError as error:
            self._note(str(error))

    def _drop(self, name: str) -> None:
        nodes = {other: node for other, node in self.record.nodes.items() if other != name}
        self.record = replace(self.record, nodes=nodes)
        self.revoke(name)

    def _block(self, node_type: str, why: str) -> None:
        self._blocked_until[node_type] = time.monotonic() + BLOCKED_S
        self._note(f"{why}; no more nodes of type {node_type} for {BLOCKED_S / 60:.0f} minutes")

    def _note(self, text: str) -> None:
        action = ScaleAction(at=time.time(), what=text)
        actions = (*self.record.actions, action)[-MAX_ACTIONS:]
        self.record = replace(self.record, actions=actions)
        self.notify(f"autoscaler: {text}")

    def _audit(self, action: AdminAction, name: str, *, why: str) -> None:
        with suppress(OSError):
            self.folder.admin_log.append(action, who=WHO, node=name, why=why)


# --- operators ------------------------------------------------------------------------------------


def request_scale(
    folder: RunFolder,
    *,
    gpus: int | None = None,
    mode: ScaleMode | None = None,
    who: str | None = None,
    why: str = "",
) -> ScaleRequest:
    """Ask the launcher of a running run for another size of its pool, or another mode. `who`: by
    default the user of this process."""
    if gpus is None and mode is None:
        raise ConfigError("nothing to change: pass --to N, --mode act or --mode recommend")
    config = folder.read_config()
    _require_bounds(config, gpus, mode)
    if folder.launcher_pid() is None:
        raise LaunchError(
            f"{folder.path} has no launcher, which starts and ends nodes. Start it with `penstock "
            f"run {folder.path}`, or start nodes yourself with `penstock join`"
        )
    who = local_user() if who is None else who
    request = ScaleRequest(at=time.time(), who=who, why=why, gpus=gpus, mode=mode)
    folder.admin_log.append(AdminAction.SCALED, who=who, gpus=gpus, mode=mode, why=why)
    folder.write_scale_request(request)
    return request


def _require_bounds(config: RunConfig, gpus: int | None, mode: ScaleMode | None) -> None:
    terms, scaling = config.dataflow.report, config.autoscale
    if gpus is not None and gpus < 0:
        raise ConfigError(f"--to {gpus}: a pool has 0 or more GPUs")
    if gpus is not None and terms.max_gpus is not None and gpus > terms.max_gpus:
        raise ConfigError(f"--to {gpus} is above dataflow.report.max_gpus {terms.max_gpus}")
    is_bounded = terms.max_gpus is not None or all(
        one.max_nodes is not None for one in scaling.node_types.values()
    )
    if mode is ScaleMode.ACT and not is_bounded:
        raise ConfigError(
            "--mode act without a limit could start any number of nodes; set "
            "dataflow.report.max_gpus in the run file, and start the run again"
        )
