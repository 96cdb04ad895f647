# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: the score of each answer to each question of a suite, by one version.

Owns the shape of stored results. Computes no figure: that is `figures`."""

from __future__ import annotations

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a question. An attempt that failed has no score and counts as wrong."""

    question: str
    """Id of the question, unique in its suite."""
    sample: int
    """Which of the attempts at the question, from 0."""
    seed: int
    score: float | None
    """From 0 (wrong) to 1 (right); None if it failed."""
    failure: str = ""
    """Kind of failure; empty if it was scored."""
    turns: int = 0
    tokens: int = 0
    """Tokens that the model sampled."""
    row: str = ""
    """Id of the recorded trajectory, for `penstock explain`; empty if none was kept."""

    @property
    def is_right(self) -> bool:
        return self.score is not None and self.score >= 1.0


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one version to one suite."""

    suite: str
    scorer: str
    suite_digest: str
    """Digest of the questions, their order and the scorer: results with another are not
    comparable."""
    policy: str
    version: int
    samples: int
    temperature: float
    answers: tuple[Answer, ...]
    """In the order of questions, then samples; failed ones included."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of one version, over all its suites."""

    model: str
    """What was evaluated: a run's name, a folder, or a model behind a URL."""
    step: int
    """Steps that the version was trained for."""
    suites: tuple[SuiteResult, ...]
