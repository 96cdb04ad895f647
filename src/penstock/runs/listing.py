# SPDX-License-Identifier: Apache-2.0
"""The runs under a folder: state, progress, age and size of each."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.state import read_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    name: str
    """Of its folder, relative to the listed one."""
    path: str
    state: str
    """A RunState, or `unreadable`."""
    step: int | None
    steps: int | None
    reward: float | None
    age_s: float
    """Seconds since its last sign of life: its end, or its newest commit."""
    size_bytes: int
    why: str
    """Why it ended before its last step, or cannot be read; else empty."""


def list_runs(root: Path) -> list[ListedRun]:
    """The runs directly under a folder, or the folder itself if it is a run; newest first."""
    if not root.is_dir():
        raise ConfigError(
            f"{root} is not a folder; pass the output_dir of your configs, such as outputs/"
        )
    if (root / "config.yaml").is_file():
        return [_listed(root, root.name)]
    found = (path for path in root.iterdir() if (path / "config.yaml").is_file())
    return sorted((_listed(path, path.name) for path in found), key=lambda run: run.age_s)


def _listed(path: Path, name: str) -> ListedRun:
    size_bytes, touched_at = _measure(path)
    now = time.time()
    try:
        found = read_summary(RunFolder(path))
    except Exception as error:  # one damaged run must not hide the others
        return ListedRun(
            name=name,
            path=str(path),
            state="unreadable",
            step=None,
            steps=None,
            reward=None,
            age_s=now - touched_at,
            size_bytes=size_bytes,
            why=str(error) or type(error).__name__,
        )
    return ListedRun(
        name=name,
        path=str(path),
        state=found.state,
        step=found.progress.step,
        steps=found.progress.steps,
        reward=found.progress.reward,
        age_s=max(0.0, now - (found.ended_at or found.progress.at or touched_at)),
        size_bytes=size_bytes,
        why=found.why,
    )


def _measure(path: Path) -> tuple[int, float]:
    """Bytes of all files, and when the newest of the top level changed. A live run removes files
    meanwhile."""
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except OSError:
                continue
    return total, path.stat().st_mtime
