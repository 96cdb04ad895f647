# SPDX-License-Identifier: Apache-2.0
"""`penstock run`: start or resume a run on this machine."""

from __future__ import annotations

from pathlib import Path


def run(
    target: Path,
    /,
    *overrides: str,
    headless: bool = False,
    json: bool = False,
    accept_changes: bool = False,
    launcher: str | None = None,
    ray_address: str | None = None,
    python_path: list[Path] | None = None,
    check_deadline: float | None = None,
    dashboard: bool = False,
) -> int:
    """Start or resume a run and supervise it until its last step.

    Args:
        target: Config file, or run folder to resume.
        overrides: Settings that override the file, such as training.steps=20.
        headless: Print plain progress lines instead of the live panel.
        json: Print one JSON object as the last line.
        accept_changes: Resume even if the config or dataset has changed since the run was started.
        launcher: What starts the processes: local, ray or ssh; the same as launcher=ray.
        ray_address: Address of a running Ray cluster; the same as ray.address=10.0.0.1:6379.
        python_path: Folder of your modules; by default the config file's folder, or the last one.
        check_deadline: Seconds that each step of your code may take in the check before the start;
            30 if not given.
        dashboard: Also show the run in a browser; prints the address.
    """
    from penstock.cli.launching import launch_and_show, print_result
    from penstock.cli.output import print_json
    from penstock.runs.preflight import ensure_startable
    from penstock.runs.target import read_target

    flags = {"launcher": launcher, "ray.address": ray_address}
    set_by_flags = [f"{key}={value}" for key, value in flags.items() if value is not None]
    resolved = read_target(target, (*overrides, *set_by_flags), python_path or ())
    result = launch_and_show(
        resolved,
        headless=headless,
        sources=ensure_startable(resolved, deadline_s=check_deadline),
        accept_changes=accept_changes,
        dashboard=dashboard,
    )
    code = print_result(result)
    if json:
        print_json(result)
    return code
