# SPDX-License-Identifier: Apache-2.0
"""From a config and a folder to a finished run: the one path that `run` and `demo` share.

Owns the order of things: lock, compare configs, start, watch, stop. Wires the launcher, the watch
and the display together; each of them knows nothing of the others.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from penstock.cli.output import note
from penstock.config import RunConfig, changed, differences, identity
from penstock.dataflow.client.dataflow import StatusClient
from penstock.dataflow.sources import are_same_tasks, preferred_digest
from penstock.errors import ConfigError, LaunchError
from penstock.fleet.launchers.local import POLL_S, LocalLauncher
from penstock.fleet.run_folder import FinishRecord, LauncherRecord, RunFolder, wait_for_port
from penstock.fleet.services import local_services
from penstock.runs.monitor import ErrorTail, RunView, StatusPoller
from penstock.wire.auth import Role, Signer

REDRAW_S = 0.5
NODE_EXIT_TIMEOUT_S = 5.0
"""Nodes leave by themselves when the run is complete; they get this long."""
FINISH_TIMEOUT_S = 60.0
"""The dataflow must say `finished` so long after the last trainer ended."""
READER_TTL_S = 3600.0


class Display(Protocol):
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
    """The signal that stopped it, 0 for none."""
    was_finished: bool = False
    """There was nothing left to do."""


@dataclass(slots=True)
class StopRequest:
    """A request to stop, made by a signal."""

    number: int = 0
    is_final: bool = False
    """Everything is being killed; further signals change nothing."""


class ForcedStop(Exception):
    """A second signal: end everything at once."""


def launch(
    config: RunConfig,
    folder: RunFolder,
    *,
    python_path: tuple[str, ...],
    headless: bool,
    sources: Mapping[str, str] | None = None,
    accept_changes: bool = False,
) -> LaunchResult:
    """Run or resume until the last step, a signal, or an error that will not pass.

    sources: digests of the tasks of the user's own sources, as far as they are known."""
    began_at = time.monotonic()
    with folder.locked():
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
        Signer.create(folder.keys, config.name)
        endpoints = folder.allocate_endpoints(
            Path.cwd(), python_path, num_partitions=config.dataflow.partitions
        )
        wait_for_port(endpoints.dataflow, timeout_s=10.0, what="dataflow")
        wait_for_port(endpoints.weights, timeout_s=10.0, what="weight server")

        def make_reader() -> StatusClient:
            token = folder.token(config.name, Role.READER, ttl_s=READER_TTL_S)
            return StatusClient(endpoints.dataflow, token)

        with _signals() as stop, StatusPoller(config.name, make_reader) as poller:
            display = _display(headless=headless)
            try:
                _supervise(config, folder, poller, display, stop)
                display.update(poller.view())
            finally:
                display.close()
            result = _launch_result(folder, poller, stop, time.monotonic() - began_at)
        if result.finished:
            folder.write_finish(
                FinishRecord(
                    finished_at=time.time(), steps=result.steps, trajectories=result.trajectories
                )
            )
        return result


def _claim_folder(
    config: RunConfig, folder: RunFolder, sources: Mapping[str, str], *, accept_changes: bool
) -> FinishRecord | None:
    """Make the folder this config's own, or say why it is not; the finish, if nothing is left."""
    is_new = not folder.config_file.exists()
    known = config if is_new else folder.last_started_config() or folder.read_config()
    changes = [*changed(identity(known), identity(config)), *_changed_sources(folder, sources)]
    if changes and not accept_changes:
        listed = "\n".join(f"    {change}" for change in changes)
        raise ConfigError(
            f"{folder.path} holds a run of another config or other data:\n{listed}\n"
            "  give the new config another name, or resume with these changes by --accept-changes"
        )
    if changes or differences(known, config):
        folder.clear_finish()  # first: killed between the two, the new config is not finished
    folder.write_config(config)
    folder.write_last_started_config(config)
    digests = folder.sources()
    for name, digest in sources.items():
        digests[name] = preferred_digest(digests.get(name, digest), digest)
    folder.write_source_digests(digests)
    return folder.finish()


def _changed_sources(folder: RunFolder, sources: Mapping[str, str]) -> Iterator[str]:
    known = folder.sources()
    for name, digest in sources.items():
        if not are_same_tasks(known.get(name, digest), digest):
            yield f"source {name}: its tasks are not those that the run began with"


def _supervise(
    config: RunConfig, folder: RunFolder, poller: StatusPoller, display: Display, stop: StopRequest
) -> None:
    began_at = time.time()
    number, log_dir = folder.new_attempt()

    def notify(what: object) -> None:
        poller.notify(str(what))
        display.notify(str(what))

    launcher = LocalLauncher(
        local_services(config, folder),
        log_dir=log_dir,
        work_dir=Path(folder.endpoints().work_dir),
        on_exit=notify,
        monitor=poller,
    )

    def record() -> None:
        launcher_record = LauncherRecord(
            pid=os.getpid(), started_at=began_at, attempt=number, services=launcher.pids()
        )
        try:
            folder.write_launcher(launcher_record)
        except OSError as error:  # only people read it; a full disk must not end the run
            notify(f"cannot record the pids of this run in {folder.path}: {error}; going on")

    try:
        launcher.start()
        record()
        tail = ErrorTail(launcher.logs())
        _supervise_loop(launcher, poller, display, tail, stop, record)
        if stop.number:
            display.notify("stopping: nodes hand back their work (a second signal ends it at once)")
        else:
            launcher.wait_for_nodes(NODE_EXIT_TIMEOUT_S)
        launcher.stop()
    except ForcedStop:
        return
    finally:
        stop.is_final = True
        launcher.kill()
        record()


def _supervise_loop(
    launcher: LocalLauncher,
    poller: StatusPoller,
    display: Display,
    tail: ErrorTail,
    stop: StopRequest,
    record: Callable[[], None],
) -> None:
    """consumes: deaths, errors in logs, status · produces: restarts, what is shown
    waits for: the next twentieth of a second · woken by: nothing; ends at a signal or the last
    step"""
    redraw_at = 0.0
    trained_at: float | None = None
    while not stop.number:
        if launcher.poll():
            record()
        now = time.monotonic()
        if launcher.has_finished_training():
            trained_at = trained_at or now
            if poller.is_finished():
                return
            if now - trained_at > FINISH_TIMEOUT_S:
                raise LaunchError(
                    f"every trainer ended well, but the dataflow does not say that the run is "
                    f"finished after {FINISH_TIMEOUT_S:.0f} s; see {launcher.logs()['dataflow']}"
                )
        if now >= redraw_at:
            redraw_at = now + REDRAW_S
            if (error := tail.newest()) is not None:
                poller.notify(error)
            display.update(poller.view())
        time.sleep(POLL_S)


@contextmanager
def _signals() -> Generator[StopRequest]:
    """SIGINT, SIGTERM and SIGHUP ask for an orderly stop; a second one is not asked."""
    stop = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_final:
            return
        if stop.number:
            stop.is_final = True
            raise ForcedStop
        stop.number = number

    handled = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup penstock run`
        handled.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _display(*, headless: bool) -> Display:
    if headless or not sys.stderr.isatty():
        from penstock.cli.progress_lines import ProgressLines

        return ProgressLines()
    from penstock.cli.live_panel import Panel

    return Panel()


def _launch_result(
    folder: RunFolder, poller: StatusPoller, stop: StopRequest, seconds: float
) -> LaunchResult:
    status = poller.view().status
    policies = status.policies if status else ()
    rewards = [policy.reward_mean for policy in policies if policy.reward_mean is not None]
    return LaunchResult(
        folder=str(folder.path),
        finished=not stop.number and poller.is_finished(),
        steps=min((policy.number for policy in policies), default=0),
        trajectories=status.trajectories if status else 0,
        reward=rewards[0] if len(rewards) == 1 else None,
        seconds=round(seconds, 2),
        signal=stop.number,
    )


def print_result(result: LaunchResult) -> int:
    """Tell people how it ended and what they can do now; the exit code."""
    where = _relative_to_cwd(Path(result.folder))
    if result.was_finished:
        note(
            f"finished before: {result.steps} steps, {result.trajectories:,} trajectories in "
            f"{where}"
        )
        return 0
    if result.signal:
        note(
            f"stopped by {signal.Signals(result.signal).name} at step {result.steps}; nothing is "
            f"lost. Resume with: penstock run {where}"
        )
        return 128 + result.signal
    reward = "" if result.reward is None else f", reward {result.reward:.3f}"
    note(
        f"finished: {result.steps} steps, {result.trajectories:,} trajectories{reward} in "
        f"{result.seconds:.0f} s; everything is in {where}"
    )
    return 0


def _relative_to_cwd(path: Path) -> Path:
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path
