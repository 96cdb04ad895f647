# SPDX-License-Identifier: Apache-2.0
"""Whether the last evaluation of a run is stored. Separate, so that `status` opens no suite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.evals.recording import FOLDER

if TYPE_CHECKING:
    from penstock.config import RunConfig


def has_last_evaluation(run_dir: Path, config: RunConfig, number: int) -> bool:
    """Is the version of this number evaluated, or does the run evaluate none?"""
    return (
        config.evaluated is None
        or (run_dir / FOLDER / f"{config.evaluated}@{number}.json").exists()
    )
