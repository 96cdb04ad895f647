# SPDX-License-Identifier: Apache-2.0
"""Starts the jobs of `training_jobs`, alone and as ranks, and reads what they saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.trainer.ranks.supervisor import HostRanks, run_ranks

JOB_TIMEOUT_S = 1800.0
MODULE = "tests.gpu.training_jobs"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def run_alone(job: str, folder: Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What one process saw; with RANK in its environment it is a rank."""
    used = environment() if env is None else env
    command = [sys.executable, "-m", MODULE, job, str(folder)]
    subprocess.run(command, env=used, check=True, timeout=JOB_TIMEOUT_S)
    return json.loads((folder / f"{job}.{used.get('RANK', '0')}.json").read_text())


def run_together(job: str, folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank saw."""
    command = [sys.executable, "-m", MODULE, job, str(folder)]
    code = run_ranks(
        command,
        HostRanks.one_host(num_ranks),
        env=environment(),
        is_stopping=lambda: False,
        final_codes=(1,),
    )
    assert code == 0, f"a rank of {job} failed; its messages are above"
    return [json.loads((folder / f"{job}.{r}.json").read_text()) for r in range(num_ranks)]
