# SPDX-License-Identifier: Apache-2.0
"""`penstock track`: the curves of a run, for trackers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.fleet.run_folder import RunFolder


def track(
    run: Path, /, *, to: list[str] | None = None, follow: bool = False, json: bool = False
) -> int:
    """Send a run's metrics to trackers: all that they lack, for a run that ended or whose tracker
    was away. A run with `report_to` does this by itself while it runs.

    Args:
        run: Run folder, or its config file.
        to: Trackers: trackio, wandb, tensorboard, mlflow, or your own; by default what
            `report_to` lists. Repeat it for several.
        follow: Go on until SIGTERM or Ctrl-C.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.config.trackers import check_tracker
    from penstock.errors import ConfigError, PenstockError
    from penstock.runs.target import find_run_folder
    from penstock.runs.tracking import catch_up

    folder = find_run_folder(run)
    config = folder.read_config()
    try:
        names = [check_tracker(name) for name in to or config.report_to]
    except ValueError as error:
        raise ConfigError(f"--to: {error}") from None
    if not names:
        raise ConfigError(
            f"run {config.name} names no tracker; pass --to trackio, or set report_to in its config"
        )
    if follow:
        return _follow(folder, config, names)
    sent: dict[str, int] = {}
    failed: list[str] = []
    for name in names:
        try:
            sent[name] = catch_up(folder, config, name)
            print_note(f"{name}: {sent[name]:,} new points")
        except PenstockError as error:
            failed.append(name)
            print_note(f"{name}: {error}")
    if json:
        print_json({"sent": sent, "failed": failed})
    return 1 if failed else 0


def _follow(folder: RunFolder, config: RunConfig, names: list[str]) -> int:
    import signal
    import threading

    from penstock.runs.service_process import enter_run
    from penstock.runs.tracking import follow

    enter_run(folder.path, "trackers")
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    follow(folder, config, names, stop)
    return 0
