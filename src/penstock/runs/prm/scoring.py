# SPDX-License-Identifier: Apache-2.0
"""Scores rows of a running run with a model: the built-in stages with role `prm` and `reward`.

Owns what is written for a row, and the refresh: before each row it looks for a newer version of the
process reward model, and a newer one that cannot be used leaves the old one in place. Every score
carries its version, as the column `step_scores@VERSION`. Decodes turns with the tokenizer that the
run published, so the run folder must be here."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import msgspec
import numpy as np
import structlog

from penstock.config import RunConfig
from penstock.config.builtin_stages import SCORING_SERVICES, RewardModelOptions
from penstock.config.stages import PipelineStageConfig
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.hub import model_folder, parse_hub_model
from penstock.runs.decoded import Decoder
from penstock.runs.prm.steps import steps_of
from penstock.trainer.pipeline.stage_worker import Scorer
from penstock.trainer.prm.head import Regressor
from penstock.trainer.prm.reward_model import RewardModel, conversation
from penstock.trainer.prm.step_text import scored_texts
from penstock.trainer.prm.traces import Step
from penstock.trainer.prm.versions import ModelVersion, newest, numbers
from penstock.types import Trajectory, view_ids

STEP_SCORES = "step_scores"
PRM_ROLE = "prm"

_log = structlog.get_logger(__name__)


class RowScores(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the column `step_scores@VERSION`, as JSON."""

    version: int
    text_digest: str
    """Of the function that built the texts."""
    base: str
    """The model that got the head."""
    scores: tuple[float | None, ...]
    """By turn; None for turns that are not scored."""


class StepScorer:
    """Scores the steps of rows with the newest version in a folder."""

    def __init__(self, folder: Path, decoder: Decoder, policies: Collection[str]) -> None:
        self._folder = folder
        self._decoder = decoder
        self._policies = policies
        self._refused = 0
        self._use(newest(folder))

    def _use(self, version: ModelVersion) -> None:
        card = version.card
        self._model = Regressor.load(version.folder, max_tokens=card.max_tokens, offset=card.offset)
        self.version = version
        _log.info("process reward model loaded", folder=str(version.folder))

    def refresh(self) -> None:
        """Use the newest version, if it is newer and fits."""
        number = (numbers(self._folder) or [0])[-1]
        if number <= max(self.version.number, self._refused):
            return
        try:
            self._use(newest(self._folder))
        except Exception as error:  # a broken file must not end the run: the old model scores on
            self._refused = number
            _log.error("new process reward model refused", number=number, why=str(error))

    def score(self, steps: tuple[Step, ...]) -> list[float | None]:
        """By turn: malformed steps get 0 without being seen; None where it is not a step."""
        texts = scored_texts(steps)
        found = dict(zip(texts, self._model.score([*texts.values()]), strict=True))
        if not all(map(math.isfinite, found.values())):
            raise ValueError(f"model {self.version.folder} gave a score that is not finite")
        return [
            found.get(index, 0.0) if step.is_scored else None for index, step in enumerate(steps)
        ]

    def __call__(self, trajectory: Trajectory) -> dict[str, bytes]:
        """The columns of a row: a float32 for each sampled token, turn after turn, and the scores
        with their version."""
        self.refresh()
        scores = self.score(steps_of(trajectory, self._decoder, self._policies))
        lengths = [len(view_ids(turn.sampled_ids)) for turn in trajectory.turns]
        by_token = np.repeat([score or 0.0 for score in scores], lengths).astype("<f4")
        card = self.version.card
        record = RowScores(
            version=self.version.number,
            text_digest=card.text_digest,
            base=card.base,
            scores=tuple(scores),
        )
        return {
            STEP_SCORES: by_token.tobytes(),
            f"{STEP_SCORES}@{self.version.number}": msgspec.json.encode(record),
        }


class ConversationScorer:
    """Scores whole rows with a reward model."""

    def __init__(self, model: RewardModel, decoder: Decoder, policies: Collection[str]) -> None:
        self._model = model
        self._decoder = decoder
        self._policies = policies

    def __call__(self, trajectory: Trajectory, **options: object) -> dict[str, float]:
        steps = steps_of(trajectory, self._decoder, self._policies)
        return {"reward": self._model.score(conversation(steps))}


def model_scorer(
    config: RunConfig, stage: PipelineStageConfig, folder: RunFolder, model: str | None = None
) -> Scorer | None:
    """The scorer of a stage that names a model and no function; None for any other. `model`
    replaces the one of the config."""
    if stage.fn is not None or stage.role not in SCORING_SERVICES:
        return None
    name = model or stage.model
    assert name is not None, "the config is checked"
    decoder, policies = Decoder(folder), frozenset(config.trained)
    if stage.role == PRM_ROLE:
        return StepScorer(_local(name, folder), decoder, policies)
    options = RewardModelOptions.model_validate(dict(stage.options))
    path = model_folder(name) if parse_hub_model(name) else _local(name, folder)
    found = RewardModel(path, max_tokens=options.max_tokens)
    return ConversationScorer(found, decoder, policies)


def find_prm_stage(config: RunConfig, id: str | None) -> str:
    """The id of the run's stage with role prm; ConfigError if there is none, or several."""
    services = [stage for _, stage in config.pipeline.services] if config.pipeline else []
    found = [stage.id for stage in services if stage.role == PRM_ROLE and stage.fn is None]
    if id is not None and id in found:
        return id
    if id is None and len(found) == 1:
        return found[0]
    known = ", ".join(found) or "none"
    raise ConfigError(
        f"run {config.name} has no single stage with role prm to serve (found: {known}); add one "
        "under pipeline.stages, with place and model, or choose one with --stage"
    )


def _local(name: str, folder: RunFolder) -> Path:
    """A path of the config: a relative one counts from where the run was started."""
    return Path(folder.endpoints().work_dir) / Path(name).expanduser()
