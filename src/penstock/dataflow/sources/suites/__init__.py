# SPDX-License-Identifier: Apache-2.0
"""Suites: fixed questions with a way to score the answers.

Opens a suite of the run file as payloads of tasks. Scores nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config.evaluation import SuiteConfig
from penstock.dataflow.sources.opening import DataSpec, open_source
from penstock.errors import ConfigError
from penstock.types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    name: str
    tasks: Sequence[JsonObject]
    """Payloads, each with its `question`, an id that is unique in the suite."""
    digest: str
    """Of the questions, their order and the scorer."""
    scorer: str
    reward: str
    """`module:function`; empty: as in training."""


def open_suite(suite: SuiteConfig, folder: Path) -> Suite:
    """Open your own suite; relative files are in `folder`."""
    if suite.task is None and suite.file is None:
        raise ConfigError(
            f"eval.suites: {suite.name} is not a suite that penstock knows; give it a `task` or a "
            "`file`, and a `reward`"
        )
    what = suite.task or DataSpec(path=str(folder / str(suite.file)), limit=suite.limit)
    source = open_source(suite.name, what, limit=suite.limit)
    if source.limit is None:
        raise ConfigError(
            f"eval.suites: {suite.name} has no last question; set its `limit`, for example 100"
        )
    tasks = [
        {"question": str(index), **source.task(index, seed=0, workflow="").payload}
        for index in range(source.limit)
    ]
    scorer = suite.scorer or suite.reward or ""
    return Suite(
        name=suite.name,
        tasks=tasks,
        digest=f"{source.digest(0)}/{scorer}",
        scorer=scorer,
        reward=suite.reward or "",
    )
