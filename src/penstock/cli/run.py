# SPDX-License-Identifier: Apache-2.0
"""`penstock run`: everything a config names, on this machine."""

from __future__ import annotations

from pathlib import Path


def run(
    target: Path,
    /,
    *overrides: str,
    headless: bool = False,
    json: bool = False,
    accept_changes: bool = False,
) -> int:
    """Start or resume a run and stay with it until its last step.

    Parameters
    ----------
    target
        A config file, or a run folder to resume.
    overrides
        Settings that win over the file, like training.steps=20.
    headless
        Plain lines instead of the live panel.
    json
        Print one JSON object as the last line.
    accept_changes
        Resume although config or data set differ from those the run was started with.
    """
    from penstock.cli.check import ensure_startable
    from penstock.cli.output import print_json
    from penstock.runs.launch import launch, print_result
    from penstock.runs.target import read_target

    resolved = read_target(target, overrides)
    sources = ensure_startable(resolved)
    result = launch(
        resolved.config,
        resolved.folder,
        python_path=resolved.python_path,
        headless=headless,
        sources=sources,
        accept_changes=accept_changes,
    )
    code = print_result(result)
    if json:
        print_json(result)
    return code
