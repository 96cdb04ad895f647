# SPDX-License-Identifier: Apache-2.0
"""From a run's settings to what learns: learners, frozen models, their pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from penstock.config import PolicyConfig, RunConfig
from penstock.config.pipeline import PipelineStageConfig
from penstock.errors import ConfigError
from penstock.trainer.actor import Actor
from penstock.trainer.advantages.gae import ValueLoss
from penstock.trainer.batches import Batch
from penstock.trainer.build_objective import NO_BOUNDS, bounds_of, objective_of, token_weights
from penstock.trainer.critic import Critic
from penstock.trainer.device import CPU
from penstock.trainer.forward_pass import Passes
from penstock.trainer.learner import Learner, Optimizer, Stats
from penstock.trainer.lora import adapter_off, put_on
from penstock.trainer.losses.mismatch import correction_of
from penstock.trainer.losses.tokens import Budgeted, Objective
from penstock.trainer.model_folders import initial_folder, is_adapted, load_model
from penstock.trainer.models import Crew
from penstock.trainer.packing_check import require_packable
from penstock.trainer.pipeline.builtin import chain_of
from penstock.trainer.pipeline.functions import find_function
from penstock.trainer.pipeline.run import ACTOR, Call, Pipeline, Stage, bind, stay
from penstock.trainer.ranks.batch_repartition import move
from penstock.trainer.ranks.group import Alone, Company, Team
from penstock.trainer.ranks.sharding import shard
from penstock.trainer.ranks.topology import Parallel
from penstock.trainer.ranks.weight_loading import fill, load_outline
from penstock.trainer.schedules import Schedule, Shape
from penstock.trainer.signals.alarms import EXCLUDED
from penstock.trainer.updates import Cut
from penstock.trainer.vocabulary_check import other_vocabularies

CRITIC = "critic"
CRITIC_RATE = 5.0
"""A critic learns so much faster than its actor, unless its stage has the option learning_rate."""
S = TypeVar("S", Actor, Critic)
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_crew(
    config: RunConfig,
    policy: str,
    folder: Path,
    team: Team | None = None,
    device: torch.device = CPU,
) -> Crew:
    """One policy's learners, the actor with the weights of this folder, and their pipeline."""
    settings = config.for_policy(policy)
    chain = chain_of(config, policy)
    if found := list(other_vocabularies(chain.stages, str(folder))):
        raise ConfigError("; ".join(found))
    builder = _Builder(settings, config.seed, team or Alone(), device)
    learners = builder.learners(folder, chain.stages)
    actor = learners.get(ACTOR)
    return Crew(
        learners,
        Pipeline(builder.bound(chain.stages, learners)),
        team,
        vocab_size=actor.vocab_size if actor else _vocab_size(folder),
        minibatches=settings.training.minibatches,
    )


def load_policy(settings: PolicyConfig, folder: Path, *, is_first: bool = True) -> PreTrainedModel:
    """The model that makes versions, with its adapter if it trains one.

    is_first: of its ranks; the others get an outline of it."""
    lora = settings.model.lora
    if is_adapted(folder) is (lora is None):
        trained, held = ("all weights", "an") if lora is None else ("an adapter", "no")
        raise ConfigError(
            f"policy {settings.name} trains {trained}, and {folder} holds {held} adapter; set lora "
            "as it was when that was written, or begin from another folder"
        )
    model = _load(folder, is_first)
    if lora is not None:
        put_on(model, folder, lora)
    return model


def _load(folder: Path, is_first: bool) -> PreTrainedModel:
    """Whole on the first rank, which tries for all whether it can be packed."""
    if not is_first:
        return load_outline(folder)
    model = load_model(folder)
    require_packable(model)
    return model


def spread_of(stages: Sequence[PipelineStageConfig]) -> list[Parallel]:
    """How the models of these stages are spread, in the order in which they run."""
    return [_parallel(stage) for stage in stages if _has_model(stage)]


def _has_model(stage: PipelineStageConfig) -> bool:
    return stage.type == "train" or (stage.type == "infer" and stage.fn is None)


def _parallel(stage: PipelineStageConfig) -> Parallel:
    return Parallel(dp=stage.parallel.dp, tp=stage.parallel.tp)


def _vocab_size(folder: Path) -> int:
    """Of a model that this rank has no share of."""
    config: Any = AutoConfig.from_pretrained(folder)
    return config.get_text_config().vocab_size


def _stage(
    stages: tuple[PipelineStageConfig, ...], type: str, role: str
) -> PipelineStageConfig | None:
    return next((stage for stage in stages if (stage.type, stage.role) == (type, role)), None)


class _Builder:
    """Makes the models of one policy."""

    def __init__(self, settings: PolicyConfig, seed: int, team: Team, device: torch.device) -> None:
        self._settings = settings
        self._seed = seed
        self._team = team
        self._device = device

    def learners(self, folder: Path, stages: tuple[PipelineStageConfig, ...]) -> dict[str, Learner]:
        """Those that this rank has a share of, the actor first."""
        found: dict[str, Learner] = {}
        actor, critic = (_stage(stages, "train", role) for role in (ACTOR, CRITIC))
        if (team := self._team_of(actor)) is not None:
            found[ACTOR] = self._actor(folder, actor, team)
        if critic and (team := self._team_of(critic)) is not None:
            found[CRITIC] = self._critic(critic, team)
        return found

    def bound(
        self, stages: tuple[PipelineStageConfig, ...], learners: dict[str, Learner]
    ) -> list[Stage]:
        """Each stage ready to be called, with the move before it where its rows lie elsewhere.
        Functions of columns take rows as they lie."""
        if not isinstance(self._team, Company):
            total = self._team.sum_over_ranks
            return [bind(one, self._call(one, learners), sum_over_ranks=total) for one in stages]
        found: list[Stage] = []
        here = self._team.place.parallel
        for stage in stages:
            there = _parallel(stage) if _has_model(stage) else here
            minibatches = self._settings.training.minibatches
            way = partial(move, before=here, after=there, minibatches=minibatches)
            found.append(
                bind(
                    stage,
                    self._call(stage, learners),
                    sum_over_ranks=self._team.at(there).sum_over_ranks,
                    move=stay if there == here else way,
                )
            )
            here = there
        return found

    def _team_of(self, stage: PipelineStageConfig | None) -> Team | None:
        """Whom its model is spread over; None where this rank sits it out."""
        if stage is None or not isinstance(self._team, Company):
            return self._team
        return self._team.gangs[_parallel(stage)]

    def _passes(self, team: Team) -> Passes:
        training = self._settings.training
        return Passes(
            ranks=team,
            micro_batch_tokens=training.micro_batch_tokens,
            precision=PRECISIONS[training.precision],
        )

    def _actor(self, folder: Path, stage: PipelineStageConfig | None, team: Team) -> Learner:
        algorithm = self._settings.algorithm
        own = stage and _own_objective(stage)
        objective = own or objective_of(algorithm)
        is_budgeted = isinstance(objective, Budgeted)
        model = load_policy(self._settings, folder, is_first=self._team.place.is_first)
        actor = Actor(model, learns_entropy=algorithm.entropy_coef > 0)
        return Learner(
            self._spread(actor, folder, team),
            objective,
            self._optimizer(self._settings.training.learning_rate),
            cut=Cut(
                minibatches=self._settings.training.minibatches,
                weights=token_weights(algorithm, self._settings.sampling.max_tokens),
                correction=None if is_budgeted else correction_of(objective),
                needs_advantage=algorithm.name != "opd",
            ),
            passes=self._passes(team),
            bounds=NO_BOUNDS if own else bounds_of(algorithm),
        )

    def _critic(self, stage: PipelineStageConfig, team: Team) -> Learner:
        rate = stage.options.get("learning_rate")
        if rate is None:
            rate = CRITIC_RATE * self._settings.training.learning_rate
        return Learner(
            self._initial(stage, team, Critic),
            _own_objective(stage) or ValueLoss(),
            self._optimizer(float(rate)),
            cut=Cut(minibatches=self._settings.training.minibatches, needs_advantage=False),
            passes=self._passes(team),
        )

    def _call(self, stage: PipelineStageConfig, learners: dict[str, Learner]) -> Call | None:
        """What runs the stage's model; None where it is a function of columns."""
        if not _has_model(stage):
            return None
        if (team := self._team_of(stage)) is None:
            return partial(_sit_out, stage)
        if stage.type == "train":
            return partial(_train, _of_role(stage, learners))
        [column] = stage.writes
        if stage.role == CRITIC or stage.role in learners:
            return partial(_look, column, _of_role(stage, learners).look)
        if self._settings.model.lora is not None and stage.model is None:
            return partial(_look, column, partial(_look_bare, learners[ACTOR]))
        frozen = self._initial(stage, team, _frozen)
        return partial(_look, column, partial(self._passes(team).look, frozen))

    def _initial(self, stage: PipelineStageConfig, team: Team, make: Callable[..., S]) -> S:
        """Of the model the stage names, or of the one its policy began with."""
        init = stage.model or self._settings.model.init
        with initial_folder(init, self._seed) as folder:
            scorer = make(_load(folder, self._team.place.is_first))
            return self._spread(scorer, folder, team)

    def _spread(self, scorer: S, folder: Path, team: Team) -> S:
        """Its share on each rank, those of the others than the first read from the folder."""
        shard(scorer, scorer.model, team, self._device)
        fill(scorer, scorer.model, folder, team, self._device)
        return scorer

    def _optimizer(self, rate: float) -> Optimizer:
        training = self._settings.training
        return Optimizer(
            schedule=Schedule(
                peak=rate,
                shape=Shape(training.lr_scheduler_type),
                warmup_steps=training.warmup_steps,
                num_steps=training.steps,
            ),
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
            epochs=training.epochs,
        )


def _of_role(stage: PipelineStageConfig, learners: dict[str, Learner]) -> Learner:
    if stage.role not in learners:
        raise ConfigError(
            f"stage {stage.id} needs the {stage.role}, and this trainer trains only "
            f"{' and '.join(learners)}; add a stage with type: train and role: {stage.role}"
        )
    return learners[stage.role]


def _frozen(model: PreTrainedModel) -> Actor:
    return Actor(model).requires_grad_(False)


def _sit_out(stage: PipelineStageConfig, batch: Batch) -> Stats | dict[str, Any]:
    """What a rank without rows says: nothing of no token."""
    if stage.type == "train":
        return Stats(skipped=None, values={})
    return {column: np.zeros(batch.samples.ids_T.shape) for column in stage.writes}


def _train(learner: Learner, batch: Batch) -> Stats:
    excluded_R = batch.columns.get("excluded")
    if excluded_R is None:
        return learner.step(batch)
    stats = learner.step(batch.without(excluded_R > 0))
    return replace(stats, values={**stats.values, EXCLUDED: float((excluded_R > 0).sum())})


def _look(column: str, look: Callable[[Batch], Any], batch: Batch) -> dict[str, Any]:
    return {column: look(batch)}


def _look_bare(actor: Learner, batch: Batch) -> Any:
    """What the actor's model says without its adapter: where the policy began, held only once."""
    with adapter_off(actor.model):
        return actor.look(batch)


def _own_objective(stage: PipelineStageConfig) -> Objective | None:
    """The user's own loss."""
    if stage.fn is None:
        return None
    function = find_function(stage)
    return partial(function, **stage.options) if function else None
