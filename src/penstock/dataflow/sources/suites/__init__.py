# SPDX-License-Identifier: Apache-2.0
"""Evaluation suites: fixed questions with what scores the answers.

Owns which rows are the questions of a suite and their ids. Runs and scores nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from penstock.config.evaluation import SuiteConfig
from penstock.errors import ConfigError
from penstock.types import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite, open."""

    name: str
    tasks: tuple[JsonObject, ...]
    """Payloads, each with `question` (its id), `prompt` and what its scorer needs."""
    digest: str
    """Of the questions, their order, and what scores them."""
    scorer: str
    reward: str
    """As the run file names it."""


def open_suite(suite: SuiteConfig, folder: Path) -> Suite:
    """All questions of a suite. `folder`: where relative paths start. Raises ConfigError."""
    reward = suite.reward or (f"penstock.scorers.{suite.scorer}:reward" if suite.scorer else "")
    if suite.file is None or not reward:
        raise ConfigError(f"suite {suite.name!r} needs a file, and a scorer or a reward; set them")
    lines = (folder / suite.file).read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()][: suite.limit]
    tasks = tuple({"question": f"{suite.name}-{i + 1}", **row} for i, row in enumerate(rows))
    text = json.dumps([tasks, reward], sort_keys=True)
    digest = blake3(text.encode()).hexdigest()
    scorer = suite.scorer or reward
    return Suite(name=suite.name, tasks=tasks, digest=digest, scorer=scorer, reward=reward)
