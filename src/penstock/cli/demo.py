# SPDX-License-Identifier: Apache-2.0
"""`penstock demo`: the built-in config, run exactly as `penstock run` does."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from penstock.cli.output import print_json, print_note


def demo(
    *overrides: str,
    seed: int = 0,
    dir: Path | None = None,
    headless: bool = False,
    json: bool = False,
) -> int:
    """Train a tiny model to reverse three letters, on this CPU, in two minutes.

    Args:
        overrides: Settings that override the demo's, such as training.steps=20.
        seed: Random seed of the run.
        dir: Run folder; by default a new folder in the system's temporary directory.
        headless: Print plain progress lines instead of the live panel.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.launching import launch_and_show, print_result
    from penstock.config import demo_config
    from penstock.fleet.processes import cpu_s
    from penstock.fleet.run_folder import RunFolder
    from penstock.runs.preflight import ensure_startable
    from penstock.runs.target import RunTarget

    began_at = time.monotonic()
    folder = RunFolder(dir or Path(tempfile.mkdtemp(prefix="penstock-demo-")))
    config = demo_config(seed, [f"output_dir={folder.path.parent}", *overrides])
    target = RunTarget(config=config, folder=folder, python_path=())
    ensure_startable(target)
    print_note(f"run folder: {folder.path}")
    result = launch_and_show(target, headless=headless)
    seconds = time.monotonic() - began_at
    cpu_ms = 1000.0 * cpu_s()
    code = print_result(result)
    if code != 0:
        return code
    return _audit_and_print(folder.path, seconds=seconds, cpu_ms=cpu_ms, json=json)


def _audit_and_print(folder: Path, *, seconds: float, cpu_ms: float, json: bool) -> int:
    """Audit the run from its files alone and print the result."""
    from penstock.audit import audit

    found = audit(folder)
    summary = found.summary
    for line in found.lines() if not found.ok else found.lines()[-1:]:
        print_note(line)
    if summary.reward_first is not None and summary.reward_last is not None:
        print_note(f"reward: {summary.reward_first:.3f} → {summary.reward_last:.3f}")
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
