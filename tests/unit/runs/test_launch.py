# SPDX-License-Identifier: Apache-2.0
"""Launching: claims, kills, full disks, stop requests. Services are stand-ins or never start."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.contract.dataflow_server import small_config
from tests.unit.runs.recorded_steps import record_steps

from penstock.cli.progress_lines import ProgressLines
from penstock.config import RunConfig, demo_config
from penstock.errors import ConfigError, LaunchError
from penstock.fleet.launchers.local import EXIT_FENCED
from penstock.fleet.run_folder import EndRecord, FinishRecord, LauncherRecord, RunFolder
from penstock.fleet.services import ServiceKind, ServiceSpec
from penstock.runs.launch import (
    FINISH_TIMEOUT_S,
    FinishTimer,
    LaunchResult,
    StopRequest,
    launch,
)
from penstock.runs.monitor import RunView, StatusPoller
from penstock.wire.auth import Signer


class Started(Exception):
    """The launch got past the question whether anything is left to do."""


def start(folder: RunFolder, config: RunConfig, *, accept_changes: bool = False) -> LaunchResult:
    return launch(config, folder, accept_changes=accept_changes)


def test_an_evaluation_after_the_last_step_may_take_as_long_as_it_needs() -> None:
    timer = FinishTimer()
    ended_at = 10 * int(FINISH_TIMEOUT_S)
    for now in range(0, ended_at + 1, 30):
        assert not timer.is_overdue(now, FINISH_TIMEOUT_S, is_evaluating=True)
    assert not timer.is_overdue(ended_at + FINISH_TIMEOUT_S, FINISH_TIMEOUT_S, is_evaluating=False)
    assert timer.is_overdue(ended_at + FINISH_TIMEOUT_S + 1, FINISH_TIMEOUT_S, is_evaluating=False)


@pytest.mark.parametrize("moment", ["clear_finish", "write_config"])
def test_a_kill_while_changes_are_accepted_does_not_mark_the_run_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = RunFolder(tmp_path / "r")
    folder.write_config(demo_config(0))
    folder.write_finish(FinishRecord(finished_at=1.0, steps=2, trajectories=3))
    assert start(folder, demo_config(0)).was_finished

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    def started(*_: object) -> None:
        raise Started

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, moment, die)
        start(folder, demo_config(1), accept_changes=True)
    monkeypatch.setattr(Signer, "create", started)
    with pytest.raises(ConfigError, match="different config or dataset"):
        start(folder, demo_config(1))
    with pytest.raises(Started):
        start(folder, demo_config(1), accept_changes=True)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise Started

    monkeypatch.setattr(Signer, "create", stop)


def with_changes(config: RunConfig, **training: object) -> RunConfig:
    return config.model_copy(update={"training": config.training.model_copy(update=training)})


@pytest.mark.usefixtures("started")
def test_settings_that_may_change_on_resume_are_accepted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    constant = with_changes(demo_config(0), lr_scheduler_type="constant")
    folder.write_config(constant)
    folder.write_finish(FinishRecord(finished_at=1.0, steps=2, trajectories=3))
    longer = with_changes(constant, steps=999, checkpoint_every=3)
    with pytest.raises(Started):
        start(folder, longer)  # not finished any more
    assert folder.read_config() == longer == folder.last_started_config()
    with pytest.raises(ConfigError, match=r"training\.epochs: 1 -> 2\n") as refused:
        start(folder, with_changes(longer, epochs=2, steps=5))
    assert "steps" not in str(refused.value)


@pytest.mark.usefixtures("started")
def test_a_config_edited_by_hand_in_the_run_folder_is_noticed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(Started):
        start(folder, demo_config(0))
    edited = with_changes(demo_config(0), learning_rate=0.5)
    folder.write_config(edited)
    with pytest.raises(ConfigError, match=r"training\.learning_rate: 0\.002 -> 0\.5"):
        start(folder, edited)
    with pytest.raises(Started):
        start(folder, edited, accept_changes=True)
    with pytest.raises(Started):
        start(folder, edited)


@pytest.mark.usefixtures("started")
def test_a_changed_dataset_is_rejected_until_it_is_accepted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")

    def begin(digest: str, *, accept_changes: bool = False) -> None:
        with pytest.raises(Started):
            launch(demo_config(0), folder, sources={"train": digest}, accept_changes=accept_changes)

    begin("a")
    begin("a")
    with pytest.raises(ConfigError, match="source train: its tasks differ"):
        begin("b")
    begin("b", accept_changes=True)
    begin("b")
    begin("b/200:c")  # looked at further than before
    begin("b")  # had no time to look as far
    with pytest.raises(ConfigError, match="source train: its tasks differ"):
        begin("b/200:d")
    begin("b/300:e")  # another limit, from now on compared by that
    with pytest.raises(ConfigError, match="source train: its tasks differ"):
        begin("b/300:f")
    begin("x", accept_changes=True)
    assert folder.sources() == {"train": "x"}


class StopAtFirstUpdate:
    """A display that keeps what it is given, and stops the run once it is supervised."""

    def __init__(self, stop: StopRequest) -> None:
        self.notes: list[str] = []
        self.is_closed = False
        self._stop = stop

    def update(self, view: RunView) -> None:
        self._stop.number = signal.SIGTERM

    def notify(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.is_closed = True


def service_that(does: str) -> ServiceSpec:
    return ServiceSpec(
        name="dataflow",
        kind=ServiceKind.SERVER,
        command=(sys.executable, "-S", "-c", f"import sys, time; {does}; time.sleep(600)"),
        build_env=lambda: dict(os.environ),
    )


def start_only(monkeypatch: pytest.MonkeyPatch, service: ServiceSpec) -> None:
    """A launch starts this service and no other."""

    def services(config: RunConfig, folder: RunFolder, devices: object) -> Sequence[ServiceSpec]:
        return [service]

    monkeypatch.setattr("penstock.runs.launch.local_services", services)


@pytest.fixture
def idle_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only service of a run is a process that sleeps."""
    start_only(monkeypatch, service_that("pass"))


@pytest.mark.usefixtures("idle_service")
def test_a_launch_installs_no_signal_handlers_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    seen: list[object] = []

    class Spy(StopAtFirstUpdate):
        def update(self, view: RunView) -> None:
            seen.append([signal.getsignal(number) for number in numbers])
            super().update(view)

    stop = StopRequest()
    display = Spy(stop)
    result = launch(demo_config(0), RunFolder(tmp_path / "r"), display=display, stop=stop)
    assert (result.signal, result.finished) == (signal.SIGTERM, False)
    assert seen and all(handlers == before for handlers in seen)
    assert display.is_closed and any("stopping" in note for note in display.notes)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.usefixtures("idle_service")
def test_a_run_whose_every_attempt_fails_ends_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failure(poller: StatusPoller) -> str:
        return "every group failed: no tool"

    monkeypatch.setattr(StatusPoller, "failure", failure)
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(LaunchError, match="every group failed: no tool with `penstock run") as e:
        launch(demo_config(0), folder)
    assert str(folder.path) in str(e.value) and "attempt_1" in str(e.value)
    assert folder.launcher_pid() is None and folder.finish() is None


def test_a_launch_that_is_stopped_before_it_starts_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a service was started")

    monkeypatch.setattr("penstock.runs.launch.local_services", refuse)
    stop = StopRequest(number=signal.SIGINT)
    result = launch(demo_config(0), RunFolder(tmp_path / "r"), stop=stop)
    assert (result.signal, result.finished) == (signal.SIGINT, False)


@pytest.mark.usefixtures("idle_service")
def test_pids_that_cannot_be_recorded_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(folder: RunFolder, launcher: LauncherRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunFolder, "write_launcher", full)
    stop = StopRequest()
    display = StopAtFirstUpdate(stop)
    result = launch(demo_config(0), RunFolder(tmp_path / "r"), display=display, stop=stop)
    assert result.signal == signal.SIGTERM
    assert any("cannot record process ids" in note for note in display.notes)


def test_a_graceful_stop_does_not_repeat_an_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alarm = '{"level": "error", "msg": "policy gets no batch"}'
    service = service_that(f"print({alarm!r}, file=sys.stderr, flush=True)")
    start_only(monkeypatch, service)
    stop = StopRequest()

    class StopAtAlarm(ProgressLines):
        def update(self, view: RunView) -> None:
            super().update(view)
            if view.note:
                stop.number = signal.SIGTERM

    launch(demo_config(0), RunFolder(tmp_path / "r"), display=StopAtAlarm(), stop=stop)
    written = capsys.readouterr().err
    assert written.count("policy gets no batch") == 1
    assert written.index("policy gets no batch") < written.index("stopping")


@pytest.mark.usefixtures("idle_service")
def test_a_stop_before_the_dataflow_answers_reports_the_recorded_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    asyncio.run(record_steps(folder, small_config(), num_steps=2))
    stop = StopRequest()
    result = launch(small_config(), folder, display=StopAtFirstUpdate(stop), stop=stop)
    assert (result.steps, result.trajectories, result.reward) == (2, 8, 0.5)


@pytest.mark.usefixtures("idle_service")
def test_the_reason_of_a_stop_is_kept_until_the_next_launch(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    stop = StopRequest()
    launch(demo_config(0), folder, display=StopAtFirstUpdate(stop), stop=stop)
    end = folder.end()
    assert end is not None and (end.signal, end.error) == (signal.SIGTERM, "")
    seen: list[EndRecord | None] = []
    stop = StopRequest()

    class Spy(StopAtFirstUpdate):
        def update(self, view: RunView) -> None:
            seen.append(folder.end())
            super().update(view)

    launch(demo_config(0), folder, display=Spy(stop), stop=stop)
    assert seen[0] is None


def test_the_error_that_ends_a_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ServiceSpec(
        name="trainer-policy",
        kind=ServiceKind.TRAINER,
        command=(sys.executable, "-S", "-c", f"raise SystemExit({EXIT_FENCED})"),
        build_env=lambda: dict(os.environ),
    )
    start_only(monkeypatch, broken)
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(LaunchError, match="another trainer took over"):
        launch(demo_config(0), folder)
    end = folder.end()
    assert end is not None and "another trainer took over" in end.error
