# SPDX-License-Identifier: Apache-2.0
"""Scorers: from an answer in free text and what was expected to a number from 0 (wrong) to 1.

Each module has `score(answer, expected, …)` for one answer, and `reward` for the run file: `reward:
penstock.scorers.math:reward`. Plain Python, so that a reward process starts fast; libraries load
when they are first needed."""

SCORERS = ("math", "choice", "exact", "code", "judge")
"""Names for `scorer:` of a suite."""
BUILT_IN_PREFIX = "penstock.scorers."
SCORER_COLUMNS = frozenset({"answer", "tests"})
"""Columns of a task that only scorers read: programs that attempt it do not get them."""


def reward_of(scorer: str) -> str:
    """The reward function of a scorer, as the run file names it."""
    return f"{BUILT_IN_PREFIX}{scorer}:reward"
