# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: the score of each answer to each question of a suite, by one version.

Owns the shape of stored results, and its bounds: a file may come from another machine. Computes no
figure: that is `figures`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.bounds import Count, Int64, Label, Reward, Text

NumSamples = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Temperature = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a question. An attempt that failed has no score and counts as wrong."""

    question: Text
    """Id of the question, unique in its suite."""
    sample: Count
    """Which of the attempts at the question, from 0."""
    seed: int
    score: Reward | None
    """From 0 (wrong) to 1 (right); None if it failed."""
    failure: Text = ""
    """Kind of failure; empty if it was scored."""
    turns: Count = 0
    tokens: Count = 0
    """Tokens that the model sampled."""
    row: Label = ""
    """Id of the recorded trajectory, for `penstock explain`; empty if none was kept."""

    @property
    def is_right(self) -> bool:
        return self.score is not None and self.score >= 1.0


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one version to one suite."""

    suite: Text
    scorer: Text
    suite_digest: Label
    """Digest of the questions, their order and the scorer: results with another are not
    comparable."""
    policy: Label
    version: Int64
    samples: NumSamples
    temperature: Temperature
    answers: tuple[Answer, ...]
    """In the order of questions, then samples; failed ones included."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of one version, over all its suites."""

    model: Text
    """What was evaluated: a run's name, a folder, or a model behind a URL."""
    step: Int64
    """Steps that the version was trained for."""
    suites: tuple[SuiteResult, ...]
