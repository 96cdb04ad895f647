# SPDX-License-Identifier: Apache-2.0
"""Runs the current command once per rank, for commands that compute with several ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping


def run_per_rank(
    num_ranks: int,
    *,
    final_codes: Collection[int],
    is_stopping: Callable[[], bool] = lambda: False,
    env: Mapping[str, str] | None = None,
) -> int:
    """Execute this command again in `num_ranks` processes; returns the exit code.

    final_codes: exit codes after which the ranks are not restarted.
    env: added to the environment of every rank."""
    from penstock.trainer.ranks.supervisor import run_ranks

    return run_ranks(
        [sys.executable, "-m", "penstock.cli.main", *sys.argv[1:]],
        num_ranks,
        env={**os.environ, **(env or {})},
        is_stopping=is_stopping,
        final_codes=final_codes,
    )
