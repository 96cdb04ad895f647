# SPDX-License-Identifier: Apache-2.0
"""What `penstock run` and `penstock demo` share: signals, the display, and the closing message."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

from penstock.cli.output import pluralise, print_note
from penstock.runs.launch import Display, ForcedStop, LaunchResult, StopRequest, launch
from penstock.runs.model_revisions import pin_models
from penstock.runs.target import RunTarget

EXIT_BUDGET = 6
"""A budget is spent; `budget` in the run file."""


def launch_and_show(
    target: RunTarget,
    *,
    headless: bool,
    sources: Mapping[str, str] | None = None,
    accept_changes: bool = False,
    dashboard: bool = False,
) -> LaunchResult:
    """Launch a run with a display on stderr, and a dashboard if asked to; signals stop it."""
    config = pin_models(target.config, target.folder, print_note)  # here ^C ends a download at once
    with stop_on_signals() as stop, _browser(target) if dashboard else nullcontext():
        return launch(
            config,
            target.folder,
            python_path=target.python_path,
            display=choose_display(headless=headless),
            stop=stop,
            sources=sources,
            accept_changes=accept_changes,
        )


def _browser(target: RunTarget) -> AbstractContextManager[None]:
    from penstock.dashboard.serving import background_dashboard

    return background_dashboard(target.folder, print_note)


@contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """The first SIGINT, SIGTERM or SIGHUP stops the run gracefully; a second one kills it."""
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


def choose_display(*, headless: bool, hint: str = "") -> Display:
    """The live panel on a terminal, plain lines elsewhere; `hint`: how to stop the run."""
    if headless or not sys.stderr.isatty():
        from penstock.cli.progress_lines import ProgressLines

        return ProgressLines()
    from penstock.cli.live_panel import LivePanel

    return LivePanel(hint=hint) if hint else LivePanel()


def print_result(result: LaunchResult) -> int:
    """Print how the launch ended and what to do next; returns the exit code."""
    where, here = Path(result.folder), Path.cwd()
    if where.is_relative_to(here):
        where = where.relative_to(here)
    done = (
        f"{pluralise(result.steps, 'step')}, "
        f"{pluralise(result.trajectories, 'trajectory', 'trajectories')}"
    )
    if result.was_finished:
        print_note(f"already finished: {done} in {where}")
        return 0
    if result.budget:
        print_note(
            f"stopped at step {result.steps}: {result.budget}, then resume with: penstock run "
            f"{where}"
        )
        return EXIT_BUDGET
    if result.signal:
        print_note(
            f"stopped by {signal.Signals(result.signal).name} at step {result.steps}; no data is "
            f"lost. Resume with: penstock run {where}"
        )
        return 128 + result.signal
    reward = "" if result.reward is None else f", reward {result.reward:.3f}"
    print_note(f"finished: {done}{reward} in {result.seconds:.0f} s; results are in {where}")
    return 0
