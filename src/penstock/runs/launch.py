# SPDX-License-Identifier: Apache-2.0
"""Launches or resumes a run on this machine and supervises it until it ends.

Owns the order: lock the folder, compare configs, start services, watch, stop. Wires launcher,
status poller and display together; none of them knows the others. Installs no signal handlers: a
`StopRequest` ends the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.config import RunConfig, config_changes
from penstock.dataflow.service.read_prompts import with_prompts
from penstock.dataflow.sources import preferred_digest
from penstock.errors import ConfigError, LaunchError, PenstockError, Stalled
from penstock.fleet.device_plan import deal_devices
from penstock.fleet.launchers.local import POLL_S, LocalLauncher
from penstock.fleet.ports import wait_for_port
from penstock.fleet.run_folder import (
    EndRecord,
    FinishRecord,
    LauncherRecord,
    RunFolder,
)
from penstock.fleet.services import local_services
from penstock.observe.admin_log import AdminAction
from penstock.redaction import hide_secrets
from penstock.runs.control import make_status_client
from penstock.runs.curves import reward_by_step
from penstock.runs.model_revisions import pin_models
from penstock.runs.monitor import ErrorTail, RunView, StatusPoller
from penstock.runs.progress import progress_of, read_progress
from penstock.runs.resume_changes import find_resume_changes
from penstock.runs.scaling import ReportPoller, Scaler
from penstock.runs.scaling_setup import build_scaler
from penstock.runs.spending import BudgetGuard
from penstock.runs.stall_guard import StallGuard
from penstock.runs.starters import build_starter
from penstock.runs.user_code import record_code
from penstock.wire.auth import Signer

REDRAW_S = 0.5
LAST_CHECKPOINT_S = 30.0
"""After the last step, for trainers that were started elsewhere to publish and save."""
NODE_EXIT_TIMEOUT_S = 5.0
"""Maximum wait for nodes to exit by themselves after the run is complete."""
OTHER_NODES_TIMEOUT_S = 30.0
"""Maximum wait for gateways and joined nodes to leave after the run is complete."""
BUDGET_STOP_S = 1800.0
"""For trainers to finish their step and save it when a budget is spent; no node samples then."""
FINISH_TIMEOUT_S = 60.0
"""Maximum wait for the dataflow to report `finished` after the last trainer exits and the last
evaluation ends."""


@dataclass(slots=True)
class FinishTimer:
    """How long the end of a run may take once its trainers have exited. An evaluation in progress
    may take as long as it needs: each question has a time limit."""

    _since: float | None = None

    def is_overdue(self, now: float, limit_s: float, *, is_evaluating: bool) -> bool:
        if self._since is None or is_evaluating:
            self._since = now
        return now - self._since > limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGuards:
    """What ends a run from within."""

    stalls: StallGuard
    budget: BudgetGuard


class Display(Protocol):
    """Shows a run to people. All calls come from the thread that called `launch`."""

    def update(self, view: RunView) -> None:
        """The run as it is now; called about twice a second."""
        ...

    def notify(self, text: str) -> None:
        """One event: a service that exited, a graceful stop."""
        ...

    def close(self) -> None: ...


class NoDisplay:
    """Shows nothing."""

    def update(self, view: RunView) -> None: ...

    def notify(self, text: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a launch ended."""

    folder: str
    finished: bool
    steps: int
    trajectories: int
    reward: float | None
    seconds: float
    signal: int = 0
    """The signal that stopped it; 0 for none."""
    was_finished: bool = False
    """The run was already complete; nothing was started."""
    budget: str = ""
    """The budget that ended it; empty for none."""


@dataclass(slots=True)
class StopRequest:
    """Set by a signal handler or another thread to stop a run gracefully."""

    number: int = 0
    """The signal; 0 while the run should continue."""
    is_final: bool = False
    """Everything is being killed; further requests have no effect."""
    budget: str = ""
    """The budget that is spent; empty while the run should continue."""

    @property
    def is_set(self) -> bool:
        return bool(self.number or self.budget)


class ForcedStop(KeyboardInterrupt):
    """Raised by a signal handler in the launching thread: kill everything without waiting."""


def launch(
    config: RunConfig,
    folder: RunFolder,
    *,
    python_path: tuple[str, ...] = (),
    display: Display | None = None,
    stop: StopRequest | None = None,
    sources: Mapping[str, str] | None = None,
    accept_changes: bool = False,
) -> LaunchResult:
    """Start or resume a run and supervise it until its last step, a stop request or a permanent
    error.

    python_path: folders of the user's modules.
    sources: digests of the tasks of user-defined sources, where known (`ensure_startable`).
    accept_changes: resume although the config or dataset differs from the one it started with."""
    display, stop = display or NoDisplay(), stop or StopRequest()
    began_at = time.monotonic()
    with folder.locked():
        config = with_prompts(pin_models(config, folder, display.notify))
        finish = _claim_folder(config, folder, sources or {}, accept_changes=accept_changes)
        if finish is not None:
            return LaunchResult(
                folder=str(folder.path),
                finished=True,
                steps=finish.steps,
                trajectories=finish.trajectories,
                reward=None,
                seconds=0.0,
                was_finished=True,
            )
        if budget := BudgetGuard(folder, config.budget).spent():
            return _nothing_left(folder, config, budget)
        Signer.create(folder.keys, config.name)
        endpoints = folder.allocate_endpoints(
            Path.cwd(),
            python_path,
            num_partitions=config.dataflow.partitions,
            network=config.network,
        )
        wait_for_port(endpoints.dataflow, timeout_s=10.0, what="dataflow")
        wait_for_port(endpoints.weights, timeout_s=10.0, what="weight server")

        make_reader = partial(make_status_client, folder, config.name)
        rewards = reward_by_step(folder.metrics)
        with (
            _end_recorded(folder, stop),
            StatusPoller(config.name, make_reader, rewards) as poller,
        ):
            try:
                if not stop.number:
                    code_note = record_code(config, folder, endpoints.python_path)
                    _supervise(config, folder, poller, display, stop, code_note)
                if not stop.is_set:  # after a stop the last view is old, and so are its alarms
                    display.update(poller.view())
            finally:
                display.close()
            result = _launch_result(config, folder, poller, stop, time.monotonic() - began_at)
        if result.finished:
            folder.write_finish(
                FinishRecord(
                    finished_at=time.time(), steps=result.steps, trajectories=result.trajectories
                )
            )
        return result


def _nothing_left(folder: RunFolder, config: RunConfig, budget: str) -> LaunchResult:
    """The result of a run that is resumed with a spent budget: nothing was started."""
    progress = read_progress(folder, config)
    return LaunchResult(
        folder=str(folder.path),
        finished=False,
        steps=progress.step,
        trajectories=progress.trajectories or 0,
        reward=progress.reward,
        seconds=0.0,
        budget=budget,
    )


@contextmanager
def _end_recorded(folder: RunFolder, stop: StopRequest) -> Generator[None]:
    """Record why this launch ends before the last step, for `penstock status`."""
    folder.clear_end()
    try:
        yield
    except PenstockError as error:
        with suppress(OSError):  # for people only; the disk may be the reason
            folder.write_end(EndRecord(ended_at=time.time(), error=hide_secrets(str(error))))
        raise
    if stop.is_set:
        with suppress(OSError):
            end = EndRecord(ended_at=time.time(), signal=stop.number, budget=stop.budget)
            folder.write_end(end)


def _claim_folder(
    config: RunConfig, folder: RunFolder, sources: Mapping[str, str], *, accept_changes: bool
) -> FinishRecord | None:
    """Claim the folder for this config, or raise if it belongs to another. Returns the finish
    record if the run is already complete."""
    is_new = not folder.config_file.exists()
    known = config if is_new else folder.last_started_config() or folder.read_config()
    changes = find_resume_changes(config, folder, sources)
    if changes and not accept_changes:
        listed = "\n".join(f"    {change}" for change in changes)
        raise ConfigError(
            f"{folder.path} was started with a different config or dataset:\n{listed}\n"
            "  Use another `name`, or pass --accept-changes to resume anyway"
        )
    all_changes = dict.fromkeys((*changes, *config_changes(known, config)))
    if all_changes:
        folder.clear_finish()  # first: killed between the two, the new config is not finished
    folder.write_config(config)
    folder.write_last_started_config(config)
    digests = folder.sources()
    for name, digest in sources.items():
        digests[name] = preferred_digest(digests.get(name, digest), digest)
    folder.write_source_digests(digests)
    finish = folder.finish()
    if finish is None:
        action = AdminAction.RUN_STARTED if is_new else AdminAction.RUN_RESUMED
        folder.admin_log.append(action, changes="; ".join(all_changes))
    return finish


def _supervise(
    config: RunConfig,
    folder: RunFolder,
    poller: StatusPoller,
    display: Display,
    stop: StopRequest,
    code_note: str,
) -> None:
    began_at = time.time()
    number, log_dir = folder.new_attempt()

    def notify(what: object) -> None:
        poller.notify(str(what))
        display.notify(str(what))

    if code_note:
        notify(code_note)
        line = json.dumps({"service": "launcher", "level": "warning", "msg": code_note})
        (log_dir / "launcher.log").write_text(line + "\n")

    work_dir = Path(folder.endpoints().work_dir)
    starter, num_devices = build_starter(config, work_dir, log_dir, notify)
    launcher = LocalLauncher(
        local_services(config, folder, deal_devices(config, num_devices)),
        log_dir=log_dir,
        starter=starter,
        on_exit=notify,
        monitor=poller,
        trains=not any(config.for_policy(name).training.external for name in config.trained),
    )

    def record() -> None:
        launcher_record = LauncherRecord(
            pid=os.getpid(), started_at=began_at, attempt=number, services=launcher.pids()
        )
        try:
            folder.write_launcher(launcher_record)
        except OSError as error:  # for people only; a full disk must not end the run
            notify(f"cannot record process ids in {folder.path}: {error}; the run continues")

    reports = ReportPoller(partial(make_status_client, folder, config.name))
    scaler = build_scaler(
        config,
        folder,
        launcher,
        log_dir=log_dir,
        read_report=lambda: reports.newest,
        notify=notify,
    )
    try:
        launcher.start()
        record()
        tail = ErrorTail(launcher.logs)
        guards = RunGuards(
            stalls=StallGuard(launcher, config.stall, log_dir, notify),
            budget=BudgetGuard(folder, config.budget),
        )
        with reports:
            _supervise_loop(launcher, scaler, poller, display, tail, stop, record, guards)
        guards.budget.close(time.monotonic(), poller.view())
        if failure := poller.failure():
            display.notify("stopping: every group fails")
            scaler.close()
            launcher.stop()
            raise LaunchError(
                f"{failure} with `penstock run {folder.path}`; the logs are in {log_dir}"
            )
        if stop.budget:
            display.notify(f"stopping, with a checkpoint: {stop.budget}")
            launcher.stop(trainer_timeout_s=BUDGET_STOP_S)
        elif stop.number:
            display.notify("stopping: nodes return their work (a second signal kills it)")
        else:
            launcher.wait_for_nodes(NODE_EXIT_TIMEOUT_S)
            _wait_for_other_nodes(poller, own=launcher.logs().keys())
        scaler.close()
        launcher.stop()
    except ForcedStop:
        return
    except Stalled:
        launcher.stop()
        raise
    finally:
        stop.is_final = True
        launcher.kill()
        record()


def _wait_for_other_nodes(poller: StatusPoller, own: Collection[str]) -> None:
    """Let gateways and nodes that joined load the last version before its server stops."""
    deadline = time.monotonic() + OTHER_NODES_TIMEOUT_S
    while poller.live_nodes() - set(own) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _supervise_loop(
    launcher: LocalLauncher,
    scaler: Scaler,
    poller: StatusPoller,
    display: Display,
    tail: ErrorTail,
    stop: StopRequest,
    record: Callable[[], None],
    guards: RunGuards,
) -> None:
    """consumes: exits, errors in logs, status, requests to scale
    produces: restarts, nodes started and retired, display updates
    waits for: the next POLL_S · woken by: nothing; ends on a stop request, after the last step,
    when every group fails, when it stalls, or when a budget is spent"""
    redraw_at = 0.0
    finish, finished_at = FinishTimer(), None
    while not stop.is_set and not poller.failure():
        if not launcher.has_finished_training() and not poller.is_finished():
            scaler.poll()
        if launcher.poll():
            record()
        now = time.monotonic()
        if not launcher.trains and poller.is_finished():
            finished_at = finished_at or now
            if now - finished_at > LAST_CHECKPOINT_S:
                return
        elif launcher.has_finished_training():
            if poller.is_finished():
                return
            limit_s = min(FINISH_TIMEOUT_S, guards.stalls.limit_s)
            if finish.is_overdue(now, limit_s, is_evaluating=poller.is_evaluating()):
                guards.stalls.trainers_exited(poller.view(), limit_s)
                finish = FinishTimer()
        if now >= redraw_at:
            redraw_at = now + REDRAW_S
            if (error := tail.newest()) is not None:
                poller.notify(error)
            view = poller.view()
            guards.stalls.check(now, view)
            stop.budget = guards.budget.check(now, view)
            display.update(view)
        time.sleep(POLL_S)


def _launch_result(
    config: RunConfig,
    folder: RunFolder,
    poller: StatusPoller,
    stop: StopRequest,
    seconds: float,
) -> LaunchResult:
    """The services have exited. After a stop the ledger knows more than the last status: the
    trainers finished their step, or no status was ever read."""
    status = poller.view().status
    if stop.is_set or status is None:
        progress = read_progress(folder, config)
    else:
        progress = progress_of(status, time.time())
    return LaunchResult(
        folder=str(folder.path),
        finished=not stop.is_set and poller.is_finished(),
        steps=progress.step,
        trajectories=progress.trajectories or 0,
        reward=progress.reward,
        seconds=round(seconds, 2),
        signal=stop.number,
        budget=stop.budget,
    )
