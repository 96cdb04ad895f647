# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a run: which suites, how often, and how much of the nodes they may take.

Owns the shape of `eval:` in the run file. Reads no file and loads no suite."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from penstock.config.base import FunctionName, Name, Section, non_blank
from penstock.options import Contradiction, non_empty
from penstock.types import MAX_TEMPERATURE, MIN_TEMPERATURE


class SuiteConfig(Section):
    """A fixed set of questions with a way to score the answers. A known suite needs only its name;
    your own has `task` or `file`, and `scorer` or `reward`."""

    name: Name
    """A suite that penstock knows, such as aime24, or the name of a custom suite."""
    task: Annotated[str, AfterValidator(non_blank)] | None = None
    """Your own: a module with tasks."""
    file: Annotated[str, AfterValidator(non_blank)] | None = None
    """A data file, a folder that `datasets` can load, or `owner/name` on the Hub; for a known suite
    instead of its place on the Hub."""
    harbor: Annotated[str, AfterValidator(non_blank)] | None = None
    """Your own: a folder of Harbor tasks."""
    scorer: Annotated[str, AfterValidator(non_blank)] | None = None
    """math, choice, exact, code or judge; null: the scorer of the known suite."""
    reward: FunctionName | None = None
    """Instead of a scorer: your own function, as in training; an answer is right at 1.0."""
    limit: PositiveInt | None = None
    """Only the first questions, this many; null: all."""

    def _contradictions(self) -> Iterator[Contradiction]:
        kinds = [key for key in ("task", "file", "harbor") if getattr(self, key) is not None]
        if len(kinds) > 1:
            text = f"suite {self.name} has {' and '.join(kinds)}; keep one"
            yield Contradiction(text=text, keys=tuple((kind,) for kind in kinds[1:]))
        if self.scorer is not None and self.reward is not None:
            text = f"suite {self.name} has a scorer and a reward; keep one"
            yield Contradiction(text=text, keys=(("reward",), ("scorer",)))


def _suite(value: Any) -> Any:
    """Accept a name alone."""
    return {"name": value} if isinstance(value, str) else value


AnySuite = Annotated[SuiteConfig, BeforeValidator(_suite, json_schema_input_type=str | SuiteConfig)]


class EvalConfig(Section):
    """Evaluations during training, each of one definite version; also before the first step and
    after the last."""

    every: PositiveInt
    """Steps between evaluations."""
    suites: Annotated[tuple[AnySuite, ...], Field(strict=False), non_empty()]
    """What is evaluated: names of known suites, or your own."""
    samples: PositiveInt = 4
    """Answers to each question."""
    temperature: float = Field(default=0.6, ge=0, le=MAX_TEMPERATURE)
    """Divides the logits; 0 always takes the likeliest token."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """Keep the smallest set of tokens with this share of the probability; 1.0 keeps all."""
    max_tokens: PositiveInt | None = None
    """Most tokens sampled in one turn; null: as in training."""
    policy: Name | None = None
    """The policy that is evaluated; null: the only one that is trained."""
    max_share: float = Field(default=0.25, gt=0, le=1)
    """Most of a node's slots that evaluations take while training goes on."""
    nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes that do nothing but evaluate; 0: the nodes of the run do it beside training."""
    best: Name | None = None
    """The suite whose score names the best checkpoint; null: the first."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if 0 < self.temperature < MIN_TEMPERATURE:
            text = f"temperature {self.temperature:g}: use 0, or at least {MIN_TEMPERATURE:g}"
            yield Contradiction(text=text, keys=(("temperature",),))
        names = [suite.name for suite in self.suites]
        for name in sorted({name for name in names if names.count(name) > 1}):
            text = f"two suites are called {name}; rename one"
            yield Contradiction(text=text, keys=(("suites",),))
        if self.best is not None and self.best not in names:
            text = f"best names {self.best}, and the suites are {', '.join(names)}; use one of them"
            yield Contradiction(text=text, keys=(("best",), ("suites",)))
