# SPDX-License-Identifier: Apache-2.0
"""`penstock demo`: the built-in config, through exactly the path of `penstock run`."""

from __future__ import annotations

import tempfile
import time
from importlib import resources
from pathlib import Path


def demo(
    *overrides: str,
    seed: int = 0,
    dir: Path | None = None,
    headless: bool = False,
    json: bool = False,
) -> int:
    """Train a tiny model to reverse three letters, on this CPU, in two minutes.

    Parameters
    ----------
    overrides
        Settings that win over the demo's, like training.steps=20.
    seed
        Seeds everything random in the run.
    dir
        The run folder; by default a new one under the system's folder for temporary files.
    headless
        Plain lines instead of the live panel.
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.check import ensure_startable
    from penstock.cli.output import note
    from penstock.config import load
    from penstock.fleet.processes import cpu_s
    from penstock.fleet.run_folder import RunFolder
    from penstock.runs.launch import launch, print_result
    from penstock.runs.target import RunTarget

    began_at = time.monotonic()
    folder = RunFolder(dir or Path(tempfile.mkdtemp(prefix="penstock-demo-")))
    with resources.as_file(resources.files("penstock.config") / "demo.yaml") as file:
        config = load(file, [f"seed={seed}", f"output_dir={folder.path.parent}", *overrides])
    ensure_startable(RunTarget(config=config, folder=folder, python_path=()))
    note(f"demo in {folder.path}")
    result = launch(config, folder, python_path=(), headless=headless)
    seconds = time.monotonic() - began_at
    cpu_ms = 1000.0 * cpu_s()
    code = print_result(result)
    if code != 0:
        return code
    return _audit_and_print(folder.path, seconds=seconds, cpu_ms=cpu_ms, json=json)


def _audit_and_print(folder: Path, *, seconds: float, cpu_ms: float, json: bool) -> int:
    """Read the ledger as a stranger would, and show what it says."""
    from penstock.audit import audit
    from penstock.cli.output import note, print_json

    found = audit(folder)
    summary = found.summary
    for line in found.lines() if not found.ok else found.lines()[-1:]:
        note(line)
    if summary.reward_first is not None and summary.reward_last is not None:
        note(f"reward went from {summary.reward_first:.3f} to {summary.reward_last:.3f}")
    if json:
        print_json(
            {
                "reward_first": summary.reward_first,
                "reward_last": summary.reward_last,
                "steps": summary.steps,
                "trajectories": summary.trajectories,
                "lost": summary.lost,
                "trained_twice": summary.trained_twice,
                "seconds": round(seconds, 1),
                "cpu_ms_per_trajectory": round(cpu_ms / max(1, summary.trajectories), 3),
            }
        )
    return 0 if found.ok else 1
