# SPDX-License-Identifier: Apache-2.0
"""`penstock status`: the state of a run, live or ended, once or until it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.fleet.run_folder import RunFolder
    from penstock.runs.state import RunSummary


LONG_WAIT_S = 15.0
"""A chain of waits is shown when its last one takes this long."""
SIGNAL = ("SIG", "signal ")
"""How the name of a signal begins; a run may also have been stopped by its budget."""


def status(run: Path, /, *, watch: bool = False, json: bool = False) -> int:
    """Show a run's state and what it is waiting for; of an ended run, how far it got and why it
    ended.

    Args:
        run: Run folder, or its config file.
        watch: Keep the display up to date until the run ends or Ctrl-C, which leaves the run alone.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.runs.state import RunState, read_summary
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    found = read_summary(folder)
    if watch and found.state is RunState.RUNNING:
        if not _watch(folder, found.name, run):
            return 0
        found = read_summary(folder)
    if json:
        print_json(_as_json(folder, found))
    elif found.status is not None:
        _draw(folder, found, hint=f"`penstock stop {run}` stops it")
    else:
        print_text("\n".join(_lines(run, found, folder)))
    return 0


def _as_json(folder: RunFolder, found: RunSummary) -> dict[str, object]:
    from penstock.runs.evaluations import read_best
    from penstock.runs.state import RunState

    return {
        "run": str(folder.path),
        "state": found.state,
        "running": found.state is RunState.RUNNING,
        "pid": found.pid,
        "finished": found.state is RunState.FINISHED,
        "policies": found.progress.policies,
        "trajectories": found.progress.trajectories,
        "started_at": found.started_at,
        "ended_at": found.ended_at,
        "why": found.why,
        "best": read_best(folder.path),
        "status": found.status,
    }


def _watch(folder: RunFolder, name: str, run: Path) -> bool:
    """Show the run until it ends (True) or Ctrl-C (False)."""
    from penstock.cli.launching import choose_display
    from penstock.cli.output import print_note
    from penstock.runs.watch import watch_run

    display = choose_display(headless=False, hint="Ctrl-C leaves, the run goes on")
    try:
        watch_run(folder, name, display)
    except KeyboardInterrupt:
        display.close()
        print_note(f"no longer watching; the run goes on. `penstock stop {run}` stops it")
        return False
    display.close()
    return True


def _draw(folder: RunFolder, found: RunSummary, *, hint: str) -> None:
    from penstock.cli.console import SafeConsole
    from penstock.cli.live_panel import draw
    from penstock.runs.curves import reward_by_step
    from penstock.runs.monitor import RunView

    assert found.status is not None
    console = SafeConsole()
    view = RunView.from_status(found.status, reward_by_step(folder.metrics))
    console.print(draw(view, console.width, hint))
    chain = found.status.chain
    if chain and chain[-1].since_s >= LONG_WAIT_S:
        for link in chain:
            console.print(f"  {link}", soft_wrap=True)
    where = folder.logs / "latest"
    if where.exists():
        console.print(f"logs: {where}", soft_wrap=True)


def _lines(run: Path, found: RunSummary, folder: RunFolder) -> Iterator[str]:
    """A run whose services do not answer, as text."""
    from penstock.cli.output import format_clock, format_moment, pluralise
    from penstock.runs.evaluations import read_evaluations
    from penstock.runs.state import RunState

    head = {
        RunState.RUNNING: f"running (pid {found.pid}), but the dataflow does not answer: "
        f"{found.why}",
        RunState.NEW: f"never started; `penstock run {run}` starts it",
        RunState.STOPPED: f"stopped{' by' if found.why.startswith(SIGNAL) else ':'} {found.why}",
        RunState.FAILED: f"failed: {found.why}",
        RunState.KILLED: f"killed: {found.why}",
    }
    yield f"{found.name} · {head.get(found.state, found.state)}"
    for policy in found.progress.policies:
        name = f"{policy.policy} " if len(found.progress.policies) > 1 else ""
        reward = "" if policy.reward is None else f" · reward {policy.reward:.3f}"
        skipped = f" · {policy.skipped} skipped" if policy.skipped else ""
        yield f"  {name}step {policy.step}/{policy.steps}{reward}{skipped}"
    if found.progress.trajectories is not None:
        yield f"  {pluralise(found.progress.trajectories, 'trajectory', 'trajectories')}"
    for line in read_evaluations(folder.path):
        yield f"  {line}"
    if found.ended_at is not None:
        took = found.ended_at - found.started_at if found.started_at else 0.0
        lasted = f", {format_clock(took)} after its last start" if took > 0 else ""
        verb = "last sign of life" if found.state is RunState.KILLED else "ended"
        yield f"  {verb} {format_moment(found.ended_at)}{lasted}"
    if found.state in (RunState.STOPPED, RunState.FAILED, RunState.KILLED):
        yield f"  `penstock run {run}` resumes it"
        yield f"  `penstock logs {run}` shows its logs"
    elif found.state is RunState.FINISHED:
        yield f"  `penstock plot {run}` draws its curve"
        yield f"  `penstock report {run}` shows where its time went"
