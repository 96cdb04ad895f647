# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a run, as its folder has them."""

from __future__ import annotations

from pathlib import Path

from penstock.config import RunConfig
from penstock.dataflow.service.build_evaluations import best_suite, open_suites
from penstock.evals.recording import ResultFiles


def result_files(config: RunConfig, run_dir: Path) -> ResultFiles | None:
    """What stores the results of this run; None if it has no evaluations."""
    if config.eval is None:
        return None
    scorers = {suite.name: suite.scorer for suite in open_suites(config)}
    return ResultFiles(run_dir, config.name, scorers=scorers, best=best_suite(config))
