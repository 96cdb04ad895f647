# SPDX-License-Identifier: Apache-2.0
"""What a run's evaluations say about one version, from the files in its folder.

A file that cannot be read is left out: an export must not fail because of an old evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.evals.results import Evaluation, SuiteResult
from penstock.fleet.run_folder import RunFolder

FOLDER = "evaluations"
BEST = "best.json"


class BestVersion(msgspec.Struct, frozen=True, kw_only=True):
    """`evaluations/best.json`: the version with the best score."""

    policy: str
    version: int
    step: int
    suite: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteScore:
    suite: str
    scorer: str
    mean: float
    """Over all answers; a failed one counts as 0."""
    num_questions: int
    samples: int
    num_failed: int
    temperature: float


def scores_of(run: RunFolder, policy: str, number: int) -> list[SuiteScore]:
    """Of each suite, in order of its name; of several evaluations, the one written last."""
    found: dict[str, SuiteScore] = {}
    files = sorted((run.path / FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in files:
        if path.name == BEST:
            continue
        try:
            evaluation = msgspec.json.decode(path.read_bytes(), type=Evaluation)
        except (msgspec.MsgspecError, OSError):
            continue
        for result in evaluation.suites:
            if (result.policy, result.version) == (policy, number) and result.answers:
                found[result.suite] = _score(result)
    return [found[name] for name in sorted(found)]


def _score(result: SuiteResult) -> SuiteScore:
    scores = [answer.score for answer in result.answers]
    return SuiteScore(
        suite=result.suite,
        scorer=result.scorer,
        mean=sum(score or 0.0 for score in scores) / len(scores),
        num_questions=len({answer.question for answer in result.answers}),
        samples=result.samples,
        num_failed=scores.count(None),
        temperature=result.temperature,
    )
