# SPDX-License-Identifier: Apache-2.0
"""Signals and displays of `penstock run`."""

from __future__ import annotations

import os
import signal

import pytest

from penstock.cli.launching import choose_display, print_result, stop_on_signals
from penstock.cli.progress_lines import ProgressLines
from penstock.runs.launch import ForcedStop, LaunchResult


def test_the_first_signal_stops_gracefully_and_the_second_kills() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.number, stop.is_final) == (signal.SIGTERM, False)
        with pytest.raises(ForcedStop):
            os.kill(os.getpid(), signal.SIGINT)
        assert (stop.number, stop.is_final) == (signal.SIGTERM, True)
        os.kill(os.getpid(), signal.SIGINT)  # everything is being killed already
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_without_a_terminal_the_display_is_plain_lines() -> None:
    assert isinstance(choose_display(headless=True), ProgressLines)


def test_a_stopped_run_says_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    result = LaunchResult(
        folder="/r",
        finished=False,
        steps=3,
        trajectories=9,
        reward=None,
        seconds=1.0,
        signal=signal.SIGTERM,
    )
    assert print_result(result) == 128 + signal.SIGTERM
    assert (
        capsys.readouterr().err
        == "stopped by SIGTERM at step 3; no data is lost. Resume with: penstock run /r\n"
    )
