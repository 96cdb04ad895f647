# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a run, as its folder has them: who writes them, and what the newest and the best
one found. Computes no figure besides the mean score."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.config import RunConfig
from penstock.dataflow.service.build_evaluations import best_suite, open_suites
from penstock.durable import read_regular
from penstock.errors import ConfigError
from penstock.evals.figures import figures
from penstock.evals.recording import BEST_FILE, FOLDER, BestVersion, ResultFiles
from penstock.runs.result_files import read_all

MAX_BEST_BYTES = 1 << 20


def result_files(config: RunConfig, run_dir: Path) -> ResultFiles | None:
    """What stores the results of this run; None if it has no evaluations."""
    if config.eval is None:
        return None
    scorers = {suite.name: suite.scorer for suite in open_suites(config)}
    return ResultFiles(run_dir, config.name, scorers=scorers, best=best_suite(config))


def read_best(run_dir: Path) -> BestVersion | None:
    """The best version so far, as the run's folder names it; None without evaluations."""
    path = run_dir / FOLDER / BEST_FILE
    try:
        return msgspec.json.decode(read_regular(path, MAX_BEST_BYTES), type=BestVersion)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}; delete it") from None


def read_evaluations(run_dir: Path) -> Iterator[str]:
    """A line about the newest evaluation and one about the best; none without evaluations."""
    found = read_all((run_dir / FOLDER).glob("*@*.json"))
    if last := max(found, key=lambda one: one.step, default=None):
        scores = ", ".join(f"{one.suite} {figures(one).avg:.3f}" for one in last.suites)
        yield f"evaluated at step {last.step}: {scores}"
    if (best := read_best(run_dir)) is not None:
        yield f"best at step {best.step}: {best.suite} {best.score:.3f}"
